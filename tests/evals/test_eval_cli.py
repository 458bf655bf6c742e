import errno
import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from quantrot.cli.eval import _windows, app
from quantrot.evals import report, spread
from quantrot.evals.mmlu import mmlu


def full(descriptor):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def run(monkeypatch, model, other_model, tokenizer, tmp_path_factory):
    """Runs a command with the two models under the names `one` and `two`."""
    models = {"one": model, "two": other_model}
    monkeypatch.chdir(tmp_path_factory.mktemp("models"))
    for name in models:
        Path(name).mkdir()

    def open_model(name, device="auto", dtype="auto"):
        opened.append((name, device, dtype))
        return models[Path(name).name], tokenizer

    opened = []
    stub = types.ModuleType("quantrot.load")
    stub.open_model = open_model
    monkeypatch.setitem(sys.modules, "quantrot.load", stub)

    def run(*args, fails=None):
        opened.clear()
        result = CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=fails is not None)
        assert fails is None or isinstance(result.exception, fails)
        return result, list(opened)

    return run


def test_ppl_prints_and_writes_the_same_number(run, tmp_path):
    (tmp_path / "t.txt").write_text("some words, " * 100)
    args = ["--text", tmp_path / "t.txt", "--seq-len", 32, "--windows", 4, "--output", tmp_path / "r.json"]
    result, opened = run("ppl", "one", *args, "--device", "cpu", "--dtype", "float32")
    report = json.loads((tmp_path / "r.json").read_text())
    assert opened == [("one", "cpu", "float32")]
    assert f"{report['results']['ppl']['ppl']:.4f}" in result.stdout
    assert report["results"]["ppl"]["windows"] == 4 and report["model"]["name"] == "one"
    assert "t.txt" in report["settings"]["text"]


def test_several_devices_have_a_share_of_the_questions_each(run, model, tokenizer, mmlu_dir, tmp_path, monkeypatch):
    def mmlu_on(name, devices, *, dtype, progress, **asked):
        seen.append((name, devices, dtype))
        return mmlu(model, tokenizer, progress=progress, **asked), report.model_entry(name, model) | {"device": "both"}

    seen: list = []
    monkeypatch.setattr(spread, "mmlu_on", mmlu_on)
    args = ["--data", mmlu_dir, "--fewshot", 0, "--limit", 1, "--output", tmp_path / "r.json"]
    result, opened = run("mmlu", "one", *args, "--device", "cpu, cpu", "--dtype", "float32")
    assert seen == [("one", ["cpu", "cpu"], "float32")] and opened == []
    assert json.loads((tmp_path / "r.json").read_text())["model"]["device"] == "both" and "overall" in result.stdout
    result, _ = run("mmlu", "one", *args[:-1], tmp_path / "s.json", "--device", "cpu,gpu", fails=ValueError)
    assert "device is 'gpu'" in str(result.exception)


def test_where_a_model_is_that_one_gpu_has_no_room_for_is_said_and_written(run, model, tmp_path, monkeypatch):
    monkeypatch.setattr(
        model, "hf_device_map", {"model.embed_tokens": 0, "model.layers": 0, "lm_head": "cpu"}, raising=False
    )
    (tmp_path / "t.txt").write_text("some words, " * 100)
    args = ["--text", tmp_path / "t.txt", "--seq-len", 32, "--windows", 4, "--output", tmp_path / "r.json"]
    result, _ = run("ppl", "one", *args)
    assert "one: no room on one GPU; it is on cuda:0, cpu" in result.stderr
    assert json.loads((tmp_path / "r.json").read_text())["model"]["device"] == "cuda:0, cpu"


def test_what_is_nan_is_said_with_what_to_do(run, model, tmp_path, monkeypatch):
    (tmp_path / "t.txt").write_text("some words, " * 100)
    args = ["--text", tmp_path / "t.txt", "--seq-len", 32, "--windows", 1]
    for command in (["ppl", "one"], ["compare", "two", "--baseline", "one"]):
        assert "nan: a model computes NaN" not in run(*command, *args)[0].stderr
    monkeypatch.setattr(model.model.norm, "variance_epsilon", float("nan"))
    for command in (["ppl", "one"], ["compare", "two", "--baseline", "one"]):
        assert "nan: a model computes NaN or infinity; give --dtype" in run(*command, *args)[0].stderr


def test_a_log_file_gets_a_line_a_tenth(run, tmp_path):
    (tmp_path / "t.txt").write_text("some words, " * 100)
    result, _ = run("ppl", "one", "--text", tmp_path / "t.txt", "--seq-len", 32, "--windows", 4)
    lines = [line for line in result.stderr.splitlines() if line.startswith("perplexity: ")]
    assert [line.split()[1] for line in lines] == ["1/4", "2/4", "3/4", "4/4"] and lines[-1].endswith(" s")


def test_windows_are_at_most_what_the_text_part_of_a_model_takes(composite, tokenizer):
    with pytest.raises(ValueError, match="seq_len is 513; the model takes at most 512"):
        _windows(composite, tokenizer, "some words, " * 100, 513, None)


def test_compare_measures_both_models(run, tmp_path):
    (tmp_path / "t.txt").write_text("some words, " * 100)
    args = ["--text", tmp_path / "t.txt", "--seq-len", 32, "--windows", 4, "--output", tmp_path / "r.json"]
    result, opened = run("compare", "one", "--baseline", "two", *args)
    report = json.loads((tmp_path / "r.json").read_text())
    assert [name for name, _, _ in opened] == ["one", "two"]
    assert report["baseline"]["name"] == "two" and report["results"]["divergence"]["kl"] > 0
    assert f"{report['results']['divergence']['kl']:.5f}" in result.stdout


def test_mmlu_with_a_baseline_reports_the_paired_difference(run, mmlu_dir, tmp_path):
    args = ["--fewshot", 2, "--limit", 2, "--data", mmlu_dir, "--baseline", "two", "--output", tmp_path / "r.json"]
    result, _ = run("mmlu", "one", *args)
    results = json.loads((tmp_path / "r.json").read_text())["results"]
    gain = results["mmlu"]["overall"]["acc"] - results["baseline"]["overall"]["acc"]
    assert results["difference"]["difference"] == pytest.approx(gain)
    assert "McNemar p" in result.stdout and "high_school_government_and_politics" in result.stdout


@pytest.mark.parametrize("stop", [ValueError("no score"), KeyboardInterrupt()])
@pytest.mark.parametrize("recipes", [False, True])
def test_what_was_measured_before_an_error_is_printed_and_written(run, mmlu_dir, tmp_path, monkeypatch, recipes, stop):
    from quantrot.evals import mmlu as evals
    from quantrot.evals import recipes as table

    real, left = evals.mmlu, [1]

    def measured(*args, **options):
        if not left:
            raise stop
        left.pop()
        return real(*args, **options)

    monkeypatch.setattr(evals, "mmlu", measured)
    monkeypatch.setattr(table, "planned", lambda *given: None)
    monkeypatch.setattr(table, "converted", lambda *given: "two")
    args = ["--fewshot", 0, "--limit", 1, "--data", mmlu_dir, "--output", tmp_path / "r.json"]
    args += ["--recipes", "bf16,mxfp4"] if recipes else ["--baseline", "two"]
    result, _ = run("mmlu", "one", *args, fails=(type(stop), SystemExit))
    assert result.exit_code and not left and ("bf16" if recipes else "overall") in result.stdout
    results = json.loads((tmp_path / "r.json").read_text())["results"]
    found = results["mmlu"]["bf16"] if recipes else results["mmlu"]
    assert found["overall"]["n"] == 57 and (tmp_path / "r.md").exists() == recipes
    if recipes:  # nor is a part taken for the whole
        says = "The run ended before it had measured mxfp4."
        assert says in (tmp_path / "r.md").read_text() and says in result.stderr and results["unmeasured"] == ["mxfp4"]


@pytest.mark.parametrize("command", ["mmlu", "ppl", "compare"])
def test_a_result_that_cannot_be_written_is_printed(run, mmlu_dir, tmp_path, monkeypatch, command):
    monkeypatch.setattr(os, "fsync", full)
    (tmp_path / "t.txt").write_text("some words, " * 100)
    data = ["--data", mmlu_dir, "--fewshot", 0, "--limit", 1] if command == "mmlu" else ["--text", tmp_path / "t.txt"]
    size = [] if command == "mmlu" else ["--seq-len", 32, "--windows", 4]
    baseline = ["--baseline", "two"] if command == "compare" else []
    result, _ = run(command, "one", *data, *size, *baseline, "--output", tmp_path / "r.json", fails=OSError)
    assert result.exception.errno == errno.ENOSPC and result.exception.filename == str(tmp_path / "r.json")
    assert {"mmlu": "overall", "ppl": "perplexity", "compare": "top-1 agreement"}[command] in result.stdout
    assert not list(tmp_path.glob("*r.json*"))


def test_a_result_is_written_though_nobody_reads_the_table(run, tmp_path, monkeypatch):
    def closed(*args):
        raise BrokenPipeError

    monkeypatch.setattr("quantrot.cli.eval.table", closed)
    (tmp_path / "t.txt").write_text("some words, " * 100)
    args = ["--text", tmp_path / "t.txt", "--seq-len", 32, "--windows", 4, "--output", tmp_path / "r.json"]
    run("ppl", "one", *args, fails=BrokenPipeError)
    assert json.loads((tmp_path / "r.json").read_text())["results"]["ppl"]["windows"] == 4


def test_a_table_of_recipes_is_written_though_nobody_reads_it(run, mmlu_dir, tmp_path, monkeypatch):
    from quantrot.cli import common
    from quantrot.evals import recipes

    def closed(*args):
        raise BrokenPipeError

    monkeypatch.setattr(recipes, "planned", lambda *given: None)
    monkeypatch.setattr(recipes, "converted", lambda *given: "two")
    monkeypatch.setattr(common, "table", closed)
    args = ["--data", mmlu_dir, "--fewshot", 0, "--limit", 1, "--output", tmp_path / "r.json"]
    run("mmlu", "one", "--recipes", "bf16,mxfp4", *args, fails=BrokenPipeError)
    assert sorted(path.name for path in tmp_path.glob("r.*")) == ["r.json", "r.md", "r.svg"]


def test_a_result_that_cannot_be_kept_stops_no_recipe(run, mmlu_dir, model_dir, tmp_path, monkeypatch):
    from quantrot.evals import recipes

    monkeypatch.setattr(recipes, "planned", lambda *given: None)
    monkeypatch.setattr(recipes, "converted", lambda *given: "two")
    monkeypatch.setattr(os, "fsync", full)
    args = ["--data", mmlu_dir, "--fewshot", 0, "--limit", 1, "--work", tmp_path / "work"]
    result, opened = run("mmlu", "one", "--recipes", "bf16, mxfp4", *args)
    assert [name for name, _, _ in opened] == ["one", "two"] and "McNemar p" in result.stdout
    notes = [line for line in result.stderr.splitlines() if "No space left on device" in line]
    assert [line.partition(": its result is not kept for another run: ")[0] for line in notes] == ["bf16", "mxfp4"]
    assert "mmlu.json" in notes[0] and not list((tmp_path / "work").iterdir())


def test_recipes_are_compared_with_the_first_on_the_same_questions(run, mmlu_dir, tmp_path, monkeypatch):
    from quantrot.evals import recipes

    one, two = (str(tmp_path / name) for name in ("one", "two"))
    for model in (one, two):
        (tmp_path / model).mkdir()
        (tmp_path / model / "config.json").write_text("{}")
    made = []
    monkeypatch.setattr(recipes, "planned", lambda *given: None)
    monkeypatch.setattr(recipes, "converted", lambda *given: made.append(given[:4]) or two)
    args = ["--fewshot", 2, "--limit", 2, "--data", mmlu_dir, "--output", tmp_path / "r.json", "--work", tmp_path]
    result, opened = run("mmlu", one, "--recipes", "bf16,my/fp8-attention.yaml", *args)
    assert made == [(one, "my/fp8-attention.yaml", tmp_path, "cpu")] and [name for name, _, _ in opened] == [one, two]
    report = json.loads((tmp_path / "r.json").read_text())
    found, difference = report["results"]["mmlu"], report["results"]["differences"]["fp8-attention"]
    gain = found["fp8-attention"]["overall"]["acc"] - found["bf16"]["overall"]["acc"]
    assert difference["difference"] == pytest.approx(gain) and difference["n"] == 114
    table = (tmp_path / "r.md").read_text()
    assert f"{gain:+.4f}" in table and f"{gain:+.4f}" in result.stdout and "McNemar p" in result.stdout
    drawn = ElementTree.parse(tmp_path / "r.svg").getroot()
    zero, gained = (float(dot.get("cx")) for dot in drawn.findall("{*}circle"))
    assert (gained > zero) == (gain > 0) and (gained < zero) == (gain < 0)

    # What was evaluated is kept, and evaluated again only where what it depends on has changed.
    kept = recipes.kept_result(next(tmp_path.glob("bf16-*.mmlu.json")))[0]
    monkeypatch.setattr("quantrot.evals.mmlu.mmlu", lambda *args, **options: kept)
    again, opened = run("mmlu", one, "--recipes", "bf16,fp8-attention", *args)
    assert not opened and again.stdout == result.stdout
    assert json.loads((tmp_path / "r.json").read_text())["results"] == report["results"]
    (tmp_path / "two" / "config.json").write_text("{} ")
    assert [name for name, _, _ in run("mmlu", one, "--recipes", "bf16,fp8-attention", *args)[1]] == [two]
    assert len(run("mmlu", one, "--recipes", "bf16,fp8-attention", *args[:2], "--limit", 1, *args[4:])[1]) == 2


def test_a_table_takes_no_other_files_place(run, mmlu_dir, model_dir, tmp_path):
    (tmp_path / "report.v2.md").write_text("mine")
    args = ["--data", mmlu_dir, "--fewshot", 2, "--limit", 2, "--recipes", "bf16,mxfp4", "--output"]
    with pytest.raises(ValueError, match=r"output: .*report\.v2\.md, .* with .*report\.v2\.json, is there; move"):
        run("mmlu", model_dir, *args, tmp_path / "report.v2.json")
    assert [path.name for path in tmp_path.iterdir()] == ["report.v2.md"]
    report.write({"settings": {"text": "t"}}, tmp_path / "report.v2.json")  # of another command
    with pytest.raises(ValueError, match=r"report\.v2\.md, which goes with"):
        run("mmlu", model_dir, *args, tmp_path / "report.v2.json")
    report.write({"settings": {"models": {}}}, tmp_path / "report.v2.json")
    assert report.compares_recipes(tmp_path / "report.v2.json") and not report.compares_recipes(tmp_path / "none")
    assert [report.beside(Path(name), ".md").name for name in ("a.json", "a-1.5b")] == ["a.md", "a-1.5b.md"]


def test_a_recipe_that_is_wrong_stops_before_anything_is_converted(run, mmlu_dir, model_dir, tmp_path):
    args = ["--data", mmlu_dir, "--fewshot", 2, "--work", tmp_path]
    wrong = {
        "bf16": "at least two",
        "a/bf16.yaml,bf16": "different names",
        "a/bf16.yaml,mxfp4": "rename the file",
        "bf16,fp9": "fp9",
        "mxfp4,fp9": "fp9",
    }
    for recipes, says in wrong.items():
        with pytest.raises(ValueError, match=says):
            run("mmlu", model_dir, "--recipes", recipes, *args)
    with pytest.raises(ValueError, match="give one as calibration"):
        run("mmlu", model_dir, "--recipes", "mxfp4,hadamard-mxfp4-gptq", *args)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="baseline: not with --recipes"):
        run("mmlu", model_dir, "--recipes", "bf16,mxfp4", "--baseline", "two", *args)


def test_no_model_is_converted_twice(model_dir, tmp_path, monkeypatch):
    from quantrot.evals import recipes

    first = recipes.converted(str(model_dir), "int8-weight-only", tmp_path)
    monkeypatch.setattr(recipes, "convert", None)
    assert recipes.converted(str(model_dir), "int8-weight-only", tmp_path) == first
    with pytest.raises(TypeError):
        recipes.converted(str(model_dir), "mxfp4", tmp_path)


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_a_model_that_was_written_to_is_converted_again(model_dir, tmp_path, file):
    from quantrot.evals import recipes

    source = shutil.copytree(model_dir, tmp_path / "source")
    first = recipes.converted(str(source), "int8-weight-only", tmp_path)
    os.utime(source / file, ns=(1, 1))
    assert recipes.converted(str(source), "int8-weight-only", tmp_path) != first


def test_a_text_is_for_the_recipes_that_round_by_gptq(run, mmlu_dir, model_dir, tmp_path):
    from quantrot.calibration import Calibration
    from quantrot.evals import recipes
    from quantrot.manifest import MANIFEST

    text = Calibration("".join(map(chr, range(32, 127))) * 8, 4, 32)
    made = [
        recipes.converted(str(model_dir), f"hadamard-mxfp4{name}", tmp_path, calibration=text) for name in ("", "-gptq")
    ]
    assert [json.loads((out / MANIFEST).read_text())["calibration"] for out in made] == [None, text.entry()]
    (tmp_path / "text").write_text(text.text)
    args = ["--data", mmlu_dir, "--fewshot", 2, "--work", tmp_path, "--calibration", tmp_path / "text"]
    with pytest.raises(ValueError, match="calibration: none of mxfp4 has rounding: gptq"):
        run("mmlu", model_dir, "--recipes", "bf16,mxfp4", *args)
    with pytest.raises(ValueError, match="calibration: only with --recipes"):
        run("mmlu", model_dir, *args)


def test_bad_options_are_refused_before_a_model_is_opened(run, tmp_path):
    with pytest.raises(ValueError, match="output: .* is a directory"):
        run("ppl", "one", "--output", tmp_path)
    with pytest.raises(ValueError, match="holds no subject of MMLU"):
        run("mmlu", "missing", "--data", tmp_path)
    with pytest.raises(ValueError, match="batch_size is 'x'"):
        run("mmlu", "missing", "--batch-size", "x")


@pytest.mark.parametrize("gpu", [False, True])
def test_a_kept_result_is_of_one_device_and_of_files_wherever_they_are_named_from(
    run, mmlu_dir, model_dir, tmp_path, monkeypatch, gpu
):
    from quantrot.evals import recipes

    def file(work, recipe, model, how):
        raise RuntimeError(f"{how['device']} {how['data']}")

    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr(recipes, "planned", lambda *given: None)
    monkeypatch.setattr(recipes, "converted", lambda *given: "two")
    monkeypatch.setattr(recipes, "result_file", file)
    monkeypatch.chdir(mmlu_dir.parent)
    with pytest.raises(RuntimeError, match=f"^{'cuda' if gpu else 'cpu'} {mmlu_dir.resolve()}$"):
        run("mmlu", model_dir, "--recipes", "bf16,mxfp4", "--data", mmlu_dir.name, "--work", tmp_path, "--fewshot", 2)


@pytest.mark.parametrize("command", ["mmlu", "compare"])
def test_a_baseline_that_is_not_there_is_said_before_the_model_is_measured(run, monkeypatch, command):
    monkeypatch.setattr("quantrot.cli.eval._open", lambda *args: pytest.fail("a model was opened"))
    with pytest.raises(ValueError, match="model 'nowhere' is no directory; give one"):
        run(command, "one", "--baseline", "nowhere")


def test_the_surface_is_what_is_documented():
    import typer

    commands = typer.main.get_command(app).commands
    surface = {name: sorted(o for p in c.params for o in p.opts if o.startswith("--")) for name, c in commands.items()}
    run = ["--device", "--dtype", "--output"]
    text = ["--seq-len", "--text", "--windows"]
    assert surface == {
        "mmlu": sorted(
            ["--baseline", "--batch-size", "--calibration", "--data", "--fewshot", "--limit", "--recipes", "--seq-len"]
            + ["--windows", "--work", *run]
        ),
        "ppl": sorted([*text, *run]),
        "compare": sorted(["--baseline", *text, *run]),
    }


def test_the_command_line_imports_nothing_heavy():
    code = "import sys, quantrot.cli.eval; print({'torch', 'transformers', 'lm_eval'} & set(sys.modules))"
    root = Path(__file__).parents[2]
    printed = subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True).stdout
    assert printed == "set()\n"


@pytest.mark.parametrize(("asked", "used"), [("auto", "cuda"), ("cuda:1", "cuda:1"), ("cpu", "cpu")])
def test_recipes_are_converted_where_they_are_evaluated(run, mmlu_dir, model_dir, tmp_path, monkeypatch, asked, used):
    from quantrot.evals import recipes

    def convert(*args, device, **options):
        raise RuntimeError(f"on {device}")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(recipes, "convert", convert)
    with pytest.raises(RuntimeError, match=f"^on {used}$"):
        run("mmlu", model_dir, "--recipes", "bf16,mxfp4", "--data", mmlu_dir, "--fewshot", 2, "--device", asked)


def test_an_interrupted_comparison_leaves_no_conversions(mmlu_dir, model_dir, tmp_path, monkeypatch):
    """As a terminated one: every command takes SIGTERM the same way, and a conversion's test sends it."""
    from quantrot.cli import main
    from quantrot.evals import recipes

    def interrupted(*args, **options):
        assert list(tmp_path.glob("quantrot-recipes-*"))
        raise KeyboardInterrupt

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(recipes, "compared", interrupted)
    args = ["eval", "mmlu", model_dir, "--recipes", "bf16,mxfp4", "--data", mmlu_dir, "--fewshot", 2, "--device", "cpu"]
    done = CliRunner().invoke(main.app, list(map(str, args)))
    assert done.exit_code and "after" in done.stderr, done.stderr
    assert not list(tmp_path.glob("quantrot-recipes-*"))


def test_a_table_says_whose_prompts_were_cut():
    from dataclasses import fields, replace

    from quantrot.evals.mmlu import Mmlu, Score
    from quantrot.evals.recipes import Row, markdown

    whole, cut = (
        Mmlu(**{f.name: 0 for f in fields(Mmlu)} | {"overall": Score(57, 0.5, 0.1), "truncated": n}) for n in (0, 114)
    )
    text = markdown("m", [Row("bf16", whole, None), Row("mxfp4", cut, None)], [])
    assert "mxfp4: 114 prompts were cut from the left" in text and "bf16: " not in text and "ended" not in text
    assert replace(cut, truncated=1).cut.startswith("1 prompt was cut from the left: ")


def test_options_of_recipes_alone(run, mmlu_dir, model_dir, tmp_path):
    args = ["--data", mmlu_dir, "--fewshot", 2]
    with pytest.raises(ValueError, match=r"r\.md is where the table or the plot goes; name a \.json file"):
        run("mmlu", model_dir, "--recipes", "bf16,mxfp4", *args, "--output", tmp_path / "r.md")
    with pytest.raises(ValueError, match="work: only with --recipes"):
        run("mmlu", model_dir, *args, "--work", tmp_path)
    with pytest.raises(ValueError, match=r"work: .*config\.json is not a directory"):
        run("mmlu", model_dir, "--recipes", "bf16,mxfp4", *args, "--work", model_dir / "config.json")


def test_what_is_kept_beside_the_questions_is_found_again(tmp_path, model_dir):
    from quantrot.evals.recipes import result_file

    data, work = tmp_path / "data", tmp_path / "data" / "work"
    (work / "mxfp4").mkdir(parents=True)
    (work / "mxfp4" / "config.json").write_text("{}")

    def names():
        return [result_file(work, "mxfp4", str(m), {"data": data}) for m in (model_dir, work / "mxfp4")]

    before = names()
    (work / "bf16.mmlu.json").write_text("{}")
    assert names() == before
    (work / "mxfp4" / "config.json").write_text("{} ")
    assert [a == b for a, b in zip(names(), before, strict=True)] == [True, False]
    (data / "test.csv").write_text("")
    assert names()[0] != before[0]
