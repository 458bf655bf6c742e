"""What a conversion will do, as data: recipe x checkpoint headers -> steps, shards, sizes, notes. No matrix is read,
but for a head that is stored although tied, which is compared with its embedding, and a few rows of each where
rotations are learned, which tell the model that they are for.

A step makes the output tensors of one source tensor: rows of the source are cut off, the norm's gain is folded in, the
input side is turned, the output side is turned, the result is quantized, and the rows go to their place in a shard.
Each step needs only its tensor, its norm's gain and rotations regenerated from seeds, so weights stream. A calibrated
one needs the Hessian of its linear's input, too (hessians.py).
"""

import copy
import hashlib
import json
import math
import sys
from collections import Counter
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from torch import Tensor

from quantrot import engines, formats, learned, llama, patterns
from quantrot.calibration import Calibration, lanes, tokens
from quantrot.checkpoint import (
    DTYPES,
    Checkpoint,
    Shard,
    lay_out,
    not_finite,
    open_checkpoint,
    read_json,
    read_rows,
)
from quantrot.device import device_type
from quantrot.formats import LinearFormat
from quantrot.llama import EMBEDDING, HEAD, Linear, Llama
from quantrot.process import counted
from quantrot.recipe import ONLINE, ROTATIONS, Recipe, RecipeLike, Rule, load_recipe
from quantrot.rotation import Rotation, by_gain, checksum, of_heads, rotation_from_spec
from quantrot.source import Source, copied_files, open_source
from quantrot.tokenizer import TOKENIZERS
from quantrot.version import __version__

CHUNK = {"cpu": 1 << 18, "cuda": 1 << 24}  # elements: 1 MB in float32 stays in cache; smaller ones wait for Python
COLUMNWISE = 16  # times as many where GPTQ takes a column of all rows at a time: 50 us, however few they are
LOOK_AHEAD = 96  # chunks in flight besides one a thread: what one thread does while another turns a whole down_proj
BUDGET = 384 << 20  # bytes that chunks in flight may take together; a larger chunk goes alone
OVERHEAD = 64 << 20  # thread pools, GEMM packing buffers, allocator slack
MODEL_CODE = 124_000_000  # bytes that a process grows by when hessians.py imports transformers' models
LARGEST_HEAD = 256  # of attention: fp8


@dataclass(frozen=True)
class Step:
    """One source tensor's way to the output.

    kind: "matrix" (2-D; folded, turned, quantized), "vector" (a bias; turned), "copy", "norm" (what a fold leaves),
    "hadamard" (the stored matrix of an online rotation), "shape" (int8's weight_shape).
    source: the tensor read ("" for none), of this dtype and shape. outputs: (name, dtype, shape).
    norm: the gain to fold, or "". rows: how many source rows are handled at a time, a multiple of what the output
    side's rotation and the format need together. hessian: the linear whose input's Hessian rounds this one, or "".
    """

    kind: Literal["matrix", "vector", "copy", "norm", "hadamard", "shape"]
    source: str
    dtype: str
    shape: tuple[int, ...]
    outputs: tuple[tuple[str, str, tuple[int, ...]], ...]
    norm: str = ""
    input_turns: tuple[Rotation, ...] = ()
    output_turn: Rotation | None = None
    format: LinearFormat | None = None
    rows: int = 0
    hessian: str = ""

    @property
    def name(self) -> str:
        """What progress, reports and the manifest call it: the output without `.weight` and the like."""
        return self.outputs[0][0].rpartition(".")[0]


@dataclass(frozen=True)
class Plan:
    """Everything `convert` will do.

    rotations: the active ones by name. linears: every linear's format, None for its own dtype. online: the rotation
    that runs on a linear's input. config: the config.json to write. notes: what a user should know before starting.
    learned: the recipe's file of rotations, whose path is in `recipe` the one that the output has it under.
    calibration: what GPTQ rounds by; windows: its tokens, int64 [n, seq_len].
    """

    source: Source
    checkpoint: Checkpoint
    llama: Llama
    recipe: Recipe
    device: str
    rotations: dict[str, Rotation]
    linears: dict[str, LinearFormat | None]
    online: dict[str, Rotation]
    steps: tuple[Step, ...]
    shards: tuple[Shard, ...]
    config: dict[str, Any]
    copied: tuple[Path, ...]
    notes: tuple[str, ...]
    learned: learned.Learned | None
    calibration: Calibration | None
    windows: Tensor | None

    @property
    def attention(self) -> Rotation | None:
        """R3, the rotation of queries and keys after RoPE."""
        return self.rotations.get("R3")

    @property
    def source_bytes(self) -> int:
        """What of the source is read."""
        return sum(self.checkpoint.tensors[name].nbytes for name in {step.source for step in self.steps} - {""})

    @property
    def output_bytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    def peak_bytes(self, threads: int) -> int:
        """Predicted peak resident set: this process as it is now, and the chunks in flight."""
        waiting = LOOK_AHEAD * max(held_bytes(step) for step in self.steps)
        largest = max(working_bytes(step) for step in self.steps)
        chunks = min(threads * largest + waiting, max(BUDGET, largest))
        dense = max((64 * r.block**2 for r in self.rotations.values() if r.kind == "random-orthogonal"), default=0)
        return psutil.Process().memory_info().rss + OVERHEAD + chunks + dense + self.calibration_bytes(threads)

    def calibration_bytes(self, threads: int) -> int:
        """What calibration holds at its worst: every window's hidden states, the widest layer in float32, what its
        Hessians become, those being decomposed in float64, twice, what is on the way in a thread's windows, code not
        imported yet."""
        if self.windows is None:
            return 0
        seq_len, most = self.windows.shape[1], 0
        threads, together = lanes(self.device, threads, seq_len)
        for _, stage in groupby(self.steps, network_order):
            steps = [step for step in stage if len(step.shape) == 2 and step.source and step.name != EMBEDDING]
            widths = sorted({step.hessian: step.shape[1] for step in steps if step.hessian}.values())
            inputs = threads * together * seq_len * (sum(widths) + 4 * self.llama.intermediate_size)
            squares = [width * width for width in widths]
            weights = sum(math.prod(step.shape) for step in steps if step.name != HEAD)  # whose logits nobody needs
            most = max(most, 4 * (weights + inputs) + 8 * sum(squares) + 16 * sum(squares[-threads:]))
        imported = 0 if "quantrot.hessians" in sys.modules else MODEL_CODE
        return 4 * self.windows.numel() * self.llama.hidden_size + most + imported

    def fingerprint(self) -> str:
        """sha256 of all that determines the weights' bytes, but the source's: recipe, headers, layout, device, text,
        and versions of quantrot and of torch, whose products may differ in their last bits."""
        tensors = sorted((t.name, t.dtype, t.shape, t.file.name, t.start) for t in self.checkpoint.tensors.values())
        layout = [shard.header.hex() for shard in self.shards]
        turns = {rotation.name: checksum(rotation) for rotation in [*self.rotations.values(), *self.online.values()]}
        versions = [__version__, torch.__version__]
        parts = [versions, self.recipe.resolved(), tensors, turns, layout, self.config, device_type(self.device)]
        if self.calibration is not None and self.windows is not None:
            parts += [self.calibration.entry(), self.windows.tolist()]  # the tokens: a tokenizer may have been changed
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def plan(
    model: str | Path,
    recipe: RecipeLike,
    device: str | torch.device = "cpu",
    max_shard_size: int = 5_000_000_000,
    calibration: Calibration | None = None,
) -> Plan:
    """Plan a conversion. ValueError lists every error that the headers and the recipe can show, one a line."""
    recipe = load_recipe(recipe)
    chunk = CHUNK[device_type(device)]
    if calibration is not None and not isinstance(calibration, Calibration):
        raise ValueError(
            f"calibration is a {type(calibration).__name__}; give quantrot.Calibration(text), of the text itself or "
            "a tuple of texts, no paths"
        )
    if not isinstance(max_shard_size, int) or max_shard_size < 1:
        raise ValueError(f"max_shard_size is {max_shard_size!r}; allowed: a positive number of bytes, as 5_000_000_000")
    source = open_source(model)
    checkpoint = open_checkpoint(source.path)
    arch = llama.from_config(checkpoint.config)
    errors: list[str] = []
    notes: list[str] = []
    errors += llama.mistakes(checkpoint, arch)
    _check_attention(recipe, arch, errors, notes)
    file = _learned(recipe, errors)
    rotations = _rotations(recipe, arch, file, errors)
    if recipe.rotations.R1.channels == "by-gain" and "R1" in rotations and not errors:
        r1 = rotations["R1"] = by_gain(rotations["R1"], _gains(checkpoint, arch))
        if r1.turned < r1.width:
            notes.append(f"R1 in {r1.extent}: in the other blocks, norms' gains are not alike (channels: by-gain)")
    linears = _assign(recipe, arch, rotations, errors, notes)
    copied = _copied(source.path, errors, notes)
    calibration, windows = _calibrated(recipe, linears, calibration, source.path, arch, errors, notes)
    if errors:
        raise ValueError("\n".join(errors))
    if file is not None:
        notes += learned.notes(file, recipe, learned.digest(checkpoint, arch))
        rotations_at_rest = recipe.rotations.model_copy(update={"path": learned.COPY})
        recipe = recipe.model_copy(update={"rotations": rotations_at_rest})
    online = _online(arch, linears, rotations)
    _note_engines(engines.support(linears, online, rotations.get("R3"), checkpoint.biased), bool(online), notes)
    untied = arch.tied and ("R1" in rotations or linears[HEAD] is not None)
    if untied:
        notes.append("the tied embedding is untied: lm_head.weight is written, tie_word_embeddings becomes false")
    native = engines.is_native(linears, bool(online) or "R3" in rotations)
    steps = _steps(checkpoint, arch, rotations, linears, online, untied, native, chunk)
    shards = lay_out([output for step in steps for output in step.outputs], max_shard_size)
    return Plan(
        source=source,
        checkpoint=checkpoint,
        llama=arch,
        recipe=recipe,
        device=str(device),
        rotations=rotations,
        linears=linears,
        online=online,
        steps=tuple(steps),
        shards=tuple(shards),
        config=_config(checkpoint.config, untied, linears, online, rotations.get("R3")),
        copied=copied,
        notes=tuple(notes),
        learned=file,
        calibration=calibration,
        windows=windows,
    )


# --- Checks ----------------------------------------------------------------------------------------------------------


def _check_attention(recipe: Recipe, arch: Llama, errors: list[str], notes: list[str]) -> None:
    """What attention and the KV cache can be made of, in this model and together."""
    dim = arch.head_dim
    if recipe.attention == "fp8" and (dim % 16 or dim > LARGEST_HEAD):
        errors.append(
            f"{recipe.where('attention')}: attention: fp8 needs a head_dim of a multiple of 16 up to {LARGEST_HEAD}, "
            f"this model's is {dim}; use bf16"
        )
    if recipe.attention == "fp8" and recipe.kv_cache == "int4":
        errors.append(
            f"{recipe.where('kv_cache')}: kv_cache: int4 is attended in the model's dtype and attention: fp8 reads e4m3"
            "; use kv_cache: fp8, or attention: bf16"
        )
    if recipe.kv_cache == "int4" and dim % 2:
        errors.append(
            f"{recipe.where('kv_cache')}: kv_cache: int4 packs two values in a byte, and this model's head_dim is {dim}"
            "; use fp8"
        )
    if recipe.attention == "fp8" and recipe.kv_cache == "bf16":
        notes.append(
            "attention: fp8 with kv_cache: bf16 quantizes the whole cache at every step; kv_cache: fp8 does not"
        )
    if recipe.kv_cache != "bf16" and arch.slides:
        notes.append(
            f"the model has a sliding window: values pass through {recipe.kv_cache}, the cache holds them wide"
        )


def _copied(path: Path, errors: list[str], notes: list[str]) -> tuple[Path, ...]:
    """What is copied as it is; two files of it are looked into: `load` reads the first, all others the second."""
    copied: tuple[Path, ...] = ()
    try:
        copied = copied_files(path)
        for name in ("generation_config.json", "tokenizer.json"):
            if (path / name).exists():
                read_json(path / name)
    except ValueError as error:
        errors.append(str(error))
    if not any((path / name).exists() for name in TOKENIZERS):
        notes.append(f"no tokenizer beside the weights ({', '.join(TOKENIZERS)}): verify, eval and servers need one")
    return copied


def _learned(recipe: Recipe, errors: list[str]) -> learned.Learned | None:
    """The recipe's file of learned rotations, None where it has none."""
    try:
        return learned.read(recipe.rotations_file) if recipe.rotations.learned else None
    except ValueError as error:
        errors.append(f"{recipe.where('rotations', 'path')}: {error}")
        return None


def _rotations(recipe: Recipe, arch: Llama, file: learned.Learned | None, errors: list[str]) -> dict[str, Rotation]:
    found: dict[str, Rotation] = {}
    for name in ROTATIONS:
        try:
            rotation = rotation_from_spec(name, getattr(recipe.rotations, name), llama.width(arch, name))
            if rotation is not None and rotation.kind == "learned" and file is not None:
                units = (arch.layers, arch.kv_heads) if name == "R2" else ()
                rotation = learned.with_matrices(rotation, file, units)
        except ValueError as error:
            errors.append(f"{recipe.where('rotations', name)}: {error}")
            continue
        if rotation is not None:
            found[name] = rotation
    return found


def _calibrated(
    recipe: Recipe,
    linears: dict[str, LinearFormat | None],
    calibration: Calibration | None,
    model: Path,
    arch: Llama,
    errors: list[str],
    notes: list[str],
) -> tuple[Calibration | None, Tensor | None]:
    """(the calibration with the windows that it has, their tokens), which is there where a rounding needs it."""
    needed = [fqn for fqn, fmt in linears.items() if fmt is not None and fmt.weights.rounding == "gptq"]
    if needed and calibration is None:
        errors.append(
            f"{recipe.where('linear')}: {len(needed)} linears have rounding: gptq, as {needed[0]}, and no text "
            "to calibrate on; give one as calibration (--calibration TEXT)"
        )
    if calibration is not None and not recipe.calibrated:
        errors.append(f"{recipe.where('linear')}: nothing has rounding: gptq, and calibration gives a text for it")
    elif calibration is not None and not needed:  # all fell back, as notes before say; other recipes may need the text
        notes.append("calibration: its text is not used: no linear is left that has rounding: gptq")
    if calibration is None or not needed:
        return None, None
    try:
        windows = tokens(calibration, model, arch)
    except ValueError as error:
        errors.append(str(error))
        return None, None
    if len(windows) < (calibration.windows or 0):
        notes.append(
            f"calibration: its text has {counted(len(windows), 'window')}, {calibration.windows} were asked for"
        )
    return replace(calibration, windows=len(windows)), windows


def _gains(checkpoint: Checkpoint, arch: Llama) -> Tensor:
    """The gain of every norm before an attention or MLP, float32 [2 * layers, hidden]: all that most plans read."""
    infos = [checkpoint.tensors[f"{name}.weight"] for name in llama.norms(arch) if name != llama.FINAL_NORM]
    gains = [read_rows(info).float() for info in infos]
    for info, gain in zip(infos, gains, strict=True):
        if not torch.isfinite(gain).all():
            raise not_finite(info)
    return torch.stack(gains)


# --- Which linear gets what ------------------------------------------------------------------------------------------


def _assign(
    recipe: Recipe, arch: Llama, rotations: dict[str, Rotation], errors: list[str], notes: list[str]
) -> dict[str, LinearFormat | None]:
    """Every linear's format. What an engine fuses falls back together, as far as it is to have one format."""
    all_linears = llama.linears(arch)
    _check_patterns(recipe, [linear.fqn for linear in all_linears], errors)
    rules: dict[str, Rule] = {}
    for linear in all_linears:
        skipped = any(patterns.matches(pattern, linear.fqn) for pattern in recipe.skip)
        rule = next((r for r in recipe.linear if patterns.matches(r.match, linear.fqn)), None)
        if rule is not None and not skipped:
            rules[linear.fqn] = rule
    for rule in dict.fromkeys(rules[a.fqn] for a in all_linears if a.input_side == "R4" and a.fqn in rules):
        if "R4" in rotations and rule.hadamard != "none":
            where = recipe.where("linear", recipe.linear.index(rule), "hadamard")
            errors.append(f"{where}: hadamard {rule.hadamard} and R4 both turn the input of down_proj; drop one")
    for i, rule in enumerate(recipe.linear):
        if any(patterns.matches(rule.match, linear.fqn) for linear in all_linears) and rule not in rules.values():
            where = recipe.where("linear", i, "match")
            notes.append(f"{where}: {rule.match!r} applies to nothing: its linears are skipped or have an earlier rule")
    misfit: dict[tuple[str, LinearFormat, str], str] = {}  # what is fused, in one format -> its first that does not fit
    for linear in all_linears:
        if linear.fqn in rules and not _fits(linear, rules[linear.fqn]):
            misfit.setdefault(_alike(linear, rules[linear.fqn]), linear.fqn)
    assigned, fallen = dict[str, LinearFormat | None](), Counter[str]()
    for linear in all_linears:
        rule = rules.get(linear.fqn)
        assigned[linear.fqn] = None if rule is None else formats.from_rule(rule)
        if rule is not None and (first := misfit.get(_alike(linear, rule))):
            wanted = formats.from_rule(rule)
            got = assigned[linear.fqn] = formats.fallback(wanted, rule, linear.in_features)
            result = formats.label(got) if got else "its own dtype"
            why = f"follows {first.rpartition('.')[2]}, which " if _fits(linear, rule) else ""
            why += f"does not fit {formats.label(wanted)}"
            shape = f"[{linear.out_features}, {linear.in_features}]"
            fallen[f"{linear.fqn.rpartition('.')[2]} {shape} {why}: {result}"] += 1
    notes += [f"{count} x {what}" for what, count in fallen.items()]
    return assigned


def _alike(linear: Linear, rule: Rule) -> tuple[str, LinearFormat, str]:
    """Equal for what can be fused: parts of several formats cannot be, whatever one of them falls back to."""
    return linear.group, formats.on_disk(formats.from_rule(rule)), rule.weights.fallback


def _fits(linear: Linear, rule: Rule) -> bool:
    fmt = formats.from_rule(rule)
    hadamard = linear.in_features % max(fmt.hadamard, 1) == 0
    groups = linear.in_features % (fmt.activations.block[1] or 1) == 0
    return hadamard and groups and formats.fits(fmt.weights, linear.out_features, linear.in_features)


def _check_patterns(recipe: Recipe, linears: list[str], errors: list[str]) -> None:
    """Every pattern of the recipe names something: a rule a linear, what is skipped a linear or the embedding."""
    found: list[tuple[tuple[str | int, ...], str, list[str]]]
    found = [(("linear", i, "match"), rule.match, linears) for i, rule in enumerate(recipe.linear)]
    found += [(("skip", i), pattern, [*linears, EMBEDDING]) for i, pattern in enumerate(recipe.skip)]
    for loc, pattern, names in found:
        if not any(patterns.matches(pattern, name) for name in names):
            hint = patterns.hint(pattern, names)
            errors.append(f"{recipe.where(*loc)}: {pattern!r} matches no module of this model ({hint})")


def _online(
    arch: Llama, linears: dict[str, LinearFormat | None], rotations: dict[str, Rotation]
) -> dict[str, Rotation]:
    """fqn -> the rotation that runs on that linear's input: R4, or its rule's block Hadamard."""
    found = {}
    for linear in llama.linears(arch):
        fmt = linears[linear.fqn]
        if linear.input_side in ONLINE and linear.input_side in rotations:
            found[linear.fqn] = rotations[linear.input_side]
        elif fmt is not None and fmt.hadamard:
            found[linear.fqn] = Rotation("hadamard", "hadamard", linear.in_features, fmt.hadamard, 0)
    return found


def _note_engines(support: list[engines.Support], online: bool, notes: list[str]) -> None:
    """What users of the most common engine would else find out from its refusal."""
    vllm = next(row for row in support if row.engine == "vLLM")
    if vllm.runs == "no":
        notes.append(f"vLLM will not load the result: {vllm.note}")
    elif online:
        notes.append(
            "online Hadamards: quantrot and vLLM (tensor parallel size 1) run the result, transformers refuses it"
        )


# --- Steps -----------------------------------------------------------------------------------------------------------


def _steps(
    checkpoint: Checkpoint,
    arch: Llama,
    rotations: dict[str, Rotation],
    linears: dict[str, LinearFormat | None],
    online: dict[str, Rotation],
    untied: bool,
    native: bool,
    chunk: int,
) -> list[Step]:
    """All steps, in the order of the network."""
    r1 = rotations.get("R1")
    embedding = checkpoint.tensors[f"{EMBEDDING}.weight"]
    table = (f"{EMBEDDING}.weight", embedding.dtype, embedding.shape)
    turns = (r1,) if r1 else ()
    kind: Literal["matrix", "copy"] = "matrix" if r1 else "copy"
    steps = [Step(kind, embedding.name, embedding.dtype, embedding.shape, (table,), input_turns=turns)]
    norms = dict.fromkeys(llama.norms(arch), turns) | dict.fromkeys(llama.head_norms(arch), ())
    for norm, turned in norms.items():
        info = checkpoint.tensors[f"{norm}.weight"]
        output = ((info.name, info.dtype, info.shape),)
        steps.append(Step("norm" if turned else "copy", info.name, info.dtype, info.shape, output, input_turns=turned))
    inputs: dict[Any, str] = {}  # what linears read -> the first that reads it
    for linear in llama.linears(arch):
        if linear.fqn != HEAD or not arch.tied or untied:
            fmt, turn = linears[linear.fqn], online.get(linear.fqn)
            hessian = ""
            if fmt is not None and fmt.weights.rounding == "gptq":
                hessian = inputs.setdefault((linear.group, turn, fmt.activations), linear.fqn)
            steps += _linear_steps(checkpoint, arch, linear, rotations, fmt, turn, native, hessian)
    return [replace(step, rows=_rows(step, chunk)) for step in sorted(steps, key=network_order)]


def network_order(step: Step) -> tuple[int, int]:
    """Embedding, layers in order, final norm and head."""
    name = step.outputs[0][0]
    if name.startswith("model.layers."):
        return 1, int(name.split(".")[2])
    return (0, 0) if name.startswith(EMBEDDING) else (2, 0)


def _linear_steps(
    checkpoint: Checkpoint,
    arch: Llama,
    linear: Linear,
    rotations: dict[str, Rotation],
    fmt: LinearFormat | None,
    online: Rotation | None,
    native: bool,
    hessian: str,
) -> list[Step]:
    source = checkpoint.tensors[f"{EMBEDDING if linear.fqn == HEAD and arch.tied else linear.fqn}.weight"]
    fused = _fused(rotations, arch, linear, linear.input_side)
    turns = tuple(r for r in (fused, online) if r is not None)
    output_turn = _fused(rotations, arch, linear, linear.output_side)
    norm = f"{linear.norm}.weight" if linear.norm and "R1" in rotations else ""
    weight = f"{linear.fqn}.weight"
    outputs: tuple[tuple[str, str, tuple[int, ...]], ...] = ((weight, source.dtype, source.shape),)
    if fmt is not None:
        stored = formats.stored_tensors(fmt.weights, linear.out_features, linear.in_features, native)
        outputs = tuple((f"{linear.fqn}.{suffix}", dtype, shape) for suffix, dtype, shape in stored)
    touched = bool(fmt or turns or output_turn or norm)
    kind: Literal["matrix", "copy"] = "matrix" if touched else "copy"
    turned: dict[str, Any] = {"norm": norm, "input_turns": turns, "output_turn": output_turn}
    steps = [Step(kind, source.name, source.dtype, source.shape, outputs, **turned, format=fmt, hessian=hessian)]
    if fmt is not None and fmt.weights.kind == "int8":
        steps.append(Step("shape", "", "I64", source.shape, ((f"{linear.fqn}.weight_shape", "I64", (2,)),)))
    if linear.bias:
        bias = checkpoint.tensors[f"{linear.fqn}.bias"]
        output = ((bias.name, bias.dtype, bias.shape),)
        steps.append(
            Step(
                "vector" if output_turn else "copy", bias.name, bias.dtype, bias.shape, output, output_turn=output_turn
            )
        )
    if online is not None and engines.is_stored(online):
        matrix = (engines.matrix_name(linear.fqn, online), "BF16", (online.block, online.block))
        steps.append(Step("hadamard", "", "BF16", (online.block, online.block), (matrix,)))
    return steps


def _fused(rotations: dict[str, Rotation], arch: Llama, linear: Linear, side: str) -> Rotation | None:
    """What turns this side of a linear offline: R1, or R2 on all heads of its layer."""
    rotation = rotations.get(side) if side not in ONLINE else None
    if rotation is None or side == "R1":
        return rotation
    repeat = arch.heads // arch.kv_heads if side == linear.input_side else 1  # query heads share a value head
    return of_heads(rotation, int(linear.fqn.split(".")[2]), arch.kv_heads, repeat)


def _rows(step: Step, chunk: int) -> int:
    """Source rows handled at a time: about `chunk` elements, whole blocks of the output rotation and the format."""
    total = step.shape[0] if step.shape else 1
    if step.kind in ("vector", "norm", "hadamard", "shape"):
        return total
    unit = 1
    if step.output_turn is not None:  # a permutation takes rows from everywhere
        unit = total if step.output_turn.permutation else step.output_turn.block
    if step.format is not None:
        unit = math.lcm(unit, step.format.weights.block[0] or 1)
    width = math.prod(step.shape[1:])
    chunk *= COLUMNWISE if step.hessian else 1
    return min(total, unit * max(1, chunk // max(unit * width, 1)))


def working_bytes(step: Step) -> int:
    """What a chunk of this step holds at its worst: source, float32, its turned copy, temporaries, outputs."""
    elements = _elements(step)
    source = DTYPES[step.dtype].itemsize
    wide = 0 if step.kind == "copy" else 4
    permuted = step.output_turn is not None and step.output_turn.permutation
    copies = 2 if step.input_turns or permuted else 1
    copies += 5 if step.hessian else 0  # columns, their steps, errors and values, these as rows
    small = min(elements, CHUNK["cpu"]) * 40  # the quantizer's temporaries, at most a cache-sized piece
    return elements * (source + wide * copies + source) + small


def held_bytes(step: Step) -> int:
    """What a finished chunk of this step holds until it is written, at most: its source and as much again."""
    return 2 * _elements(step) * DTYPES[step.dtype].itemsize


def _elements(step: Step) -> int:
    """Of a chunk; `shape` is what a shape step writes, two numbers."""
    return 2 if step.kind == "shape" else step.rows * math.prod(step.shape[1:])


# --- Files -----------------------------------------------------------------------------------------------------------


def _config(
    source: dict[str, Any],
    untied: bool,
    linears: dict[str, LinearFormat | None],
    online: dict[str, Rotation],
    attention: Rotation | None,
) -> dict[str, Any]:
    """The source's config.json as it is, plus quantization_config; only an untied head changes a key of it."""
    config = copy.deepcopy(source)
    if untied:
        config["tie_word_embeddings"] = False
    fragment = engines.quantization_config(linears, online, attention)
    if fragment is not None:
        config["quantization_config"] = fragment
    return config
