"""Learned rotations: exact as all are, never worse than their start, and in the output what learning measured."""

import errno
import json
import math
import os
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from quantrot import convert, load, plan, verify
from quantrot.cli.learn import _fragment
from quantrot.cli.main import app
from quantrot.evals.divergence import divergence
from quantrot.formats import ActivationFormat
from quantrot.learn import Cayley, _slope, learn
from quantrot.learned import COPY, distance, read
from quantrot.load import open_model
from quantrot.recipe import load_recipe
from quantrot.tokenizer import windows
from tests.damage import Q_PROJ, copy, poison

TEXT = "".join(chr(97 + i * i % 23) for i in range(640))
SHORT = {"text": TEXT, "steps": 10, "seq_len": 32, "held_out": 2, "device": "cpu"}
MXFP4 = {"weights": {"format": "mxfp4"}, "activations": {"format": "mxfp4"}}
R1, R2 = {"kind": "random-hadamard", "block": 16, "channels": "by-gain"}, {"kind": "hadamard", "block": 8}
START = {"rotations": {"R1": R1, "R2": R2}, "linear": [{"match": "*", **MXFP4}]}
SHAPE = {"heads": 4, "kv_heads": 2, "head_dim": 32, "tied": True, "attention_bias": True, "mlp_bias": True}


def using(path, recipe=START, **spec):
    """The recipe with what was learned."""
    rotations = {name: {**made, "kind": "learned", **spec} for name, made in recipe["rotations"].items() if name < "R3"}
    return {**recipe, "rotations": {**recipe["rotations"], **rotations, "path": str(path)}}


@pytest.fixture(scope="module")
def source(tiny, tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("model") / "source", **SHAPE)


@pytest.fixture(scope="module")
def learned(source, tmp_path_factory):
    path = tmp_path_factory.mktemp("learned") / "rotations.safetensors"
    return path, learn(source, START, path, rate=0.02, **SHORT)


def test_learning_gets_nearer_to_the_original(learned):
    path, found = learned
    file = read(path)
    assert found.names == ("R1", "R2") and found.best_step > 0 and found.kl_after < 0.97 * found.kl_before
    assert (file.about["kl_before"], file.about["kl_after"]) == (found.kl_before, found.kl_after)
    assert file.matrices["R1"].shape == (4, 16, 16) and file.matrices["R2"].shape == (2, 2, 4, 8, 8)
    assert all(distance(matrices) < 1e-6 for matrices in file.matrices.values())


def test_the_same_seed_learns_the_same_and_another_another(source, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        learn(source, START, tmp_path / name, rate=0.01, seed=seed, **{**SHORT, "steps": 3})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()


def test_where_nothing_is_better_the_start_is_kept(source, learned, tmp_path):
    """A rate that only destroys; the start is what was learned before."""
    found = learn(source, using(learned[0]), tmp_path / "out", rate=0.99, **{**SHORT, "steps": 2})
    before, after = read(learned[0]), read(tmp_path / "out")
    assert found.best_step == 0 and found.kl_after == found.kl_before == pytest.approx(learned[1].kl_after, rel=1e-3)
    for name, matrices in before.matrices.items():
        assert (matrices - after.matrices[name]).abs().max() < 1e-6


@pytest.mark.parametrize(
    "recipe",
    [
        START,
        {
            "rotations": {"R1": {**R1, "block": "full"}, "R2": R2, "R4": {"kind": "random-hadamard", "seed": 2}},
            "linear": [
                {"match": "down_proj", "weights": {"format": "int8", "group": 64}},
                {"match": "mlp.*", **MXFP4, "hadamard": 32},
                {"match": "o_proj", "weights": {"format": "fp8", "block": "channel"}},
                {"match": "lm_head", **MXFP4},
            ],
            "skip": ["model.layers.0.mlp.up_proj"],
        },
        {"rotations": {"R2": R2}, "linear": [{"match": "*", **MXFP4}]},
    ],
    ids=["mxfp4", "mixed", "R2-alone"],
)
def test_what_is_measured_while_learning_is_what_the_conversion_has(source, tmp_path, recipe):
    found = learn(source, recipe, tmp_path / "learned", **{**SHORT, "steps": 2})
    convert(source, using(tmp_path / "learned", recipe), tmp_path / "out")
    original, tokenizer = open_model(source, "cpu", "float32")
    ids = windows(tokenizer, TEXT, 32)[-2:]
    reached = divergence(load(tmp_path / "out", device_map="cpu"), original, ids)
    assert reached.kl == pytest.approx(found.kl_after, rel=0.08)  # that has one token more a window


@pytest.mark.parametrize("online", [{"hadamard": 32}, {"hadamard": 64}, {}])
def test_the_start_is_measured_as_the_conversion_runs_it(source, tmp_path, online):
    """An online Hadamard in front of MXFP4 is the quantizer's, which rounds what it makes of x less than x's dtype."""
    recipe = {"rotations": {"R2": R2}, "linear": [{"match": "*", **MXFP4, **online}]}
    measured, converted = start_of(source, recipe, tmp_path)
    assert measured == pytest.approx(converted, rel=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_a_narrow_table_and_biases_are_rounded_behind_their_turn(tiny, tmp_path, seed):
    """As the conversion writes them (else 6 to 25% off here); the head, which it rounds alike, is left in float32."""
    narrow = tiny(tmp_path / "narrow", dtype=torch.bfloat16, seed=seed, **SHAPE)
    measured, converted = start_of(narrow, START, tmp_path)
    assert measured == pytest.approx(converted, rel=2e-2)


def start_of(source, recipe, tmp_path):
    """(KL of the start as `learn` has it, of what is converted)."""
    found = learn(source, recipe, tmp_path / "learned", **{**SHORT, "steps": 1})
    model = load(convert(source, recipe, tmp_path / "out").out, device_map="cpu", dtype="float32")
    original, tokenizer = open_model(source, "cpu", "float32")
    ids = windows(tokenizer, TEXT, 32)[-2:]
    with torch.no_grad():
        p, q = (each(input_ids=ids).logits.log_softmax(-1) for each in (original, model))
    return found.kl_before, (p.exp() * (p - q)).sum(-1).mean().item()


def test_unquantized_the_logits_stay(source, learned, tmp_path):
    """With every block and head turned by another matrix: a wrong place of one would show."""
    path, _ = learned
    convert(source, {"rotations": using(path)["rotations"]}, tmp_path / "out")
    original, _ = open_model(source, "cpu", "float32")
    ids = torch.arange(30).view(1, 30)
    with torch.no_grad():
        before, after = original(ids).logits, load(tmp_path / "out", device_map="cpu")(ids).logits
    assert (before - after).abs().max() < 1e-4 * before.abs().max()


def test_an_output_holds_what_it_was_turned_with(source, learned, tmp_path):
    """verify needs no other file, and the manifest does not say where the file was."""
    shutil.copy(learned[0], tmp_path / "learned")
    convert(source, using(tmp_path / "learned"), tmp_path / "out")
    (tmp_path / "learned").unlink()
    manifest = json.loads((tmp_path / "out" / "quantrot.json").read_text())
    assert (tmp_path / "out" / COPY).read_bytes() == learned[0].read_bytes() and COPY in manifest["files"]
    assert manifest["recipe"]["rotations"]["path"] == COPY and str(tmp_path) not in json.dumps(manifest["rotations"])
    assert {r["kind"] for r in manifest["rotations"].values()} == {"learned"}
    assert not verify(tmp_path / "out", text=TEXT, seq_len=32, count=2, device="cpu").failures


def test_resumed_conversions_end_with_the_same_bytes(source, learned, tmp_path):
    recipe = using(learned[0])
    convert(source, recipe, tmp_path / "whole")

    def stop(name, done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, recipe, tmp_path / "again", progress=stop)
    with pytest.raises(ValueError, match="holds an unfinished conversion of another source, recipe"):
        convert(source, START, tmp_path / "again", resume=True)
    convert(source, recipe, tmp_path / "again", resume=True, threads=1)
    for file in (tmp_path / "whole").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name


def test_a_path_starts_at_the_recipe(source, learned, tmp_path):
    shutil.copy(learned[0], tmp_path / "r.safetensors")
    fragment = "rotations: {path: r.safetensors, R2: {kind: learned, block: 8}}\n"
    (tmp_path / "recipe.yaml").write_text(fragment)
    assert plan(source, tmp_path / "recipe.yaml").learned.path == tmp_path / "r.safetensors"


def edited(path, out, **change):
    """The file with other matrices."""
    file = read(path)
    data = safetensors.torch.save({**file.matrices, **change}, {"quantrot": json.dumps(file.about)})
    out.write_bytes(data)
    return out


def test_every_wrong_file_is_an_error_of_the_plan(source, learned, tmp_path):
    path, r1 = learned[0], read(learned[0]).matrices["R1"]
    cases = [
        (tmp_path / "none", {}, r"recipe: .*none: no such file; `quantrot learn` writes one"),
        (tmp_path, {}, rf"recipe: {tmp_path}: a directory; name the file that `quantrot learn` wrote"),
        (edited(path, tmp_path / "half", R1=r1.half()), {}, r"R1 as float16 \[4, 16, 16\]; .*needs float32 \[4,"),
        (path, {"block": 32}, r"R1 as float32 \[4, 16, 16\]; this model, in blocks of 32, needs float32 \[2, 32, 32\]"),
        (edited(path, tmp_path / "skewed", R1=r1 * 1.001), {}, r"R1 of .* is not orthogonal: .* reaches 2.0e-03"),
        (edited(path, tmp_path / "nan", R1=r1 * torch.nan), {}, r"R1 of .* is not orthogonal: .* reaches nan"),
    ]
    for file, spec, message in cases:
        with pytest.raises(ValueError, match=message):
            plan(source, using(file, **spec))
    with pytest.raises(ValueError) as caught:  # all at once
        plan(source, using(path, block=32) | {"skip": ["lm_hed"]})
    assert len(str(caught.value).splitlines()) == 3
    weights = source / "model.safetensors"
    with pytest.raises(ValueError, match="its metadata does not say what was learned"):
        plan(source, using(weights))
    safetensors.torch.save_file({"R1": r1}, tmp_path / "one", {"quantrot": json.dumps(read(path).about)})
    with pytest.raises(ValueError, match="one holds no R2; it holds R1"):
        plan(source, using(tmp_path / "one"))
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = path.read_bytes()[8 : 8 + length].replace(b'"__metadata__":{', b'"__metadata__":{"n":3,')
    (tmp_path / "number").write_bytes(len(header).to_bytes(8, "little") + header + path.read_bytes()[8 + length :])
    with pytest.raises(ValueError, match="number: safetensors cannot read it: .*; learn it again"):
        plan(source, using(tmp_path / "number"))


def about_learned(planned):
    return [note for note in planned.notes if "learned" in note]


def test_rotations_of_another_model_or_recipe_are_noted(source, learned, tiny, tmp_path):
    path, other = learned[0], tiny(tmp_path / "other", seed=1, **SHAPE)
    assert not about_learned(plan(source, using(path)))
    assert any("learned on another model than this, " in note for note in about_learned(plan(other, using(path))))
    wide = using(path) | {"linear": []}
    assert any("learned for a recipe of other formats" in note for note in about_learned(plan(source, wide)))


def test_a_model_is_known_by_every_matrix_and_by_nothing_that_it_need_not_hold(source, learned, tmp_path):
    tensors, path = safetensors.torch.load_file(source / "model.safetensors"), learned[0]
    root = copy(source, tmp_path)

    def noted(**change):
        safetensors.torch.save_file(tensors | change, root / "model.safetensors", {"format": "pt"})
        return bool(about_learned(plan(root, using(path))))

    for name, tensor in tensors.items():
        assert noted(**{name: tensor.flip(0)}), name
    assert not noted(**{"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    assert not noted(**{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)})


@pytest.mark.parametrize(
    "more", [{"kv_cache": "fp8"}, {"attention": "fp8"}, {"rotations": {"R3": {"kind": "hadamard"}}}]
)
def test_what_learning_does_not_run_is_no_other_recipe(source, learned, more):
    recipe = using(learned[0])
    rotations = {**recipe["rotations"], **more.get("rotations", {})}
    assert not about_learned(plan(source, recipe | more | {"rotations": rotations}))
    rotations["R4"] = {"kind": "hadamard", "block": 32}
    assert about_learned(plan(source, recipe | more | {"rotations": rotations}))


@pytest.mark.parametrize(
    ("rotations", "message"),
    [
        ({"R1": {"kind": "learned"}}, "R1 is learned and path is missing; name the file of `quantrot learn`"),
        ({"R1": {"kind": "learned"}, "path": ""}, "R1 is learned and path is empty; name the file of `quantrot learn`"),
        ({"path": "a"}, "path is 'a' and no rotation is of kind learned; give one that kind"),
        ({"path": "a", "R4": {"kind": "learned"}}, "R4 runs online, where learned is a dense product"),
    ],
)
def test_recipes_that_cannot_be(rotations, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load_recipe({"rotations": rotations})


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ({"linear": START["linear"]}, {}, "recipe recipe: R1 and R2 turn nothing, nothing else is learned"),
        (
            {"rotations": {"R1": {"kind": "hadamard", "block": 1}}, "linear": START["linear"]},
            {},
            "R1 and R2 turn nothing",
        ),
        ({"rotations": START["rotations"]}, {}, "recipe recipe: it quantizes no linear"),
        (START, {"steps": 0}, "steps is 0; a positive number"),
        (START, {"held_out": 0}, "held_out is 0; a positive number"),
        (START, {"rate": float("nan")}, "rate is nan; a number of radians between 0 and 1"),
        (START, {"held_out": 20}, "text: 20 windows of 32 tokens, 20 are held out; give a longer text or"),
        (START, {"windows": 2}, "text: 2 windows of 32 tokens, 2 are held out; give more windows or less held_out"),
        (START, {"seed": 1 << 63}, "seed is 9223372036854775808; a whole number from 0 to"),
        (START, {"seq_len": 1000}, "seq_len is 1000; the model takes at most 512"),
    ],
)
def test_what_cannot_be_learned(source, tmp_path, recipe, options, message):
    with pytest.raises(ValueError, match=message):
        learn(source, recipe, tmp_path / "out", **SHORT | options)
    assert not list(tmp_path.iterdir())


def test_what_is_learned_goes_where_a_link_is_to(source, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="Too many levels of symbolic links: .*loop"):
        learn(source, START, tmp_path / "loop", **SHORT)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "file")
    with pytest.raises(ValueError, match="link is in no directory; make that first"):
        learn(source, START, tmp_path / "link", **SHORT)


def test_a_model_that_is_not_finite_is_refused(source, tmp_path):
    root = copy(source, tmp_path)
    poison(Q_PROJ, float("nan"), (0, 0))(root)
    with pytest.raises(ValueError, match="KL at the start is nan: the model computes NaN or infinity; repair"):
        learn(root, START, tmp_path / "out", **SHORT)
    assert not (tmp_path / "out").exists()


@pytest.mark.gpu
def test_a_gpu_learns_the_same(source, learned, tmp_path):
    found = learn(source, START, tmp_path / "out", rate=0.02, **SHORT | {"device": "cuda"})
    assert found.kl_before == pytest.approx(learned[1].kl_before, rel=0.01)
    assert found.best_step > 0 and found.kl_after < 0.97 * found.kl_before
    assert all(distance(matrices) < 1e-6 for matrices in read(tmp_path / "out").matrices.values())


def test_what_is_there_is_not_replaced(source, tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ValueError, match="out exists; choose another name"):
        learn(source, START, tmp_path / "out", **SHORT)
    with pytest.raises(ValueError, match="is in no directory"):
        learn(source, START, tmp_path / "none" / "out", **SHORT)


def test_what_a_full_disk_refuses_is_kept_elsewhere(source, tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    refused = iter([OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))])

    def once(descriptor):
        for error in refused:
            raise error

    monkeypatch.setattr(os, "fsync", once)
    with pytest.raises(OSError, match=r"No space left on device: '.*full/out'\nwhat was learned is in .*/out instead"):
        learn(source, START, tmp_path / "full" / "out", **SHORT | {"steps": 1})
    (kept,) = tmp_path.glob("quantrot-learn-*/out")
    assert not about_learned(plan(source, using(kept))) and not list((tmp_path / "full").iterdir())


def test_an_output_that_cannot_be_written_is_said_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (tmp_path, os.W_OK))
    with pytest.raises(ValueError, match="out is in a directory that cannot be written to"):
        learn("no model", START, tmp_path / "out", **SHORT)


def test_from_the_command_line(source, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "start.yaml").write_text(json.dumps(START))
    run = ["learn", str(source), "-r", str(tmp_path / "start.yaml"), "-o", str(tmp_path / "r #1.safetensors")]
    run += ["--text", str(tmp_path / "text.txt"), "--steps", "2", "--seq-len", "32", "--held-out", "2"]
    result = CliRunner().invoke(app, [*run, "--windows", "100000"])
    assert result.exit_code == 0 and "KL of what was learned" in result.output, result.output
    assert "the text has 20 windows, 100000 were asked for\n" in result.stderr
    fragment = result.output.partition("in the recipe:\n")[2]
    assert "  R1: {kind: learned, block: 16, channels: by-gain}\n" in fragment
    (tmp_path / "use.yaml").write_text(fragment + "linear: " + json.dumps(START["linear"]))
    shown = CliRunner().invoke(app, ["plan", str(source), "-r", str(tmp_path / "use.yaml")])
    assert "R2: learned, width 32, blocks of 8, from " in shown.output and "note: the rotations" not in shown.output
    converted = CliRunner().invoke(
        app, ["convert", str(source), "-r", str(tmp_path / "use.yaml"), "-o", str(tmp_path / "out")]
    )
    assert converted.exit_code == 0, converted.output
    assert "R1: learned, blocks of 16, fused" in CliRunner().invoke(app, ["inspect", str(tmp_path / "out")]).output


@pytest.mark.parametrize(("step", "checks", "kept"), [(1, 4, False), (9, 4, True), (9, 1, True)])
def test_an_interrupt_keeps_the_best_until_then(source, tmp_path, monkeypatch, step, checks, kept):
    """Of ten steps the held-out windows are run after the third, fifth and eighth; else when it is interrupted."""
    real = Cayley.step

    def interrupted(optimizer, rate):
        if optimizer.count + 1 == step:
            raise KeyboardInterrupt
        real(optimizer, rate)

    monkeypatch.setattr(Cayley, "step", interrupted)
    monkeypatch.setattr(sys.modules[learn.__module__], "CHECKS", checks)
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "start.yaml").write_text(json.dumps(START))
    out = tmp_path / "r.safetensors"
    run = ["learn", str(source), "-r", str(tmp_path / "start.yaml"), "-o", str(out), "--steps", "10", "--rate", "0.02"]
    run += ["--text", str(tmp_path / "text.txt"), "--seq-len", "32", "--held-out", "2", "--device", "cpu"]
    result = CliRunner().invoke(app, run)
    assert result.exit_code == 130 and out.exists() == kept
    assert (f"interrupted; {out} holds the best matrices until then" in result.stderr) == kept
    assert ("interrupted; nothing was written: until step 0 the held-out windows" in result.stderr) != kept
    if kept:
        about = read(out).about
        assert about["best_step"] in ((3, 5, 8) if checks == 4 else (8,))
        assert about["interrupted"] and about["kl_after"] < about["kl_before"]
        assert not about_learned(plan(source, using(out)))


@pytest.mark.parametrize(("step", "kept"), [(2, False), (9, True)])
@pytest.mark.parametrize("kind", ["memory", "nan"])
def test_an_error_keeps_the_best_until_then(source, tmp_path, monkeypatch, kind, step, kept):
    module, out, seen = sys.modules[learn.__module__], tmp_path / "r.safetensors", []
    real = module.kl

    def failing(network, turns, ids):
        if torch.is_grad_enabled():
            seen.append(ids)
            if len(seen) == step and kind == "memory":
                raise torch.OutOfMemoryError("memory is full")
        return real(network, turns, ids) * (math.nan if len(seen) == step and torch.is_grad_enabled() else 1)

    monkeypatch.setattr(module, "kl", failing)
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "start.yaml").write_text(json.dumps(START))
    run = ["learn", str(source), "-r", str(tmp_path / "start.yaml"), "-o", str(out), "--steps", "10", "--rate", "0.02"]
    run += ["--text", str(tmp_path / "text.txt"), "--seq-len", "32", "--held-out", "2", "--device", "cpu"]
    result = CliRunner().invoke(app, run)
    if kind == "nan":
        assert result.exit_code == 2 and f"error: KL is nan in step {step} of 10; give a lower rate" in result.stderr
    else:
        assert isinstance(result.exception, torch.OutOfMemoryError)
    assert out.exists() == kept and (f"{out} holds the best matrices until this error" in result.stderr) == kept
    if kept:
        about = read(out).about
        assert about["interrupted"] and about["best_step"] in (3, 5, 8) and about["kl_after"] < about["kl_before"]


def test_a_source_that_is_gone_at_the_end_costs_nothing(tiny, tmp_path):
    root = tiny(tmp_path / "source", **SHAPE)

    def gone(what, done, total):
        shutil.rmtree(root, ignore_errors=True)

    how = {"text": TEXT, "steps": 4, "seq_len": 32, "held_out": 2, "device": "cpu", "progress": gone}
    learn(root, START, tmp_path / "r.safetensors", **how)
    assert not root.exists() and read(tmp_path / "r.safetensors").about["digest"]


def test_a_file_that_came_meanwhile_stays(source, tmp_path):
    out = tmp_path / "r.safetensors"

    def other(what, done, total):
        out.write_text("mine")

    how = {"text": TEXT, "steps": 4, "seq_len": 32, "held_out": 2, "device": "cpu", "progress": other}
    with pytest.raises(OSError, match="was made by another meanwhile\nwhat was learned is in") as error:
        learn(source, START, out, **how)
    saved = Path(str(error.value).partition("learned is in ")[2].partition(" instead")[0])
    assert out.read_text() == "mine" and read(saved).matrices
    shutil.rmtree(saved.parent)


TERMINATED = """
import os, signal, sys
from quantrot.cli.main import app
from quantrot.learn import Cayley
real = Cayley.step
def terminated(optimizer, rate):
    if optimizer.count == 8:
        os.kill(os.getpid(), signal.SIGHUP)
    real(optimizer, rate)
Cayley.step = terminated
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores, in what it starts, too
app(sys.argv[1:])
"""


def test_a_termination_keeps_the_best_until_then(source, tmp_path, alone):
    """By SIGHUP; every command takes SIGTERM the same way, and a conversion's test sends it."""
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "start.yaml").write_text(json.dumps(START))
    out = tmp_path / "r.safetensors"
    args = ["learn", str(source), "-r", str(tmp_path / "start.yaml"), "-o", str(out), "--steps", "10", "--rate", "0.02"]
    args += ["--text", str(tmp_path / "text.txt"), "--seq-len", "32", "--held-out", "2", "--device", "cpu"]
    done = alone(TERMINATED, *args)
    assert done.returncode == 128 + signal.SIGHUP and f"interrupted; {out} holds the best" in done.stderr, done.stderr
    assert read(out).about["interrupted"] and not about_learned(plan(source, using(out)))


def test_what_is_not_learned_is_printed_as_it_is(source, tmp_path):
    """A recipe whose rotations are replaced by the printed ones turns what was turned while learning."""
    others = {"R3": {"kind": "hadamard"}, "R4": {"kind": "random-hadamard", "block": "<=32", "seed": 7}}
    start = {"rotations": {"R2": R2, **others}, "linear": START["linear"]}
    learning = learn(source, start, tmp_path / "r.safetensors", **SHORT | {"steps": 1})
    printed = _fragment(learning, load_recipe(start))
    (tmp_path / "use.yaml").write_text(printed + "\nlinear: " + json.dumps(START["linear"]))
    before, after = plan(source, start), plan(source, tmp_path / "use.yaml")
    assert after.rotations.keys() == before.rotations.keys() == {"R2", "R3", "R4"}
    assert all(after.rotations[name] == before.rotations[name] for name in ("R3", "R4"))
    assert after.rotations["R2"].kind == "learned" and not about_learned(after)


def test_steps_stay_orthogonal():
    generator = torch.Generator().manual_seed(0)
    r = torch.eye(16, dtype=torch.float64).repeat(3, 1, 1).requires_grad_()
    optimizer = Cayley([r])
    for _ in range(300):
        r.grad = torch.randn(r.shape, generator=generator, dtype=torch.float64)
        optimizer.step(0.1)
    assert distance(r.detach()) < 1e-12 and distance(r.detach() + 1e-5) > 1e-6


def test_steps_go_downhill():
    """To a matrix that is known, from 90 degrees away in one plane."""
    wanted = torch.eye(4, dtype=torch.float64).roll(1, 0)
    wanted[0] *= -1  # a rotation, as the start is
    r = torch.eye(4, dtype=torch.float64).requires_grad_()
    optimizer = Cayley([r])
    for _ in range(400):
        (r - wanted).square().sum().backward()
        optimizer.step(0.01)
    assert (r - wanted).abs().max() < 0.02


def test_the_gradient_knows_that_errors_grow_with_their_scale():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 64, generator=generator, dtype=torch.float64)
    error, grad = (torch.randn(5, 64, generator=generator, dtype=torch.float64) for _ in range(2))
    at = x.clone().requires_grad_()
    groups = at.view(5, 2, 32)
    scale = groups.abs().amax(-1, keepdim=True)
    ((groups + error.view(5, 2, 32) * (scale / scale.detach())).flatten(1) * grad).sum().backward()
    slope = _slope(grad, x, x + error, ActivationFormat("mxfp4", (1, 32), "even"))
    assert torch.allclose(slope, at.grad)
    zeros = torch.zeros(1, 32)
    assert torch.equal(_slope(zeros + 1, zeros, zeros, ActivationFormat("mxfp4", (1, 32), "even")), zeros + 1)
    assert _slope(grad, x, x + error, ActivationFormat("fp8", (1, 32), "exact")) is grad
