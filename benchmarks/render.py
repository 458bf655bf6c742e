"""Render the tables of README.md and docs/ from benchmarks/results/*.json, in place, between their markers.

    python benchmarks/render.py [--check]

A marker names the table, `<!-- table: accuracy smollm2-135m -->`, and `<!-- end -->` closes it. --check writes nothing
and fails if a table is not what the results say.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


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
    """The paper's eight variants, then the shapes of Llama-3.1-8B and 70B, tokens down and shapes across."""
    rows = result["rows"]

    lines = [
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
    packed = [row for row in rows if row["case"]["narrow"] == "packed"]
    shapes = sorted({(row["case"]["n"], row["case"]["k"]) for row in packed})
    for group, name in ((0, "one scale a channel"), (128, "groups of 128")):
        lines += ["", f"The on-disk weight against bfloat16 cuBLAS, {name}; the fraction of the floor in brackets:", ""]
        lines += ["| tokens | " + " | ".join(f"{n} x {k}" for n, k in shapes) + " |", "|---" * (len(shapes) + 1) + "|"]
        cells = {(r["case"]["m"], r["case"]["n"], r["case"]["k"]): r for r in packed if r["case"]["group"] == group}
        for m in sorted({m for m, _, _ in cells}):
            found = [cells[m, n, k] for n, k in shapes]
            shown = (f"{row['of_cublas']:.2f} ({row['floor_us'] / row['us']:.2f})" for row in found)
            lines.append(f"| {m} | " + " | ".join(shown) + " |")
    return [*lines, "", _source(result)]


def model(result: dict[str, Any]) -> list[str]:
    """A recipe, phase and size a row, against transformers' bfloat16 model and against that in quantrot's attention."""
    head = ["recipe", "phase", "sequences or tokens", "us", "bfloat16, us", "faster by", "its attention alone"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    attention = {_place(row): row["us"] for row in result["rows"] if row["case"]["recipe"] == "bf16"}
    for row in result["rows"]:
        wide, us = row["peers_us"]["bf16"], row["us"]
        if row["case"]["recipe"] != "bf16":
            gain = wide / attention[_place(row)]
            lines.append(
                f"| `{row['case']['recipe']}` | {' | '.join(map(str, _place(row)))} | {us:.0f} | {wide:.0f} "
                f"| {wide / us:.2f} | {gain:.2f} |"
            )
    return [*lines, "", _source(result)]


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
    "convert": conversion,
    "fp8_accuracy": fp8_accuracy,
    "mixed": mixed,
    "model": model,
    "tokens": tokens,
    "mmlu": mmlu,
    "attention_error": attention_error,
}


def render(text: str) -> str:
    """The text with every marked table made anew."""

    def table(match: re.Match[str]) -> str:
        kind, name = match[1], match[2]
        path = RESULTS / f"bench_{kind}-{name}.json"
        if not path.exists():  # not measured yet: the page says so
            return match[0]
        result = json.loads(path.read_text())
        return "\n".join([f"<!-- table: {kind} {name} -->", *TABLES[kind](result), "<!-- end -->"])

    pattern = r"<!-- table: (" + "|".join(TABLES) + r") ([\w.-]+) -->\n.*?<!-- end -->"
    return re.sub(pattern, table, text, flags=re.DOTALL)


def main() -> None:
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        old = path.read_text()
        new = render(old)
        if new != old:
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(new)
    print(f"{', '.join(stale) or 'nothing'} {'stale' if '--check' in sys.argv else 'rewritten'}")
    if stale and "--check" in sys.argv:
        sys.exit(1)


if __name__ == "__main__":
    main()
