"""Every kind of model that llama.py knows: its tensors, biases and norms, through convert, load, learn and generate."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quantrot import convert, load, plan
from quantrot.learn import learn
from quantrot.llama import SUPPORTED, from_config, tensors
from quantrot.modules.layer import FusedLayer

IDS = 1 + torch.arange(24).view(2, 12) * 7 % 255
R3 = {"rotations": {"R3": {"kind": "hadamard"}}, "linear": []}


def edited(path, **fields):
    """The checkpoint at path with other fields in its config; None: without one."""
    config = json.loads((path / "config.json").read_text()) | fields
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return path


@torch.no_grad()
def logits(model):
    return model(IDS).logits.float()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", SUPPORTED)
def test_the_tensors_are_those_that_transformers_saves(tiny, tmp_path, model_type, tied):
    source = tiny(tmp_path / "model", model_type=model_type, head_dim=24, tied=tied)
    config = json.loads((source / "config.json").read_text())
    stored = {name: tuple(t.shape) for name, t in load_file(source / "model.safetensors").items()}
    assert tensors(from_config(config)) == stored


@pytest.mark.parametrize("recipe", ["fp8-dynamic", "mxfp4-weight-only", "int8-weight-only"])
@pytest.mark.parametrize("model_type", SUPPORTED)
def test_transformers_reads_what_quantrot_reads(tiny, tmp_path, model_type, recipe):
    sizes = {"hidden": 128, "intermediate": 256, "dtype": torch.bfloat16}
    source = tiny(tmp_path / "model", model_type=model_type, **sizes)
    out = convert(source, recipe, tmp_path / "out").out
    ours = logits(load(out, device_map="cpu", dtype="float32"))
    theirs = logits(AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16))
    assert (ours - theirs).norm() < (0.1 if recipe == "fp8-dynamic" else 0.02) * theirs.norm()  # neighbours, codes


@pytest.mark.parametrize("recipe", [R3, {"kv_cache": "fp8"}, {"kv_cache": "int4"}, "fp8-attention-rotated"])
@pytest.mark.parametrize("model_type", SUPPORTED)
def test_generated_tokens_are_those_of_a_forward_without_a_cache(tiny, tmp_path, model_type, recipe):
    source = tiny(tmp_path / "model", model_type=model_type, head_dim=16)
    model = load(convert(source, recipe, tmp_path / "out").out, device_map="cpu")
    cached = model.generate(IDS, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=256)
    with torch.no_grad():
        whole = model(cached, use_cache=False).logits
    assert torch.equal(whole[:, 11:-1].argmax(-1), cached[:, 12:])
    if recipe is R3:
        torch.testing.assert_close(logits(model), logits(AutoModelForCausalLM.from_pretrained(source)))


@pytest.mark.parametrize("model_type", SUPPORTED)
def test_merged_layers_change_nothing(tiny, tmp_path, model_type):
    source = tiny(tmp_path / "model", model_type=model_type, hidden=128, intermediate=256)
    out = convert(source, "hadamard-mxfp4", tmp_path / "out").out
    merged, apart = (load(out, device_map="cpu", merge=merge) for merge in (True, False))
    assert all(isinstance(layer, FusedLayer) for layer in merged.model.layers)
    assert merged.state_dict().keys() == apart.state_dict().keys()
    torch.testing.assert_close(logits(merged), logits(apart))


def test_rotations_are_learned_around_norms_of_heads(tiny, tmp_path):
    source = tiny(tmp_path / "model", model_type="qwen3", head_dim=32)
    r1, r2 = {"kind": "random-hadamard", "block": 16}, {"kind": "hadamard", "block": 8}
    recipe = {"rotations": {"R1": r1, "R2": r2}, "linear": [{"match": "*", "weights": {"format": "mxfp4"}}]}
    text = "".join(chr(97 + i * i % 23) for i in range(640))
    found = learn(source, recipe, tmp_path / "r", text=text, steps=10, seq_len=32, held_out=2, device="cpu", rate=0.02)
    assert found.kl_after < found.kl_before
    learned = {name: {**made, "kind": "learned"} for name, made in recipe["rotations"].items()}
    out = convert(source, {"rotations": learned | {"path": str(tmp_path / "r")}, "linear": []}, tmp_path / "out").out
    exact = logits(AutoModelForCausalLM.from_pretrained(source))
    assert (logits(load(out, device_map="cpu")) - exact).norm() < 1e-4 * exact.norm()


def test_qwen2_is_llama_with_biases_of_queries_keys_and_values(tiny, tmp_path):
    """The same tensors come out, but for the bias that a Llama's o_proj must have."""
    qwen = tiny(tmp_path / "qwen", model_type="qwen2", hidden=128, intermediate=256)
    llama = tiny(tmp_path / "llama", attention_bias=True, hidden=128, intermediate=256)
    zeros = {f"model.layers.{i}.self_attn.o_proj.bias": torch.zeros(128) for i in range(2)}
    save_file(load_file(qwen / "model.safetensors") | zeros, llama / "model.safetensors", {"format": "pt"})
    a, b = (convert(source, "quarot-mxfp4", source.parent / f"{source.name}-out").out for source in (qwen, llama))
    found, wanted = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert found.keys() == wanted.keys() - zeros.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)


@pytest.mark.parametrize(
    "fields",
    [
        {"use_sliding_window": True, "layer_types": None, "max_window_layers": 1},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"layer_types": 5},
    ],
)
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_layers_with_windows_of_their_own_are_refused(tiny, tmp_path, model_type, fields):
    source = edited(tiny(tmp_path / "model", model_type=model_type), sliding_window=8, **fields)
    with pytest.raises(
        ValueError, match=r"config\.json: use_sliding_window and layer_types say .* set use_sliding_window"
    ):
        plan(source, "mxfp4")


@pytest.mark.parametrize(
    "fields", [{"max_window_layers": 2}, {"layer_types": ["full_attention"] * 2}, {"sliding_window": None}]
)
def test_a_window_that_no_layer_has_is_none(tiny, tmp_path, fields):
    """By transformers' own reading."""
    source = tiny(tmp_path / "model", model_type="qwen2")
    config = json.loads((source / "config.json").read_text())
    del config["layer_types"]
    config |= {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0} | fields
    (source / "config.json").write_text(json.dumps(config))
    base = AutoModelForCausalLM.from_pretrained(source)
    assert set(base.config.layer_types) == {"full_attention"}
    model = load(convert(source, R3, tmp_path / "out").out, device_map="cpu")
    torch.testing.assert_close(logits(model), logits(base))


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_a_head_dim_of_null_is_an_error(tiny, tmp_path, model_type):
    source = tiny(tmp_path / "model", model_type=model_type)
    config = json.loads((source / "config.json").read_text()) | {"head_dim": None}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json: head_dim is null, .*; drop it, or give a number"):
        plan(source, "mxfp4")


def test_a_window_that_is_not_used_is_none(tiny, tmp_path):
    """As Qwen's config.json has it."""
    fields = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 2, "layer_types": None}
    source = edited(tiny(tmp_path / "model", model_type="qwen2"), **fields)
    assert not any("window" in note for note in plan(source, {"kv_cache": "int4"}).notes)
    model = load(convert(source, {"kv_cache": "int4"}, tmp_path / "out").out, device_map="cpu")
    assert not model.model.layers[0].self_attn.window


@pytest.mark.parametrize("model_type", SUPPORTED)
def test_sizes_that_a_config_leaves_out_are_transformers_own(tmp_path, model_type):
    """As transformers reads the same file."""
    from transformers import AutoConfig

    fields = {"vocab_size": 64, "hidden_size": 512, "intermediate_size": 64, "num_hidden_layers": 1}
    fields |= {"num_attention_heads": 32, "model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    made, config = from_config(fields), AutoConfig.from_pretrained(tmp_path)
    assert made.kv_heads == config.num_key_value_heads
    assert made.head_dim == (getattr(config, "head_dim", None) or 512 // 32)
