"""Rows of one step of a plan: read, fold, turn, quantize. On one thread each, so that the bytes do not depend on how
many there are (a multi-threaded GEMM may sum in another order).
"""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from quantrot import formats
from quantrot.checkpoint import DTYPES, TensorInfo, not_finite, read_rows, tensor_bytes
from quantrot.formats import WeightFormat
from quantrot.gptq import Feedback, round_rows
from quantrot.orthogonal import sylvester
from quantrot.plan import CHUNK, Plan, Step
from quantrot.rotation import split_gain, turn_input, turn_output


@dataclass(frozen=True)
class Chunk:
    """A chunk's output rows, the source bytes they came from, and its part of the step's signal and error energy."""

    outputs: list[Tensor]
    source: memoryview
    signal: float = 0.0
    error: float = 0.0


@contextmanager
def one_threaded(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Workers whose arithmetic is one-threaded each; torch's own number of threads is back afterwards."""
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def starts(step: Step) -> range:
    """The first row of every chunk."""
    return range(0, max(step.shape[0] if step.shape else 1, 1), max(step.rows, 1))


def transform(plan: Plan, step: Step, start: int, feedback: Feedback | None = None) -> Chunk:
    """Rows of one step, from `start` on: read, fold, turn, quantize. feedback: of its inputs, for GPTQ."""
    if step.kind == "hadamard":
        return Chunk([sylvester(step.shape[0]).to(torch.bfloat16)], memoryview(b""))
    if step.kind == "shape":
        return Chunk([torch.tensor(step.shape, dtype=torch.int64)], memoryview(b""))
    info = plan.checkpoint.tensors[step.source]
    rows = read_rows(info, start, min(start + step.rows, info.shape[0]))
    source = tensor_bytes(rows)
    if step.kind != "matrix" and not _is_finite(rows):
        raise not_finite(info)
    if step.kind == "copy":
        return Chunk([rows], source)
    if step.kind == "norm":
        return Chunk([split_gain(rows.float(), step.input_turns[0])[1].to(rows.dtype)], source)
    if step.kind == "vector":
        assert step.output_turn is not None
        bias = turn_input(rows.to(plan.device, torch.float32), step.output_turn).to(rows.dtype).cpu()
        if not _is_finite(bias):
            raise _overflow(info, bias.dtype)
        return Chunk([bias], source)
    w = turned_rows(plan, step, rows, start)
    if step.format is None:
        return Chunk([w.cpu()], source)
    return _quantize(step, info, w, source, feedback)


def _is_finite(values: Tensor) -> bool:
    """Ten times as fast as `values.isfinite().all()`."""
    return values.numel() == 0 or bool(torch.isfinite(torch.stack(values.aminmax())).all())


def turned_rows(plan: Plan, step: Step, rows: Tensor, start: int = 0) -> Tensor:
    """What a step makes of its source's rows before they are quantized: float32, or rounded to the dtype that they
    keep, on the plan's device."""
    w = rows.to(plan.device).to(torch.float32, copy=True)  # a GPU widens what comes narrow
    if step.norm:
        gain = read_rows(plan.checkpoint.tensors[step.norm]).float()
        w.mul_(split_gain(gain, step.input_turns[0])[0].to(plan.device))
    for rotation in step.input_turns:
        w = turn_input(w, rotation)
    w = w if step.output_turn is None else turn_output(w, step.output_turn, start)
    w = w.to(DTYPES[step.dtype]) if step.format is None else w
    if not _is_finite(w):
        info = plan.checkpoint.tensors[step.source]
        if not _is_finite(rows):
            raise not_finite(info)
        raise _overflow(info, w.dtype)
    return w


def _overflow(info: TensorInfo, dtype: torch.dtype) -> ValueError:
    what = f"{info.file.name}: {info.name} holds values that overflow {dtype} once folded and turned"
    return ValueError(f"{what}; repair the checkpoint, or convert without rotations")


def in_pieces(weights: WeightFormat, w: Tensor) -> tuple[Tensor, ...]:
    """w [N, K] as some of its rows at a time, each piece small enough for the cache and of whole blocks."""
    unit = weights.block[0] or 1
    return w.split(unit * max(1, CHUNK[w.device.type] // (unit * w.shape[1])))


def _quantize(step: Step, info: TensorInfo, w: Tensor, source: memoryview, feedback: Feedback | None) -> Chunk:
    """Quantize rows piece by piece, and add up what it costs. (GPTQ rounds a column of all at a time.)"""
    assert step.format is not None
    weights = step.format.weights
    pieces, signal, error = [], 0.0, 0.0
    for piece in in_pieces(weights, w) if feedback is None else (w,):
        if feedback is None:
            stored = formats.quantize_rows(weights, piece)
        else:
            stored = round_rows(weights, piece, feedback)
        rounded = formats.dequantize(weights, stored, w.shape[1], torch.float32)
        noise = rounded.sub_(piece).flatten()
        signal += torch.dot(piece.flatten(), piece.flatten()).item()
        error += torch.dot(noise, noise).item()
        if not math.isfinite(error) and not _is_finite(noise):
            what = f"{info.file.name}: {info.name} holds values that {weights.kind} rounds to infinity or NaN"
            raise ValueError(f"{what}; repair the checkpoint, or skip this linear")
        pieces.append([tensor.cpu() for tensor in stored])
    return Chunk([torch.cat(parts) for parts in zip(*pieces, strict=True)], source, signal, error)
