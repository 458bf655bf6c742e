"""verify tells a good conversion from a broken one."""

import dataclasses
import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from quantrot import Calibration, convert, plan, verify
from quantrot.checkpoint import sha256_range
from quantrot.cli.main import app
from quantrot.formats import WeightFormat
from quantrot.load import load, merge_projections
from quantrot.modules import LINEARS
from quantrot.transform import in_pieces
from quantrot.verify import Layer, _sqnr, _turned, _warnings

TEXT = "The quick brown fox jumps over the lazy dog. " * 40
OPTIONS = dict(text=TEXT, seq_len=64, count=2, device="cpu")


@pytest.fixture(scope="module")
def source(tiny, tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("model") / "source", hidden=128, intermediate=256)


def damage(out, name, change):
    """Change a tensor and the manifest's hash with it: a conversion that is wrong, in files that are intact."""
    tensors = load_file(out / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    manifest = json.loads((out / "quantrot.json").read_text())
    file = out / "model.safetensors"
    manifest["files"][file.name] = {"size": file.stat().st_size, "sha256": sha256_range(file)}
    (out / "quantrot.json").write_text(json.dumps(manifest))


def test_lossless_conversion_passes_with_tiny_divergence(source, tmp_path):
    convert(source, "rotate-only", tmp_path / "out")
    found = verify(tmp_path / "out", **OPTIONS)
    # What is left of KL is float32's rounding of its logarithms, 6e-8 of about 6 a token, either sign (CPUs differ).
    assert abs(found.divergence.kl) < 1e-7 and found.divergence.top1 == 1 and not found.failures and not found.layers


def test_a_wrong_weight_fails(source, tmp_path):
    convert(source, "rotate-only", tmp_path / "out")
    damage(tmp_path / "out", "model.layers.0.mlp.down_proj.weight", lambda t: t.flip(0).contiguous())
    found = verify(tmp_path / "out", **OPTIONS)
    assert len(found.failures) == 1 and "nats per token, above 0.01" in found.failures[0]


def test_tensors_that_are_not_the_manifests_are_named(source, tmp_path):
    """In files that are as the manifest lists them: another tool's work, or a later version's."""
    out = convert(source, "int8-weight-only", tmp_path / "out").out
    name = "model.layers.1.self_attn.q_proj.weight_scale"
    damage(out, name, lambda scale: scale[:64].contiguous())
    with pytest.raises(
        ValueError, match=rf"out: its tensors are not those of quantrot\.json: {name} is \(64, 1\), and"
    ):
        verify(out, **OPTIONS)
    stored = load_file(out / "model.safetensors")
    save_file(stored | {"unknown": torch.ones(1)}, out / "model.safetensors", metadata={"format": "pt"})
    damage(out, name, lambda scale: scale.repeat(2, 1))
    with pytest.raises(ValueError, match=r"unknown is \(1,\), and not known there; convert again$"):
        verify(out, **OPTIONS)


def test_limits_are_the_callers(source, tmp_path):
    convert(source, "int8-weight-only", tmp_path / "out")
    assert not verify(tmp_path / "out", **OPTIONS).failures
    found = verify(tmp_path / "out", max_kl=0.0, min_top1=1.0, **OPTIONS)
    assert [f.split(" with")[0].split(" to")[0] for f in found.failures] == ["KL", "top-1 agreement"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(path=None), r"path is None; the directory of a conversion is needed$"),
        (dict(path="out", seq_len=64.0), r"seq_len is 64\.0; a whole number is needed$"),
        (dict(path="out", count=None), r"count is None; a whole number is needed$"),
        (dict(path="out", text=Path("text.txt")), r"text is PosixPath\('text\.txt'\); a string is needed; of a file, "),
    ],
)
def test_wrong_types_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        verify(**arguments)


def test_an_empty_text_is_not_exchanged_for_another(source, tmp_path):
    convert(source, "int8-weight-only", tmp_path / "out")
    with pytest.raises(ValueError, match="text: 0 tokens, one window needs"):
        verify(tmp_path / "out", **{**OPTIONS, "text": ""})


def test_linears_are_measured_in_the_first_window(source, tmp_path):
    out = convert(source, "quarot-mxfp4", tmp_path / "out").out
    first, both = (verify(out, **{**OPTIONS, "count": count}) for count in (1, 2))
    assert first.layers == both.layers and first.divergence.kl != both.divergence.kl


def test_a_head_that_is_turned_and_quantized_is_measured_in_both_models(source, tmp_path):
    """Of the original's head rows are read as they are needed, but where somebody looks on."""
    rule = {"match": "*", "weights": {"format": "mxfp4"}, "activations": {"format": "mxfp4"}}
    recipe = {"rotations": {"R1": {"kind": "hadamard"}}, "linear": [rule], "skip": []}
    layers = verify(convert(source, recipe, tmp_path / "out").out, **OPTIONS).layers
    assert layers[-1].fqn == "lm_head" and 12 < layers[-1].unrotated_db < 22 and 12 < layers[-1].sqnr_db < 22


def test_rows_are_turned_alike_however_many_at_a_time(source):
    kinds = {name: {"kind": "random-hadamard", "block": 32, "seed": 0} for name in ("R1", "R2")}
    whole = plan(source, {"rotations": kinds, "linear": [{"match": "*", "weights": {"format": "mxfp4"}}]})
    turned = [step for step in whole.steps if step.format is not None]
    assert sum(step.output_turn is not None for step in turned) == 6  # v_proj, o_proj and down_proj of two layers
    for step in turned:
        few = _turned(whole, dataclasses.replace(step, rows=32))
        torch.testing.assert_close(few, _turned(whole, step), rtol=1e-5, atol=1e-6)


def test_pieces_that_are_quantized_are_of_whole_blocks(monkeypatch):
    monkeypatch.setattr("quantrot.transform.CHUNK", {"cpu": 200 * 64})
    for block, rows in (((128, 128), [128, 128, 44]), ((1, 32), [200, 100])):
        pieces = in_pieces(WeightFormat("fp8", block, "exact"), torch.zeros(300, 64))
        assert [len(piece) for piece in pieces] == rows


def test_progress_is_of_layers_and_windows(source, tmp_path):
    seen = []
    convert(source, "mxfp4", tmp_path / "out")
    verify(tmp_path / "out", progress=lambda *step: seen.append(step), **OPTIONS)
    steps = [step for step in seen if step[0] != "source"]
    assert steps == [(what, done, 2) for what in ("original", "converted", "logits") for done in (1, 2)]


def test_a_window_is_as_long_as_it_is_asked_for(source, tmp_path):
    """By default no longer than the model takes, of which there are 512 here; asked for more, it is said."""
    out = convert(source, "int8-weight-only", tmp_path / "out").out
    for options, tokens in (({}, 255), (dict(seq_len=300), 299), (dict(seq_len=300, count=2), 598)):
        found = verify(out, text=TEXT, device="cpu", **{"count": 1, **options}).divergence
        assert found.tokens == tokens
    with pytest.raises(ValueError, match="seq_len is 513; the model takes at most 512"):
        verify(out, text=TEXT, seq_len=513, device="cpu")
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    arguments = ["verify", str(out), "--text", str(text), "--device", "cpu", "--seq-len", "100", "--windows", "3"]
    assert ", 3 windows of 100 tokens, float32\n" in CliRunner().invoke(app, arguments).stdout


def test_a_model_of_few_positions_takes_shorter_windows(tiny, tmp_path):
    source = tiny(tmp_path / "model")
    config = json.loads((source / "config.json").read_text()) | {"max_position_embeddings": 80}
    (source / "config.json").write_text(json.dumps(config))
    out = convert(source, "int8-weight-only", tmp_path / "out").out
    assert verify(out, text=TEXT, device="cpu").divergence.seq_len == 80


def test_what_a_short_text_is_answered_with_can_be_given(source, tmp_path):
    convert(source, "int8-weight-only", tmp_path / "out")
    (tmp_path / "short.txt").write_text("short")
    result = CliRunner().invoke(app, ["verify", str(tmp_path / "out"), "--text", str(tmp_path / "short.txt")])
    assert result.exit_code == 2 and result.stderr.endswith(
        "one window needs 256; give a longer text or less seq_len\n"
    )


def test_limits_that_are_none_are_refused_before_the_work(tmp_path):
    for limit in ({"max_kl": float("nan")}, {"max_kl": -1.0}, {"min_top1": float("nan")}, {"min_top1": 90.0}):
        with pytest.raises(ValueError, match=r"(max_kl|min_top1) is (nan|-1\.0|90\.0); a number from 0 (up|to 1) is"):
            verify(tmp_path, **limit)


def test_layer_sqnr_is_the_formats_noise(source, tmp_path):
    convert(source, "int8-weight-only", tmp_path / "int8")
    convert(source, "mxfp4", tmp_path / "mxfp4")
    int8 = verify(tmp_path / "int8", **OPTIONS).layers
    mxfp4 = verify(tmp_path / "mxfp4", **OPTIONS).layers
    assert len(int8) == len(mxfp4) == 14
    assert all(35 < layer.sqnr_db < 50 and layer.unrotated_db is None for layer in int8)
    assert all(12 < layer.sqnr_db < 22 for layer in mxfp4)


def test_without_a_rotation_inputs_are_quantized_too(source, tmp_path):
    """The first layer's queries, keys and values read the same, whatever was done to the layers after them."""
    layers = {}
    for name, kind in (("plain", "none"), ("turned", "hadamard")):
        rule = {"match": "*", "weights": {"format": "mxfp4"}, "activations": {"format": "mxfp4"}}
        convert(source, {"rotations": {"R1": {"kind": kind}}, "linear": [rule]}, tmp_path / name)
        layers[name] = verify(tmp_path / name, **OPTIONS).layers
    for plain, turned in zip(layers["plain"][:3], layers["turned"][:3], strict=True):
        assert plain.fqn == turned.fqn and turned.unrotated_db == pytest.approx(plain.sqnr_db, abs=1e-3)
        assert abs(turned.sqnr_db - plain.sqnr_db) > 0.01


def test_every_linear_is_looked_at_where_projections_would_be_merged(source, tmp_path, monkeypatch):
    convert(source, "int8-weight-only", tmp_path / "out")
    expected = verify(tmp_path / "out", **OPTIONS).layers
    for linear in LINEARS.values():  # as on a GPU, with the reference behind it
        monkeypatch.setattr(linear, "runs_packed", lambda self, device: True)
        monkeypatch.setattr(linear, "multiply", lambda self, x: self.multiply_wide(x, self.dequantized(x.dtype)))
    assert merge_projections(load(tmp_path / "out", merge=False)) == 4
    assert verify(tmp_path / "out", **OPTIONS).layers == expected and len(expected) == 14


def test_a_rotation_that_costs_more_than_it_gains_is_named(source, tmp_path, tiny):
    """Weights that MXFP4 holds exactly lose by any rotation: there the warning must come."""
    from quantrot.kernels.mxfp4 import dequantize_mxfp4, quantize_mxfp4

    exact = tiny(tmp_path / "exact", hidden=128, intermediate=256)
    tensors = load_file(exact / "model.safetensors")
    for name, t in tensors.items():
        if name.endswith("proj.weight"):
            tensors[name] = dequantize_mxfp4(*quantize_mxfp4(t), torch.float32)
    save_file(tensors, exact / "model.safetensors", metadata={"format": "pt"})
    recipe = {"rotations": {"R1": {"kind": "hadamard"}}, "linear": [{"match": "*", "weights": {"format": "mxfp4"}}]}
    convert(exact, recipe, tmp_path / "out")
    found = verify(tmp_path / "out", **OPTIONS)
    assert len(found.warnings) == 1 and "rotation made 14 of 14 linears worse" in found.warnings[0]
    convert(source, "int8-weight-only", tmp_path / "plain")
    assert not verify(tmp_path / "plain", **OPTIONS).warnings


def test_what_gptq_gains_does_not_hide_what_a_rotation_costs(source, tmp_path):
    """Norm gains that are large in some channels cost a weight that they are folded into, less than GPTQ gains. Inputs
    of the first layer's queries, keys and values are the same however the weights were rounded."""
    model = shutil.copytree(source, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    for name, t in tensors.items():
        if name.endswith("layernorm.weight"):
            t[::32] *= 30
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    found = {}
    for rounding, calibration in {"nearest": None, "gptq": Calibration(TEXT, windows=8, seq_len=64)}.items():
        rule = {"match": "*", "weights": {"format": "mxfp4", "rounding": rounding}}
        folded = {"rotations": {"R1": {"kind": "hadamard", "block": 1}}, "linear": [rule]}
        convert(model, folded, tmp_path / rounding, calibration=calibration)
        found[rounding] = verify(tmp_path / rounding, **OPTIONS)
    nearest, gptq = ([layer for layer in v.layers if layer.worse] for v in found.values())
    assert len(nearest) == len(gptq) == 10 and all(layer.nearest_db is None for layer in nearest)
    assert all(layer.sqnr_db > layer.unrotated_db > layer.nearest_db + 0.5 for layer in gptq)
    assert all(b.format == a.format.replace("MXFP4", "MXFP4 gptq", 1) for a, b in zip(nearest, gptq, strict=True))
    for a, b in zip(nearest[:3], gptq[:3], strict=True):
        assert a.fqn == b.fqn and a.sqnr_db == pytest.approx(b.nearest_db, abs=0.02)
    (warning,) = found["gptq"].warnings
    assert "made 10 of 14 linears worse" in warning and warning.endswith(" with, both rounded to nearest")
    convert(model, {"linear": [rule]}, tmp_path / "plain", calibration=calibration)
    assert all(layer.nearest_db is None for layer in verify(tmp_path / "plain", **OPTIONS).layers)


def test_a_source_that_moved_is_asked_for(tiny, tmp_path):
    source = tiny(tmp_path / "model", hidden=64)
    convert(source, "mxfp4", tmp_path / "out")
    source.rename(tmp_path / "moved")
    with pytest.raises(ValueError, match="has moved, give its place as against"):
        verify(tmp_path / "out", **OPTIONS)
    assert verify(tmp_path / "out", tmp_path / "moved", **OPTIONS).divergence.tokens == 126


def test_another_model_is_not_compared_with(source, tiny, tmp_path):
    out = convert(source, "int8-weight-only", tmp_path / "out").out
    other = tiny(tmp_path / "other", hidden=32, layers=1)
    with pytest.raises(ValueError, match="other: not the model that was converted: .* there and .* here; .*against"):
        verify(out, against=other, device="cpu")


def test_a_source_that_was_trained_on_since_is_not_compared_with(tiny, tmp_path):
    """Neither in its place nor as against, whatever its sizes; what was converted may be in other files by now."""
    source = tiny(tmp_path / "model")
    out = convert(source, "int8-weight-only", tmp_path / "out").out
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1.01
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    for options in ([], ["--against", str(source)]):
        result = CliRunner().invoke(app, ["verify", str(out), "--device", "cpu", *options])
        message = "model: not the model that was converted: model.layers.1.mlp.up_proj.weight is another there; give"
        assert result.exit_code == 2 and message in result.stderr and not result.stdout
    parts, seen = tiny(tmp_path / "parts", max_shard_size="50KB"), []
    assert not verify(out, parts, progress=lambda *step: seen.append(step), **OPTIONS).failures
    assert seen[:22] == [("source", done, 21) for done in range(22)]


def test_a_damaged_output_is_said_before_its_source_is_read(source, tmp_path, monkeypatch):
    def unread(*args):
        raise AssertionError("read")

    out = convert(source, "int8-weight-only", tmp_path / "out").out
    monkeypatch.setattr(sys.modules["quantrot.verify"], "sha256_of", unread)  # the package has the function
    raw = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(ValueError, match="model.safetensors: differs from what quantrot.json lists"):
        verify(out, **OPTIONS)
    monkeypatch.setattr("quantrot.manifest.sha256_range", unread)  # sizes come before any hash
    (out / "tokenizer_config.json").write_text("")
    with pytest.raises(ValueError, match="tokenizer_config.json: differs from what quantrot.json lists"):
        verify(out, **OPTIONS)
    (out / "config.json").unlink()
    with pytest.raises(ValueError, match="config.json: missing, although quantrot.json lists it"):
        verify(out, **OPTIONS)


def test_an_output_that_is_nan_is_the_worst_there_is():
    one = torch.ones(2)
    assert _sqnr(one, torch.tensor([float("nan"), 1.0])) == _sqnr(torch.zeros(2), one) == -math.inf
    assert _sqnr(one, one) == _sqnr(torch.zeros(2), torch.zeros(2)) == math.inf
    assert _sqnr(one, one * 0.9) == pytest.approx(20)


def test_a_linear_of_no_decibels_is_compared_too():
    layers = [Layer("b", "f", 1.0, 1.6), Layer("a", "f", -1.0, 0.0)]
    (warning,) = _warnings(layers)
    assert "2 of 2 linears" in warning and "most: a, 0.0 dB without, -1.0 dB with" in warning


def test_weights_are_turned_where_the_models_run(source, tmp_path, monkeypatch):
    out, module = convert(source, "rotate-only", tmp_path / "out").out, sys.modules["quantrot.verify"]

    def planned(model, recipe, device):
        raise ValueError(f"planned for {device}")

    monkeypatch.setattr(module, "known_device", lambda name: f"the device of {name}")
    monkeypatch.setattr(module, "make_plan", planned)
    with pytest.raises(ValueError, match="planned for the device of cuda:1"):
        verify(out, device="cuda:1")
