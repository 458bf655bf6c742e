"""Render the tables of README.md and docs/, between their markers, and docs/models.svg from benchmarks/results/*.json.

    python benchmarks/render.py [--check]

A marker names the table, `<!-- table: accuracy smollm2-135m -->`, and `<!-- end -->` closes it. --check writes nothing
and fails if a table or the plot is not what the results say.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
PLOT = DOCS / "models.svg"
COLOURS = {"int8-weight-only": "#7a9a3a", "fp8-block": "#4878a8", "hadamard-mxfp4": "#c8553d"}


def accuracy(result: dict[str, Any]) -> list[str]:
    """A recipe a row, best KL first."""
    lines = [
        "| recipe | bits a weight | perplexity | KL (nats a token) | top-1 | seconds to convert |",
        "|---|---|---|---|---|---|",
        f"| the original | 16 | {result['rows'][0]['baseline_ppl']:.2f} | 0 | 1 | |",
    ]
    for row in sorted(result["rows"], key=lambda row: row["kl"]):
        name = row["case"]["recipe"]
        shown = (name if ":" in name else f"`{name}`") + (f" ({row['device']})" if "device" in row else "")
        lines.append(
            f"| {shown} | {row['bits']:.2f} | {row['ppl']:.2f} | {row['kl']:.4f} ± {row['kl_stderr']:.4f} "
            f"| {row['top1']:.3f} | {row['seconds']:.1f} |"
        )
    source = f"{result['windows']} windows of {result['seq_len']} tokens of {result['text']}; {result['device']}"
    return [*lines, "", f"{source}, torch {result['torch']}: `{result['command']}`"]


def recipes(result: dict[str, Any]) -> list[str]:
    """The same of shipped recipes alone, without how long they took."""
    lines = ["| recipe | bits a weight | perplexity | KL (nats a token) | top-1 |", "|---|---|---|---|---|"]
    lines.append(f"| the original | 16 | {result['rows'][0]['baseline_ppl']:.2f} | 0 | 1 |")
    for row in sorted(result["rows"], key=lambda row: row["kl"]):
        if ":" not in row["case"]["recipe"]:
            kl = f"{row['kl']:.4f} ± {row['kl_stderr']:.4f}"
            lines.append(
                f"| `{row['case']['recipe']}` | {row['bits']:.2f} | {row['ppl']:.2f} | {kl} | {row['top1']:.3f} |"
            )
    return lines


def conversion(result: dict[str, Any]) -> list[str]:
    """A tool and shape a row: time, peak memory, the plan's prediction."""
    lines = ["| checkpoint | tool | seconds | CPU seconds | peak MB | predicted MB |", "|---|---|---|---|---|---|"]
    for row in result["rows"]:
        predicted = f"{row['predicted_mb']:.0f}" if "predicted_mb" in row else ""
        lines.append(
            f"| {row['case']['shape']} | {row['case']['tool']} | {row['seconds']:.0f} | {row['cpu_seconds']:.0f} "
            f"| {row['peak_mb']:.0f} | {predicted} |"
        )
    return [*lines, "", f"Whole processes on {result['cores']} cores: `{result['command']}`"]


def fp8_accuracy(result: dict[str, Any]) -> list[str]:
    """A choice of blocks a row, best KL first."""
    lines = [
        "| weights by activations | KL (nats a token) | perplexity | top-1 | KL of a prompt alone to it in a batch |",
        "|---|---|---|---|---|",
        f"| the original | 0 | {result['rows'][0]['baseline_ppl']:.2f} | 1 | |",
    ]
    for row in sorted(result["rows"], key=lambda row: row["kl"]):
        lines.append(
            f"| {row['case']['blocks']} | {row['kl']:.4f} ± {row['kl_stderr']:.4f} | {row['ppl']:.2f} "
            f"| {row['top1']:.3f} | {row['batch_kl']:.4f} |"
        )
    source = f"{result['windows']} windows of {result['seq_len']} tokens of {result['text']}; {result['device']}"
    return [*lines, "", f"{source}, torch {result['torch']}: `{result['command']}`"]


def mixed(result: dict[str, Any]) -> list[str]:
    """The paper's eight variants, then the shapes of Llama 3.1 8B and 70B, tokens down and shapes across."""
    rows = result["rows"]
    lines = ["The eight variants of the paper's shape, m = 3456, n = 4096, k = 2048, and e4m3:", ""]
    lines += [
        "| narrow | wide | narrow operand | us | cuBLAS, equal types | of cuBLAS | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        case = row["case"]
        if case["m"] == 3456:
            lines.append(
                f"| {case['narrow']} | {case['wide']} | {case['narrow_operand']} | {row['us']:.1f} "
                f"| {row['peers_us']['same_type_cublas']:.1f} | {row['of_cublas']:.2f} | {row['error']:.1e} |"
            )
    lines += ["", "Weights by bfloat16 tokens: time, of cuBLAS, and up to 64 tokens the fraction of the floor."]
    weights = [row for row in rows if row["case"]["m"] != 3456]
    kinds = {("packed", 0): "As on disk, one scale a channel", ("packed", 128): "As on disk, groups of 128"}
    for (narrow, group), name in (kinds | {("e4m3", 0): "e4m3, one scale a channel"}).items():
        found = [row for row in weights if (row["case"]["narrow"], row["case"]["group"]) == (narrow, group)]
        cells = {(row["case"]["m"], row["case"]["n"], row["case"]["k"]): _mixed_cell(row) for row in found}
        shapes = sorted({(n, k) for _, n, k in cells})
        lines += ["", f"{name}:", "", "| tokens | " + " | ".join(f"{n} x {k}" for n, k in shapes) + " |"]
        lines.append("|---" * (len(shapes) + 1) + "|")
        for m in sorted({m for m, *_ in cells}):
            lines.append(f"| {m} | " + " | ".join(cells[m, n, k] for n, k in shapes) + " |")
    return [*lines, "", _source(result)]


def _mixed_cell(row: dict[str, Any]) -> str:
    floor = f" ({row['floor_us'] / row['us']:.2f})" if row["case"]["m"] <= 64 else ""
    return f"{row['us']:.1f} us, {row['of_cublas']:.2f}{floor}"


def model(result: dict[str, Any]) -> list[str]:
    """A recipe, phase and size a row, against transformers' bfloat16 model and against that in quantrot's attention."""
    head = ["recipe", "phase", "sequences or tokens", "us", "bfloat16, us", "faster by", "its attention alone"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    attention = {_place(row): row["us"] for row in _of(result, "bf16")}
    for row in result["rows"]:
        wide, us = row["peers_us"]["bf16"], row["us"]
        if row["case"]["recipe"] != "bf16":
            gain = wide / attention[_place(row)]
            lines.append(
                f"| `{row['case']['recipe']}` | {' | '.join(map(str, _place(row)))} | {us:.0f} | {wide:.0f} "
                f"| {wide / us:.2f} | {gain:.2f} |"
            )
    return [*lines, "", _source(result)]


def model_plot(result: dict[str, Any]) -> str:
    """An SVG of the same: a bar a row, the paler part being the attention's alone."""
    bars: dict[tuple[str, int], list[tuple[str, float, float]]] = {}
    attention = {_place(row): row["peers_us"]["bf16"] / row["us"] for row in _of(result, "bf16")}
    for name in COLOURS:
        for row in _of(result, name):
            times = row["peers_us"]["bf16"] / row["us"]
            bars.setdefault(_place(row), []).append((name, times, attention[_place(row)]))
    left, scale, line, y = 150, 200, 22, 34
    parts = []
    for (phase, size), found in sorted(bars.items()):
        what = f"one token, {size} sequence{'s' * (size > 1)}" if phase == "decode" else f"prompt of {size}"
        parts.append(f'<text x="{left - 10}" y="{y + line * len(found) / 2 + 1:.0f}" text-anchor="end">{what}</text>')
        for name, times, alone in found:
            colour = f'fill="{COLOURS[name]}"'
            parts.append(f'<rect x="{left}" y="{y}" width="{times * scale:.0f}" height="{line - 5}" {colour}/>')
            gained = f'x="{left + scale}" y="{y}" width="{(min(alone, times) - 1) * scale:.0f}" height="{line - 5}"'
            parts.append(f'<rect {gained} fill="#fff" opacity="0.45"/>')
            parts.append(f'<text x="{left + times * scale + 6:.0f}" y="{y + 13}">{times:.2f} {name}</text>')
            y += line
        y += 14
    one = f'x1="{left + scale}" y1="26" x2="{left + scale}" y2="{y - 8}"'
    font = 'font-family="sans-serif" font-size="13"'
    title = f"times faster than transformers' bfloat16: Llama 3.1 8B's shapes, compiled, {result['gpu']}"
    note = "paler: what quantrot's attention gives the bfloat16 model, too"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {y + 20}" {font}>',
            f'<rect width="800" height="{y + 20}" fill="white"/>',
            f'<text x="{left}" y="18">{title}</text>',
            *parts,
            f'<line {one} stroke="#333" stroke-dasharray="4 3"/>',
            f'<text x="{left}" y="{y + 8}" fill="#555">{note}</text>',
            "</svg>",
            "",
        ]
    )


def _of(result: dict[str, Any], recipe: str) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if row["case"]["recipe"] == recipe]


def hadamard(result: dict[str, Any]) -> list[str]:
    """2^25 elements: an order a row, fraction of a copy's speed in each dtype."""
    dtypes = ("bfloat16", "float16", "float32")
    found = {
        (row["case"]["n"], row["case"]["dtype"]): row
        for row in result["rows"]
        if row["case"]["elements"] == 1 << 25 and not row["case"]["inplace"]
    }
    lines = ["| n | " + " | ".join(dtypes) + " | fast-hadamard-transform, bfloat16 |", "|---" * 5 + "|"]
    for n in (32, 128, 1024, 4096, 8192, 12288, 14336, 16384, 28672, 32768, 53248):
        rows = [found.get((n, dtype)) for dtype in dtypes]
        cells = [f"{row['peers_us']['copy'] / row['us']:.2f}" if row else "" for row in rows]
        peers = rows[0]["peers_us"] if rows[0] else {}
        package = peers.get("fast_hadamard_transform")
        lines.append(f"| {n} | {' | '.join(cells)} | " + (f"{peers['copy'] / package:.2f} |" if package else "|"))
    return lines


def tokens(result: dict[str, Any]) -> list[str]:
    """A number of tokens a row: bfloat16's microseconds a layer, each format's, and times faster."""
    us = {(row["case"]["format"], row["case"]["m"]): row["us"] for row in result["rows"]}
    first, *others = dict.fromkeys(name for name, _ in us)
    lines = ["| tokens | " + " | ".join([first, *others]) + " |", "|---" * (len(others) + 2) + "|"]
    for m in dict.fromkeys(m for _, m in us):
        wide = us[first, m]
        cells = [f"{us[name, m]:.0f} us, {wide / us[name, m]:.2f}" for name in others]
        lines.append(f"| {m} | {wide:.0f} us | " + " | ".join(cells) + " |")
    return [*lines, "", _source(result)]


def _place(row: dict[str, Any]) -> tuple[str, int]:
    return row["case"]["phase"], row["case"]["size"]


def _source(result: dict[str, Any]) -> str:
    return (
        f"{result['gpu']}, driver {result['driver']}, torch {result['torch']}, triton {result['triton']}, copy "
        f"{result['copy_gbps']:.0f} GB/s: `{result['command']}`, commit {result['commit']}"
    )


def mmlu(result: dict[str, Any]) -> list[str]:
    """A recipe a row: accuracy, and the paired difference to the first."""
    head = ["recipe", "MMLU", "difference", "right only with it", "only without", "McNemar p"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name in result["results"]["recipes"]:
        score, change = result["results"]["mmlu"][name]["overall"], result["results"]["differences"].get(name)
        line = f"| `{name}` | {score['acc']:.4f} ± {score['stderr']:.4f} | "
        if change:
            line += f"{change['difference']:+.4f} ± {change['stderr']:.4f} | {change['only_model']} "
            lines.append(line + f"| {change['only_baseline']} | {change['p_value']:.3f} |")
        else:
            lines.append(line + "| | | |")
    asked = f"{score['n']} questions, {result['settings']['fewshot']}-shot, lm-eval {result['versions']['lm_eval']}"
    return [*lines, "", f"{asked}, {result['device']}, torch {result['versions']['torch']}: `{result['command']}`"]


def attention_error(result: dict[str, Any]) -> list[str]:
    """A shape a row: what each scheme's error is, and what a rotation divides per-tensor e4m3's by."""
    names = list(result["rows"][0]["error"])
    head = ["data", "head_dim", "tokens", "causal", *names, "per tensor / rotated", "/ int8, rotated"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in result["rows"]:
        e = row["error"]
        gains = e["per tensor"] / e["rotated"], e["per tensor"] / e["int8, rotated"]
        cells = [*map(str, row["case"].values()), *(f"{e[n]:.3f}" for n in names), *(f"{g:.2f}" for g in gains)]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, "", f"Means over {result['seeds']} seeds, torch {result['torch']}: `{result['command']}`"]


TABLES: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "accuracy": accuracy,
    "recipes": recipes,
    "convert": conversion,
    "fp8_accuracy": fp8_accuracy,
    "mixed": mixed,
    "model": model,
    "hadamard": hadamard,
    "tokens": tokens,
    "mmlu": mmlu,
    "attention_error": attention_error,
}


def render(text: str) -> str:
    """The text with every marked table made anew."""

    def table(match: re.Match[str]) -> str:
        kind, name = match[1], match[2]
        path = RESULTS / f"bench_{'accuracy' if kind == 'recipes' else kind}-{name}.json"
        if not path.exists():  # not measured yet: the page says so
            return match[0]
        result = json.loads(path.read_text())
        return "\n".join([f"<!-- table: {kind} {name} -->", *TABLES[kind](result), "<!-- end -->"])

    pattern = r"<!-- table: (" + "|".join(TABLES) + r") ([\w.-]+) -->\n.*?<!-- end -->"
    return re.sub(pattern, table, text, flags=re.DOTALL)


def main() -> None:
    stale = []
    made = {path: render(path.read_text()) for path in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]}
    made[PLOT] = model_plot(json.loads((RESULTS / "bench_model-h200.json").read_text()))
    for path, new in made.items():
        if not path.exists() or path.read_text() != new:
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(new)
    print(f"{', '.join(stale) or 'nothing'} {'stale' if '--check' in sys.argv else 'rewritten'}")
    if stale and "--check" in sys.argv:
        sys.exit(1)


if __name__ == "__main__":
    main()
