"""The pictures of docs/, as SVG: a function a picture, from a results file's contents to text."""

import math
from collections.abc import Callable
from typing import Any

from tables import place

GREEN, BLUE, RED = "#7a9a3a", "#4878a8", "#c8553d"
MODELS = {"int8-weight-only": GREEN, "fp8-block": BLUE, "hadamard-mxfp4": RED}
FORMATS = {"int8": GREEN, "fp8": BLUE, "mxfp4": RED}
RUNS = {"bfloat16": BLUE, "mxfp4": RED}


def models(result: dict[str, Any]) -> str:
    """How many times faster than bfloat16 whole models are: a bar a row, paler what the attention alone gives."""
    bars: dict[tuple[str, int], list[tuple[str, float, float]]] = {}
    times = {(row["case"]["recipe"], *place(row)): row["peers_us"]["bf16"] / row["us"] for row in result["rows"]}
    for name in MODELS:
        for recipe, *at in times:
            if recipe == name:
                bars.setdefault((at[0], at[1]), []).append((name, times[recipe, *at], times["bf16", *at]))
    left, scale, line, y = 150, 200, 22, 34
    parts = []
    for (phase, size), found in sorted(bars.items()):
        what = f"one token, {size} sequence{'s' * (size > 1)}" if phase == "decode" else f"prompt of {size}"
        parts.append(f'<text x="{left - 10}" y="{y + line * len(found) / 2 + 1:.0f}" text-anchor="end">{what}</text>')
        for name, gain, alone in found:
            colour = f'fill="{MODELS[name]}"'
            parts.append(f'<rect x="{left}" y="{y}" width="{gain * scale:.0f}" height="{line - 5}" {colour}/>')
            gained = f'x="{left + scale}" y="{y}" width="{(min(alone, gain) - 1) * scale:.0f}" height="{line - 5}"'
            parts.append(f'<rect {gained} fill="#fff" opacity="0.45"/>')
            parts.append(f'<text x="{left + gain * scale + 6:.0f}" y="{y + 13}">{gain:.2f} {name}</text>')
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


def _smooth(values: list[float], width: int = 10) -> list[tuple[float, float]]:
    """(step, mean of the `width` losses that end there)."""
    return [(i, sum(values[i + 1 - width : i + 1]) / width) for i in range(width - 1, len(values))]


def finetune(result: dict[str, Any]) -> str:
    """Training losses (thin, means of ten steps) and validation losses (thick, dots)."""
    width, height, left, bottom, top = 760, 400, 60, 50, 30
    curves = [(run["kind"], _smooth(run["loss"]), run["validation"]) for run in result["runs"]]
    values = [y for _, thin, thick in curves for _, y in [*thin, *thick]]
    low, high = math.floor(min(values) * 10) / 10, math.ceil(max(values) * 10) / 10

    def point(x: float, y: float) -> str:
        across = left + x / result["steps"] * (width - left - 20)
        return f"{across:.1f},{height - bottom - (y - low) / (high - low) * (height - bottom - top):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for i in range(6):
        y = low + (high - low) * i / 5
        start, end = point(0, y), point(result["steps"], y)
        (x1, y1), (x2, y2) = start.split(","), end.split(",")
        parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{float(y1) + 4:.1f}" text-anchor="end">{y:.2f}</text>')
        step = result["steps"] * i // 5
        parts.append(
            f'<text x="{point(step, low).split(",")[0]}" y="{height - bottom + 18}" text-anchor="middle">{step}</text>'
        )
    for i, (kind, thin, thick) in enumerate(curves):
        line = " ".join(point(x, y) for x, y in thin)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{RUNS[kind]}" opacity="0.45"/>')
        line = " ".join(point(x, y) for x, y in thick)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{RUNS[kind]}" stroke-width="2.5"/>')
        for x, y in thick:
            cx, cy = point(x, y).split(",")
            parts.append(f'<circle cx="{cx}" cy="{cy}" r="3.5" fill="{RUNS[kind]}"/>')
        label = f"{kind}: validation {thick[0][1]:.3f} at step 0, {thick[-1][1]:.3f} at step {thick[-1][0]}"
        parts.append(
            f'<text x="{width - 30}" y="{top + 16 + 18 * i}" text-anchor="end" fill="{RUNS[kind]}">{label}</text>'
        )
    parts.append(
        f'<text x="{(width + left) / 2}" y="{height - 10}" text-anchor="middle">step ({result["batch"]} x '
        f"{result['seq_len']} tokens); thick: validation loss, thin: training loss, mean of ten steps</text>"
    )
    return "\n".join([*parts, "</svg>", ""])


def tokens(result: dict[str, Any]) -> str:
    """How many times faster than bfloat16 each format's layer is, tokens on a scale of powers of two."""
    rows = result["rows"]
    width, height, left, bottom, top = 760, 380, 50, 50, 20
    most = max(row["case"]["m"] for row in rows)
    high = math.ceil(max(row["peers_us"]["bf16"] / row["us"] for row in rows) * 2) / 2

    def point(m: int, times: float) -> tuple[float, float]:
        across = left + math.log2(m) / math.log2(most) * (width - left - 20)
        return round(across, 1), round(height - bottom - times / high * (height - bottom - top), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for i in range(int(high * 2) + 1):
        (x1, y), (x2, _) = point(1, i / 2), point(most, i / 2)
        parts.append(f'<line x1="{x1}" y1="{y}" x2="{x2}" y2="{y}" stroke="{"#888" if i == 2 else "#ddd"}"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{i / 2:.1f}</text>')
    for i in range(int(math.log2(most)) + 1):
        parts.append(f'<text x="{point(1 << i, 0)[0]}" y="{height - bottom + 18}" text-anchor="middle">{1 << i}</text>')
    for i, (name, colour) in enumerate(FORMATS.items()):
        points = [point(r["case"]["m"], r["peers_us"]["bf16"] / r["us"]) for r in rows if r["case"]["format"] == name]
        line = " ".join(f"{x},{y}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in points]
        parts.append(f'<text x="{width - 30}" y="{top + 16 + 18 * i}" text-anchor="end" fill="{colour}">{name}</text>')
    parts.append(
        f'<text x="{(width + left) / 2}" y="{height - 10}" text-anchor="middle">tokens; a decoder layer\'s products of '
        "Llama 3.1 8B, times faster than bfloat16</text>"
    )
    return "\n".join([*parts, "</svg>", ""])


PLOTS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {  # in docs/: of which results, by what
    "models.svg": ("bench_model-h200", models),
    "tokens.svg": ("bench_tokens-h200", tokens),
    "finetune_mxfp4.svg": ("finetune_mxfp4-smollm2-135m", finetune),
}
