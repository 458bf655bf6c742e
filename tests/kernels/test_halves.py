"""Integers in groups by PyTorch's int4 product on a CPU."""

import subprocess
import sys

import pytest
import torch

from quantrot.kernels.halves import CHUNK, halve, halves_bytes, halves_gemm, has_halves

SHAPES = [(16, 32, 32), (48, 96, 32), (80, 256, 256), (336, 1536, 128), (272, 160, 160), (CHUNK + 64, 128, 128)]


def product(rows: int, columns: int, group: int, tokens: tuple[int, ...], least: int = -128) -> None:
    """Within bfloat16's rounding, and that of float32 sums, of float64's."""
    generator = torch.Generator().manual_seed(rows + columns + len(tokens))
    codes = torch.randint(least, -least, (rows, columns), dtype=torch.int8, generator=generator)
    codes[0, :4] = torch.tensor([least, -1, 0, -least - 1])
    steps = (torch.rand(rows, columns // group, generator=generator) + 0.1).bfloat16().float()
    x = torch.randn(*tokens, columns, generator=generator).bfloat16()
    made = halve(codes, steps)
    assert made is not None and sum(t.nbytes for t in made) == halves_bytes(rows, columns, group)
    weight = codes.double() * steps.double().repeat_interleave(group, 1)
    y, exact, size = halves_gemm(x, *made), x.double() @ weight.T, x.double().abs() @ weight.abs().T
    assert y.shape == (*tokens, rows) and y.dtype == torch.bfloat16
    assert ((y.double() - exact).abs() <= exact.abs() * 2**-8 + size * 2**-16).all()


@pytest.mark.parametrize("rows, columns, group", SHAPES)
@pytest.mark.parametrize("tokens", [(1,), (), (3, 2), (17,)], ids=str)
def test_every_code_is_multiplied_exactly(rows, columns, group, tokens):
    product(rows, columns, group, tokens)
    product(rows, columns, group, tokens, least=-12)


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_so_it_is_by_what_other_machines_have(capability):
    """Whose order of the codes, PyTorch's own, is another."""
    code = f"import tests.kernels.test_halves as t\nfor s in {SHAPES}: t.product(*s, (3,))"
    subprocess.run([sys.executable, "-c", code], check=True, env={"ATEN_CPU_CAPABILITY": capability, "PATH": ""})


def test_a_product_of_which_the_kernel_is_not_fast_is_none(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert has_halves(32, 64, 32) and has_halves(48, 160, 160)
    assert not has_halves(40, 64, 32)  # rows
    assert not has_halves(32, 48, 48) and not has_halves(32, 64, 16)  # groups
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not has_halves(32, 64, 32)


@pytest.mark.parametrize("step", [1.001, 2.0**-133 * 1.5, 2.0**97, -(2.0**125), float("nan"), -float("inf")])
@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16], ids=str)
def test_steps_that_are_no_bfloat16_numbers_or_too_large_have_no_halves(step, default):
    steps = torch.ones(16, 2)
    assert halve(torch.ones(16, 64, dtype=torch.int8), steps) is not None
    steps[3, 1] = step
    torch.set_default_dtype(default)
    try:
        assert halve(torch.ones(16, 64, dtype=torch.int8), steps) is None
    finally:
        torch.set_default_dtype(torch.float32)
