"""A plan says everything beforehand: which linear gets what, what falls back, how large, and why not."""

import json
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from quantrot import Calibration, verify
from quantrot.convert import convert
from quantrot.learned import COPY
from quantrot.manifest import MANIFEST
from quantrot.plan import plan, working_bytes
from quantrot.recipe import SHIPPED, load_recipe, shipped_recipes
from quantrot.source import FETCHED, TWICE, open_source

MODULE = sys.modules["quantrot.plan"]  # the package's `plan` is the function
FP8 = {"weights": {"format": "fp8", "block": [128, 128]}, "activations": {"format": "fp8", "block": [1, 128]}}
MXFP4 = {"weights": {"format": "mxfp4"}}


@pytest.fixture(scope="module")
def source(tiny, tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("model") / "source", hidden=192, intermediate=256, heads=2, kv_heads=1)


def kinds(planned):
    """last component -> weight kind and block, of layer 0."""
    short = {}
    for fqn, fmt in planned.linears.items():
        if ".1." not in fqn:
            short[fqn.rpartition(".")[2]] = None if fmt is None else (fmt.weights.kind, fmt.weights.block)
    return short


def test_of_a_hub_repository_only_what_is_read_is_downloaded(single, monkeypatch):
    """Mistral's repositories hold every weight twice."""
    import huggingface_hub

    asked = {}
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **kwargs: asked.update(kwargs) or str(single)
    )
    assert open_source("owner/name@refs/pr/1").path == single and asked["revision"] == "refs/pr/1"
    files = ["config.json", "model-00001-of-00002.safetensors", "consolidated.safetensors", "pytorch_model.bin"]
    files += ["consolidated-00001-of-00002.safetensors", "tekken.json", "modeling.py", "original/consolidated.00.pth"]
    patterns = {key: asked[key] for key in ("allow_patterns", "ignore_patterns")}
    kept = list(huggingface_hub.utils.filter_repo_objects(files, **patterns))
    assert kept == ["config.json", "model-00001-of-00002.safetensors", "tekken.json"]


def test_first_matching_rule_wins_and_skip_wins_over_all(source):
    rules = [
        {"match": "down_proj", "weights": {"format": "int8", "group": 64}},
        {"match": "mlp.*", **MXFP4},
        {"match": "model.layers.0.self_attn.q_proj", "weights": {"format": "fp8", "block": "channel"}},
    ]
    found = kinds(plan(source, {"linear": rules, "skip": ["gate_proj", "lm_head"]}))
    assert found["down_proj"] == ("int8", (1, 64))
    assert found["up_proj"] == ("mxfp4", (1, 32))
    assert found["q_proj"] == ("fp8", (1, 0))
    assert found["gate_proj"] is None and found["k_proj"] is None and found["lm_head"] is None


def test_a_misfit_falls_back_with_all_that_an_engine_fuses(source):
    """192 is no multiple of 128: q (192 x 192) does not fit, so k and v follow it; gate and up (256 x 192) neither."""
    planned = plan(source, {"linear": [{"match": "*", **FP8}]})
    assert set(kinds(planned).values()) == {("fp8", (1, 0)), None}
    assert any("2 x q_proj [192, 192] does not fit FP8 128x128" in note for note in planned.notes)
    keep = {"format": "fp8", "block": [128, 128], "fallback": "keep"}
    kept = plan(source, {"linear": [{"match": "*", "weights": keep, "activations": FP8["activations"]}]})
    assert set(kinds(kept).values()) == {None}


def test_a_misfit_takes_along_only_what_has_its_format(tiny, tmp_path):
    """Of another format or behind another Hadamard, a neighbour that fits keeps what its rule says."""
    source = tiny(tmp_path / "model", hidden=192, intermediate=320, heads=4, kv_heads=2, head_dim=64)
    turned = {"match": "gate_proj", **MXFP4, "hadamard": 128}
    rules = [{"match": "q_proj", **FP8}, turned, {"match": "up_proj", **MXFP4, "hadamard": 32}, {"match": "*", **MXFP4}]
    planned = plan(source, {"linear": rules})
    found = kinds(planned)
    assert found["q_proj"] == ("fp8", (1, 0)) and found["gate_proj"] is None
    assert found["k_proj"] == found["v_proj"] == found["up_proj"] == ("mxfp4", (1, 32))
    assert [note for note in planned.notes if "fit" in note] == [
        "2 x q_proj [256, 192] does not fit FP8 128x128 x FP8 1x128: FP8 channel x FP8 token",
        "2 x gate_proj [320, 192] does not fit MXFP4 h128: its own dtype",
    ]


def test_what_follows_a_misfit_says_so(tiny, tmp_path):
    """k and v have 64 rows, q 256: one product only if all have a scale a channel."""
    source = tiny(tmp_path / "model", hidden=256, intermediate=256, heads=4, kv_heads=1, head_dim=64)
    planned = plan(source, {"linear": [{"match": "*", **FP8}]})
    assert kinds(planned)["q_proj"] == kinds(planned)["k_proj"] == ("fp8", (1, 0))
    result = "does not fit FP8 128x128 x FP8 1x128: FP8 channel x FP8 token"
    notes = [f"2 x q_proj [256, 256] follows k_proj, which {result}", f"2 x k_proj [64, 256] {result}"]
    assert set(notes) < set(planned.notes)
    powers = {"weights": {**FP8["weights"], "scale_rule": "pow2"}, "activations": FP8["activations"]}
    planned = plan(source, {"linear": [{"match": "q_proj", **powers}, {"match": "*", **FP8}]})  # the same on disk
    assert kinds(planned)["q_proj"] == kinds(planned)["k_proj"] == ("fp8", (1, 0)) and set(notes) < set(planned.notes)
    kept = {"weights": {**FP8["weights"], "fallback": "keep"}, "activations": FP8["activations"]}
    planned = plan(source, {"linear": [{"match": "q_proj", **FP8}, {"match": "*", **kept}]})
    assert kinds(planned)["q_proj"] == ("fp8", (128, 128)) and kinds(planned)["k_proj"] is None


def test_native_fp8_needs_every_linear_to_be_block_scaled(tiny, tmp_path):
    source = tiny(tmp_path / "model", hidden=256, intermediate=512, kv_heads=4)
    config = plan(source, "fp8-block").config["quantization_config"]
    assert config["quant_method"] == "fp8" and config["modules_to_not_convert"] == ["lm_head"]
    mixed = plan(source, {"linear": [{"match": "mlp.*", **FP8}, {"match": "*", **MXFP4}]})
    assert mixed.config["quantization_config"]["format"] == "mixed-precision"
    names = {name for step in mixed.steps for name, _, _ in step.outputs}
    assert "model.layers.0.mlp.down_proj.weight_scale" in names
    assert "model.layers.0.mlp.down_proj.weight_scale_inv" not in names


def test_targets_are_names_where_layers_differ(source):
    rules = [
        {"match": "model.layers.1.mlp.down_proj", **MXFP4},
        {"match": "q_proj", "weights": {"format": "int8", "group": 64}},
    ]
    groups = plan(source, {"linear": rules}).config["quantization_config"]["config_groups"]
    targets = {tuple(group["targets"]) for group in groups.values()}
    assert targets == {("model.layers.1.mlp.down_proj",), ("re:.*q_proj$",)}


def test_every_tensor_of_the_source_is_accounted_for(source):
    for recipe in shipped_recipes():
        planned = plan(source, load_recipe(recipe).nearest())
        assert {step.source for step in planned.steps} - {""} == set(planned.checkpoint.tensors)
        names = [name for step in planned.steps for name, _, _ in step.outputs]
        assert len(names) == len(set(names))
        assert sum(s.nbytes for s in planned.shards) == planned.output_bytes


def test_tied_head_is_untied_only_where_something_changes_it(tiny, tmp_path):
    source = tiny(tmp_path / "model", tied=True)
    assert "lm_head.weight" not in {n for s in plan(source, "mxfp4").steps for n, _, _ in s.outputs}
    for recipe in ("quarot-mxfp4", {"linear": [{"match": "lm_head", **MXFP4}], "skip": []}):
        planned = plan(source, recipe)
        assert planned.config["tie_word_embeddings"] is False
        assert any(n.startswith("lm_head.weight") for s in planned.steps for n, _, _ in s.outputs)
    assert plan(source, "mxfp4").config["tie_word_embeddings"] is True


def test_the_fingerprint_follows_everything_that_changes_bytes(source, tiny, tmp_path, monkeypatch):
    base = plan(source, "quarot-mxfp4").fingerprint()
    assert base == plan(source, "quarot-mxfp4").fingerprint()
    first, second = (plan(source, "quarot-mxfp4", device=f"cuda:{i}").fingerprint() for i in range(2))
    assert first == second != base
    recipe = load_recipe("quarot-mxfp4").resolved()
    recipe["rotations"]["R1"]["seed"] = 1
    others = [
        plan(source, recipe),
        plan(source, "mxfp4"),
        plan(source, "quarot-mxfp4", max_shard_size=1 << 16),
        plan(tiny(tmp_path / "other", hidden=192, intermediate=512, heads=2, kv_heads=1), "quarot-mxfp4"),
    ]
    assert base not in {other.fingerprint() for other in others}
    planned = plan(source, "quarot-mxfp4")
    monkeypatch.setattr(torch, "__version__", "2.0.0")
    assert planned.fingerprint() != base


def test_predicted_memory_does_not_grow_with_depth(tiny, tmp_path):
    shallow = plan(tiny(tmp_path / "a", layers=1), "quarot-mxfp4")
    deep = plan(tiny(tmp_path / "b", layers=9), "quarot-mxfp4")
    assert len({max(working_bytes(step) for step in planned.steps) for planned in (shallow, deep)}) == 1


def test_predicted_memory_is_its_parts(single, monkeypatch):
    """The embedding, 256 x 64 in float32, takes most: to read, wide, turned and written 16 bytes an element, 40 for a
    quantizer; 8 until it is written."""
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=5))
    monkeypatch.setattr(psutil, "Process", lambda: process)
    planned, chunk = plan(single, "rotate-only"), 256 * 64 * (16 + 40)
    least = 5 + (64 << 20)
    for threads in (1, 2, 7):
        assert planned.peak_bytes(threads) == least + threads * chunk + 96 * 256 * 64 * 8
    monkeypatch.setattr(MODULE, "BUDGET", 2 * chunk)
    assert planned.peak_bytes(1) == planned.peak_bytes(7) == least + 2 * chunk
    monkeypatch.setattr(MODULE, "BUDGET", 0)
    assert planned.peak_bytes(7) == least + chunk


def test_a_checkpoint_without_a_tokenizer_is_noted(single, tmp_path):
    root = Path(shutil.copytree(single, tmp_path / "model"))
    for there in (True, False):
        notes = [line for line in plan(root, "mxfp4").notes if line.startswith("no tokenizer beside the weights")]
        assert bool(notes) != there
        (root / "tokenizer.json").unlink(missing_ok=True)


@pytest.mark.parametrize("broken", ["link", "permission"])
def test_what_cannot_be_copied_is_among_the_errors(single, tmp_path, monkeypatch, broken):
    root = Path(shutil.copytree(single, tmp_path / "model"))
    config = root / "tokenizer_config.json"
    if broken == "link":
        config.unlink(), config.symlink_to("/nowhere")
    else:
        monkeypatch.setattr(os, "access", lambda path, mode: path != config or mode != os.R_OK)  # root may read all
    with pytest.raises(ValueError) as caught:
        plan(root, {"linear": [{"match": "q_porj", **MXFP4}]})
    pattern, file = str(caught.value).splitlines()
    assert "q_porj" in pattern
    what = "links to /nowhere, which is not there" if broken == "link" else "no permission to read it, and it is copied"
    assert file.startswith(f"{config}: {what}; ")


def test_arguments_of_other_types_are_taken_or_named(single, tmp_path):
    assert plan(single, "mxfp4", torch.device("cuda", 1)).device == "cuda:1"
    with pytest.raises(
        ValueError, match=r"calibration is a str; give quantrot\.Calibration\(text\), of the text itself"
    ):
        plan(single, "mxfp4-w4a8-gptq", calibration="words")
    with pytest.raises(ValueError, match=r"threads is '2'; a positive integer is needed"):
        convert(single, "mxfp4", tmp_path / "out", threads="2")
    with pytest.raises(ValueError, match=r"out is None; give a directory to create"):
        convert(single, "mxfp4", None)
    with pytest.raises(ValueError, match=r"max_kl is '1'; a number from 0 up is needed"):
        verify(tmp_path, max_kl="1")


def test_predicted_memory_of_calibration_is_its_parts(single, monkeypatch):
    """Of a layer, in float32: its weights, and of a thread's 32 tokens what four Hessians are of and four times the 128
    inside the MLP; in float64 the Hessians, and those being decomposed twice more."""
    monkeypatch.setitem(sys.modules, "quantrot.hessians", None)  # as if it had been imported
    recipe = {"linear": [{"match": "*", "weights": {"format": "mxfp4", "rounding": "gptq"}}]}
    planned = plan(single, recipe, calibration=Calibration("abcdefgh" * 100, windows=4, seq_len=32))
    weights = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128
    inputs, narrow, wide = 32 * (3 * 64 + 128 + 4 * 128), 64 * 64, 128 * 128
    for threads, decomposed in ((1, wide), (2, wide + narrow), (9, wide + 3 * narrow)):
        layer = 4 * (weights + threads * inputs) + 8 * (wide + 3 * narrow) + 16 * decomposed
        assert planned.calibration_bytes(threads) == 4 * 4 * 32 * 64 + layer
    assert planned.peak_bytes(2) > planned.peak_bytes(1) + planned.calibration_bytes(2) - planned.calibration_bytes(1)
    monkeypatch.delitem(sys.modules, "quantrot.hessians")
    assert planned.calibration_bytes(9) == 4 * 4 * 32 * 64 + layer + MODULE.MODEL_CODE


def test_rows_are_whole_blocks_of_the_rotation_and_of_the_format(tiny, tmp_path, monkeypatch):
    source = tiny(tmp_path / "model", hidden=384, intermediate=384, layers=1, kv_heads=4)
    monkeypatch.setitem(MODULE.CHUNK, "cpu", 1 << 10)
    recipe = {"rotations": {"R1": {"kind": "hadamard", "block": 12}}, "linear": [{"match": "*", **FP8}]}
    rows = {step.name.rpartition(".")[2]: step.rows for step in plan(source, recipe).steps}
    assert rows["o_proj"] == rows["down_proj"] == 384 and rows["q_proj"] == 128


def test_shipped_recipes_say_what_they_are_for_and_round_trip():
    assert len(shipped_recipes()) == 21
    for name in shipped_recipes():
        recipe = load_recipe(name)
        comment = (SHIPPED / f"{name}.yaml").read_text()
        assert recipe.description and comment.startswith("# ") and re.search(r"[Ee]ngine", comment), name
        assert load_recipe(json.loads(json.dumps(recipe.resolved()))).resolved() == recipe.resolved()


def test_source_dtypes_are_kept(tiny, tmp_path):
    for dtype, name in ((torch.float16, "F16"), (torch.bfloat16, "BF16"), (torch.float32, "F32")):
        planned = plan(tiny(tmp_path / name, dtype=dtype), "rotate-only")
        assert {d for s in planned.steps for _, d, _ in s.outputs} == {name}


def test_what_a_conversion_lists_is_downloaded_from_a_hub(tiny, tmp_path):
    from huggingface_hub.utils import filter_repo_objects

    model = tiny(tmp_path / "model")
    for name in ("merges.txt", "vocab.json", "license.txt", "LICENCE", "use_policy.md", "chat_template.jinja"):
        (model / name).write_text("x")
    out = convert(model, {"rotations": {"R1": {"kind": "hadamard"}}}, tmp_path / "out").out
    listed = set(json.loads((out / MANIFEST).read_text())["files"]) | {MANIFEST, COPY}
    assert {"merges.txt", "license.txt", "LICENCE", "use_policy.md"} < listed
    assert set(filter_repo_objects(listed, allow_patterns=FETCHED, ignore_patterns=TWICE)) == listed


@pytest.mark.parametrize(
    ("weights", "label"), [({"format": "fp8", "block": "channel"}, "FP8 channel"), ({"format": "mxfp4"}, "MXFP4")]
)
def test_groups_of_inputs_that_do_not_fit_fall_back(tiny, tmp_path, weights, label):
    """96 is no multiple of 128; the weights fit all the same, and stay what the rule says."""
    rule = {"match": "*", "weights": weights, "activations": {"format": "fp8", "block": [1, 128]}}
    planned = plan(tiny(tmp_path / "model", hidden=96, intermediate=128), {"linear": [rule]})
    short = {fqn.rpartition(".")[2]: fmt for fqn, fmt in planned.linears.items()}
    assert short["q_proj"].activations.block == (1, 0) and short["down_proj"].activations.block == (1, 128)
    assert short["q_proj"].weights == short["down_proj"].weights
    assert f"2 x q_proj [96, 96] does not fit {label} x FP8 1x128: {label} x FP8 token" in planned.notes


def test_mxfp4_of_no_whole_groups_keeps_its_dtype(tiny, tmp_path):
    """Whatever its inputs are, and where the Hadamard before it does not fit either."""
    source = tiny(tmp_path / "model", hidden=96, intermediate=144)
    for activations in ("none", "mxfp4", "fp8"):
        made = {"format": activations} | ({"block": "token"} if activations == "fp8" else {})
        assert kinds(plan(source, {"linear": [{"match": "*", **MXFP4, "activations": made}]}))["down_proj"] is None
    rule = {"match": "*", **MXFP4, "activations": FP8["activations"], "hadamard": 64}
    assert set(kinds(plan(source, {"linear": [rule]})).values()) == {None}


def test_a_head_that_was_trained_apart_is_not_lost(tiny, tmp_path):
    model = tiny(tmp_path / "model", tied=True)
    tensors = load_file(model / "model.safetensors")
    for change, works in ((0.0, True), (1.0, False)):
        head = tensors["model.embed_tokens.weight"] + change
        save_file(tensors | {"lm_head.weight": head}, model / "model.safetensors", metadata={"format": "pt"})
        if works:
            assert plan(model, "fp8-dynamic").llama.tied
        else:
            with pytest.raises(ValueError, match="lm_head.weight is not the embedding, .* set that to false, or drop"):
                plan(model, "fp8-dynamic")


def test_what_is_written_of_a_shape_takes_no_memory(single):
    recipe = {"linear": [{"match": "*", "weights": {"format": "int8", "group": "channel"}}]}
    steps = {step.kind: step for step in plan(single, recipe).steps if step.shape == (128, 64)}
    assert working_bytes(steps["shape"]) < 1000 < working_bytes(steps["matrix"] if "matrix" in steps else steps["copy"])


def test_a_dense_rotation_counts_into_the_peak(tiny, tmp_path):
    source = tiny(tmp_path / "model", hidden=1024)
    recipes = ({"rotations": {"R1": {"kind": kind}}} for kind in ("hadamard", "random-orthogonal"))
    peaks = [plan(source, recipe).peak_bytes(1) for recipe in recipes]
    assert peaks[1] - peaks[0] > 60 * 1024**2


def test_a_source_has_the_name_that_finds_it_from_anywhere(single, monkeypatch):
    monkeypatch.chdir(single)
    found = plan(".", "mxfp4").source
    assert found.name == str(single) and found.base_model == str(single)


def test_a_home_that_is_not_there_is_an_error_of_the_user():
    with pytest.raises(ValueError, match="model '~nobody-here/model' is no directory; give one"):
        plan("~nobody-here/model", "mxfp4")
