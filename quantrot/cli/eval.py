"""quantrot eval: MMLU, perplexity, and divergence from a baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantrot.cli import common
from quantrot.cli.common import count_progress, note, table
from quantrot.process import counted
from quantrot.source import open_source

if TYPE_CHECKING:
    from quantrot.calibration import Calibration
    from quantrot.evals.mmlu import Mmlu, Score
    from quantrot.evals.statistics import Paired

app = typer.Typer(help="Measure a model: MMLU, perplexity, divergence from a baseline.", no_args_is_help=True)

Model = Annotated[str, typer.Argument(help="A converted directory, any local or hub model, or demo.", metavar="MODEL")]
Text = Annotated[Path | None, typer.Option("--text", help="UTF-8 file; without it WikiText-2, or Python's own topics.")]
Device = Annotated[
    str, typer.Option(help="cpu, cuda, cuda:N, or auto: a GPU, of a model that it has no room for all, then the CPU.")
]
Dtype = Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16, float16.")]
Output = Annotated[Path | None, typer.Option("--output", help="Write the whole result to this JSON file.")]


@app.command(cls=common.Command)
def mmlu(
    model: Model,
    fewshot: Annotated[int, typer.Option(help="Examples before each question, 0 to 5.")] = 5,
    limit: Annotated[int | None, typer.Option(help="Only the first N questions of each subject.")] = None,
    batch_size: Annotated[str, typer.Option(help="A number, or auto: 1 on a CPU, what fits on a GPU.")] = "auto",
    data: Annotated[Path | None, typer.Option(help="Local parquet or CSV files, read without a network.")] = None,
    baseline: Annotated[str | None, typer.Option(help="Compare with this model, question by question.")] = None,
    recipes: Annotated[
        str | None,
        typer.Option(
            help="Convert MODEL by each of these and compare them: bf16,fp8-attention,... ; --output then has a table "
            "(.md) and a plot (.svg) beside it."
        ),
    ] = None,
    work: Annotated[
        Path | None, typer.Option(help="Where conversions and results of --recipes are kept for the next run.")
    ] = None,
    texts: common.Texts = None,
    windows: common.Windows = None,
    seq_len: common.SeqLen = None,
    output: Output = None,
    device: Annotated[
        str,
        typer.Option(help="As for ppl; of several, cuda:0,cuda:1, each has the model and a share of the questions."),
    ] = "auto",
    dtype: Dtype = "auto",
) -> None:
    """MMLU by lm-eval's own task: 57 subjects, accuracy and standard errors."""
    from quantrot.device import known_device
    from quantrot.evals import harness, report
    from quantrot.evals import mmlu as evals

    report.check_output(output)
    evals.check_options(fewshot, limit, batch_size)
    _check_mmlu(recipes, baseline, output, texts, work)
    if data is not None or recipes is not None:  # whose conversions may take hours
        evals.check_data(data, fewshot)
    calibration = common.calibration(texts, windows, seq_len)
    settings = {"data": str(data) if data else "hub", "fewshot": fewshot, "limit": limit}
    tokens: harness.Tokens | None = None if recipes is None and baseline is None else {}

    devices = [known_device(each.strip()) for each in device.split(",")]
    asked: dict[str, Any] = {"fewshot": fewshot, "limit": limit, "batch_size": batch_size, "data": data}

    def run(name: str) -> tuple[Mmlu, dict[str, Any]]:
        if len(devices) > 1:
            from quantrot.evals.spread import mmlu_on

            with _progress("MMLU") as progress:
                return mmlu_on(name, devices, dtype=dtype, progress=progress, **asked)
        loaded, tokenizer = _open(name, device, dtype)
        with _progress("MMLU") as progress:
            result = evals.mmlu(loaded, tokenizer, progress=progress, tokens=tokens, **asked)
        return result, report.model_entry(name, loaded)

    if baseline is not None:
        open_source(baseline)  # what is not there is said before the first model's hours
    if recipes is not None:
        how = {**settings, "data": data and data.resolve(), "batch": batch_size, "device": devices[0], "dtype": dtype}
        names = [name.strip() for name in recipes.split(",")]
        return _recipes(model, names, calibration, work, output, settings, how, run)
    result, entry = run(model)
    against = against_entry = difference = None
    failed: BaseException | None = None
    if baseline is not None:
        try:
            against, against_entry = run(baseline)  # the first model is freed by now
            difference = evals.compare(result, against)
        except (Exception, KeyboardInterrupt) as error:  # the first one's hours are not lost
            failed = error
    results = {"mmlu": result, "baseline": against, "difference": difference}
    with _then_written(output, "mmlu", entry, settings | {"seed": result.seed}, results, against_entry):
        _print_mmlu(model, result, against, difference)
        for name, seen in {model: result, baseline: against}.items():
            if seen is not None and seen.truncated:
                note(f"{name}: {seen.cut}")
    if failed is not None:
        raise failed


def _check_mmlu(
    recipes: str | None, baseline: str | None, output: Path | None, texts: list[Path] | None, work: Path | None
) -> None:
    """ValueError for options that do not go together, or a table or plot that would take another file's place."""
    from quantrot.evals import report

    if recipes is None and texts:
        raise ValueError("calibration: only with --recipes, which converts; an evaluation needs no such text")
    if recipes is None and work is not None:
        raise ValueError("work: only with --recipes, whose conversions it keeps; leave it out")
    if work is not None and work.exists() and not work.is_dir():
        raise ValueError(f"work: {work} is not a directory; name one, or what is to become one")
    if recipes is not None and baseline is not None:
        raise ValueError("baseline: not with --recipes, whose first entry is what the others are compared with")
    if recipes is not None and output is not None and output.suffix in (".md", ".svg"):
        raise ValueError(f"output: {output} is where the table or the plot goes; name a .json file")
    if recipes is not None and output is not None and not report.compares_recipes(output):
        for taken in (report.beside(output, suffix) for suffix in (".md", ".svg")):
            if taken.exists():
                raise ValueError(f"output: {taken}, which goes with {output}, is there; move it, or name another")


def _recipes(
    model: str,
    names: list[str],
    calibration: Calibration | None,
    work: Path | None,
    output: Path | None,
    settings: dict[str, Any],
    how: dict[str, Any],
    run: Callable[[str], tuple[Mmlu, dict[str, Any]]],
) -> None:
    """The table of several recipes of one model; --output writes it as JSON, and .md and .svg beside that.

    settings: what the report says was asked; how: all that a kept result depends on. Conversions run on the device
    that the evaluations run on.
    """
    import tempfile

    from quantrot.evals import recipes as table
    from quantrot.recipe import load_recipe

    table.check_names(names)
    others = [name for name in names if name != table.ORIGINAL]
    if calibration is not None and not any(load_recipe(name).calibrated for name in others):
        raise ValueError(f"calibration: none of {', '.join(others)} has rounding: gptq; leave the text out")
    on = how["device"]
    with tempfile.TemporaryDirectory(prefix="quantrot-recipes-") as temporary:
        place = work or Path(temporary)
        for name in others:  # all recipes' errors before the first conversion, which may take hours, as evaluations do
            table.planned(model, name, on, calibration)
        where = {table.ORIGINAL: model}
        for name in others:
            with common.byte_progress() as progress:
                where[name] = str(table.converted(model, name, place, on, calibration, progress))
        entries: dict[str, Any] = {}

        def evaluate(name: str) -> Mmlu:
            file = table.result_file(place, name, where[name], how)
            if file.exists():
                note(f"{name}: {where[name]}, as in {file}")
                result, entries[table.label(name)] = table.kept_result(file)
                return result
            note(f"{name}: {where[name]}")
            result, entry = run(where[name])
            entries[table.label(name)] = entry
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                table.keep_result(file, result, entry)
            except OSError as error:  # the table needs no file: what follows need not be lost, too
                note(f"{name}: its result is not kept for another run: {error}")
            return result

        rows: list[Any] = []
        failed: BaseException | None = None
        try:
            for row in table.compared(names, evaluate):
                rows.append(row)
        except (Exception, KeyboardInterrupt) as error:  # what is done is not lost, with or without --work
            if not rows:
                raise
            failed = error
    settings["models"] = entries
    left = [table.label(name) for name in names[len(rows) :]]
    beside = {".md": lambda: table.markdown(model, rows, left), ".svg": lambda: table.svg(model, rows)}
    with _then_written(output, "mmlu", entries[rows[0].recipe], settings, table.summary(rows, left), beside=beside):
        common.table(
            f"MMLU, {rows[0].mmlu.fewshot}-shot, {rows[0].mmlu.overall.n} questions, {model}",
            table.COLUMNS,
            table.cells(rows),
        )
        for row in rows:
            if row.mmlu.truncated:
                note(f"{row.recipe}: {row.mmlu.cut}")
        if left:
            note(table.unmeasured(left))
    if failed is not None:
        raise failed


@app.command(cls=common.Command)
def ppl(
    model: Model,
    text: Text = None,
    seq_len: Annotated[int, typer.Option(help="Tokens in a window.")] = 2048,
    windows: Annotated[int | None, typer.Option(help="At most N windows; all by default.")] = None,
    output: Output = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Perplexity on non-overlapping windows of a text (GPTQ's protocol)."""
    from quantrot.evals import report
    from quantrot.evals.perplexity import perplexity

    report.check_output(output)
    content, origin = _text(text)
    loaded, tokenizer = _open(model, device, dtype)
    entry = report.model_entry(model, loaded)
    ids = _windows(loaded, tokenizer, content, seq_len, windows)
    with _progress("perplexity") as progress:
        result = perplexity(loaded, ids, progress)
    settings = {"text": origin, "seq_len": seq_len, "windows": windows, "seed": None}
    rows = [
        ["perplexity", report.number(result.ppl), report.number(result.ppl_stderr)],
        ["nats per token", report.number(result.nll, 5), report.number(result.nll_stderr, 5)],
    ]
    with _then_written(output, "ppl", entry, settings, {"ppl": result}):
        table(f"{model}, {_extent(result)}", ["", "value", "± stderr"], rows)
        _note_nan(result.ppl)


@app.command(cls=common.Command)
def compare(
    model: Model,
    baseline: Annotated[str, typer.Option(help="The model to compare with, usually the unconverted one.")],
    text: Text = None,
    seq_len: Annotated[int, typer.Option(help="Tokens in a window.")] = 1024,
    windows: Annotated[int, typer.Option(help="At most N windows.")] = 24,
    output: Output = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Mean KL, top-1 agreement and perplexity ratio against a baseline, on the same tokens."""
    from quantrot.evals import report
    from quantrot.evals.divergence import divergence

    report.check_output(output)
    open_source(baseline)
    content, origin = _text(text)
    loaded, tokenizer = _open(model, device, dtype)
    reference, _ = _open(baseline, device, dtype)
    entries = report.model_entry(model, loaded), report.model_entry(baseline, reference)
    ids = _windows(loaded, tokenizer, content, seq_len, windows)
    with _progress("divergence") as progress:
        result = divergence(loaded, reference, ids, progress)
    settings = {"text": origin, "seq_len": seq_len, "windows": windows, "seed": None}
    rows = [
        ["mean KL(baseline || model), nats per token", report.number(result.kl, 5), report.number(result.kl_stderr, 5)],
        ["top-1 agreement", report.number(result.top1), report.number(result.top1_stderr)],
        ["perplexity ratio", report.number(result.ppl_ratio), report.number(result.ppl_ratio_stderr)],
        ["perplexity", report.number(result.ppl), "-"],
        ["perplexity of the baseline", report.number(result.baseline_ppl), "-"],
        ["max logit error / max logit", report.number(result.max_logit_error), "-"],
    ]
    with _then_written(output, "compare", entries[0], settings, {"divergence": result}, entries[1]):
        table(f"{model} against {baseline}, {_extent(result)}", ["", "value", "± stderr"], rows)
        _note_nan(result.ppl, result.baseline_ppl)


def _note_nan(*perplexities: float) -> None:
    if any(map(math.isnan, perplexities)):
        note("nan: a model computes NaN or infinity; give --dtype bfloat16 or float32, or repair its checkpoint")


@contextmanager
def _then_written(
    output: Path | None, *content: Any, beside: dict[str, Callable[[], str]] | None = None
) -> Iterator[None]:
    """Write a report of this content, and what makes texts beside it by their endings, behind what is printed: a disk
    that is full must not cost the table, nor a reader who leaves the table (`| head`) the report."""
    from quantrot.evals import report

    try:
        yield
    finally:
        if output:
            report.write(report.report(*content), output)
            for ending, made in (beside or {}).items():
                report.write_text(made(), report.beside(output, ending))


def _open(name: str, device: str, dtype: str) -> tuple[Any, Any]:
    from quantrot.device import devices_of
    from quantrot.load import open_model

    model, tokenizer = open_model(name, device=device, dtype=dtype)
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        note(f"{name}: no room on one GPU; it is on {devices_of(model)}")
    return model, tokenizer


def _text(path: Path | None) -> tuple[str, str]:
    from quantrot.evals.text import evaluation_text

    content, origin = evaluation_text(path)
    note(f"text: {origin}")
    return content, origin


def _windows(model: Any, tokenizer: Any, text: str, seq_len: int, limit: int | None) -> Any:
    from quantrot.evals.logits import text_config
    from quantrot.tokenizer import windows

    known = (getattr(text_config(model), name, None) for name in ("max_position_embeddings", "vocab_size"))
    return windows(tokenizer, text, seq_len, limit, *known)


def _extent(result: Any) -> str:
    return f"{counted(result.windows, 'window')} of {result.seq_len} tokens"


def _print_mmlu(name: str, result: Mmlu, against: Mmlu | None, difference: Paired | None) -> None:
    from quantrot.evals.report import number

    baseline = dict(_mmlu_scores(against)) if against else {}
    rows = []
    for label, score in _mmlu_scores(result):
        row = [label, str(score.n), number(score.acc), number(score.stderr)]
        if baseline:
            row += [number(baseline[label].acc), f"{score.acc - baseline[label].acc:+.4f}"]
        rows.append(row)
    columns = ["", "n", "acc", "± stderr", *(["baseline", "difference"] if against else [])]
    table(f"MMLU, {result.fewshot}-shot, {name}", columns, rows)
    if difference:
        row = ["overall", f"{difference.difference:+.4f}", number(difference.stderr), str(difference.only_model)]
        row += [str(difference.only_baseline), number(difference.p_value)]
        columns = ["", "difference", "± stderr", "only model", "only baseline", "McNemar p"]
        table("The same questions, model minus baseline", columns, [row])


def _mmlu_scores(result: Mmlu) -> Iterator[tuple[str, Score]]:
    """The table's lines: the whole, then each group before its subjects."""
    yield "overall", result.overall
    for group, subjects in result.members.items():
        yield f"  {group}", result.groups[group]
        for subject in subjects:
            yield f"    {subject}", result.subjects[subject]


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr that counts; yields the function that moves it to (done, total)."""
    with count_progress() as show:
        yield lambda done, total: show(what, done, total)
