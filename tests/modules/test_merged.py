"""Linears of one input as one product: the same numbers, names and tensors, wherever they are moved."""

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from quantrot import formats
from quantrot.formats import WIDE, ActivationFormat, LinearFormat, WeightFormat
from quantrot.load import merge_projections
from quantrot.modules import LINEARS, OnlineHadamard, QuantizedAttention, QuantizedMLP
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
def kernels(monkeypatch):
    """Merged where there are kernels: here everywhere, with the references behind them."""
    for linear in LINEARS.values():
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


def test_a_replaced_projection_is_the_one_that_runs():
    llama = model("fp8")
    merge_projections(llama)
    mlp = llama.model.layers[0].mlp
    mlp.up_proj = nn.Linear(256, 384, bias=False)
    x = torch.randn(3, 256)
    with torch.no_grad():
        torch.testing.assert_close(mlp.outputs(x)[1], mlp.up_proj(x))


def test_only_equal_linears_are_merged():
    llama = model("mxfp4")
    layer = llama.model.layers[0]
    layer.mlp.gate_proj._decoded = torch.zeros(384, 256)
    layer.self_attn.k_proj = model("int8").model.layers[0].self_attn.k_proj
    layer.self_attn.v_proj = nn.Linear(256, 128, bias=False)
    assert merge_projections(llama) == 2  # of the other layer
    assert not isinstance(layer.self_attn, QuantizedAttention) and not isinstance(layer.mlp, QuantizedMLP)
