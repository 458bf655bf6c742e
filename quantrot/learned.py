"""The file of learned rotations: a safetensors file with the matrices, and what they were learned for.

R1 is float32 [hidden / block, block, block], along the channels in the order that the recipe's `channels` gives them
(blocks that by-gain does not turn are there, not used). R2 is float32 [layers, kv_heads, head_dim / block, block,
block]. The metadata's one entry, `quantrot`, is JSON: `model` and its `digest`, the `recipe` that was started from, the
text, steps, seed, and the KL on windows that were held out, before and after.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from quantrot import llama
from quantrot.checkpoint import Checkpoint, read_header, read_rows, write_whole
from quantrot.llama import Llama
from quantrot.recipe import Recipe
from quantrot.rotation import Rotation

COPY = "quantrot.rotations"  # in an output, where engines would take a *.safetensors for weights
ORTHOGONAL = 1e-6  # largest entry of R^T R - I that is let pass; float32 leaves 1e-7 of an exact matrix


@dataclass(frozen=True)
class Learned:
    """A file as it was read: its bytes, its matrices, and what it says of itself."""

    path: Path
    data: bytes
    matrices: dict[str, Tensor]
    about: dict[str, Any]


def read(path: Path) -> Learned:
    """Read a file of learned rotations; ValueError where it is none."""
    if path.is_dir():
        raise ValueError(f"{path}: a directory; name the file that `quantrot learn` wrote")
    if not path.is_file():
        raise ValueError(f"{path}: no such file; `quantrot learn` writes one")
    read_header(path)
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    try:
        about = json.loads(header["__metadata__"]["quantrot"])
        str(about["model"]), str(about["digest"]), dict(about["recipe"])
    except (KeyError, TypeError, ValueError, RecursionError):
        raise ValueError(f"{path}: its metadata does not say what was learned; `quantrot learn` writes that") from None
    try:
        return Learned(path, data, safetensors.torch.load(data), about)
    except safetensors.SafetensorError as error:  # stricter than `read_header`, as on other metadata
        raise ValueError(f"{path}: safetensors cannot read it: {error}; learn it again") from None


def write(path: Path, matrices: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write a file of learned rotations, whole or not at all."""
    write_whole(path, safetensors.torch.save(matrices, {"quantrot": json.dumps(about)}))


def with_matrices(rotation: Rotation, file: Learned, units: tuple[int, ...]) -> Rotation:
    """The rotation with its matrices out of the file. units: () for R1, (layers, kv_heads) for R2.

    ValueError where the file has none of its name, shape and dtype, or what it has is not orthogonal.
    """
    name, found = rotation.name, file.matrices.get(rotation.name)
    if found is None:
        raise ValueError(f"{file.path} holds no {name}; it holds {', '.join(sorted(file.matrices)) or 'nothing'}")
    shape = (*units, rotation.width // rotation.block, rotation.block, rotation.block)
    if found.dtype != torch.float32 or found.shape != shape:
        raise ValueError(
            f"{file.path} holds {name} as {_shown(found.dtype, found.shape)}; this model, in blocks of "
            f"{rotation.block}, needs {_shown(torch.float32, shape)}"
        )
    error = distance(found)
    if not error <= ORTHOGONAL:  # NaN fails too
        raise ValueError(
            f"{name} of {file.path} is not orthogonal: R^T R - I reaches {error:.1e}, {ORTHOGONAL:.0e} is allowed; "
            "learn it again"
        )
    return replace(rotation, matrices=found.numpy().tobytes())


def _shown(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def distance(matrices: Tensor) -> float:
    """The largest entry of R^T R - I over matrices [..., b, b], in float64."""
    r = matrices.double().flatten(0, -3)
    eye = torch.eye(r.shape[-1], dtype=r.dtype, device=r.device)
    return max((m.T @ m - eye).abs().max().item() for m in r)


def digest(checkpoint: Checkpoint, arch: Llama) -> str:
    """Which model this is: sha256 of its tensors' names and shapes, every vector, and two rows of every matrix. What a
    file may hold besides, such as a tied head, and in which dtype it does, is no other model."""
    shapes = sorted(llama.tensors(arch).items())
    found = hashlib.sha256(json.dumps(shapes).encode())
    for name, shape in shapes:
        spans = [(0, 1), (shape[0] // 2, shape[0] // 2 + 1)] if len(shape) == 2 else [(0, shape[0])]
        for start, stop in spans:
            found.update(read_rows(checkpoint.tensors[name], start, stop).float().numpy().tobytes())
    return found.hexdigest()


def purpose(recipe: Recipe) -> dict[str, Any]:
    """What of a recipe learned rotations are good for: all but its description, how R1 and R2 are made, how weights are
    rounded to their formats, and what it makes of attention and the KV cache, which learning leaves as they were."""
    tree = recipe.resolved()
    del tree["description"], tree["attention"], tree["kv_cache"], tree["rotations"]["path"], tree["rotations"]["R3"]
    for name in ("R1", "R2"):
        del tree["rotations"][name]["kind"], tree["rotations"][name]["seed"]
    for rule in tree["linear"]:
        del rule["weights"]["rounding"]
    return tree


def notes(file: Learned, recipe: Recipe, digest: str) -> list[str]:
    """What does not make the rotations wrong, but not what they were measured to be."""
    found = []
    if file.about["digest"] != digest:
        found.append(f"learned on another model than this, {file.about['model']}")
    if file.about["recipe"] != purpose(recipe):
        found.append("learned for a recipe of other formats, blocks or channels than this one's")
    return [f"the rotations of {file.path} were {what}: exact, but not what they were measured to be" for what in found]
