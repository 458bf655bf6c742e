"""The model card (README.md) that every output carries: what it is, which engine runs it how, and what it cost."""

import re
import shlex
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import yaml

from quantrot import engines, formats, llama
from quantrot.calibration import Calibration
from quantrot.plan import Plan
from quantrot.recipe import ONLINE
from quantrot.version import __version__

CARD = "README.md"


def model_card(plan: Plan, manifest: dict[str, Any]) -> str:
    """The card's text. The licence is the source card's own."""
    front: dict[str, Any] = {}
    if plan.source.is_public:  # the hub refuses a card whose base_model is a path
        front |= {"base_model": plan.source.base_model, "base_model_relation": "quantized"}
    front |= {"library_name": "transformers", "pipeline_tag": "text-generation", **_inherited(plan.source.path)}
    front |= {"tags": ["quantrot", *_tags(plan)]}
    title = Path(plan.source.base_model).name
    narrow = (plan.recipe.attention, plan.recipe.kv_cache) != ("bf16", "bf16")
    rows = engines.support(plan.linears, plan.online, plan.attention, plan.checkpoint.biased, narrow)
    return "\n".join(
        [
            "---",
            yaml.safe_dump(front, sort_keys=False).rstrip(),
            "---",
            "",
            f"# {title}, {plan.recipe.name}",
            "",
            plan.recipe.description or "Converted by quantrot.",
            "",
            "| linears | count | format | bits a weight | mean SQNR of the weights (dB) |",
            "|---|---|---|---|---|",
            *_scheme_rows(plan, manifest),
            "",
            _rotations(plan),
            *(["", _calibration(plan.calibration)] if plan.calibration else []),
            *(["", _attention(plan)] if narrow else []),
            "",
            "| engine | runs it | as |",
            "|---|---|---|",
            *(f"| {row.engine} | {row.runs} | {row.note} |" for row in rows),
            "",
            "```",
            engines.serve_command(rows, plan.linears, plan.online),
            "```",
            "",
            "Measure it with `quantrot eval mmlu .` and `quantrot eval compare . --baseline "
            f"{shlex.quote(plan.source.name)}`; `quantrot verify .` checks the files.",
            "",
            f"Made by quantrot {__version__} from `{plan.source.base_model}`"
            + (f" at revision `{plan.source.revision}`" if plan.source.revision else "")
            + f". Recipe (`{plan.recipe.name}`):",
            "",
            "```yaml",
            yaml.safe_dump(plan.recipe.model_dump(mode="json", exclude_defaults=True), sort_keys=False).rstrip(),
            "```",
            "",
        ]
    )


def _scheme_rows(plan: Plan, manifest: dict[str, Any]) -> list[str]:
    """One row a kind of linear and format."""
    shapes = {linear.fqn: (linear.out_features, linear.in_features) for linear in llama.linears(plan.llama)}
    counts: Counter[tuple[str, str, str]] = Counter()
    noise: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for fqn, fmt in plan.linears.items():
        if fmt is None:
            continue
        bits = f"{formats.bits_per_weight(fmt.weights, *shapes[fqn]):.2f}"
        key = fqn.rpartition(".")[2], formats.label(fmt), bits
        counts[key] += 1
        sqnr = manifest["linears"][fqn]["sqnr_db"]
        if sqnr is not None:
            noise[key].append(sqnr)
    rows = []
    for key, count in counts.items():
        mean = f"{sum(noise[key]) / len(noise[key]):.1f}" if noise[key] else "-"
        rows.append(f"| {key[0]} | {count} | {key[1]} | {key[2]} | {mean} |")
    wide = Counter(fqn.rpartition(".")[2] for fqn, fmt in plan.linears.items() if fmt is None)
    return rows + [f"| {name} | {count} | as the original | | |" for name, count in wide.items()]


def _rotations(plan: Plan) -> str:
    blocks = sorted({r.block for r in plan.online.values() if r.name not in plan.rotations})
    if not plan.rotations and not blocks:
        return "No rotation."
    words = [
        f"{name} {r.kind}, {r.extent}, {'online' if name in ONLINE else 'fused'}" for name, r in plan.rotations.items()
    ]
    words += [f"a Hadamard in front of linears, blocks of {block}, online" for block in blocks]
    turned = " Adapters made for the original model (LoRA, prefixes) do not fit: merge them into it and convert that."
    return "Rotations: " + "; ".join(words) + "." + turned * any(name in plan.rotations for name in ("R1", "R2", "R3"))


def _calibration(used: Calibration) -> str:
    digests = ", ".join(digest[:16] for digest in used.entry()["text_sha256"])
    return (
        f"Weights marked gptq were rounded by GPTQ, calibrated on {used.windows} windows of {used.seq_len} tokens of "
        f"{'a text' if len(used.texts) == 1 else 'texts'} with sha256 {digests}."
    )


def _attention(plan: Plan) -> str:
    """What attention and the KV cache are when quantrot runs the files."""
    cache, size = plan.recipe.kv_cache, ""
    if cache != "bf16":
        from quantrot.modules.cache import bits_per_value  # with transformers' models, which take a second

        size = f", {bits_per_value(cache, plan.llama.head_dim):.2f} bits a value"
    return (
        f"Attention in {plan.recipe.attention}, KV cache in {cache}{size}: quantrot does both at run time, the weights "
        "do not hold them."
    )


def _tags(plan: Plan) -> list[str]:
    return sorted({fmt.weights.kind for fmt in plan.linears.values() if fmt is not None}) or ["rotated"]


def _inherited(source: Path) -> dict[str, Any]:
    """license, license_name, license_link and language of the source's own card, where it has one."""
    try:
        text = (source / CARD).read_text(encoding="utf-8-sig")
        found = re.match(r"---[ \t]*\n(.*?)\n---[ \t]*(\n|$)", text, re.DOTALL)
        front = yaml.safe_load(found[1]) if found else {}
    except (OSError, ValueError, yaml.YAMLError, RecursionError):  # ValueError: a date that is none, too
        return {}
    keys = ("license", "license_name", "license_link", "language")
    return {key: front[key] for key in keys if isinstance(front, dict) and key in front}
