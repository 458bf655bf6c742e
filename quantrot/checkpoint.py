"""Sharded safetensors by slices: a reader that trusts nothing, and a writer that knows every byte before the first.

Reads go through `pread` into fresh buffers and not through a memory map, whose pages would count towards the process's
resident set: a conversion's memory is then what it allocates. Headers are checked against the file before any offset
is used. Format: https://github.com/huggingface/safetensors (8-byte little-endian header size, JSON, data).
"""

import codecs
import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from quantrot.process import cpus

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_HEADER = 100_000_000  # the safetensors library's own limit
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
FLOATS = ("F64", "F32", "F16", "BF16")
HASH_CHUNK = 8 << 20
HASHED_AT_ONCE = 8  # files or tensors, each with a chunk in memory
T = TypeVar("T")


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: dtype is safetensors' name for it, start a byte offset in the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def same_bytes(a: TensorInfo, b: TensorInfo) -> bool:
    """Whether two tensors have the same dtype, shape and values; reads both."""
    hashes = (sha256_of(info) for info in (a, b))
    return (a.dtype, a.shape) == (b.dtype, b.shape) and len(set(hashes)) == 1


def not_finite(info: TensorInfo) -> ValueError:
    """The error for a tensor that a conversion cannot make anything of."""
    return ValueError(f"{info.file.name}: {info.name} holds NaN or infinity; repair the checkpoint before converting")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory whose headers have been read and checked; no weight has."""

    root: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def biased(self) -> set[str]:
        """Names of the modules with a bias."""
        return {name.removesuffix(".bias") for name in self.tensors if name.endswith(".bias")}


def open_checkpoint(root: Path) -> Checkpoint:
    """Read config.json and every shard's header. ValueError says which file is missing, malformed or lying."""
    if not root.is_dir():
        raise ValueError(f"{root}: not a directory; give one that holds config.json and safetensors files")
    if not (root / "config.json").exists():
        _refuse_other_kinds(root)
    config = read_json(root / "config.json")
    tensors: dict[str, TensorInfo] = {}
    for file in _shards(root):
        for info in read_header(file):
            if info.name in tensors:
                raise ValueError(f"{file.name}: tensor {info.name!r} is also in {tensors[info.name].file.name}")
            tensors[info.name] = info
    return Checkpoint(root, config, tensors)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or a ValueError that names the file."""
    try:
        text = path.read_bytes()
        if text.startswith(codecs.BOM_UTF8):
            raise ValueError("it begins with a byte order mark, which transformers does not read; save it without one")
        data = json.loads(text)
    except FileNotFoundError:
        raise ValueError(f"{path}: missing; a Hugging Face checkpoint directory has a {path.name}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: a JSON object is needed, found a {type(data).__name__}")
    return data


def _shards(root: Path) -> list[Path]:
    """The safetensors files of a directory: the single file, else the index's. As transformers looks for them, whose
    save_pretrained leaves an index behind when a sharded model becomes one file."""
    if (root / SINGLE).exists():
        return [root / SINGLE]
    if (root / INDEX).exists():
        weight_map = read_json(root / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise ValueError(f"{root / INDEX}: weight_map is missing or does not map tensor names to file names")
        names = sorted(set(weight_map.values()))
        for name in names:
            if Path(name).name != name or name in ("", ".."):
                raise ValueError(
                    f"{root / INDEX}: {name!r} points outside the directory; only plain file names are read"
                )
        missing = [name for name in names if not (root / name).is_file()]
        if missing:
            raise ValueError(
                f"{root}: missing {len(missing)} of {len(names)} shards: {', '.join(missing[:5])}; download again"
            )
        return [root / name for name in names]
    pickles = sorted(p.name for p in root.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickles:
        raise ValueError(
            f"{root}: holds only pickle weights ({', '.join(pickles[:3])}), which can run code and are never loaded; "
            "save the model as safetensors first (model.save_pretrained(...) in transformers does)"
        )
    for path in (root / SINGLE, root / INDEX):
        if path.is_symlink():
            raise ValueError(f"{path}: links to {os.readlink(path)}, which is not there; download it again")
    _refuse_other_kinds(root)
    raise ValueError(f"{root}: no {SINGLE} and no {INDEX}; give a checkpoint that was saved as safetensors")


def _refuse_other_kinds(root: Path) -> None:
    """ValueError for a directory that holds something else than a checkpoint, known by its files."""
    if (root / "adapter_config.json").exists():
        raise ValueError(
            f"{root}: a PEFT adapter (adapter_config.json); merge it into its model first (peft's merge_and_unload) "
            "and convert what that saves"
        )
    gguf = sorted(path.name for path in root.glob("*.gguf"))
    if gguf:
        raise ValueError(f"{root}: holds GGUF weights ({gguf[0]}), which are not read; give the safetensors checkpoint")


def read_header(file: Path) -> list[TensorInfo]:
    """Every tensor of a safetensors file, after checking that sizes, offsets and the file's length agree."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        first = handle.read(8)
        length = int.from_bytes(first, "little")
        if first == b"version ":
            raise ValueError(f"{file}: a Git LFS pointer, not the file itself; run git lfs pull, or download it again")
        if len(first) < 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
            raise ValueError(
                f"{file}: not a safetensors file, or truncated: header of {length} bytes in a file of {size}"
            )
        raw = handle.read(length)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: the safetensors header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise ValueError(f"{file}: the safetensors header is not a JSON object")
    header.pop("__metadata__", None)
    found = [_entry(file, name, entry, 8 + length) for name, entry in header.items()]
    end = 8 + length
    for info in sorted(found, key=lambda info: (info.start, info.nbytes)):
        if info.start != end:
            raise ValueError(f"{file}: tensor {info.name!r} starts at byte {info.start}, the one before ends at {end}")
        end = info.start + info.nbytes
    if end != size:
        raise ValueError(f"{file}: truncated or padded: the header describes {end} bytes, the file has {size}")
    return found


def _entry(file: Path, name: str, entry: Any, base: int) -> TensorInfo:
    """One header entry, checked: dtype known, shape of counts, offsets as long as dtype and shape say."""
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"{file}: tensor {name!r} lacks dtype, shape or data_offsets") from None
    counts = [*shape, start, stop] if isinstance(shape, list) else [None]
    if not all(isinstance(c, int) and not isinstance(c, bool) and 0 <= c < 1 << 62 for c in counts):
        raise ValueError(f"{file}: tensor {name!r} has shape {shape!r:.80} and offsets {start!r:.20}, {stop!r:.20}")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{file}: tensor {name!r} has dtype {dtype!r:.40}; supported: {', '.join(DTYPES)}")
    nbytes = DTYPES[dtype].itemsize
    for dim in shape:
        nbytes *= dim
    if stop - start != nbytes:
        raise ValueError(
            f"{file}: tensor {name!r} {dtype} {shape} needs {nbytes} bytes, its offsets span {stop - start}"
        )
    return TensorInfo(name, file, dtype, tuple(shape), base + start, nbytes)


def read_rows(info: TensorInfo, start: int = 0, stop: int | None = None) -> Tensor:
    """Rows start:stop of a tensor (all of it by default; a scalar counts as one row), in its own dtype, on the CPU."""
    rows = info.shape[0] if info.shape else 1
    stop = rows if stop is None else stop
    row = info.nbytes // max(rows, 1)
    raw = torch.empty((stop - start) * row, dtype=torch.uint8)
    _read_into(info, raw.numpy().data, info.start + start * row)
    return raw.view(DTYPES[info.dtype]).view(stop - start if info.shape else 1, *info.shape[1:])


def look_up(info: TensorInfo, rows: Tensor) -> Tensor:
    """The rows of these numbers, int64 [...] -> [..., columns], each of which is read once."""
    numbers, where = rows.unique(return_inverse=True)
    return torch.cat([read_rows(info, row, row + 1) for row in numbers.tolist()])[where]


def _read_into(info: TensorInfo, buffer: memoryview, offset: int) -> None:
    descriptor = os.open(info.file, os.O_RDONLY)
    try:
        done = 0
        while done < len(buffer):
            count = os.preadv(descriptor, [buffer[done : done + (1 << 30)]], offset + done)
            if count == 0:
                raise ValueError(f"{info.file}: ended while reading {info.name!r}; was it changed meanwhile?")
            done += count
    finally:
        os.close(descriptor)


# --- Writing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """One output file, laid out to the byte: `header` is what comes first, `tensors` have final offsets."""

    name: str
    header: bytes
    tensors: tuple[TensorInfo, ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(t.nbytes for t in self.tensors)


def lay_out(tensors: list[tuple[str, str, tuple[int, ...]]], max_bytes: int) -> list[Shard]:
    """Distribute (name, dtype, shape) over shards of at most max_bytes of data each, in order.

    A tensor larger than max_bytes has a shard of its own. Within a shard wide types come first, which keeps every
    tensor aligned to its own size.
    """
    groups: list[list[tuple[str, str, tuple[int, ...], int]]] = [[]]
    used = 0
    for name, dtype, shape in tensors:
        nbytes = torch.Size(shape).numel() * DTYPES[dtype].itemsize
        if groups[-1] and used + nbytes > max_bytes:
            groups.append([])
            used = 0
        groups[-1].append((name, dtype, shape, nbytes))
        used += nbytes
    count = len(groups)
    names = [SINGLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    return [_shard(name, group) for name, group in zip(names, groups, strict=True)]


def _shard(file: str, tensors: list[tuple[str, str, tuple[int, ...], int]]) -> Shard:
    ordered = sorted(tensors, key=lambda t: -DTYPES[t[1]].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape, nbytes in ordered:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    raw = len(text).to_bytes(8, "little") + text
    infos = tuple(
        TensorInfo(name, Path(file), dtype, shape, len(raw) + header[name]["data_offsets"][0], nbytes)
        for name, dtype, shape, nbytes in ordered
    )
    return Shard(file, raw, infos)


def index_json(shards: list[Shard]) -> bytes:
    """model.safetensors.index.json for the shards."""
    total = sum(t.nbytes for shard in shards for t in shard.tensors)
    weight_map = {t.name: shard.name for shard in shards for t in shard.tensors}
    return json.dumps(
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=2
    ).encode()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def resolved(path: str | Path) -> Path:
    """Where links lead; OSError for a loop of them, of which Path.resolve makes a RuntimeError or, since Python 3.13,
    nothing."""
    found = Path(os.path.realpath(path))
    try:
        found.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise
    return found


@contextmanager
def named(path: Path) -> Iterator[None]:
    """An error of the file system with the file that it is about."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, the one that a link is to, whole or not at all: nobody reads half of it, and an old one survives a
    failure."""
    with named(path):  # not the temporary file
        path = resolved(path)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes it private
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def sha256_of(info: TensorInfo) -> str:
    """sha256 of a tensor's bytes."""
    return sha256_range(info.file, info.start, info.start + info.nbytes)


def sha256_range(file: Path, start: int = 0, stop: int | None = None) -> str:
    """sha256 of a byte range of a file (all of it by default)."""
    digest = hashlib.sha256()
    for chunk in _chunks(file, start, file.stat().st_size if stop is None else stop):
        digest.update(chunk)
    return digest.hexdigest()


def hashed(sha256: Callable[[T], str], files: Iterable[T]) -> Generator[str, None, None]:
    """`sha256` of each, in order, of several at once: 3.4 GB in 1.2 s for 3.5 on a server of 16 cores."""
    pool = ThreadPoolExecutor(min(cpus(), HASHED_AT_ONCE))
    try:
        yield from pool.map(sha256, files)
    finally:
        pool.shutdown(cancel_futures=True)


def first_differing(
    sha256: Callable[[T], str], wanted: Mapping[T, str], report: Callable[[int], None] = lambda done: None
) -> T | None:
    """The first file or tensor whose sha256 is not the wanted one. report: how many are hashed, before each."""
    with closing(hashed(sha256, wanted)) as hashes:
        for done, (what, found) in enumerate(zip(wanted, hashes, strict=True)):
            report(done)
            if found != wanted[what]:
                return what
    report(len(wanted))
    return None


def _chunks(file: Path, start: int, stop: int) -> Iterator[bytes]:
    with file.open("rb") as handle:
        handle.seek(start)
        while start < stop:
            chunk = handle.read(min(HASH_CHUNK, stop - start))
            if not chunk:
                return
            start += len(chunk)
            yield chunk
