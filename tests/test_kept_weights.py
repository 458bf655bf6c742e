"""What a loaded model keeps of its weights beside the files' tensors, and that it is theirs."""

from functools import cache
from types import SimpleNamespace

import psutil
import pytest
import torch

from quantrot import convert, load
from quantrot.kernels.halves import halves_gemm
from quantrot.modules import QuantizedAttention, QuantizedLinear, QuantizedMLP

IDS = torch.arange(2, 26).view(2, 12)


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    """`made(recipe)`, where a small model that it converted lies."""
    root = tmp_path_factory.mktemp("kept")
    source = tiny(root / "source", hidden=128, intermediate=256, kv_heads=4, dtype=torch.bfloat16)
    return cache(lambda recipe: convert(source, recipe, root / recipe).out)


def test_decoding_ahead_changes_nothing(made):
    model = load(made("quarot-mxfp4-online"), device_map="cpu")
    with torch.no_grad():
        ahead = model(IDS).logits
        for module in model.modules():
            if isinstance(module, QuantizedLinear):
                assert module._decoded is not None
                module._decoded = module._halves_for = None
        assert torch.equal(model(IDS).logits, ahead)


@torch.no_grad()
@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("enough", range(5))
def test_what_is_kept_of_weights_takes_half_of_the_free_memory_at_most(made, monkeypatch, capability, merge, enough):
    """Where there is no room for both, halves come before a decoded weight."""
    numbers = 2 * (4 * 128 * 128 + 3 * 128 * 256)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    limits = [numbers * 5 // 4, 2 * numbers, numbers * 13 // 4]
    free = SimpleNamespace(available=2 * [limits[0] - 1, limits[0], limits[1], limits[2] - 1, limits[2]][enough])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    model = load(made("quarot-mxfp4-online"), device_map="cpu", merge=merge)
    fast = capability == "AVX512"
    dense, halved = (enough == 4, enough >= 1) if fast else (enough >= 2, False)
    modules = list(model.modules())
    wholes = [m.merged for m in modules if isinstance(m, QuantizedMLP | QuantizedAttention)]
    linears = [m for m in modules if isinstance(m, QuantizedLinear)]
    assert len(linears) == 14 + 4 * merge and all((m._decoded is not None) == dense for m in linears)
    parts = [m for m in linears if not m._apart]
    assert len(wholes) == 4 * merge and len(parts) == 10 * merge and all(m._halves is None for m in parts)
    assert all((m._halves_for is not None) == halved and m._halves is None for m in linears)
    model(IDS[:1, :1])
    assert all(bool(m._halves) == halved for m in linears if m._apart)
    monkeypatch.setattr("quantrot.formats.halve", lambda *of: pytest.fail("halved again"))
    model(IDS[:1, :1])


@torch.no_grad()
@pytest.mark.parametrize("recipe", ["int8-weight-only", "mxfp4-weight-only", "mxfp4-w4a8", "hadamard-mxfp4"])
@pytest.mark.parametrize("dense", [False, True])
def test_few_tokens_are_multiplied_by_halves(made, monkeypatch, recipe, dense):
    """Of a bfloat16 model on a CPU: as near to float32's logits as a decoded weight's are."""
    monkeypatch.setattr("quantrot.kernels.halves.CAPABILITY", torch.backends.cpu.get_cpu_capability())
    out = made(recipe)
    single = load(out, device_map="cpu", dtype="float32")
    assert all(m._halves_for is None for m in single.modules() if isinstance(m, QuantizedLinear))
    exact = single(IDS[:1, :3]).logits
    model = load(out, device_map="cpu", dtype="bfloat16")
    halved = [m for m in model.modules() if isinstance(m, QuantizedLinear) and m._halves_for]
    assert len(halved) == 18  # eight products, ten parts of some
    for module in model.modules():
        if isinstance(module, QuantizedLinear) and not dense:
            module._decoded = None
    calls = []
    monkeypatch.setattr(
        "quantrot.modules.linear.halves_gemm", lambda x, *rest: calls.append(x) or halves_gemm(x, *rest)
    )
    few = model(IDS[:1, :3]).logits.float()
    assert len(calls) == 8
    long = IDS[:1].repeat(1, 9)[:, : 5 if dense else 33]
    model(long)
    assert len(calls) == 8
    for module in halved:
        module._halves_for = None
    wide = model(IDS[:1, :3]).logits.float()
    assert len(calls) == 8
    assert (few - exact).norm() <= 1.5 * (wide - exact).norm()


@torch.no_grad()
@pytest.mark.parametrize("recipe", ["fp8-block", "mxfp4", "int8-weight-only", "quarot-w4a4kv4"])
def test_a_model_that_is_cast_is_the_model_loaded_in_that_dtype(made, recipe):
    """Its weights were decoded on the CPU: what is kept of them follows the rest."""
    out = made(recipe)
    cast, loaded = load(out, device_map="cpu").to(torch.float32), load(out, device_map="cpu", dtype="float32")
    assert any(m._decoded is not None for m in cast.modules() if isinstance(m, QuantizedLinear))
    assert torch.equal(cast(IDS).logits, loaded(IDS).logits)


@pytest.mark.parametrize("recipe", ["int8-weight-only", "fp8-block"])
def test_a_model_loaded_in_inference_mode_is_of_use_outside(made, recipe):
    out = made(recipe)
    with torch.inference_mode():
        model = load(out, device_map="cpu")
    assert not any(p.is_inference() for p in model.parameters())
    cast, loaded = model.to(torch.float32), load(out, device_map="cpu", dtype="float32")
    with torch.no_grad():
        assert torch.equal(cast(IDS).logits, loaded(IDS).logits)


@torch.no_grad()
@pytest.mark.parametrize("merge", [False, True])
def test_scales_that_were_only_widened_are_the_same_numbers(made, merge):
    """As peft's prepare_model_for_kbit_training leaves every parameter of 16 bits."""
    out = made("int8-weight-only")
    model, expected = load(out, device_map="cpu", merge=merge), load(out, device_map="cpu", dtype="float32")
    for p in model.parameters():
        if p.dtype == torch.bfloat16:
            p.data = p.data.to(torch.float32)
    assert model.model.layers[0].mlp.down_proj.weight_scale.dtype == torch.float32
    torch.testing.assert_close(model(IDS).logits, expected(IDS).logits, rtol=1e-5, atol=1e-5)
    model.model.layers[0].mlp.down_proj.weight_scale.data *= 1.001
    with pytest.raises(ValueError, match=r"weight_scale is torch\.float32, not .*or by p\.data = p\.data\.to\(dtype\)"):
        model(IDS)


@torch.no_grad()
@pytest.mark.parametrize("assign", [False, True])
def test_tensors_loaded_into_a_model_are_the_ones_that_count(made, assign):
    model = load(made("quarot-mxfp4-online"), device_map="cpu")
    before, state = model(IDS).logits, {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name in state:
        if name.endswith("down_proj.weight_scale"):
            state[name] += 2  # e8m0: four times the weight
    model.load_state_dict(state, assign=assign)
    after = model(IDS).logits
    assert not torch.equal(after, before)
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module._decoded = module._halves_for = None
    assert torch.equal(model(IDS).logits, after)
