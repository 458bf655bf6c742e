"""Launches that are repeated give what the operator gives, of whatever is in the tensors by then."""

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from quantrot.kernels import mixed
from quantrot.kernels.fp8 import fp8_linear, fused, quantize_fp8_block
from quantrot.kernels.mixed import mixed_linear, quantize_int8
from quantrot.kernels.mxfp4 import fused as mxfp4
from quantrot.kernels.mxfp4 import mxfp4_fused, quantize_mxfp4
from quantrot.kernels.ready import KEPT, Ready, lies_well, like, same, unseen

N, K = 512, 1024
ROOT = Path(__file__).parents[2]


def test_a_call_is_seen_by_graphs_modes_transforms_and_subclasses():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    class Mine(torch.Tensor):
        pass

    x = torch.zeros(2, 3)
    found = []
    assert not unseen(x)  # a gradient may be recorded
    with torch.no_grad():
        assert unseen(x, None) and unseen(nn.Parameter(x))
        assert not unseen(x, x.as_subclass(Mine))
        with Mode():
            assert not unseen(x)
        with torch.overrides.BaseTorchFunctionMode(), torch.device("cpu"):
            assert not unseen(x)
        with torch.device("meta"):
            assert unseen(x)  # launches say where they make tensors
        with torch.autograd.forward_ad.dual_level():
            assert not unseen(x)
        assert not unseen(torch.zeros(2, dtype=torch.complex64).conj().imag)  # negative by a bit of the tensor's
        torch.jit.trace(lambda t: (found.append(unseen(t)), t + 1)[1], x, check_trace=False)
        torch.func.vmap(lambda t: (found.append(unseen(t)), t)[1])(x)
        torch.compile(lambda t: (found.append(unseen(t)), t + 1)[1], backend="eager")(x)
    with torch.inference_mode():
        assert unseen(x)
    assert found and not any(found)


def test_keys_have_what_plans_and_launches_look_at():
    x = torch.zeros(8, 64, dtype=torch.bfloat16)
    others = x[:4], x.T, x.half(), torch.zeros(8, 64, dtype=torch.bfloat16, device="meta"), x.flatten()[8:40].view(4, 8)
    assert all(like(x) != like(other) and same(x) != same(other) for other in others)
    assert like(x) == like(x.clone()) and same(x) != same(x.clone()) and like(None) is same(None) is None
    moved = torch.zeros(8 * 64 + 1, dtype=torch.bfloat16)[1:].view(8, 64)
    assert like(moved) != like(x) and not lies_well(moved) and not lies_well(x.T) and lies_well(x) and lies_well(None)


def test_what_is_kept_is_bounded():
    ready, x = Ready(), torch.zeros(8, 64)
    for i in range(KEPT + 3):
        assert ready.keep(i, abs, -1)(-i) == i
    assert len(ready) == 3 and ready.find(KEPT + 2) is not None and ready.find([1.0]) is None
    with pytest.raises(ValueError, match=r"epsilon: \[1.0\]; a non-negative, finite number is needed"), torch.no_grad():
        fp8_linear(x, *quantize_fp8_block(x, (128, 128)), epsilon=[1.0])


def test_calls_that_are_found_again_launch_what_the_operator_does():
    """With other weights, and operands of any dimensions and strides; the CPU says that it is a GPU."""
    done = subprocess.run([sys.executable, "-m", "tests.kernels.recorded"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "differs" not in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    compared, again = map(int, re.findall(r"\d+", done.stdout))
    assert compared == 4739 and again > 1000


def fp8(x, b, **around):
    return fp8_linear(x, *b, b_settled=True, **around)


def mxfp4_of(activations):
    rest = {"activations": activations, "hadamard": 32 if activations == "mxfp4" else 0, "settled": True}
    return lambda x, b, **around: mxfp4_fused(x, *b, **rest, **around)


def int8(x, b, **around):
    return mixed_linear(x, *b, weight_ready=True, **around)


OPERATORS = {  # run, what it keeps, and how a weight is quantized
    "fp8": (fp8, fused.READY, lambda w: quantize_fp8_block(w, (128, 128))),
    "mxfp4": (mxfp4_of("mxfp4"), mxfp4.READY, quantize_mxfp4),
    "mxfp4 by fp8": (mxfp4_of("fp8"), mxfp4.READY, quantize_mxfp4),
    "mxfp4 by bf16": (mxfp4_of("none"), mxfp4.READY, quantize_mxfp4),
    "int8": (int8, mixed.READY, lambda w: quantize_int8(w, K)),
}


def parts_of(quantize, w):
    return [t.clone() for t in list(quantize(w))[:2]]


@pytest.fixture(params=OPERATORS)
def case(request):
    """run(x, b, **around), what its operator keeps, and how a weight is quantized."""
    run, ready, quantize = OPERATORS[request.param]
    ready.clear()
    return run, ready, quantize


def arounds(tokens, seed=0):
    """What may be around a product of so many tokens, each anew."""
    torch.manual_seed(seed)
    norm = torch.rand(K, device="cuda").bfloat16() + 0.5
    residual = torch.randn(tokens, N, device="cuda").bfloat16()
    return (
        {},
        {"residual": residual},
        {"norm": norm, "epsilon": 1e-5},
        {"norm": norm, "epsilon": 1e-5, "residual": residual},
    )


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 40, 65, 300, 2048, 4100])
def test_a_repeated_call_is_the_operators(case, tokens):
    run, ready, quantize = case
    torch.manual_seed(1)
    b, other = (parts_of(quantize, torch.randn(N, K, device="cuda")) for _ in range(2))
    for kind in range(4):
        for seed in range(3):
            around = arounds(tokens, seed)[kind]
            x = torch.randn(tokens, K, device="cuda").bfloat16()
            with torch.enable_grad():  # by the operator
                expected = run(x, b, **around)
            with torch.no_grad():
                assert torch.equal(run(x, b, **around), expected)
                assert torch.equal(run(x.clone(), b, **around), expected)
        with torch.no_grad():  # other numbers in the same memory
            before = [t.clone() for t in b]
            for t, new in zip(b, other, strict=True):
                t.copy_(new)
            changed = run(x, b, **around)
            assert torch.equal(changed, run(x, other, **around)) and not torch.equal(changed, expected)
            for t, old in zip(b, before, strict=True):
                t.copy_(old)
            assert torch.equal(run(x, b, **around), expected)
    assert ready or tokens > 2  # more may be a batch's product


@pytest.mark.gpu
def test_tensors_that_lie_otherwise_are_another_call(case):
    run, ready, quantize = case
    b = parts_of(quantize, torch.randn(N, K, device="cuda"))
    x = torch.randn(2, K + 8, device="cuda").bfloat16()
    with torch.no_grad():
        expected = run(x[:, :K].contiguous(), b, residual=(r := torch.randn(2, N, device="cuda").bfloat16()))
        moved = torch.empty(2 * K + 1, device="cuda", dtype=torch.bfloat16)[1:].view(2, K).copy_(x[:, :K])
        wide = torch.empty(2, 2 * N, device="cuda", dtype=torch.bfloat16)[:, :N].copy_(r)
        for given in (x[:, :K], moved):
            for residual in (r, wide):
                for _ in range(2):
                    assert torch.equal(run(given, b, residual=residual), expected)


@pytest.mark.gpu
def test_threads_and_streams_repeat_it_at_once(case):
    run, _, quantize = case
    b = parts_of(quantize, torch.randn(N, K, device="cuda"))
    xs = [torch.randn(1, K, device="cuda").bfloat16() for _ in range(4)]
    rest = arounds(1)[3]
    with torch.no_grad():
        expected = [run(x, b, **rest) for x in xs]
    torch.cuda.synchronize()
    wrong = []

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            for _ in range(200):
                if not torch.equal(run(xs[i], b, **rest), expected[i]):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.gpu
def test_a_graph_records_it(case):
    run, _, quantize = case
    b = parts_of(quantize, torch.randn(N, K, device="cuda"))
    x, rest = torch.randn(1, K, device="cuda").bfloat16(), arounds(1)[3]
    with torch.no_grad():
        run(x, b, **rest)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run(x, b, **rest)
        x.normal_()
        graph.replay()
        assert torch.equal(y, run(x, b, **rest))


@pytest.mark.gpu
def test_no_weight_is_held(case):
    run, _, quantize = case
    x = torch.randn(1, K, device="cuda").bfloat16()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        b = parts_of(quantize, torch.randn(N, K, device="cuda"))
        with torch.no_grad():
            run(x, b, **arounds(1)[3])
    del b
    assert torch.cuda.memory_allocated() <= before + 4096
