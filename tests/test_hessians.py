"""Conversions that round by GPTQ: calibrated on what the converted layers see, whatever happens on the way."""

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from quantrot import Calibration, convert, load, plan, verify
from quantrot.calibration import lanes
from quantrot.cli.main import app
from quantrot.evals.divergence import divergence
from quantrot.hessians import _tf32, weighed
from quantrot.learn import learn
from quantrot.llama import SUPPORTED
from quantrot.load import open_model
from quantrot.manifest import read_manifest
from quantrot.modules import quantize_dequantize
from quantrot.plan import MODEL_CODE
from quantrot.recipe import load_recipe
from tests.damage import GAIN, Q_PROJ, contents, copy, poison

TEXT, *MORE = ("".join(chr(97 + n * i * i % 23) for i in range(640)) for n in (1, 2, 3, 5))
CALIBRATION = Calibration(TEXT, windows=7, seq_len=48)
MXFP4 = {"weights": {"format": "mxfp4", "rounding": "gptq"}, "activations": {"format": "mxfp4"}}
FUSED = {
    "R1": {"kind": "random-hadamard", "block": 32, "channels": "by-gain"},
    "R2": {"kind": "hadamard", "block": 16},
    "R4": {"kind": "random-hadamard", "block": 64},
}
PLAIN = {"linear": [{"match": "*", **MXFP4}]}
ROTATED = {"rotations": FUSED, **PLAIN}
MIXED = {
    "rotations": {"R1": FUSED["R1"]},
    "linear": [
        {"match": "down_proj", "weights": {"format": "int8", "group": 64, "rounding": "gptq"}},
        {"match": "gate_proj", **MXFP4},
        {"match": "mlp.*", **MXFP4, "hadamard": 64},
        {"match": "o_proj", "weights": {"format": "fp8", "block": "channel"}},
        {"match": "v_proj", "weights": {"format": "fp8", "block": [128, 128], "rounding": "gptq"}},
        {"match": "lm_head", **MXFP4},
    ],
    "skip": ["embed_tokens", "model.layers.0.self_attn.q_proj"],
}
SHAPE = {"hidden": 128, "intermediate": 256, "layers": 3, "attention_bias": True, "mlp_bias": True, "tied": True}


@pytest.fixture(scope="module")
def source(tiny, tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("model") / "source", dtype=torch.bfloat16, **SHAPE)


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    return convert(source, MIXED, tmp_path_factory.mktemp("whole") / "out", calibration=CALIBRATION).out


@pytest.mark.parametrize("recipe", [PLAIN, ROTATED, MIXED], ids=["plain", "rotated", "mixed"])
def test_it_is_nearer_to_the_original_than_nearest(source, tmp_path, recipe):
    convert(source, recipe, tmp_path / "gptq", calibration=CALIBRATION)
    convert(source, load_recipe(recipe).nearest(), tmp_path / "nearest")
    original, _ = open_model(source, "cpu", "float32")
    ids = plan(source, recipe, calibration=CALIBRATION).windows
    found, nearest = (divergence(load(tmp_path / d, device_map="cpu"), original, ids).kl for d in ("gptq", "nearest"))
    assert found < 0.8 * nearest


def test_the_heads_stored_shape_is_no_head(source, tmp_path):
    rule = {"match": "lm_head", "weights": {"format": "int8", "group": "channel", "rounding": "gptq"}}
    convert(source, {"linear": [rule], "skip": ["embed_tokens"]}, tmp_path / "out", calibration=CALIBRATION)
    load(tmp_path / "out", device_map="cpu")


def test_what_a_config_says_of_layers_and_of_transformers_calls_is_not_the_calibrations(source, tmp_path):
    said = {"layer_types": ["full_attention"] * 3, "attn_implementation": "flash_attention_2", "return_dict": False}
    convert(source, PLAIN, tmp_path / "plain", calibration=CALIBRATION)
    model = copy(source, tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | said))
    convert(model, PLAIN, tmp_path / "said", calibration=CALIBRATION)
    plain, told = ((tmp_path / out / "model.safetensors").read_bytes() for out in ("plain", "said"))
    assert plain == told
    (model / "config.json").write_text(json.dumps(config | {"hidden_act": "gelo"}))
    with pytest.raises(ValueError, match="config.json: transformers cannot build the model to calibrate it: KeyError"):
        convert(model, PLAIN, tmp_path / "unknown", calibration=CALIBRATION)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_a_window_that_no_layer_has_is_not_calibrated_with(tiny, tmp_path, model_type):
    """Neither where layer types say so nor where max_window_layers does."""
    model = tiny(tmp_path / "model", model_type=model_type)
    config = json.loads((model / "config.json").read_text()) | {"layer_types": None}
    window = {"use_sliding_window": True, "sliding_window": 8}
    types = {"layer_types": ["full_attention"] * 2, "max_window_layers": 0}
    cases = {"without": {}, "types": window | types, "layers": window | {"max_window_layers": 2}}
    for name, fields in cases.items():
        (model / "config.json").write_text(json.dumps(config | fields))
        convert(model, PLAIN, tmp_path / name, calibration=CALIBRATION)
    without, *others = ((tmp_path / name / "model.safetensors").read_bytes() for name in cases)
    assert all(other == without for other in others)


def test_the_window_that_every_layer_has_is_calibrated_with(tiny, tmp_path):
    model = tiny(tmp_path / "model", model_type="mistral")
    config = json.loads((model / "config.json").read_text())
    for name, window in {"without": None, "with": 8}.items():
        fields = {"sliding_window": window, "use_sliding_window": False}
        (model / "config.json").write_text(json.dumps(config | fields))
        convert(model, PLAIN, tmp_path / name, calibration=CALIBRATION)
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("without", "with"))
    assert first != second


def test_the_callers_default_dtype_and_inference_mode_do_not_matter(source, whole, tmp_path, alone):
    code = f"""import torch
from quantrot import Calibration, convert
torch.set_default_dtype(torch.bfloat16)
with torch.inference_mode():
    convert({str(source)!r}, {MIXED!r}, {str(tmp_path / "bfloat16")!r}, calibration=Calibration({TEXT!r}, 7, 48))"""
    assert alone(code).returncode == 0
    first, second = ((d / "model.safetensors").read_bytes() for d in (whole, tmp_path / "bfloat16"))
    assert first == second


def counts(x):
    """What a window's tokens [S, K] count for: none for more than the middle one."""
    sizes = x.double().square().sum(1, keepdim=True)
    return (sizes.sort(0).values[(len(x) - 1) // 2] / sizes).clamp(max=1).float()


def test_no_token_counts_for_more_than_the_middle_one():
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    x *= torch.tensor([100, 3, 2, 1, 1, 0.9, 0.5, 0.1, 0])[:, None] * 8 / x.norm(dim=1, keepdim=True)
    counted = weighed(x)
    torch.testing.assert_close(counted.norm(dim=1), torch.tensor([8, 8, 8, 8, 8, 7.2, 4, 0.8, 0]))
    assert torch.equal(counted[4:], x[4:])


@pytest.mark.parametrize(
    ("recipe", "model_type"),
    [(PLAIN, "llama"), (MIXED, "llama"), *((ROTATED, model_type) for model_type in SUPPORTED)],
    ids=["plain", "mixed", *SUPPORTED],
)
def test_hessians_are_of_what_the_converted_linears_multiply(tiny, tmp_path, monkeypatch, recipe, model_type):
    """Of layer 1's first linears and of the head; the others follow linears of their own layer, which are exact."""
    biases = {} if model_type == "llama" else {"attention_bias": False, "mlp_bias": False}  # what is Llama's to choose
    source = tiny(tmp_path / "model", **SHAPE | biases | {"layers": 2}, model_type=model_type)
    seen, real = [], sys.modules["quantrot.gptq"].feedback
    monkeypatch.setattr(sys.modules["quantrot.gptq"], "feedback", lambda *of: seen.append(of[0].clone()) or real(*of))
    done = convert(source, recipe, tmp_path / "out", calibration=CALIBRATION, threads=1)
    names = [step.hessian for step in done.plan.steps if step.hessian == step.name]
    model = load(tmp_path / "out", device_map="cpu", dtype=torch.float32, merge=False)
    names = sorted(names, key=lambda fqn: (fqn == "lm_head", fqn))  # by layer, within one by name
    hessians = dict(zip(names, seen, strict=True))
    first = next(n for n in ("q_proj", "v_proj") if f"model.layers.1.self_attn.{n}" in hessians)
    for fqn in {f"model.layers.1.self_attn.{first}", "lm_head"} & hessians.keys():
        module, total = model.get_submodule(fqn), 0.0

        def note(module, args, fqn=fqn):
            nonlocal total
            x = quantize_dequantize(module.turned(args[0]), module.format.activations).flatten(0, -2)
            total = total + (x * counts(x)).T @ x

        handle = module.register_forward_pre_hook(note)
        with torch.no_grad():
            for ids in done.plan.windows:
                model(ids[None])
        handle.remove()
        assert (hessians[fqn].triu() - total.triu()).norm() < 2e-3 * total.norm(), fqn


def test_windows_go_through_a_layer_together_on_a_gpu(source, tmp_path, monkeypatch):
    """Seven windows by three: nearly the weights of one at a time, whose middle tokens are others."""
    assert lanes("cpu", 3, 512) == (3, 1) and lanes("cuda:1", 3, 512) == (1, 8) and lanes("cuda", 3, 9999) == (1, 1)
    original, _ = open_model(source, "cpu", "float32")
    alone = convert(source, PLAIN, tmp_path / "alone", calibration=CALIBRATION)
    monkeypatch.setattr(sys.modules["quantrot.hessians"], "lanes", lambda *_: (1, 3))
    together = convert(source, PLAIN, tmp_path / "together", calibration=CALIBRATION)
    assert contents(together.out) != contents(alone.out)
    a, b = (divergence(load(d.out, device_map="cpu"), original, alone.plan.windows).kl for d in (alone, together))
    assert b == pytest.approx(a, rel=0.1)


def test_products_in_tf32_end_with_the_calibration():
    before = torch.backends.cuda.matmul.fp32_precision
    with pytest.raises(KeyError), _tf32():
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        raise KeyError
    assert torch.backends.cuda.matmul.fp32_precision == before


def test_threads_do_not_change_a_byte(source, whole, tmp_path):
    for threads in (1, 3):
        out = convert(source, MIXED, tmp_path / str(threads), calibration=CALIBRATION, threads=threads).out
        assert contents(out) == contents(whole)


@pytest.mark.parametrize("moment", [1, 12, 37, 60])
def test_resumed_conversions_end_with_the_same_bytes(source, whole, tmp_path, monkeypatch, moment):
    real, left = os.pwrite, [moment]

    def stop(*args):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", stop)
        with pytest.raises(KeyboardInterrupt):
            convert(source, MIXED, tmp_path / "out", calibration=CALIBRATION)
    other = Calibration(TEXT[1:], windows=7, seq_len=48)
    with pytest.raises(ValueError, match="holds an unfinished conversion of another source, recipe, text"):
        convert(source, MIXED, tmp_path / "out", calibration=other, resume=True)
    convert(source, MIXED, tmp_path / "out", calibration=CALIBRATION, resume=True, threads=1)
    assert contents(tmp_path / "out") == contents(whole)


def test_the_manifest_says_how_it_was_rounded(source, whole, tmp_path, monkeypatch):
    manifest = read_manifest(whole)
    assert manifest.data["calibration"] == CALIBRATION.entry()
    assert manifest.data["calibration"].keys() == {"text_sha256", "windows", "seq_len"}
    roundings = {fqn.rpartition(".")[2]: fmt.weights.rounding for fqn, fmt in manifest.linears.items() if fmt}
    assert roundings["down_proj"] == roundings["v_proj"] == roundings["lm_head"] == "gptq"
    assert roundings["o_proj"] == "nearest"
    assert convert(source, "mxfp4", tmp_path / "out").manifest["calibration"] is None
    planned = plan(source, MIXED, calibration=CALIBRATION)
    assert planned.fingerprint() == manifest.data["conversion"]
    assert "calibrated on 7 windows of 48 tokens" in (whole / "README.md").read_text()
    few = plan(source, MIXED, calibration=Calibration(TEXT, windows=99, seq_len=48))
    assert few.calibration.windows == len(few.windows) == 13 and any("its text has 13 windows" in n for n in few.notes)
    held = planned.calibration_bytes(1)
    assert planned.calibration_bytes(2) > held > 0
    with monkeypatch.context() as before_import:
        before_import.delitem(sys.modules, "quantrot.hessians")
        assert planned.calibration_bytes(1) == held + MODEL_CODE
    assert plan(source, "mxfp4").calibration_bytes(2) == 0


def test_verifying_and_learning_need_no_text(source, whole, tmp_path):
    assert not verify(whole, text=TEXT, seq_len=32, count=2, device="cpu").failures
    learn(source, ROTATED, tmp_path / "r", text=TEXT, steps=1, seq_len=32, windows=3, held_out=1, device="cpu")
    rotations = {name: {**FUSED[name], "kind": "learned"} for name in ("R1", "R2")} | {"R4": FUSED["R4"]}
    recipe = {"rotations": {**rotations, "path": str(tmp_path / "r")}, **PLAIN}
    assert not any("learned" in note for note in plan(source, recipe, calibration=CALIBRATION).notes)


def test_learned_rotations_and_gptq_from_the_command_line(source, tmp_path, monkeypatch):
    """Stopped and resumed, it ends with the same bytes, which are nearer to the original than to nearest."""
    learn(source, ROTATED, tmp_path / "r", text=TEXT, steps=1, seq_len=32, windows=3, held_out=1, device="cpu")
    rotations = {name: {**FUSED[name], "kind": "learned"} for name in ("R1", "R2")} | {"R4": FUSED["R4"]}
    recipe, (text, out) = {"rotations": {**rotations, "path": "r"}, **PLAIN}, (tmp_path / "text", tmp_path / "out")
    (tmp_path / "learned.yaml").write_text(json.dumps(recipe))
    text.write_text(TEXT)
    run = ["convert", str(source), "-r", str(tmp_path / "learned.yaml"), "--calibration", str(text)]
    run += ["--windows", "7", "--seq-len", "48", "-o"]
    assert CliRunner().invoke(app, [*run, str(out)]).exit_code == 0
    real, left = os.pwrite, [30]

    def stop(*args):
        left[0] -= 1
        if not left[0]:
            raise OSError("no space")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", stop)
        assert CliRunner().invoke(app, [*run, str(tmp_path / "again")]).exit_code
    result = CliRunner().invoke(app, [*run, str(tmp_path / "again"), "--resume"])
    assert result.exit_code == 0, result.output
    assert contents(tmp_path / "again") == contents(out)
    assert not verify(out, text=TEXT, seq_len=32, count=2, device="cpu").failures
    convert(source, load_recipe(tmp_path / "learned.yaml").nearest(), tmp_path / "nearest")
    original, _ = open_model(source, "cpu", "float32")
    ids = plan(source, tmp_path / "learned.yaml", calibration=CALIBRATION).windows
    found, nearest = (divergence(load(d, device_map="cpu"), original, ids).kl for d in (out, tmp_path / "nearest"))
    assert found < 0.8 * nearest


@pytest.mark.parametrize(
    ("recipe", "calibration", "message"),
    [
        (PLAIN, None, "recipe: 21 linears have rounding: gptq, as model.layers.0.self_attn.q_proj, and no text to"),
        ("mxfp4", CALIBRATION, "nothing has rounding: gptq, and calibration gives a text for it"),
        (PLAIN, Calibration("short"), "calibration: text: 5 tokens, one window needs 512"),
        (PLAIN, Calibration((TEXT, "short")), "calibration, text 2 of 2: text: 5 tokens, one window needs 512"),
        (PLAIN, Calibration((TEXT, "short"), names=("a", "b")), "calibration, b: text: 5 tokens, one window needs 512"),
        (PLAIN, Calibration(__file__), f"({__file__!r} is a file: give what is in it, its read_text())"),
        (PLAIN, Calibration(TEXT, seq_len=1000), "calibration: seq_len is 1000; the model takes at most 512"),
    ],
)
def test_texts_that_do_not_fit_are_errors_of_the_plan(source, tmp_path, recipe, calibration, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        convert(source, recipe, tmp_path / "out", calibration=calibration)
    assert not list(tmp_path.iterdir())


WINDOWS, SEQ_LEN = "a whole number from 1 up, or None for all is needed", "a whole number from 2 up is needed"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": ()}, "there is no text in it; give at least one"),
        *(
            (
                {"text": text},
                f"text is {text!r}; a text itself or a tuple of texts is needed, of a file its read_text()",
            )
            for text in (Path("text.txt"), b"text", None, ["text"], ("text", Path("text.txt")))
        ),
        ({"text": "a\udce8"}, "character 1 is '\\udce8', half of a surrogate pair; read the file as UTF-8"),
        *(({"windows": windows}, f"windows is {windows!r}; {WINDOWS}") for windows in ("4", 2.0, True, 0, -1)),
        *(({"seq_len": seq_len}, f"seq_len is {seq_len!r}; {SEQ_LEN}") for seq_len in ("4", 64.0, True, None, 1)),
        ({"text": ("a", "b", "c"), "windows": 2}, "windows is 2 of 3 texts, which take turns; give at least 3 windows"),
        ({"names": ("a", "b")}, "names has 2 for 1 texts; give one for each"),
    ],
)
def test_fields_of_a_calibration_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=f"^calibration: {re.escape(message)}"):
        Calibration(**{"text": TEXT} | fields)


def test_a_calibration_text_of_the_command_is_named(source, tmp_path):
    (tmp_path / "a").write_text(TEXT), (tmp_path / "b").write_text("abc")
    for names, named in ((["b"], "b"), (["a", "b"], "b")):
        words = [word for name in names for word in ("--calibration", str(tmp_path / name))]
        result = CliRunner().invoke(app, ["plan", str(source), "-r", "mxfp4-weight-only-gptq", *words])
        told = f"error: calibration, {tmp_path / named}: text: 3 tokens, one window needs 512; "
        assert result.exit_code == 2 and told in result.stderr
    result = CliRunner().invoke(app, ["plan", str(source), "-r", "mxfp4-weight-only-gptq", "--calibration", ""])
    assert result.exit_code == 2
    assert result.stderr == "error: text .: a directory (as an empty name is); name a UTF-8 file\n"


def test_a_text_that_no_linear_is_left_to_need_is_noted(tiny, tmp_path):
    """172 columns are no whole groups of 32: down_proj, which alone has rounding: gptq, keeps its dtype."""
    source = tiny(tmp_path / "model", intermediate=172)
    recipe = {"linear": [{"match": "down_proj", **MXFP4}]}
    misfit = "2 x down_proj [64, 172] does not fit MXFP4 gptq x MXFP4: its own dtype"
    assert plan(source, recipe).notes == (misfit,)
    done = convert(source, recipe, tmp_path / "out", calibration=CALIBRATION)
    assert done.plan.notes == (misfit, "calibration: its text is not used: no linear is left that has rounding: gptq")
    assert done.manifest["calibration"] is None


@pytest.mark.parametrize(("name", "at"), [(Q_PROJ, (-1, -1)), ("model.embed_tokens.weight", (0, 0)), (GAIN, (5,))])
def test_weights_that_are_not_finite_are_named(source, tmp_path, name, at):
    root = copy(source, tmp_path)
    poison(name, float("nan"), at)(root)
    with pytest.raises(ValueError, match=rf"model\.safetensors: {re.escape(name)} holds NaN or infinity; repair"):
        convert(root, PLAIN, tmp_path / "out", calibration=CALIBRATION)


def test_a_changed_tokenizer_is_another_conversion(source, tmp_path):
    root = copy(source, tmp_path)
    before = plan(root, PLAIN, calibration=CALIBRATION).fingerprint()
    tokenizer = json.loads((root / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (root / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert plan(root, PLAIN, calibration=CALIBRATION).fingerprint() != before


def test_a_missing_text_is_one_error_among_all(source):
    with pytest.raises(ValueError) as caught:
        plan(source, {**PLAIN, "skip": ["lm_hed"]})
    assert len(str(caught.value).splitlines()) == 2


def test_a_model_without_a_tokenizer_cannot_be_calibrated(tiny, tmp_path):
    root = tiny(tmp_path / "model")
    tokenizer = json.loads((root / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = ["no token"]
    (root / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match="transformers cannot load its tokenizer: Token `no` out of vocabulary"):
        plan(root, PLAIN, calibration=CALIBRATION)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (root / name).unlink()
    with pytest.raises(ValueError, match=r"model: no tokenizer, none of tokenizer\.json, .*; put its files there$"):
        plan(root, PLAIN, calibration=CALIBRATION)


def test_windows_of_several_texts_take_turns(source, tmp_path):
    texts = TEXT, MORE[0], MORE[1][:100]
    a, b, c = (plan(source, PLAIN, calibration=Calibration(text, None, 48)).windows for text in texts)
    assert len(c) == 2 and not torch.equal(a[0], b[0])
    several = Calibration(texts, 8, 48)
    found = plan(source, PLAIN, calibration=several).windows
    assert torch.equal(found, torch.stack([a[0], b[0], c[0], a[1], b[1], c[1], a[2], b[2]]))
    assert torch.equal(plan(source, PLAIN, calibration=Calibration(texts, 3, 48)).windows, found[:3])
    assert several.entry()["text_sha256"] == [Calibration(text).entry()["text_sha256"][0] for text in texts]
    for i, text in enumerate(texts):
        (tmp_path / str(i)).write_text(text)
    run = ["convert", str(source), "-r", "mxfp4-weight-only-gptq", "-o", str(tmp_path / "out"), "--seq-len", "48"]
    result = CliRunner().invoke(app, [*run, *(word for i in "012" for word in ("--calibration", str(tmp_path / i)))])
    assert result.exit_code == 0, result.output
    assert read_manifest(tmp_path / "out").data["calibration"] == Calibration(texts, 28, 48).entry()
    assert "28 windows of 48 tokens of texts with sha256" in (tmp_path / "out" / "README.md").read_text()


def test_from_the_command_line(source, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "mixed.yaml").write_text(json.dumps(MIXED))
    run = [str(source), "-r", str(tmp_path / "mixed.yaml")]
    text = ["--calibration", str(tmp_path / "text.txt"), "--windows", "7", "--seq-len", "48"]
    assert "give one as calibration (--calibration TEXT)" in CliRunner().invoke(app, ["plan", *run]).output
    shown = CliRunner().invoke(app, ["plan", *run, *text])
    assert "MXFP4 gptq x MXFP4" in shown.output and "of it for calibration" in shown.output, shown.output
    result = CliRunner().invoke(app, ["convert", *run, *text, "-o", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert read_manifest(tmp_path / "out").data["calibration"] == CALIBRATION.entry()
    assert "INT8 g64 gptq" in CliRunner().invoke(app, ["inspect", str(tmp_path / "out")]).output


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [PLAIN, ROTATED, MIXED], ids=["plain", "rotated", "mixed"])
def test_a_gpu_rounds_as_well(source, tmp_path, recipe):
    """By the mean of four texts: noise of 2^-12 in a CPU's products moves the KL of one by up to 20%, their mean by up
    to 6% (18 draws)."""
    original, _ = open_model(source, "cpu", "float32")
    ratios = []
    for text in (TEXT, *MORE):
        found = {}
        for device in ("cpu", "cuda"):
            out = tmp_path / f"{device}-{len(ratios)}"
            done = convert(source, recipe, out, calibration=replace(CALIBRATION, text=text), device=device)
            found[device] = divergence(load(out, device_map="cpu"), original, done.plan.windows).kl
        ratios.append(found["cuda"] / found["cpu"])
    assert sum(ratios) / len(ratios) == pytest.approx(1, abs=0.12), ratios
