"""Run a plan: stream rows of the source through fold, turn and quantize into laid-out shards.

Work goes into `<out>.partial`; a journal there has a line for each finished step, with the sha256 of its tensors'
bytes. A killed conversion resumes by checking those hashes and doing the rest, so it needs no fsync on the way and ends
with the same bytes. Only a complete directory gets the output's name.

Chunks are independent and their size does not depend on the number of threads: the bytes do not either. Where GPTQ
rounds, the layers before a chunk's are written first, because its layer's inputs are theirs (hessians.py).
"""

import fcntl
import hashlib
import json
import math
import os
import platform
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from heapq import nlargest
from pathlib import Path
from typing import Any, BinaryIO

import torch

from quantrot.calibration import Calibration
from quantrot.card import CARD, model_card
from quantrot.checkpoint import (
    HASHED_AT_ONCE,
    INDEX,
    TensorInfo,
    first_differing,
    hashed,
    index_json,
    named,
    read_json,
    resolved,
    sha256_of,
    sha256_range,
    tensor_bytes,
)
from quantrot.device import known_device
from quantrot.gptq import Feedback
from quantrot.learned import COPY
from quantrot.manifest import MANIFEST, VERSION, check_files, dump, rotation_entry
from quantrot.plan import BUDGET, LOOK_AHEAD, Plan, held_bytes, working_bytes
from quantrot.plan import plan as make_plan
from quantrot.process import Progress, cpus, peak_bytes, size
from quantrot.recipe import ONLINE, RecipeLike
from quantrot.transform import Chunk, one_threaded, starts, transform
from quantrot.version import __version__

JOURNAL = "journal.jsonl"
REST = 2048  # bytes a step of config, index, card, manifest (together 440 to 930) and journal (400)
SET_ASIDE = ".set-aside"  # in an output that is being overwritten, until the new one has its name


@dataclass(frozen=True)
class Conversion:
    """A finished conversion: what was planned, the manifest that was written, and what it took."""

    out: Path
    plan: Plan
    manifest: dict[str, Any]
    seconds: float
    peak_bytes: int


@torch.inference_mode(False)  # the caller's, in which the threads that do the work are not
def convert(
    model: str | Path,
    recipe: RecipeLike,
    out: str | Path,
    *,
    device: str | torch.device = "cpu",
    resume: bool = False,
    overwrite: bool = False,
    max_shard_size: int = 5_000_000_000,
    calibration: Calibration | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Convert a checkpoint by a recipe into the directory `out`. The source is only read.

    model: a directory, hub id or "demo"; recipe: a shipped name, a YAML file, a dict or a `Recipe`; calibration: the
    texts for what the recipe rounds by GPTQ; threads: chunks at a time (default: the CPUs this process may use);
    progress: told the current tensor, source bytes done, source bytes in all.
    ValueError for anything a user can mend, before a weight is read wherever headers show it; OSError from the file
    system passes through, and what was done stays resumable.
    """
    started = time.monotonic()
    target = _target(out)
    plan = make_plan(model, recipe, device, max_shard_size, calibration)
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise ValueError(f"threads is {threads!r}; a positive integer is needed")
    workers = threads or cpus()
    known_device(device)  # a plan needs none
    partial = _prepare(target, plan, resume, overwrite)
    if partial is not None:  # None: resumed after the last rename, nothing is left to do
        with (partial / JOURNAL).open("a+b", buffering=0) as journal:  # closing it writes nothing that could fail
            _lock(journal, partial)
            if not (partial / MANIFEST).exists():
                _write_rest(plan, partial, _run(plan, partial, journal, workers, progress))
            _finish(partial, target, overwrite)
    _remove(_replaced(target))
    return Conversion(target, plan, read_json(target / MANIFEST), time.monotonic() - started, peak_bytes())


# --- Directories -----------------------------------------------------------------------------------------------------


def begun(out: str | Path) -> bool:
    """Whether there is something of a conversion to `out` that resuming it would go on from."""
    return _partial(_target(out)).exists()


def _target(out: str | Path) -> Path:
    if not isinstance(out, str | os.PathLike):
        raise ValueError(f"out is {out!r:.80}; give a directory to create")
    return resolved(os.path.expanduser(out))  # where a link points: a rename would replace the link


def _partial(target: Path) -> Path:
    return target.with_name(target.name + ".partial")


def _prepare(target: Path, plan: Plan, resume: bool, overwrite: bool) -> Path | None:
    """The directory to work in, checked and ready, or None if the output already is this conversion's."""
    if not target.name:
        raise ValueError(f"output {target} has no name of its own; give a directory to create")
    partial = _partial(target)
    source = resolved(plan.source.path)
    if target == source or source in target.parents:
        raise ValueError(f"output {target} is inside the source {source}; choose another directory")
    for taken in (target, partial, _replaced(target)):  # all three may be deleted
        if resolved(taken) in (source, *source.parents):
            raise ValueError(f"the source {source} is in {taken}, which would be replaced; choose another output")
    if target.suffix in (partial.suffix, _replaced(target).suffix):
        raise ValueError(f"output {target}: names that end so are of unfinished and older outputs; choose another")
    for kept, signs in ((partial, (JOURNAL, MANIFEST)), (_replaced(target), (SET_ASIDE,))):
        ours = any((kept / name).exists() for name in signs)
        if kept.exists() and not ours and any(kept.iterdir() if kept.is_dir() else [kept]):
            raise ValueError(
                f"{kept} is nothing that a conversion left, and would be replaced; move it, or change output"
            )
    if resume and not partial.exists() and _is_done(target, plan):
        return None
    _check_free(target, overwrite)
    if partial.exists() and not resume:
        if overwrite or (partial / JOURNAL).exists():
            with (partial / JOURNAL).open("ab") as journal:
                _lock(journal, partial)  # it may not be unfinished but running
                if overwrite:
                    _remove(partial)
        if not overwrite:
            raise ValueError(
                f"{partial} is left from an unfinished conversion; resume (--resume) goes on, overwrite (--overwrite) "
                "starts again"
            )
    if (partial / MANIFEST).exists() and not _is_done(partial, plan):
        raise ValueError(_other_conversion(partial))
    there = partial if partial.exists() else next(path for path in partial.parents if path.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"output {target}: no permission to write in {there}; change it, or choose another directory")
    written = sum(f.stat().st_blocks * 512 for f in partial.iterdir()) if there == partial else 0
    free, needed = shutil.disk_usage(there).free, _needed(plan)
    if free + written < needed:
        raise ValueError(
            f"output {target}: the disk has {size(free)} free and the conversion writes {size(needed)}; free some "
            "space or choose another disk"
        )
    partial.mkdir(parents=True, exist_ok=True)
    return partial


def _needed(plan: Plan) -> int:
    """Bytes that a conversion writes, rounded up."""
    copied = sum(path.stat().st_size for path in plan.copied) + (len(plan.learned.data) if plan.learned else 0)
    return plan.output_bytes + copied + REST * len(plan.steps)


def _check_free(target: Path, overwrite: bool) -> None:
    """Nothing is where the output will be, or a conversion that may be overwritten."""
    if target.exists() and not overwrite:
        raise ValueError(
            f"output {target} exists; choose another, or give overwrite (--overwrite) to replace it when done"
        )
    if target.exists() and any(target.iterdir() if target.is_dir() else [target]) and not (target / MANIFEST).is_file():
        raise ValueError(f"output {target} was not written by quantrot and is not replaced; choose another directory")
    if target.exists() and not os.access(target, os.W_OK | os.X_OK):
        raise ValueError(
            f"output {target}: no permission to write in it, and overwrite deletes what it holds; change that (chmod), "
            "or choose another directory"
        )
    if others := _others(target):
        raise ValueError(
            f"output {target} also holds {', '.join(others[:5])}{', ...' if others[5:] else ''}, which overwrite would "
            "delete; move it, or choose another directory"
        )


def _others(target: Path) -> list[str]:
    """What lies in an output and is none of its files; nothing where its manifest cannot be read."""
    try:
        ours = {*read_json(target / MANIFEST)["files"], CARD, MANIFEST, SET_ASIDE}
        return sorted(path.name for path in target.iterdir() if path.name not in ours)
    except (ValueError, LookupError, TypeError, OSError):
        return []


def _is_done(directory: Path, plan: Plan) -> bool:
    """Whether a directory holds all that the plan makes of the source as it is now. Reads both: a source that was
    trained on in place has the headers that it had, of which a fingerprint is."""
    try:
        data = read_json(directory / MANIFEST)
        if data["conversion"] != plan.fingerprint():
            return False
        check_files(directory, data)
        files, copies = data["files"], _copies(plan)
        if set(files) != set(_names(plan)):
            return False
        if any(files[name]["sha256"] != sha256_range(path) for name, path in copies.items()):
            return False
        wanted = {plan.checkpoint.tensors[name]: sha256 for name, sha256 in data["source"]["tensors"].items()}
        return first_differing(sha256_of, wanted) is None
    except (ValueError, LookupError, TypeError, AttributeError, OSError):
        return False


def _other_conversion(partial: Path) -> str:
    return (
        f"{partial} holds an unfinished conversion of another source, recipe, text, shard size, device or version "
        "of quantrot or torch; repeat that one's arguments with resume, or start again with overwrite alone"
    )


def _lock(journal: BinaryIO, partial: Path) -> None:
    try:
        fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{partial}: another process is converting into it; wait, or choose another output") from None


def _replaced(target: Path) -> Path:
    """Where an output that is being overwritten waits for the moment of the rename."""
    return target.with_name(target.name + ".replaced")


def _remove(directory: Path) -> None:
    """Delete a directory of ours; what says that it is ours goes last, so that a kill leaves nothing unknown."""
    if directory.is_dir():
        for path in directory.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name not in (MANIFEST, JOURNAL, SET_ASIDE):
                path.unlink(missing_ok=True)
        for name in (MANIFEST, JOURNAL, SET_ASIDE):
            (directory / name).unlink(missing_ok=True)
        shutil.rmtree(directory, ignore_errors=True)


def _finish(partial: Path, target: Path, overwrite: bool) -> None:
    """Give the complete directory its name; an older output steps aside only now. Safe to repeat after a kill."""
    _check_free(target, overwrite)  # somebody may have put something there meanwhile
    (partial / JOURNAL).unlink(missing_ok=True)
    _sync(partial)
    if target.exists():
        _remove(_replaced(target))
        (target / SET_ASIDE).touch()  # so that nothing else of this name is ever removed
        target.rename(_replaced(target))
    partial.rename(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with named(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- Steps -----------------------------------------------------------------------------------------------------------


@dataclass
class _Open:
    """A step whose chunks are being written: hashes so far, the next byte of each output, energies."""

    offsets: list[int]
    digests: list[Any]
    source: Any = field(default_factory=hashlib.sha256)
    signal: float = 0.0
    error: float = 0.0


def _run(plan: Plan, partial: Path, journal: BinaryIO, workers: int, progress: Progress | None) -> list[dict[str, Any]]:
    """Do every step that the journal does not hold yet; returns the records of all steps, in order."""
    places = {info.name: info for shard in plan.shards for info in shard.tensors}
    records = _resume(plan, partial, journal, places)
    sizes = [plan.checkpoint.tensors[step.source].nbytes if step.source else 0 for step in plan.steps]
    done, total = sum(sizes[i] for i in records), sum(sizes)
    handles = {shard.name: _open_shard(partial / shard.name, shard.header, shard.nbytes) for shard in plan.shards}

    def report(name: str) -> None:
        if progress is not None:
            progress(name, done, total)

    # 3.4 GB on a GPU and 16 CPUs took 15.1 s for 18.0; where both CPUs of two are at work already, 29 for 26.
    hash_threads = ThreadPoolExecutor(HASHED_AT_ONCE) if cpus() >= 2 * HASHED_AT_ONCE else None
    try:
        for i, chunk, last in _chunks(plan, set(records), partial, workers, report):
            step = plan.steps[i]
            outputs = [places[name] for name, _, _ in step.outputs]
            if i not in records:
                records[i] = {}
                state = _Open([place.start for place in outputs], [hashlib.sha256() for _ in outputs])
                report(step.name)
            _write_chunk(chunk, outputs, handles, state, hash_threads)
            done += len(chunk.source)
            if last:
                hashes = {place.name: digest.hexdigest() for place, digest in zip(outputs, state.digests, strict=True)}
                records[i] = {"step": i, "sha256": hashes, "source": state.source.hexdigest()}
                records[i] |= {"signal": state.signal, "error": state.error}
                _note(journal, records[i])
                report(step.name)
        for handle in handles.values():
            with named(Path(handle.name)):
                os.fsync(handle.fileno())
    except ValueError as error:
        raise ValueError(f"{error}\n(once that is mended, start again with overwrite, --overwrite)") from None
    finally:
        if hash_threads:
            hash_threads.shutdown()
        for handle in handles.values():
            handle.close()
    return [records[i] for i in range(len(plan.steps))]


def _resume(plan: Plan, partial: Path, journal: BinaryIO, places: dict[str, TensorInfo]) -> dict[int, dict[str, Any]]:
    """The journal's steps whose bytes still are what their hashes say; a new journal gets its first line."""
    files = sorted({info.file for info in plan.checkpoint.tensors.values()})
    stats = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    first = {"conversion": plan.fingerprint(), "source": stats}
    journal.seek(0)
    whole = [line for line in journal.read().splitlines(keepends=True) if line.endswith(b"\n")]
    journal.truncate(sum(map(len, whole)))  # drops a torn last line
    if not whole:
        _note(journal, first)
        return {}
    try:
        head, *lines = (json.loads(line) for line in whole)
        if head != first:
            lines = []
        for line in lines:
            if set(line["sha256"]) != {name for name, _, _ in plan.steps[line["step"]].outputs}:
                raise KeyError(line["step"])
            float(line["signal"]), float(line["error"]), str(line["source"])
        done = {line["step"]: line for line in lines if _intact(partial, line["sha256"], places)}
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{partial / JOURNAL}: malformed ({what}); start again with overwrite alone") from None
    if head != first:
        raise ValueError(_other_conversion(partial))
    return done


def _note(journal: BinaryIO, what: dict[str, Any]) -> None:
    """Append a line to the journal."""
    line = json.dumps(what).encode() + b"\n"
    with named(Path(journal.name)):
        while line:
            line = line[journal.write(line) :]


def _intact(partial: Path, hashes: dict[str, str], places: dict[str, TensorInfo]) -> bool:
    for name, expected in hashes.items():
        place = replace(places[name], file=partial / places[name].file)
        if not place.file.exists() or sha256_of(place) != expected:
            return False
    return True


def _open_shard(path: Path, header: bytes, nbytes: int) -> BinaryIO:
    handle = path.open("r+b" if path.exists() else "w+b", buffering=0)
    with named(path):
        handle.write(header)
        handle.truncate(nbytes)
    return handle


def _write_chunk(
    chunk: Chunk, outputs: list[TensorInfo], handles: dict[str, BinaryIO], state: _Open, hash_threads: Executor | None
) -> None:
    """Write a chunk's rows where the ones before it ended, and bring the step's hashes and energies up to date."""
    written = [tensor_bytes(tensor) for tensor in chunk.outputs]
    each = hash_threads.map if hash_threads else map  # which starts when it is asked
    hashing = each(lambda digest, data: digest.update(data), [state.source, *state.digests], [chunk.source, *written])
    for k, (data, place) in enumerate(zip(written, outputs, strict=True)):
        handle = handles[place.file.name]
        with named(Path(handle.name)):
            while data:
                count = os.pwrite(handle.fileno(), data, state.offsets[k])
                state.offsets[k] += count
                data = data[count:]
    list(hashing)
    state.signal += chunk.signal
    state.error += chunk.error


def _chunks(
    plan: Plan, done: set[int], partial: Path, workers: int, report: Callable[[str], None]
) -> Iterator[tuple[int, Chunk, bool]]:
    """What `_stream` gives of all steps that are not done; where GPTQ rounds, layer by layer."""
    if plan.calibration is None:
        yield from _stream(plan, [i for i in range(len(plan.steps)) if i not in done], {}, workers)
        return
    from quantrot.hessians import stages  # with transformers' models, which take a second

    for todo, feedback in stages(plan, done, partial, workers, report):
        yield from _stream(plan, todo, feedback, workers)


def _stream(
    plan: Plan, todo: list[int], feedback: dict[str, Feedback], workers: int
) -> Iterator[tuple[int, Chunk, bool]]:
    """(step, chunk, whether it is the step's last) in order, computed ahead by one-threaded workers.

    Of the chunks in flight, the largest are taken to be at work, the others to be finished and wait to be written.
    """
    chunks = ((i, row, row + max(plan.steps[i].rows, 1)) for i in todo for row in starts(plan.steps[i]))
    pending: deque[tuple[int, bool, Future[Chunk]]] = deque()
    working = {i: working_bytes(plan.steps[i]) for i in todo}
    held = {i: held_bytes(plan.steps[i]) for i in todo}
    following = next(chunks, None)
    with one_threaded(workers) as pool:
        while following or pending:
            while following and len(pending) < workers + LOOK_AHEAD:
                i, start, stop = following
                steps = [i, *(k for k, _, _ in pending)]
                needed = sum(nlargest(workers, (working[k] for k in steps))) + sum(held[k] for k in steps)
                if pending and needed > BUDGET:
                    break
                step = plan.steps[i]
                last = stop >= (step.shape[0] if step.shape else 1)
                pending.append((i, last, pool.submit(transform, plan, step, start, feedback.get(step.hessian))))
                following = next(chunks, None)
            i, last, future = pending.popleft()
            yield i, future.result(), last


# --- The files beside the shards -------------------------------------------------------------------------------------


def sqnr_db(signal: float, error: float) -> float | None:
    """Signal to quantization noise in decibels; None for a lossless or all-zero tensor, and past float32's range."""
    measurable = signal > 0 and error > 0 and math.isfinite(signal) and math.isfinite(error)
    return round(10 * math.log10(signal / error), 2) if measurable else None


def _write_rest(plan: Plan, partial: Path, records: list[dict[str, Any]]) -> None:
    """Config, tokenizer, model card and, last, the manifest: its presence says that all else is there."""
    names = _names(plan)
    for path in [path for path in partial.rglob("*") if not path.is_dir()]:
        if str(path.relative_to(partial)) not in (*names, JOURNAL):
            path.unlink()  # what the source had when this conversion was begun
    for name, path in _copies(plan).items():
        (partial / name).parent.mkdir(exist_ok=True)
        with path.open("rb") as file, named(partial / name), (partial / name).open("wb") as copy:
            shutil.copyfileobj(file, copy)
    _write(partial / "config.json", (json.dumps(plan.config, indent=2, ensure_ascii=False) + "\n").encode())
    if len(plan.shards) > 1:
        _write(partial / INDEX, index_json(list(plan.shards)))
    if plan.learned is not None:
        _write(partial / COPY, plan.learned.data)
    manifest = _manifest(plan, records)
    # a path's bytes that are no character to this locale are written as they are
    _write(partial / CARD, model_card(plan, manifest).encode(errors="surrogateescape"))
    for name in (*names, CARD):
        _sync(partial / name)  # the manifest must not reach the disk before what it lists
    names = sorted(names)
    hashes = hashed(sha256_range, [partial / name for name in names])
    manifest["files"] = {
        name: {"size": (partial / name).stat().st_size, "sha256": sha256}
        for name, sha256 in zip(names, hashes, strict=True)
    }
    temporary = partial / (MANIFEST + ".tmp")
    _write(temporary, dump(manifest))
    _sync(temporary)
    temporary.replace(partial / MANIFEST)


def _write(path: Path, data: bytes) -> None:
    with named(path):
        path.write_bytes(data)


def _copies(plan: Plan) -> dict[str, Path]:
    """What is copied byte for byte: its name in the output -> the source's file."""
    return {str(path.relative_to(plan.source.path)): path for path in plan.copied}


def _names(plan: Plan) -> list[str]:
    """The files of an output that its manifest lists: not the card, which people edit."""
    names = [*_copies(plan), "config.json", *(shard.name for shard in plan.shards)]
    names += [INDEX] if len(plan.shards) > 1 else []
    return names + ([COPY] if plan.learned is not None else [])


def _manifest(plan: Plan, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything but the files' hashes, which come when all files are written."""
    by_name = {
        step.name: (step, record)
        for step, record in zip(plan.steps, records, strict=True)
        if step.kind in ("matrix", "copy") and len(step.shape) == 2
    }
    sources = sorted(
        {step.source: r["source"] for step, r in zip(plan.steps, records, strict=True) if step.source}.items()
    )
    linears = {}
    for fqn, fmt in plan.linears.items():
        step, record = by_name.get(fqn, (None, {}))
        online = plan.online.get(fqn)
        linears[fqn] = {
            "format": asdict(fmt) if fmt else None,
            "shape": list(step.shape) if step else None,
            "sqnr_db": sqnr_db(record["signal"], record["error"]) if step and fmt else None,
            "online": rotation_entry(online, True) if online else None,
        }
    return {
        "layout": VERSION,
        "quantrot": __version__,
        "conversion": plan.fingerprint(),
        "recipe_name": plan.recipe.name,
        "recipe": plan.recipe.resolved(),
        "source": {
            "model": plan.source.name,
            "revision": plan.source.revision,
            "weights_sha256": hashlib.sha256(json.dumps(sources).encode()).hexdigest(),
            "tensors": dict(sources),
        },
        "rotations": {name: rotation_entry(r, name in ONLINE) for name, r in plan.rotations.items()},
        "attention": rotation_entry(plan.attention, True) if plan.attention else None,
        "arithmetic": plan.recipe.attention,
        "kv_cache": plan.recipe.kv_cache,
        "calibration": plan.calibration.entry() if plan.calibration else None,
        "linears": linears,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
