"""Outputs load unchanged in plain transformers with compressed-tensors, and never silently wrong."""

import json
import re
import shlex

import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from quantrot import convert, load
from quantrot.engines import serve_command, support
from quantrot.formats import WIDE, compressed_tensors_group, from_rule
from quantrot.kernels.fp8 import dequantize_fp8_block, quantize_fp8_block
from quantrot.kernels.mixed import dequantize_int8, quantize_int8
from quantrot.kernels.mxfp4 import dequantize_mxfp4, power_of_two, quantize_mxfp4
from quantrot.manifest import read_manifest
from quantrot.modules import QuantizedLinear
from quantrot.plan import plan
from quantrot.recipe import load_recipe

MXFP4_BOTH = {"weights": {"format": "mxfp4"}, "activations": {"format": "mxfp4"}}
FP8_BLOCK = {"weights": {"format": "fp8", "block": [128, 128]}, "activations": {"format": "fp8", "block": [1, 128]}}
COMPRESSED = ["rotate-only", "fp8-dynamic", "mxfp4-weight-only", "mxfp4", "quarot-mxfp4", "int8-weight-only"]
MIXED = {
    "fp8 and mxfp4": [{"match": "down_proj", **FP8_BLOCK}, {"match": "*", **MXFP4_BOTH}],
    "some layers": [{"match": "model.layers.0.*", "weights": {"format": "mxfp4"}}],
    "int8 per channel and a quantized head": [{"match": "*", "weights": {"format": "int8", "group": "channel"}}],
}


@pytest.fixture(scope="module")
def source(tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "source"
    return tiny(
        path, hidden=256, intermediate=512, kv_heads=4, dtype=torch.bfloat16, attention_bias=True, max_shard_size="1MB"
    )


def logits(model):
    with torch.no_grad():
        return model(torch.arange(40).view(2, 20)).logits.float()


def plain(path, dtype):
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def difference(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


def convert_named(source, recipe, out):
    skip = [] if "head" in recipe else ["lm_head"]
    convert(source, {"linear": MIXED[recipe], "skip": skip} if recipe in MIXED else recipe, out)


@pytest.mark.parametrize(
    "recipe", ["rotate-only", "fp8-dynamic", "int8-weight-only", "int8 per channel and a quantized head"]
)
def test_compressed_tensors_outputs_give_our_logits(source, tmp_path, recipe):
    """In float32, because in bfloat16 the engine's emulation of FP8 activations rounds their scales too."""
    convert_named(source, recipe, tmp_path / "out")
    ours = logits(load(tmp_path / "out", device_map="cpu", dtype=torch.float32))
    assert difference(logits(plain(tmp_path / "out", torch.float32)), ours) < 1e-6


@pytest.mark.parametrize("recipe", ["mxfp4-weight-only", "mxfp4", "quarot-mxfp4", "int8-weight-only", "some layers"])
def test_the_same_in_bfloat16_to_the_bit(source, tmp_path, recipe):
    convert_named(source, recipe, tmp_path / "out")
    assert torch.equal(logits(plain(tmp_path / "out", "auto")), logits(load(tmp_path / "out", device_map="cpu")))


def widen_activations(model):
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.format = type(module.format)(module.format.weights, WIDE)
    return model


def test_mixed_formats_hold_our_weights_to_the_bit(source, tmp_path):
    convert_named(source, "fp8 and mxfp4", tmp_path / "out")
    model = widen_activations(load(tmp_path / "out", device_map="cpu"))
    config = json.loads((tmp_path / "out/config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = None
    (tmp_path / "out/config.json").write_text(json.dumps(config))
    assert config["quantization_config"]["format"] == "mixed-precision"
    assert torch.equal(logits(plain(tmp_path / "out", "auto")), logits(model))


@pytest.mark.parametrize("recipe", ["fp8-block", "gridquant-fp8", "quarot-fp8"])
def test_native_fp8_outputs_give_our_logits(source, tmp_path, recipe):
    """Without a GPU transformers dequantizes these to bfloat16 and leaves activations wide: so do we here."""
    convert(source, recipe, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["quant_method"] == "fp8"
    model = widen_activations(load(tmp_path / "out", device_map="cpu"))
    assert torch.equal(logits(plain(tmp_path / "out", "auto")), logits(model))


@pytest.mark.parametrize(
    "recipe",
    [
        "hadamard-mxfp4",
        "quarot-mxfp4-online",
        {"rotations": {"R3": {"kind": "hadamard"}}},
        {"rotations": {"R4": {"kind": "hadamard", "block": 32}}},
        {"rotations": {"R4": {"kind": "random-hadamard"}}, "linear": [{"match": "*", **FP8_BLOCK}]},
    ],
    ids=lambda r: r if isinstance(r, str) else "+".join(r["rotations"]),
)
def test_plain_transformers_refuses_an_online_rotation(source, tmp_path, recipe):
    convert(source, recipe, tmp_path / "out")
    with pytest.raises(ValueError, match="online-hadamard"):
        plain(tmp_path / "out", "auto")
    assert logits(load(tmp_path / "out", device_map="cpu")).isfinite().all()
    manifest = read_manifest(tmp_path / "out")
    verdicts = {row.engine: row.runs for row in support(manifest.linears, manifest.online, manifest.attention)}
    assert verdicts["transformers"] == "no" and verdicts["quantrot"] == "yes"


def test_an_inexpressible_rotation_breaks_every_compressed_tensors_schema(source, tmp_path):
    """vLLM validates transform_config with the package's own model: it must refuse what it cannot run."""
    from compressed_tensors.transform import TransformConfig

    convert(source, {"rotations": {"R3": {"kind": "hadamard"}}}, tmp_path / "r3")
    convert(source, "quarot-mxfp4-online", tmp_path / "r4")
    configs = [json.loads((tmp_path / d / "config.json").read_text())["quantization_config"] for d in ("r3", "r4")]
    with pytest.raises(ValueError, match="needs_quantrot"):
        TransformConfig.model_validate(configs[0]["transform_config"])
    TransformConfig.model_validate(configs[1]["transform_config"])


def test_stored_matrix_and_fold_are_inverse(source, tmp_path):
    """The engine's own recipe, x H / sqrt(B) by W H / sqrt(B), read from the file's tensors, is the plain product."""
    convert(source, "quarot-mxfp4-online", tmp_path / "out")
    with safe_open(tmp_path / "out/model.safetensors", "pt") as f:
        h = f.get_tensor("model.layers.0.mlp.down_proj.R4_input.weight").double()
    assert torch.equal(h @ h.T, 32 * torch.eye(32, dtype=torch.float64))


def scheme(rule):
    group = compressed_tensors_group(from_rule(load_recipe({"linear": [rule]}).linear[0]), ["Linear"], "")
    return QuantizationScheme.model_validate(group)


@pytest.mark.parametrize("rule", ["even", "mse", "rceil"])
def test_mxfp4_bytes_equal_compressed_tensors(rule):
    w = torch.randn(96, 256, generator=torch.Generator().manual_seed(0))
    packed, scale = quantize_mxfp4(w, rule)
    state = {"weight": w, "weight_scale": power_of_two(scale.int() - 127)}
    theirs = MXFP4PackedCompressor.compress(state, scheme({"match": "*", **MXFP4_BOTH}))
    assert torch.equal(theirs["weight_packed"], packed)
    assert torch.equal(theirs["weight_scale"], scale)
    back = MXFP4PackedCompressor.decompress(theirs, scheme({"match": "*", **MXFP4_BOTH}))
    assert torch.equal(back["weight"].float(), dequantize_mxfp4(packed, scale, torch.float32))


@pytest.mark.parametrize("group", [64, 128, "channel"])
def test_int8_bytes_equal_compressed_tensors(group):
    from quantrot.kernels.mixed import pack_int8

    w = torch.randn(96, 256, generator=torch.Generator().manual_seed(1))
    q, scale = quantize_int8(w, 256 if group == "channel" else group)
    rule = {"match": "*", "weights": {"format": "int8", "group": group}}
    theirs = PackedQuantizationCompressor.compress({"weight": w, "weight_scale": scale.float()}, scheme(rule))
    assert torch.equal(theirs["weight_packed"], pack_int8(q))
    assert theirs["weight_shape"].tolist() == [96, 256]
    assert dequantize_int8(q, scale).shape == (96, 256)


@pytest.mark.parametrize("recipe", [*COMPRESSED[1:], *MIXED])
def test_config_passes_compressed_tensors_own_schema(source, tmp_path, recipe):
    convert_named(source, recipe, tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    for key in ("sparsity_config", "transform_config", "quant_method"):
        config.pop(key)
    QuantizationConfig.model_validate(config)


@pytest.mark.parametrize(
    "more", [FP8_BLOCK | {"hadamard": 32}, {**FP8_BLOCK, "weights": {"format": "mxfp4"}}], ids=["fp8 h32", "mxfp4"]
)
def test_inputs_in_blocks_are_groups_of_128(source, more):
    config = plan(source, {"linear": [{"match": "*", **more}]}).config["quantization_config"]
    assert config["config_groups"]["group_0"]["input_activations"] == {
        "num_bits": 8,
        "type": "float",
        "strategy": "group",
        "group_size": 128,
        "symmetric": True,
        "dynamic": True,
    }


def test_mxfp4_of_a_float16_model_runs_in_transformers_as_the_card_says(tiny, tmp_path):
    """As it is, compressed-tensors multiplies float16 by bfloat16 and raises."""
    root = tiny(tmp_path / "half", hidden=64, intermediate=64, layers=1, dtype=torch.float16)
    out = convert(root, "mxfp4-weight-only", tmp_path / "out").out
    assert "from_pretrained(..., dtype=torch.bfloat16)" in (out / "README.md").read_text()
    ours = load(out, device_map="cpu", dtype=torch.bfloat16)
    assert torch.equal(logits(plain(out, torch.bfloat16)), logits(ours))


def test_config_is_the_sources_own_plus_quantization(source, tmp_path):
    convert(source, "mxfp4", tmp_path / "out")
    before, after = (json.loads((d / "config.json").read_text()) for d in (source, tmp_path / "out"))
    after.pop("quantization_config")
    assert before == after and list(before) == list(after)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (source / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


TOKEN, GROUPS = {"format": "fp8", "block": "token"}, {"format": "fp8", "block": [1, 128]}
CHANNEL, BLOCKS, INT8 = ({"format": "fp8", "block": "channel"}, FP8_BLOCK["weights"], {"format": "int8", "group": 128})


def rule(weights, activations=None, **more):
    return {"match": "*", "weights": weights, **({"activations": activations} if activations else {}), **more}


# What vLLM 0.33.0 and SGLang 0.5.23 make of such files, by their own choice of a scheme; "" where they refuse it.
VERDICTS = [
    (rule(CHANNEL, TOKEN), "W8A8", "W8A8"),
    (rule(CHANNEL, GROUPS), "W8A8.*a token, not the recipe's", "W8A8.*a token, not the recipe's"),
    (rule(CHANNEL), "W8A16", "W8A16$"),
    (rule(BLOCKS, GROUPS), "W8A8.*E8M0=0", "W8A8"),
    (rule(BLOCKS | {"scale_rule": "pow2"}, GROUPS), r"W8A8[^;]*$", "W8A8"),
    (rule(BLOCKS, TOKEN), "W8A8.*1x128 blocks, not the recipe's", "W8A8.*1x128 blocks, not the recipe's"),
    (rule(BLOCKS), "W8A16", ""),
    (rule(INT8), "W8A16$", "W8A16; INT8 in shapes that are multiples of 64 x 128$"),
    (rule({"format": "mxfp4"}), "W4A16.*marlin", ""),
    (rule({"format": "mxfp4"}, {"format": "mxfp4"}), "W4A4 on Blackwell, W4A16", ""),
    (rule({"format": "mxfp4"}, TOKEN), "W4A8$", ""),
    (rule({"format": "mxfp4"}, {"format": "fp8", "block": [256, 256]}), "W4A8.*1x128 blocks, not the recipe's", ""),
    (rule(CHANNEL, TOKEN, hadamard=32), "", ""),
    (rule(INT8, hadamard=32), "", ""),
]


@pytest.mark.parametrize(("given", "vllm", "sglang"), VERDICTS)
def test_what_other_engines_do_is_said(source, given, vllm, sglang):
    planned = plan(source, {"linear": [given]})
    found = {row.engine: row for row in support(planned.linears, planned.online, None)}
    for engine, says in (("vLLM", vllm), ("SGLang", sglang)):
        assert found[engine].runs == ("yes" if says else "no")
        assert re.search(says or "refused|does not|takes|runs", found[engine].note)
    assert bool(vllm) != any(note.startswith("vLLM will not load the result") for note in planned.notes)
    blocks = given["weights"]["format"] == "mxfp4" and given.get("activations", TOKEN).get("block", "token") != "token"
    wide = given["weights"]["format"] == "fp8" and "activations" not in given
    for what, said in (("MXFP4 by FP8 activations in blocks", blocks), ("FP8 by wide activations", wide)):
        assert (f", and {what} on a GPU, with dequantized" in found["quantrot"].note) == said
    native = given in (rule(BLOCKS, GROUPS), rule(BLOCKS | {"scale_rule": "pow2"}, GROUPS))
    assert found["transformers"].note.startswith("FP8 kernels on GPUs of capability 8.9") == native


SPLITS = [
    ([{**rule(CHANNEL, TOKEN), "match": "q_proj"}], "makes one linear of .*qkv_proj", "makes one linear of .*qkv_proj"),
    ([{**rule(INT8), "match": "up_proj"}, rule(CHANNEL)], "one linear of .*gate_up", "one linear of .*gate_up"),
    ([{**rule(INT8), "match": "model.layers.0.*"}, rule(CHANNEL)], "", "from layer to layer"),
    ([{**rule(INT8), "match": "down_proj"}, rule(CHANNEL)], "", ""),
    ([{**rule(INT8), "match": "mlp.*"}], "", ""),
    ([{**rule(BLOCKS | {"scale_rule": "pow2"}, GROUPS), "match": "q_proj"}, rule(BLOCKS, GROUPS)], "", ""),
]


@pytest.mark.parametrize(("linear", "vllm", "sglang"), SPLITS)
def test_formats_that_differ_where_engines_have_one_linear(source, linear, vllm, sglang):
    planned = plan(source, {"linear": linear})
    found = {row.engine: row for row in support(planned.linears, {}, None)}
    for engine, why in (("vLLM", vllm), ("SGLang", sglang)):
        assert found[engine].runs == ("no" if why else "yes") and re.search(why, found[engine].note)


def test_a_bias_behind_an_online_hadamard_is_not_for_vllm(source):
    planned = plan(source, "hadamard-mxfp4")
    biased = planned.checkpoint.biased
    assert {fqn.rpartition(".")[2] for fqn in biased} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    verdicts = [support(planned.linears, planned.online, None, who)[1] for who in ((), biased, {"lm_head"})]
    assert [verdict.runs for verdict in verdicts] == ["yes", "no", "yes"]
    assert "--tensor-parallel-size 1" in verdicts[0].note and "bias" in verdicts[1].note


def test_a_quantized_head_is_a_target_of_its_own(source):
    config = plan(source, {"skip": ["embed_tokens"], "linear": [rule(CHANNEL, TOKEN)]}).config["quantization_config"]
    assert config["config_groups"]["group_0"]["targets"] == ["Linear", "re:.*lm_head$"]
    native = plan(source, {"skip": ["embed_tokens"], "linear": [FP8_BLOCK | {"match": "*"}]})
    assert [row.runs for row in support(native.linears, {}, None)] == ["yes", "no", "yes", "no"]


def test_what_is_ignored_is_named_as_engines_name_it(source):
    """SGLang looks up the name of the linear that it makes of several."""
    config = plan(source, {"linear": [{**rule(CHANNEL, TOKEN), "match": "mlp.*"}]}).config["quantization_config"]
    names = {f"model.layers.{i}.self_attn.{kind}" for i in (0, 1) for kind in ("q_proj", "o_proj", "qkv_proj")}
    assert names <= set(config["ignore"]) and not any("gate_up" in name for name in config["ignore"])


def test_an_online_rotation_of_wide_linears_is_refused_too(source, tmp_path):
    convert(source, {"rotations": {"R4": {"kind": "hadamard", "block": 32}}}, tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    assert group["targets"] == ["Linear"] and group["weights"] is None  # SGLang reads no group without a target
    with pytest.raises(ValueError):
        plain(tmp_path / "out", "auto")
    manifest = read_manifest(tmp_path / "out")
    verdicts = support(manifest.linears, manifest.online, manifest.attention)
    assert [row.runs for row in verdicts] == ["yes", "no", "no", "no"]


@pytest.mark.parametrize(
    ("recipe", "command"),
    [
        ("fp8-block", "VLLM_USE_DEEP_GEMM_E8M0=0 vllm serve ."),
        ({"linear": [rule(BLOCKS | {"scale_rule": "pow2"}, GROUPS)]}, "vllm serve ."),
        ("mxfp4", "vllm serve ."),
        ({"rotations": {"R3": {"kind": "hadamard"}}}, "python -c"),
    ],
)
def test_the_command_that_serves_it(source, recipe, command):
    planned = plan(source, recipe)
    verdicts = support(planned.linears, planned.online, planned.attention, planned.checkpoint.biased)
    said = serve_command(verdicts, planned.linears, planned.online)
    assert said == command or (command == "python -c" and said.startswith(command))
    *_, last = shlex.split(serve_command(verdicts, planned.linears, planned.online, "a model's/out"))
    assert last == "a model's/out" or (command == "python -c" and last.endswith("""load("a model's/out")"""))


def test_weights_that_are_rounded_again_lose_what_is_said():
    """As vLLM's DeepGEMM does it: the codes times their scales, rounded once more to scales that are powers of two."""
    torch.manual_seed(0)
    w = torch.randn(512, 512)

    def rounded(w, rule):
        return dequantize_fp8_block(*quantize_fp8_block(w, (128, 128), rule), (128, 128), torch.float32)

    def decibels(got):
        return 10 * (w.square().sum() / (got - w).square().sum()).log10().item()

    once, again, powers = rounded(w, "bf16"), rounded(rounded(w, "bf16"), "pow2"), rounded(w, "pow2")
    assert decibels(once) - decibels(again) == pytest.approx(3, abs=0.3)
    assert abs(decibels(once) - decibels(powers)) < 0.1 and torch.equal(rounded(powers, "pow2"), powers)
