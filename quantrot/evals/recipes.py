"""Several recipes of one model on the same questions: HadaCore's table, with what a difference is worth.

Source of the table's shape: HadaCore, arXiv:2412.08832, table 3 (MMLU of FP16, FP8 attention, and FP8 attention after a
Hadamard). Added here: the paired difference to the first recipe and McNemar's exact p.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantrot.calibration import Calibration
from quantrot.checkpoint import read_json
from quantrot.convert import begun, convert
from quantrot.evals.mmlu import Mmlu, Score, compare
from quantrot.evals.report import number, versions, write
from quantrot.evals.statistics import Paired
from quantrot.manifest import read_manifest
from quantrot.plan import Plan, plan
from quantrot.process import Progress
from quantrot.recipe import load_recipe
from quantrot.source import open_source

ORIGINAL = "bf16"  # what the unconverted model is called among recipes


@dataclass(frozen=True)
class Row:
    """A recipe's result; difference: to the first one's, None for that one."""

    recipe: str
    mmlu: Mmlu
    difference: Paired | None


def label(recipe: str) -> str:
    """What the table calls a recipe: a file goes by its name alone."""
    return Path(recipe).stem


def check_names(names: list[str]) -> None:
    """Raise ValueError where the list of recipes cannot be compared."""
    if len(names) < 2 or len({label(name) for name in names}) != len(names) or not all(names):
        raise ValueError(
            f"recipes is {','.join(names)!r}; give at least two of different names, {ORIGINAL} for the original"
        )
    for name in names:
        if label(name) == ORIGINAL != name:
            raise ValueError(f"recipes: {name} would be called {ORIGINAL}, as the original is; rename the file")


def planned(model: str, recipe: str, device: str = "cpu", calibration: Calibration | None = None) -> Plan:
    """The plan of `converted`; ValueError where there can be none."""
    return plan(model, recipe, device, calibration=calibration if load_recipe(recipe).calibrated else None)


def converted(
    model: str,
    recipe: str,
    work: Path,
    device: str = "cpu",
    calibration: Calibration | None = None,
    progress: Progress | None = None,
) -> Path:
    """The directory of a model by a recipe, under `work`: what an earlier run left there, or converted now.

    calibration: for what the recipe rounds by GPTQ, if anything. A model whose files were written to since is converted
    again: its headers, which the plan's fingerprint is of, may be as they were.
    """
    made = planned(model, recipe, device, calibration)
    sources = sorted({*(info.file for info in made.checkpoint.tensors.values()), *made.copied})
    depends = json.dumps([made.fingerprint(), _stamps(sources, made.source.path)])
    name = re.sub(r"[^\w.-]", "-", made.recipe.name)
    out = work / f"{name}-{hashlib.sha256(depends.encode()).hexdigest()[:12]}"
    if out.is_dir():
        read_manifest(out)
        return out
    work.mkdir(parents=True, exist_ok=True)
    text = calibration if made.recipe.calibrated else None
    return convert(model, recipe, out, device=device, calibration=text, resume=begun(out), progress=progress).out


def _stamps(files: Iterable[Path], root: Path) -> list[tuple[str, int, int]]:
    """Each file's name, size and time: what shows, without reading it, that it was written to."""
    stats = [(str(file.relative_to(root)), file.stat()) for file in files]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def result_file(work: Path, recipe: str, model: str, settings: dict[str, Any]) -> Path:
    """Where the result of this model is kept: a name for what it depends on, so that any change asks anew.

    settings: what was asked; of `data`, a directory, and of the model's, each file's name, size and time count, but for
    those under `work`, which the run itself writes.
    """
    places = [open_source(model).path, *([Path(settings["data"])] if settings["data"] else [])]
    kept, files = work.resolve(), []
    for place in places:
        inside = place.resolve().is_relative_to(kept)  # a conversion, whose files count
        found = (f for f in sorted(place.rglob("*")) if f.is_file() and (inside or kept not in f.absolute().parents))
        files += _stamps(found, place)
    depends = json.dumps([files, settings, versions()], sort_keys=True, default=str)
    stem = re.sub(r"[^\w.-]", "-", label(recipe))
    return work / f"{stem}-{hashlib.sha256(depends.encode()).hexdigest()[:12]}.mmlu.json"


def keep_result(file: Path, result: Mmlu, entry: dict[str, Any]) -> None:
    """Write a recipe's result as soon as it is there: a run that is stopped loses one recipe, not all."""
    write({"mmlu": asdict(result), "model": entry}, file)


def kept_result(file: Path) -> tuple[Mmlu, dict[str, Any]]:
    """What `keep_result` wrote."""
    content = read_json(file)
    mmlu = content["mmlu"]
    scores = {key: {name: Score(**score) for name, score in mmlu[key].items()} for key in ("groups", "subjects")}
    return Mmlu(**mmlu | scores | {"overall": Score(**mmlu["overall"])}), content["model"]


def compared(names: list[str], run: Callable[[str], Mmlu]) -> Iterator[Row]:
    """Run each recipe and compare it with the first. ValueError where they did not see the same questions."""
    first: Mmlu | None = None
    for name in names:
        result = run(name)
        yield Row(label(name), result, compare(result, first) if first else None)
        first = first or result


COLUMNS = ["recipe", "accuracy", "± stderr", "difference", "± stderr", "only it", "only the first", "McNemar p"]


def cells(rows: list[Row]) -> list[list[str]]:
    """The table's cells, under COLUMNS."""
    found = []
    for row in rows:
        d, overall = row.difference, row.mmlu.overall
        line = [row.recipe, number(overall.acc), number(overall.stderr)]
        if d is None:
            line += ["-"] * 5
        else:
            line += [f"{d.difference:+.4f}", number(d.stderr), str(d.only_model), str(d.only_baseline)]
            line += [number(d.p_value)]
        found.append(line)
    return found


def unmeasured(left: list[str]) -> str:
    """What a table says of recipes that a run that was stopped or failed did not come to."""
    return f"The run ended before it had measured {', '.join(left)}."


def markdown(model: str, rows: list[Row], left: list[str]) -> str:
    """The table with a line that says what was asked; left: recipes that it lacks."""
    first = rows[0].mmlu
    asked = f"MMLU of {model}: {first.overall.n} questions, {first.fewshot}-shot, lm-eval {first.lm_eval}."
    note = f"Differences are to {rows[0].recipe}, on the same questions."
    lines = ["| " + " | ".join(line) + " |" for line in (COLUMNS, ["---"] * len(COLUMNS), *cells(rows))]
    cut = [f"{row.recipe}: {row.mmlu.cut}." for row in rows if row.mmlu.truncated]
    lacks = [unmeasured(left)] if left else []
    return "\n".join([asked, "", *lines, "", note, *cut, *lacks, ""])


LEFT, WIDTH, LINE = 220, 640, 34  # pixels: labels, the axis' end, a row's height


def svg(model: str, rows: list[Row]) -> str:
    """A dot a recipe at its difference to the first, with a paired standard error to each side, and a line at zero.

    The accuracies stand above the dots: their own standard errors are larger and hide what the same questions tell.
    """
    points = [(d.difference, d.stderr or 0.0) if (d := row.difference) else (0.0, 0.0) for row in rows]
    reach = 1.1 * max(abs(d) + e for d, e in points) or 0.01
    middle, half = (LEFT + WIDTH - 20) / 2, (WIDTH - 20 - LEFT) / 2

    def x(value: float) -> str:
        return f"{middle + value / reach * half:.1f}"

    height = 60 + LINE * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="20">MMLU of {_escaped(model)}: accuracy, and its difference to {_escaped(rows[0].recipe)} '
        "± one standard error</text>",
        f'<path d="M{x(0)} 30V{height - 25}" stroke="#bbb"/>',
    ]
    for i, (row, (difference, error)) in enumerate(zip(rows, points, strict=True)):
        y, accuracy = 50 + LINE * i, f"{row.mmlu.overall.acc:.4f}"
        parts += [
            f'<text x="{LEFT - 10}" y="{y + 4}" text-anchor="end">{_escaped(row.recipe)}</text>',
            f'<path d="M{x(difference - error)} {y}H{x(difference + error)}" stroke="#36c" stroke-width="2"/>',
            f'<circle cx="{x(difference)}" cy="{y}" r="4" fill="#36c"/>',
            f'<text x="{x(difference)}" y="{y - 8}" text-anchor="middle" font-size="11">{accuracy}</text>',
        ]
    for value in (-reach, 0.0, reach):
        parts.append(f'<text x="{x(value)}" y="{height - 8}" text-anchor="middle" fill="#666">{value:+.4f}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def summary(rows: list[Row], left: list[str]) -> dict[str, Any]:
    """What the JSON report holds: the results and differences by recipe, in order; left: recipes that it lacks."""
    return {
        "recipes": [row.recipe for row in rows],
        "unmeasured": left,
        "mmlu": {row.recipe: row.mmlu for row in rows},
        "differences": {row.recipe: row.difference for row in rows if row.difference is not None},
    }
