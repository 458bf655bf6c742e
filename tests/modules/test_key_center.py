"""Keys with a large bias: what is taken off all of them changes no score, and what is quantized is what differs."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from quantrot import convert, load
from quantrot.kernels.attention import int4_token
from quantrot.kernels.hadamard import hadamard_transform
from quantrot.modules import QuantizedAttention, attention
from quantrot.rotation import Rotation

IDS = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def biased():
    """Two layers whose keys share a bias of 300 where RoPE turns least."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 1e6}  # Qwen2's
    config = LlamaConfig(num_hidden_layers=2, vocab_size=97, attention_bias=True, rope_parameters=rope, **sizes)
    model = LlamaForCausalLM(config).eval()
    for layer in model.model.layers:
        for proj in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            torch.nn.init.normal_(proj.weight, std=0.3)
            torch.nn.init.normal_(proj.bias)
        layer.self_attn.k_proj.bias.data.view(2, 32)[:, [15, 31]] += torch.tensor([300.0, -200.0])
    return model


def narrow(model, **kind):
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        layer.self_attn = QuantizedAttention(layer.self_attn, **kind)
    return model


@torch.no_grad()
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    "kind", [{"kv_cache": "fp8"}, {"kv_cache": "int4"}, {"arithmetic": "fp8", "kv_cache": "fp8"}, {"arithmetic": "fp8"}]
)
def test_a_bias_of_all_keys_costs_no_accuracy(biased, kind, turned):
    exact = biased(IDS).logits
    model = narrow(biased, rotation=Rotation("R3", "hadamard", 32, 32, 0) if turned else None, **kind)

    def error():
        whole = model(IDS).logits
        steps = model(IDS[:, :20], use_cache=True)
        last = model(IDS[:, 20:21], past_key_values=steps.past_key_values).logits  # a token on a cache
        return max((whole - exact).norm() / exact.norm(), (last - exact[:, 20:21]).norm() / exact[:, 20:21].norm())

    before = error()
    for layer in model.model.layers:
        layer.self_attn.center_keys(model.model.rotary_emb)
    assert error() < before / 2


@torch.no_grad()
@pytest.mark.parametrize("turned", [False, True])
def test_a_token_by_the_operator_of_int4_is_turned_once(biased, monkeypatch, turned):
    """Centered keys have been through RoPE when the operator, which would turn them, gets them."""
    model = narrow(biased, rotation=Rotation("R3", "hadamard", 32, 32, 0) if turned else None, kv_cache="int4")
    for layer in model.model.layers:
        layer.self_attn.center_keys(model.model.rotary_emb)
    monkeypatch.setattr(int4_token, "DTYPES", (torch.float32,))
    calls, real, logits = [], int4_token.try_attend_one, []
    monkeypatch.setattr(int4_token, "try_attend_one", lambda *a, **k: calls.append(k["turn"]) or real(*a, **k))
    for used in (True, False):
        monkeypatch.setattr(int4_token, "runs_on", lambda device, used=used: used)
        steps = model(IDS[:, :20], use_cache=True)
        logits.append(model(IDS[:, 20:21], past_key_values=steps.past_key_values).logits)
    assert [(turn.cos, turn.order) for turn in calls] == [(None, 32 * turned)] * 2
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("kind", ["bf16", "fp8", "int4"])
def test_heads_that_one_kernel_turns_are_turned_once(biased, monkeypatch, kind, centered, turned):
    """What that kernel gives, by torch: no bit of a prompt's logits, or of a token's behind it, is another."""
    model = narrow(biased, rotation=Rotation("R3", "random-hadamard", 32, 32, 0) if turned else None, kv_cache=kind)
    if centered:
        for layer in model.model.layers:
            layer.self_attn.center_keys(model.model.rotary_emb)
    calls, logits = [], []

    def try_turn(q, k, turn):
        calls.append(turn)
        q, k = apply_rotary_pos_emb(q, k, turn.cos, turn.sin, unsqueeze_dim=2)
        return (hadamard_transform(t, order=turn.order, signs=turn.signs) for t in (q, k)) if turn.order else (q, k)

    for replaced in (lambda *_: None, try_turn):
        monkeypatch.setattr(attention, "try_turn", replaced)
        steps = model(IDS[:, :20], use_cache=True)
        token = model(IDS[:, 20:21], past_key_values=steps.past_key_values)
        logits.append(torch.cat([steps.logits, token.logits], 1))
    by_one = turned and model.model.layers[0].self_attn.key_center is None
    assert len(calls) == 4 and all(turn.order == 32 * by_one for turn in calls)
    assert torch.equal(*logits)


@torch.no_grad()
def test_without_quantization_nothing_changes(biased, monkeypatch):
    monkeypatch.setattr(attention, "round_trip", lambda kind, key, value: (key, value))
    model = narrow(biased, kv_cache="fp8")
    for layer in model.model.layers:
        layer.self_attn.center_keys(model.model.rotary_emb)
        assert layer.self_attn.key_center.abs().max() > 290
    torch.testing.assert_close(model(IDS, use_cache=False).logits, biased(IDS).logits, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_a_loaded_model_is_centered_and_stores_nothing_of_it(biased, tmp_path):
    biased.save_pretrained(tmp_path / "model")
    model = load(convert(tmp_path / "model", "fp8-attention", tmp_path / "out").out, device_map="cpu")
    assert all(layer.self_attn.key_center is not None for layer in model.model.layers)
    assert not any("key_center" in name for name in model.state_dict())
    exact = biased(IDS).logits
    centered = (model(IDS).logits - exact).norm()
    for layer in model.model.layers:
        layer.self_attn.key_center = None
    assert centered < (model(IDS).logits - exact).norm() / 2


@torch.no_grad()
def test_rope_that_remembers_the_longest_sequence_has_not_seen_one(biased):
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    config = LlamaConfig(**{**biased.config.to_dict(), "max_position_embeddings": 16, "rope_parameters": rope})
    model = narrow(LlamaForCausalLM(config).eval(), kv_cache="fp8")
    rotary = model.model.rotary_emb
    before = rotary.inv_freq.clone(), rotary.max_seq_len_cached
    for layer in model.model.layers:
        layer.self_attn.center_keys(rotary)
    assert torch.equal(rotary.inv_freq, before[0]) and rotary.max_seq_len_cached == before[1]


def test_no_bias_no_narrow_keys_and_a_bias_elsewhere(biased):
    wide = QuantizedAttention(copy.deepcopy(biased.model.layers[0].self_attn))
    wide.center_keys(biased.model.rotary_emb)
    assert wide.key_center is None
    plain = QuantizedAttention(copy.deepcopy(biased.model.layers[0].self_attn), kv_cache="int4")
    plain.k_proj.bias = torch.nn.Parameter(plain.k_proj.bias.to("meta"))
    with pytest.raises(ValueError, match="layer 0: k_proj.bias is offloaded to disk"):
        plain.center_keys(biased.model.rotary_emb)
    plain.k_proj.bias = None
    plain.center_keys(biased.model.rotary_emb)
    assert plain.key_center is None
