"""Linears of one input as one product: the same numbers, names and tensors, wherever they are moved."""

import copy
import io
from contextlib import contextmanager

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_module
from safetensors.torch import load_file, load_model, save_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from quantrot import formats
from quantrot.formats import WIDE, ActivationFormat, LinearFormat, WeightFormat
from quantrot.kernels.mixed import mixed_linear
from quantrot.load import merge_projections
from quantrot.modules import LINEARS, OnlineHadamard, QuantizedAttention, QuantizedLinear, QuantizedMLP, int8
from quantrot.rotation import Rotation

FORMATS = {
    "fp8": LinearFormat(WeightFormat("fp8", (128, 128), "bf16"), ActivationFormat("fp8", (1, 128), "bf16")),
    "mxfp4": LinearFormat(WeightFormat("mxfp4", (1, 32), "even"), ActivationFormat("mxfp4", (1, 32), "even")),
    "int8": LinearFormat(WeightFormat("int8", (1, 0), "bf16"), WIDE),
}


def model(kind: str, bias: bool = False, online: bool = False, fmt: LinearFormat | None = None) -> LlamaForCausalLM:
    """Two layers, every linear quantized and, on the CPU, said to have kernels (the tests' fixture)."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        attention_bias=bias,
    )
    llama = LlamaForCausalLM(config).eval()
    for layer in llama.model.layers:
        for name, old in [*layer.self_attn.named_children(), *layer.mlp.named_children()]:
            if isinstance(old, nn.Linear):
                turn = OnlineHadamard(Rotation("block", "hadamard", old.in_features, 32, 0), True) if online else None
                if turn is not None:
                    nn.init.zeros_(turn.weight)  # stored for other engines, not used
                shape = old.in_features, old.out_features, old.bias is not None, torch.float32
                new = LINEARS[kind](*shape, fmt or FORMATS[kind], online=turn)
                stored = formats.quantize_rows(new.format.weights, old.weight.data)
                for tensor, value in zip(new.tensor_names, stored, strict=True):
                    getattr(new, tensor).data = value
                if old.bias is not None:
                    new.bias.data = torch.randn(old.out_features)
                setattr(layer.self_attn if hasattr(layer.self_attn, name) else layer.mlp, name, new)
    return llama


@pytest.fixture(autouse=True)
def kernels(monkeypatch, request):
    """Merged where there are kernels: without a GPU everywhere, with the references behind them."""
    for linear in LINEARS.values() if "gpu" not in request.keywords else []:
        monkeypatch.setattr(linear, "runs_packed", lambda self, device: True)
        monkeypatch.setattr(linear, "multiply", lambda self, x: self.multiply_wide(x, self.dequantized(x.dtype)))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_merged_layers_give_the_same_logits_from_the_same_tensors(kind, online, bias):
    llama = model(kind, bias, online)
    ids = torch.randint(0, 64, (2, 9))
    with torch.no_grad():
        expected, before = llama(ids).logits, copy.deepcopy(llama.state_dict())
        assert merge_projections(llama) == 4
        torch.testing.assert_close(llama(ids).logits, expected, rtol=1e-5, atol=1e-5)
        whole = torch.compile(llama.model.layers[0].mlp, backend="eager", fullgraph=True)
        x = torch.randn(3, 256)
        torch.testing.assert_close(whole(x), llama.model.layers[0].mlp(x))
    after = llama.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    attention = llama.model.layers[0].self_attn
    name = attention.q_proj.tensor_names[0]
    memory, query, key = (getattr(linear, name) for linear in (attention.merged, attention.q_proj, attention.k_proj))
    assert query.data_ptr() == memory.data_ptr() and key.data_ptr() == memory[len(query) :].data_ptr()
    assert merge_projections(llama) == 4 and isinstance(llama.model.layers[0].mlp, QuantizedMLP)


def test_what_is_moved_or_cast_is_merged_again():
    llama = model("int8", bias=True)
    merge_projections(llama)
    ids = torch.randint(0, 64, (1, 5))
    with torch.no_grad():
        expected = llama(ids).logits
        moved = llama.to(torch.float64)
        attention = moved.model.layers[1].self_attn
        assert attention.q_proj.bias.data_ptr() == attention.merged.bias.data_ptr()
        torch.testing.assert_close(moved(ids).logits.float(), expected, rtol=1e-5, atol=1e-5)
        attention.k_proj.bias.data.add_(1)  # the part's memory is the whole's
        q, k, v = attention.outputs(torch.zeros(1, 256, dtype=torch.float64))
        torch.testing.assert_close(k[0], attention.k_proj.bias)


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_cast_leaves_the_stored_tensors_as_they_are(kind, merge):
    llama = model(kind, bias=True)
    if merge:
        merge_projections(llama)
    linear = llama.model.layers[0].self_attn.k_proj
    before = [(name, getattr(linear, name).clone()) for name in linear.tensor_names]
    with torch.no_grad():
        expected = llama(torch.arange(5)[None]).logits
        cast = llama.to(torch.bfloat16)(torch.arange(5)[None]).logits
    for name, tensor in before:
        now = getattr(linear, name)
        assert now.dtype == tensor.dtype and torch.equal(now.view(torch.uint8), tensor.view(torch.uint8))
    assert linear.bias.dtype == cast.dtype == torch.bfloat16
    assert (cast.float() - expected).norm() < 0.2 * expected.norm()  # FP4 activations fall into other codes


@torch.no_grad()
@pytest.mark.parametrize("change", ["deepcopy", "save", "assign", "assign one"])
def test_the_parts_stay_slices_of_the_whole(change):
    """Of a copy, too, and of tensors that load_state_dict(assign=True) put there: what is written into them counts."""
    llama = model("fp8", bias=True)
    merge_projections(llama)
    x = torch.randn(3, 256)
    expected = [y.clone() for y in llama.model.layers[0].self_attn.outputs(x)]
    if change == "deepcopy":
        llama = copy.deepcopy(llama)
    if change == "save":
        torch.save(llama, file := io.BytesIO())
        llama = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    attention = llama.model.layers[0].self_attn
    if change.startswith("assign"):
        state = copy.deepcopy(llama.state_dict())
        name = "model.layers.0.self_attn.v_proj.weight_scale"
        llama.load_state_dict(state if change == "assign" else {name: state[name]}, strict=False, assign=True)
    assert attention.current() is not None
    for got, want in zip(attention.outputs(x), expected, strict=True):
        assert torch.equal(got, want)
    attention.v_proj.weight_scale.mul_(2)
    attention.v_proj.bias.mul_(2)
    q, k, v = attention.outputs(x)
    assert torch.equal(q, expected[0]) and torch.equal(k, expected[1]) and torch.equal(v, expected[2] * 2)


def changed(change: str, llama: LlamaForCausalLM, alone: LlamaForCausalLM) -> LlamaForCausalLM:
    """llama, or what takes its place; alone, of the same numbers, has them changed as they are."""
    if "copy" in change:
        return copy.deepcopy(llama)
    if change == "save":
        torch.save(llama, file := io.BytesIO())
        return torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    if change in ("cast", "widen"):
        for each in (llama, alone):
            each.to(torch.bfloat16 if change == "cast" else torch.float32)
    if change in ("load", "assign"):
        state = {name: tensor.clone() for name, tensor in llama.state_dict().items()}
        state["model.layers.0.self_attn.k_proj.weight_scale"] += 1
        for each in (llama, alone):
            each.load_state_dict(copy.deepcopy(state), assign=change == "assign")
    return llama


@torch.no_grad()
@pytest.mark.parametrize("change", ["none", "deepcopy", "save", "cast", "load", "assign"])
def test_decoded_weights_are_merged_where_there_are_no_kernels(monkeypatch, change):
    """And again after everything that makes them anew: a weight is decoded once, and the parts' are slices of it."""
    monkeypatch.undo()
    llama = model("mxfp4", bias=True, online=True)
    for linear in llama.model.layers.modules():
        if isinstance(linear, QuantizedLinear):
            linear.decode(torch.float32)
    alone = copy.deepcopy(llama)
    assert merge_projections(llama) == 4
    llama = changed(change, llama, alone)
    for layer, before in zip(llama.model.layers, alone.model.layers, strict=True):
        for module, old in ((layer.self_attn, before.self_attn), (layer.mlp, before.mlp)):
            whole, x = module.current(), torch.randn(5, 256).to(llama.dtype)
            assert whole is not None and whole._decoded.dtype == llama.dtype
            start = 0
            for name, y in zip(module.parts, module.outputs(x), strict=True):
                part = getattr(module, name)
                assert part._decoded.data_ptr() == whole._decoded[start:].data_ptr()
                start += part.out_features
                torch.testing.assert_close(y, getattr(old, name)(x), rtol=0, atol=2**-7 * y.abs().max().item())


@torch.no_grad()
def test_a_decoded_part_that_is_written_in_place_is_decoded_anew(monkeypatch):
    monkeypatch.undo()
    llama, x = model("mxfp4"), torch.randn(3, 256)
    for linear in llama.model.layers[0].self_attn.children():
        linear.decode(torch.float32)
    merge_projections(llama)
    attention = llama.model.layers[0].self_attn
    q, k, v = attention.outputs(x)
    attention.k_proj.weight_scale.add_(1)  # exponents
    got = attention.outputs(x)
    assert attention.current() is not None
    for y, want in zip(got, (q, 2 * k, v), strict=True):
        torch.testing.assert_close(y, want)


@torch.no_grad()
def test_a_whole_that_alone_was_decoded_is_not_used_for_other_tensors():
    mlp, x = QuantizedMLP(model("int8").model.layers[0].mlp), torch.randn(3, 256)
    assert mlp.merge()
    mlp.merged.decode(torch.float32)
    mlp.load_state_dict({name: t * 2 if "scale" in name else t for name, t in mlp.state_dict().items()})
    torch.testing.assert_close(mlp.outputs(x)[0], mlp.gate_proj(x))


def test_what_accelerate_may_move_is_not_merged_where_there_are_no_kernels(monkeypatch):
    monkeypatch.undo()
    llama = model("mxfp4")
    llama.lm_head.to("meta")
    assert merge_projections(llama) == 0


def test_it_is_merged_and_cast_under_autocast_which_knows_no_e4m3():
    llama = model("fp8")
    with torch.autocast("cpu", torch.bfloat16):
        assert merge_projections(llama) == 4
        llama.to(torch.float16)
    assert llama.model.layers[0].mlp.current() is not None


@pytest.mark.parametrize("name", QuantizedMLP.parts)
def test_a_replaced_projection_is_the_one_that_runs(name):
    llama = model("fp8")
    merge_projections(llama)
    mlp, x, at = llama.model.layers[0].mlp, torch.randn(3, 256), QuantizedMLP.parts.index(name)
    setattr(mlp, name, new := nn.Linear(256, 384, bias=False))
    with torch.no_grad():
        torch.testing.assert_close(mlp.outputs(x)[at], new(x))
        llama.to(torch.bfloat16)
        assert mlp.current() is None and torch.equal(mlp.outputs(x.bfloat16())[at], new(x.bfloat16()))


@pytest.mark.parametrize("hook", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_a_projection_that_is_watched_is_called(hook):
    llama = model("int8")
    merge_projections(llama)
    mlp, x, seen = llama.model.layers[0].mlp, torch.randn(3, 256, requires_grad=True), []
    expected = mlp(x)
    handle = getattr(mlp.gate_proj, f"register_{hook}_hook")(lambda module, *values: seen.append(module))
    y = mlp(x)
    y.sum().backward()
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    assert seen == [mlp.gate_proj] and mlp.current() is None
    handle.remove()
    assert torch.equal(mlp(x), expected) and len(seen) == 1 and mlp.current() is not None


class Adds(ModelHook):
    def post_forward(self, module, output):
        return output + 1


@torch.no_grad()
@pytest.mark.parametrize("way", ["patched", "accelerate", "patched, then moved", "moved, then patched"])
def test_a_projection_that_was_given_another_forward_runs_it(way):
    llama = model("mxfp4")
    merge_projections(llama)
    mlp, x = llama.model.layers[0].mlp, torch.randn(3, 256)
    torch.compiler.reset()
    compiled = torch.compile(mlp, fullgraph=True, backend="eager")
    before = mlp(x)
    assert torch.equal(compiled(x), before)
    add_hook_to_module(mlp.gate_proj, AlignDevicesHook(execution_device="cpu"))  # as dispatch_model: it only moves
    assert mlp.current() is not None
    remove_hook_from_module(mlp.gate_proj)
    assert "forward" in vars(mlp.gate_proj) and mlp.current() is not None  # its own, that accelerate put back
    gate = mlp.gate_proj(x) + 1
    if way == "accelerate":
        add_hook_to_module(mlp.gate_proj, Adds())
    if way == "moved, then patched":
        add_hook_to_module(mlp.gate_proj, AlignDevicesHook(execution_device="cpu"))
    if "patched" in way:
        own = mlp.gate_proj.forward
        mlp.gate_proj.forward = lambda x: own(x) + 1
    if way == "patched, then moved":
        add_hook_to_module(mlp.gate_proj, AlignDevicesHook(execution_device="cpu"))
    assert mlp.current() is None and not torch.allclose(mlp(x), before)
    torch.testing.assert_close(mlp.outputs(x)[0], gate)
    if way in ("patched", "accelerate"):
        assert torch.equal(torch.compile(mlp, backend="eager")(x), mlp(x))
    if way == "patched":  # after it was compiled
        assert torch.equal(compiled(x), mlp(x))


@torch.no_grad()
@pytest.mark.parametrize("way", ["hook", "patched"])
def test_an_activation_that_is_watched_is_called(way):
    llama = model("mxfp4")
    merge_projections(llama)
    mlp, x, seen = llama.model.layers[0].mlp, torch.randn(3, 256), []
    if way == "hook":
        mlp.act_fn.register_forward_hook(lambda *values: seen.append(1))
    else:
        own = mlp.act_fn.forward
        mlp.act_fn.forward = lambda x: seen.append(1) or own(x)
    mlp(x)
    assert seen == [1]


@torch.no_grad()
@pytest.mark.parametrize("change", ["load", "assign", "in place", "cast"])
def test_tensors_that_one_part_was_given_count(monkeypatch, change):
    monkeypatch.undo()
    attention = model("mxfp4").model.layers[0].self_attn
    for name in QuantizedAttention.parts:
        getattr(attention, name).decode(torch.float32)
    merged, x = QuantizedAttention(attention), torch.randn(3, 256)
    assert merged.merge()
    part, before = merged.v_proj, merged.outputs(x)[2]
    scale = part.weight_scale + 1
    if change in ("load", "assign"):
        part.load_state_dict({**part.state_dict(), "weight_scale": scale}, assign=change == "assign")
    elif change == "in place":
        part.weight_scale.copy_(scale)
        part.decode(torch.float32)
    else:
        part.to(torch.float64).weight_scale.copy_(scale)
        part.decode(torch.float32)
    torch.testing.assert_close(merged.outputs(x)[2], before * 2)
    assert (merged.current() is None) == (change in ("assign", "cast"))


@pytest.mark.parametrize("kind", ["mxfp4", "int8"])
def test_a_bias_that_is_trained_or_given_alone_counts(kind):
    attention = model(kind, bias=True).model.layers[0].self_attn
    merged, x = QuantizedAttention(attention), torch.randn(3, 256)
    assert merged.merge()
    part, before = merged.v_proj, merged.outputs(x)[2].detach()
    part.bias.requires_grad_(True)
    merged.outputs(x)[2].sum().backward()
    assert torch.equal(part.bias.grad, torch.full_like(part.bias, 3))
    with torch.no_grad():
        assert merged.current() is not None
        part.bias.data = part.bias.data + 1
        torch.testing.assert_close(merged.outputs(x)[2], before + 1)
        assert merged.merge() and merged.current() is not None
        part.bias = torch.nn.Parameter(part.bias + 1)
        torch.testing.assert_close(merged.outputs(x)[2], before + 2)
        part.bias = None
        torch.testing.assert_close(merged.outputs(x)[2], part(x))


@torch.no_grad()
def test_stacked_biases_are_those_that_were_given():
    attention = model("int8", bias=True).model.layers[0].self_attn
    merged, x = QuantizedAttention(attention), torch.randn(3, 256)
    assert merged.merge()
    expected = merged.outputs(x)[2]

    def values(bias):
        previous, merged.v_proj._parameters["bias"] = merged.v_proj.bias, bias
        try:
            return merged.outputs(x)[2]
        finally:
            merged.v_proj._parameters["bias"] = previous

    bias = merged.v_proj.bias
    torch.testing.assert_close(torch.vmap(values)(torch.stack([bias, bias + 1])), torch.stack([expected, expected + 1]))


@torch.no_grad()
@pytest.mark.parametrize("rows", [100, 192])
def test_blocks_that_end_in_the_middle_of_a_part_are_not_merged(rows):
    mlp = model("fp8").model.layers[0].mlp
    for name in QuantizedMLP.parts:
        part = LINEARS["fp8"](256, rows, False, torch.float32, FORMATS["fp8"])
        stored = formats.quantize_rows(FORMATS["fp8"].weights, torch.randn(rows, 256))
        for tensor, value in zip(part.tensor_names, stored, strict=True):
            getattr(part, tensor).data = value
        setattr(mlp, name, part)
    assert not QuantizedMLP(mlp).merge()


def test_shared_memory_stays_shared():
    llama = model("int8", bias=True)
    merge_projections(llama)
    llama.share_memory()
    attention = llama.model.layers[0].self_attn
    assert attention.current() is not None and all(t.is_shared() for t in attention.merged.stored())
    assert all(p.is_shared() for p in llama.parameters())


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("change", ["none", "act", "hook", "replaced"])
def test_silu_of_a_merged_product_is_left_to_the_linear_behind_it(monkeypatch, change, merge):
    """And to nobody where it is another function, where the linear is watched, or is another module."""
    llama, gated = model("fp8"), []
    mlp = QuantizedMLP(llama.model.layers[0].mlp)
    if merge:
        assert mlp.merge()
    if change == "act":
        mlp.act_fn = nn.GELU()
    if change == "hook":
        seen = []
        mlp.down_proj.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    if change == "replaced":
        mlp.down_proj = nn.Linear(384, 256, bias=False)
    kind = LINEARS["fp8"]
    multiply_gated = kind.multiply_gated
    monkeypatch.setattr(kind, "multiply_gated", lambda self, x: gated.append(x) or multiply_gated(self, x))
    x = torch.randn(3, 256)
    with torch.no_grad():
        expected = mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
        torch.testing.assert_close(mlp(x), expected, rtol=1e-4, atol=1e-4)
    assert len(gated) == (merge and change == "none")
    assert change != "hook" or len(seen) == 2


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("change", ["none", "act", "decoded"])
def test_the_gate_of_an_int8_product_is_its_own(monkeypatch, change, tokens, device):
    """And not where it is another function, or where the dequantized weight was kept."""
    mlp, gated = QuantizedMLP(model("int8").model.layers[0].mlp).to(device), []
    assert mlp.merge()
    if change == "act":
        mlp.act_fn = nn.GELU()
    if change == "decoded":
        mlp.merged.decode(torch.bfloat16)
    x = torch.randn(1, tokens, 256, device=device, dtype=torch.bfloat16)
    torch.compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(mlp, fullgraph=True, backend="eager")(x)
        monkeypatch.setattr(
            int8, "mixed_linear", lambda *args, **rest: gated.append(rest["gates"]) or mixed_linear(*args, **rest)
        )
        expected = mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
        y = mlp(x)
    assert torch.equal(compiled, y) and y.dtype == x.dtype
    torch.testing.assert_close(y, expected, rtol=0, atol=2**-6 * expected.abs().max().item())
    assert gated == [True] * (change == "none")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("tokens", [1, 200])
@pytest.mark.parametrize("kind", FORMATS)
def test_merged_is_separate_and_compiled_is_eager(kind, tokens, device):
    """One layer at a time: in a whole model the next quantizer turns a last bit's difference into a code's."""
    llama = model(kind, online=kind == "mxfp4").to(device)
    layer, x = llama.model.layers[0], torch.randn(1, tokens, 256, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        separate = [getattr(layer.mlp, part)(x) for part in QuantizedMLP.parts]
        separate += [getattr(layer.self_attn, part)(x) for part in QuantizedAttention.parts]
        assert merge_projections(llama) == 4

        def merged(x):
            return [*layer.mlp.outputs(x), *layer.self_attn.outputs(x)]

        backend = {"backend": "eager"} if device == "cpu" else {"mode": "reduce-overhead"}
        compiled = torch.compile(merged, fullgraph=True, **backend)
        for _ in range(3):
            recorded = [y.clone() for y in compiled(x)]
        for one, whole, same in zip(separate, merged(x), recorded, strict=True):
            torch.testing.assert_close(whole, one, rtol=0, atol=2**-7 * one.abs().max().item())  # the order of sums
            assert torch.equal(same, whole)


@pytest.mark.parametrize("decoded", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_the_weights_sizes_are_known_in_code_for_any_size(kind, decoded):
    """Also where models of two sizes ran: kernels are chosen by them."""
    llama, weights = model(kind), []
    merge_projections(llama)
    mlp = llama.model.layers[0].mlp
    if decoded:
        for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            linear.decode(torch.bfloat16)
        mlp.merge()
    assert mlp.merged is not None

    def backend(graph, examples):
        values = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        weights.extend(value.shape for value in values if isinstance(value, torch.Tensor) and value.dim() == 2)
        return graph

    with torch.no_grad():
        torch.compile(mlp, dynamic=True, fullgraph=True, backend=backend)(torch.ones(3, 2, 256).bfloat16())
    assert len(weights) >= 2 and all(type(size) is int for shape in weights for size in shape)


def test_only_equal_linears_are_merged():
    llama = model("mxfp4")
    layer = llama.model.layers[0]
    layer.mlp.gate_proj.decode(torch.float32)
    layer.self_attn.k_proj = model("int8").model.layers[0].self_attn.k_proj
    layer.self_attn.v_proj = nn.Linear(256, 128, bias=False)
    assert merge_projections(llama) == 2  # of the other layer
    assert not isinstance(layer.self_attn, QuantizedAttention) and not isinstance(layer.mlp, QuantizedMLP)


def test_a_state_dict_takes_each_tensor_on_its_own_gpu(monkeypatch):
    """from_dlpack refuses tensors of a GPU that is not the current one, as all but the first one's are."""
    llama, current = model("int8"), []
    merge_projections(llama)

    @contextmanager
    def device_of(tensor):
        current.append(tensor.untyped_storage().data_ptr())
        yield
        current.pop()

    def from_dlpack(tensor):
        taken.append(current == [tensor.untyped_storage().data_ptr()])
        return real(tensor)

    real, taken = torch.from_dlpack, []
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(torch, "from_dlpack", from_dlpack)
    llama.state_dict()
    assert taken and all(taken)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_who_writes_safetensors_finds_every_tensor(tmp_path, kind, bias):
    """accelerate, and safetensors' own save_model, leave out what has the storage of another tensor."""
    llama = model(kind, bias)
    assert merge_projections(llama) == 4
    state = llama.state_dict()
    memory = {(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in state.values()}
    assert len(memory) == len(state)
    q = llama.model.layers[0].self_attn.q_proj
    assert state[f"model.layers.0.self_attn.q_proj.{q.tensor_names[0]}"].data_ptr() == q.stored()[0].data_ptr()
    save_model(llama, str(tmp_path / "model.safetensors"))
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name].view(torch.uint8), state[name].view(torch.uint8)) for name in state)
    other = model(kind, bias)
    merge_projections(other)
    for p in other.model.layers.parameters():
        p.data.zero_()
    load_model(other, str(tmp_path / "model.safetensors"))
    ids = torch.randint(0, 64, (1, 9))
    with torch.no_grad():
        assert torch.equal(other(ids).logits, llama(ids).logits)


class Adapted(nn.Module):
    """As LoRA's: the linear, and what is learned beside it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("names", [("q_proj",), ("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj")])
def test_who_writes_safetensors_finds_every_tensor_that_an_adapter_holds(tmp_path, kind, names):
    llama = model(kind)
    merge_projections(llama)
    for layer in llama.model.layers:
        for name in names:
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)))
    state = llama.state_dict()
    save_model(llama, str(tmp_path / "model.safetensors"))
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name].view(torch.uint8), state[name].view(torch.uint8)) for name in state)


def test_a_state_dict_leaves_alone_what_is_not_the_merged_parts_own():
    llama = model("mxfp4", bias=True)
    assert merge_projections(llama) == 4
    attention = llama.model.layers[0].self_attn
    attention.q_proj.register_buffer("steps", torch.tensor(7))
    kept = llama.state_dict(keep_vars=True)
    assert all(kept[name] is parameter for name, parameter in llama.named_parameters())
    assert llama.state_dict()["model.layers.0.self_attn.q_proj.steps"] == 7
    attention.k_proj = nn.Linear(128, 256, bias=False)
    attention.k_proj.weight = nn.Parameter(torch.randn(128, 256).t())
    name = "model.layers.0.self_attn.k_proj.weight"
    assert torch.equal(llama.state_dict()[name], attention.k_proj.weight)
