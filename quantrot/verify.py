"""Prove a conversion: files against their hashes, the model against its source, each linear against its exact self.

A linear's SQNR compares what its module computes from the inputs that really reach it with the exact product of the
same inputs and the unquantized, rotated weight. Where a rotation turned the linear, the same number is taken from the
source model without any rotation, so that a rotation which cost more than it gained shows. Without it weights are
rounded to nearest; where GPTQ rounded the linear, what is compared with that is its turned weight rounded to nearest,
too: GPTQ gains more than many a rotation costs.

Neither model is ever whole in memory: both go through the text a layer at a time (streamed.py).
"""

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantrot import formats, llama
from quantrot.checkpoint import Checkpoint, first_differing, open_checkpoint, read_rows, sha256_of
from quantrot.convert import sqnr_db
from quantrot.device import known_device
from quantrot.evals.divergence import Divergence, mean_divergence
from quantrot.evals.logits import default_chunk
from quantrot.evals.text import python_topics
from quantrot.formats import LinearFormat
from quantrot.load import architecture, skeleton
from quantrot.manifest import MANIFEST, check_files, read_manifest
from quantrot.modules import QuantizedLinear, quantize_dequantize
from quantrot.plan import Plan, Step
from quantrot.plan import plan as make_plan
from quantrot.process import Progress
from quantrot.recipe import load_recipe
from quantrot.streamed import streamed_logits
from quantrot.tokenizer import open_tokenizer, windows
from quantrot.transform import in_pieces, starts, turned_rows

EXACT_KL = 0.01  # nats: what rounding rotated weights to bfloat16 may cost; SmolLM2-135M measures 0.0002
BROKEN_KL = 4.0  # the worst shipped recipe measures 1.5 on SmolLM2-135M
SEQ_LEN = 256  # tokens of a window, where the model takes as many
WORSE_DB = 0.5  # a rotation that costs a linear more than this is reported


@dataclass(frozen=True)
class Layer:
    """One quantized linear: output SQNR in dB as converted, without rotation (None where none turned it), and with it
    but rounded to nearest (None but for what was turned and rounded by GPTQ)."""

    fqn: str
    format: str
    sqnr_db: float
    unrotated_db: float | None
    nearest_db: float | None = None

    @property
    def rotated_db(self) -> float:
        """What there is to compare with unrotated_db: of the same rounding."""
        return self.sqnr_db if self.nearest_db is None else self.nearest_db

    @property
    def worse(self) -> bool:
        """Whether its rotation made it worse by more than WORSE_DB."""
        return self.unrotated_db is not None and self.rotated_db < self.unrotated_db - WORSE_DB


@dataclass(frozen=True)
class Verification:
    """What was found. failures: why the conversion is not acceptable; warnings: what to think about; max_kl: the limit
    that held."""

    divergence: Divergence
    layers: tuple[Layer, ...]
    failures: tuple[str, ...]
    warnings: tuple[str, ...]
    max_kl: float


@torch.no_grad()
def verify(
    path: str | Path,
    against: str | Path | None = None,
    *,
    text: str | None = None,
    seq_len: int | None = None,
    count: int = 4,
    max_kl: float | None = None,
    min_top1: float | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> Verification:
    """Check a converted directory against its source, both in float32.

    against: the unconverted model (default: the source that the manifest names). text: what is run through both
    (default: Python's own help topics), at most `count` windows of `seq_len` tokens (default: 256, or as many as the
    model takes); linears are measured in the first. max_kl: nats per token (default 0.01 where nothing is quantized,
    else 4). min_top1: least agreement. ValueError for files that do not match their hashes, and for a source that has
    other tensors than those that were converted.
    """
    for name, value in (("max_kl", max_kl), ("min_top1", min_top1)):
        most = 1 if name == "min_top1" else math.inf
        if value is not None and not (isinstance(value, int | float) and 0 <= value <= most):
            raise ValueError(f"{name} is {value!r}; a number from 0 {'to 1' if name == 'min_top1' else 'up'} is needed")
    for name, length in (("seq_len", seq_len), ("count", count)):
        if not isinstance(length, int | None) or isinstance(length, bool) or (length is None and name == "count"):
            raise ValueError(f"{name} is {length!r:.80}; a whole number is needed")
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"path is {path!r:.80}; the directory of a conversion is needed")
    if not (text is None or isinstance(text, str)):
        raise ValueError(f"text is {text!r:.80}; a string is needed; of a file, what its read_text() gives")
    root = Path(os.path.expanduser(path))
    manifest = read_manifest(root)
    source = str(against) if against is not None else _source_name(manifest.data)
    where = known_device(device)
    try:
        plan = make_plan(source, load_recipe(manifest.data["recipe"], str(root / MANIFEST)).nearest(), where)
    except ValueError as error:
        raise ValueError(
            f"{error}\n(the source to compare with; if it has moved, give its place as against, --against)"
        ) from None
    report = progress or (lambda what, done, total: None)
    arch, text = plan.llama, python_topics() if text is None else text
    seq_len = min(SEQ_LEN, arch.max_positions) if seq_len is None else seq_len
    ids = windows(open_tokenizer(plan.source.path), text, seq_len, count, arch.max_positions, arch.vocab_size)
    check_files(root, manifest.data)  # before the source, which is larger, is read
    _check_same(manifest.data, plan, source, report)
    model, baseline = skeleton(root, manifest, torch.float32), architecture(plan.source.path, torch.float32)
    written = open_checkpoint(root)
    _check_stored(model, written)
    measured = _measured(plan, model, baseline)
    logits = zip(
        streamed_logits(baseline, plan.checkpoint.tensors, ids, where, partial(report, "original")),
        streamed_logits(model, written.tensors, ids, where, partial(report, "converted")),
        strict=True,
    )
    rows = default_chunk(baseline)
    pairs = (zip(*(whole.split(rows) for whole in both), strict=True) for both in logits)
    found = mean_divergence(pairs, ids, partial(report, "logits"))
    layers = measured()
    exact = not any(manifest.linears.values()) and (manifest.arithmetic, manifest.kv_cache) == ("bf16", "bf16")
    limit = max_kl if max_kl is not None else EXACT_KL if exact else BROKEN_KL
    failures = []
    if not found.kl <= limit:  # NaN fails too
        failures.append(f"KL to the source is {found.kl:.4g} nats per token, above {limit:g}")
    if min_top1 is not None and not found.top1 >= min_top1:
        failures.append(f"top-1 agreement with the source is {found.top1:.4f}, below {min_top1:g}")
    return Verification(found, tuple(layers), tuple(failures), tuple(_warnings(layers)), limit)


def _source_name(data: dict[str, Any]) -> str:
    name, revision = data["source"]["model"], data["source"]["revision"]
    return f"{name}@{revision}" if revision else name


def _check_same(data: dict[str, Any], plan: Plan, source: str, report: Progress) -> None:
    """ValueError where the source is not the model that was converted: other sizes, or other bytes. Reads all of it."""
    shapes = {linear.fqn: [linear.out_features, linear.in_features] for linear in llama.linears(plan.llama)}
    converted = {fqn: entry["shape"] or shapes.get(fqn) for fqn, entry in data["linears"].items()}
    differing = [fqn for fqn in {**converted, **shapes} if converted.get(fqn) != shapes.get(fqn)]
    if differing:
        fqn = differing[0]
        raise ValueError(
            f"{source}: not the model that was converted: {fqn} is {shapes.get(fqn, 'missing')} there and "
            f"{converted.get(fqn, 'missing')} here; give that model as against"
        )
    hashes, tensors = data["source"]["tensors"], plan.checkpoint.tensors
    wrong = next((f"{name} is missing" for name in hashes if name not in tensors), None)
    wanted = {} if wrong else {tensors[name]: sha256 for name, sha256 in hashes.items()}
    if other := first_differing(sha256_of, wanted, lambda done: report("source", done, len(hashes))):
        wrong = f"{other.name} is another"
    if wrong:
        what = f"not the model that was converted: {wrong} there"
        raise ValueError(f"{source}: {what}; give that model as against, or convert this one")


def _check_stored(model: nn.Module, written: Checkpoint) -> None:
    """ValueError where a conversion's tensors are not those of the model that its manifest describes."""
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = {name: info.shape for name, info in written.tensors.items()}
    if differing := [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]:
        name = differing[0]
        here, there = found.get(name, "missing"), wanted.get(name, "not known")
        what = f"{name} is {here}, and {there} there"
        raise ValueError(f"{written.root}: its tensors are not those of {MANIFEST}: {what}; convert again")


def _warnings(layers: list[Layer]) -> list[str]:
    worse = sorted((layer for layer in layers if layer.worse), key=_gain)
    if not worse:
        return []
    first = worse[0]
    rounding = "" if first.nearest_db is None else ", both rounded to nearest"
    return [
        f"rotation made {len(worse)} of {len(layers)} linears worse by more than {WORSE_DB} dB; most: {first.fqn}, "
        f"{first.unrotated_db:.1f} dB without, {first.rotated_db:.1f} dB with{rounding}"
    ]


def _gain(layer: Layer) -> float:
    return layer.rotated_db - (layer.rotated_db if layer.unrotated_db is None else layer.unrotated_db)


# --- Per layer -------------------------------------------------------------------------------------------------------


def _measured(plan: Plan, model: nn.Module, baseline: nn.Module) -> Callable[[], list[Layer]]:
    """Have every quantized linear measured where it stands, at its first call in both models; what was found is given
    by the function that this returns."""
    steps = {step.name: (step, step.format) for step in plan.steps if step.format is not None}
    rotated: dict[str, float] = {}
    nearest: dict[str, float] = {}
    plain: dict[str, float] = {}
    labels: dict[str, str] = {}
    turned = [fqn for fqn, (step, _) in steps.items() if step.input_turns or step.output_turn or step.norm]

    def converted(fqn: str, module: QuantizedLinear, x: Tensor, y: Tensor) -> None:
        (step, fmt), labels[fqn] = steps[fqn], formats.label(module.format)
        weight = _turned(plan, step).to(x.device)
        exact = F.linear(module.turned(x), weight, module.bias)
        rotated[fqn] = _sqnr(exact, y)
        if fqn in turned and module.format.weights.rounding == "gptq":  # the plan's format rounds to nearest
            nearest[fqn] = _sqnr(exact, module.multiply_wide(x, _rounded(fmt, weight)))

    def original(fqn: str, module: nn.Linear, x: Tensor, y: Tensor) -> None:
        _, fmt = steps[fqn]
        rounded = quantize_dequantize(x, fmt.activations)
        plain[fqn] = _sqnr(y, F.linear(rounded, _rounded(fmt, module.weight), module.bias))

    _at_first_call(model, steps, converted)
    _at_first_call(baseline, turned, original)
    return lambda: [Layer(fqn, labels[fqn], rotated[fqn], plain.get(fqn), nearest.get(fqn)) for fqn in steps]


def _turned(plan: Plan, step: Step) -> Tensor:
    """What the step quantizes, float32, made of a few rows at a time: it is there thrice while it is turned."""
    info, rows = plan.checkpoint.tensors[step.source], step.rows
    chunks = ((start, read_rows(info, start, min(start + rows, info.shape[0]))) for start in starts(step))
    return torch.cat([turned_rows(plan, step, chunk, start) for start, chunk in chunks])


def _rounded(fmt: LinearFormat, weight: Tensor) -> Tensor:
    """The weight through its format and back, float32."""
    stored = (formats.quantize_rows(fmt.weights, piece) for piece in in_pieces(fmt.weights, weight.float()))
    return torch.cat([formats.dequantize(fmt.weights, x, weight.shape[1], torch.float32) for x in stored])


def _sqnr(exact: Tensor, got: Tensor) -> float:
    """Output SQNR in dB; infinite where nothing was lost, minus infinity where the output is NaN or all noise."""
    signal, error = exact.double().square().sum().item(), (got.double() - exact.double()).square().sum().item()
    value = sqnr_db(signal, error)
    return math.inf if error == 0 else -math.inf if value is None else value


def _at_first_call(model: nn.Module, names: Iterable[str], function: Callable[..., None]) -> None:
    """Call function(fqn, module, input, output) once for each named module."""
    called = set()

    def hook(fqn: str, module: nn.Module, args: tuple[Tensor], y: Tensor) -> None:
        if fqn not in called:
            called.add(fqn)
            function(fqn, module, args[0], y)

    for fqn in names:
        model.get_submodule(fqn).register_forward_hook(partial(hook, fqn))
