"""How eight-bit codes become floats: every instruction sequence is exact for all 256 codes."""

import re
from itertools import product

import pytest
import torch

from quantrot.kernels.mixed import mixed_gemm

KINDS = ["int8", "uint8", "packed", "e4m3"]

gpu = pytest.mark.gpu


def code_values(kind: str) -> torch.Tensor:
    """What the bytes 0 ... 255 stand for, float64."""
    codes = torch.arange(256, dtype=torch.int16)
    if kind == "e4m3":
        return codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
    if kind == "int8":
        return codes.to(torch.uint8).view(torch.int8).double()
    return (codes - (128 if kind == "packed" else 0)).double()


class Ptx:
    """Runs the few instructions of a conversion on vectors of registers, 32 bits of them in an int64."""

    HALVES = {"f16x2": torch.float16, "bf16x2": torch.bfloat16}

    def __init__(self, **registers: torch.Tensor) -> None:
        self.registers = registers

    def read(self, name: str) -> torch.Tensor:
        return self.registers[name] if name in self.registers else torch.tensor(int(name, 0))

    def floats(self, name: str, dtype: torch.dtype) -> list[torch.Tensor]:
        word = self.read(name)
        return [((word >> shift) & 0xFFFF).to(torch.uint16).view(dtype).double() for shift in (0, 16)]

    @staticmethod
    def word(pair: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        low, high = (value.to(dtype).view(torch.uint16).long() for value in pair)
        return low | high << 16

    def run(self, text: str) -> None:
        for statement in text.strip("{} ").split(";"):
            statement = statement.strip()
            if statement and not statement.startswith(".reg"):
                name, _, rest = statement.partition(" ")
                self.step(name, [a.strip() for a in re.findall(r"\{[^}]*\}|[^,\s][^,]*", rest)])

    def step(self, name: str, args: list[str]) -> None:
        out, *sources = args
        kind = name.rpartition(".")[2]
        if name == "mov.b32" and out.startswith("{"):
            low, high = out.strip("{}").split(",")
            word = self.read(sources[0])
            self.registers[low.strip()], self.registers[high.strip()] = word & 0xFFFF, word >> 16
            return
        if name in ("mov.b32", "mov.b16", "cvt.u32.u16"):
            result = self.read(sources[0])
        elif name == "prmt.b32":
            eight, selector = self.read(sources[0]) | self.read(sources[1]) << 32, int(sources[2], 16)
            picked = [(eight >> 8 * (selector >> 4 * i & 7)) & 0xFF for i in range(4)]
            result = sum(byte << 8 * i for i, byte in enumerate(picked))
        elif name == "xor.b32":
            result = self.read(sources[0]) ^ self.read(sources[1])
        elif name == "and.b32":
            result = self.read(sources[0]) & self.read(sources[1])
        elif name == "neg.bf16x2":
            result = self.read(sources[0]) ^ 0x80008000
        elif name == "sub.rn.f16x2":
            a, b = (self.floats(s, torch.float16) for s in sources)
            result = self.word([x - y for x, y in zip(a, b, strict=True)], torch.float16)
        elif name.startswith("fma.rn") and kind in self.HALVES:
            a, b, c = (self.floats(s, self.HALVES[kind]) for s in sources)
            sums = [x * y + z for x, y, z in zip(a, b, c, strict=True)]
            result = self.word([s.clamp(min=0) for s in sums] if ".relu" in name else sums, self.HALVES[kind])
        elif name == "cvt.rn.f16x2.e4m3x2":
            codes = [(self.read(sources[0]) >> shift & 0xFF).to(torch.uint8) for shift in (0, 8)]
            result = self.word([c.view(torch.float8_e4m3fn).double() for c in codes], torch.float16)
        elif name == "cvt.f32.f16":
            result = self.read(sources[0]).to(torch.uint16).view(torch.float16).double()
        else:
            assert name == "cvt.rn.bf16x2.f32", name
            result = self.word([self.read(sources[1]), self.read(sources[0])], torch.bfloat16)
        self.registers[out] = result


@pytest.mark.parametrize("pairs", [1, 2])
@pytest.mark.parametrize(("kind", "wide"), [*product(KINDS[:3], ["bf16", "fp16"]), ("e4m3", "bf16")])
def test_every_conversion_program_is_exact_for_all_codes_in_every_place(kind, wide, pairs):
    pytest.importorskip("triton", reason="triton is not installed")
    from quantrot.kernels.mixed.conversions import program

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[wide]
    places = torch.stack([torch.randperm(256) for _ in range(2 * pairs)])  # the code in each byte of the register
    word = sum(places[i] << 8 * i for i in range(2 * pairs))
    machine = Ptx(**{"$1" if pairs == 1 else "$2": word})
    machine.run(program(kind, wide, pairs, 90))
    found = torch.stack([half for i in range(pairs) for half in machine.floats(f"${i}", dtype)])
    torch.testing.assert_close(found, code_values(kind)[places], rtol=0, atol=0, equal_nan=True)


CONVERTED = """
import torch, triton
import triton.language as tl
from quantrot.kernels.mixed.conversions import widen

@triton.jit
def convert(codes, out, KIND: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(out + at, widen(tl.load(codes + at), KIND, out.dtype.element_ty, "", 1, 0))

codes = torch.arange(256).to(torch.uint8)
for kind in ("int8", "uint8", "packed", "e4m3"):
    for dtype in (torch.float16, torch.float32):
        out = torch.empty(256, dtype=dtype)
        convert[(1,)](codes, out, kind)
        exact = {"int8": codes.view(torch.int8), "uint8": codes, "packed": codes.short() - 128,
                 "e4m3": codes.view(torch.float8_e4m3fn)}[kind].double()
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=0, equal_nan=True)
print("exact")
"""


def test_the_portable_conversions_are_exact_for_all_codes(interpreted):
    assert interpreted(CONVERTED).strip() == "exact"


@gpu
@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_gpu_converts_all_codes_exactly(kind, wide):
    codes = torch.arange(256, device="cuda").to(torch.uint8).repeat(64, 2)
    weight = {"int8": codes.view(torch.int8), "uint8": codes, "packed": codes.view(torch.int32)}.get(kind)
    weight = codes.view(torch.float8_e4m3fn) if weight is None else weight
    exact = code_values(kind)
    finite = exact.isfinite().repeat(2).cuda()
    for rows in (16, 512):  # decode and prefill: one column of the weight at a time
        x = torch.eye(512, device="cuda", dtype=wide)[:rows]
        masked = weight if kind != "e4m3" else torch.where(finite, codes, 0).view(torch.float8_e4m3fn)
        y = mixed_gemm(x, masked, torch.ones(64, 1, device="cuda"), backend="triton")
        expected = torch.where(finite, exact.repeat(2).cuda(), 0)[:rows]
        assert torch.equal(y.double(), expected[:, None].expand(-1, 64))
    ones = torch.ones(64, 1, device="cuda")
    expanded = torch.ops.quantrot.mixed_expand(weight, ones, None, 512, wide)
    torch.testing.assert_close(expanded[0].cpu().double(), exact.repeat(2), rtol=0, atol=0, equal_nan=True)
