"""quantrot.json: the contract between convert and load.

It holds the resolved recipe, what the source was, every rotation with the checksum of its matrix, every linear's
format, each file's hash, and versions. It has no times and no paths of the output, so that the same conversion gives the
same bytes.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantrot.checkpoint import read_json, sha256_range
from quantrot.formats import ActivationFormat, LinearFormat, WeightFormat
from quantrot.rotation import Rotation, checksum

MANIFEST = "quantrot.json"
VERSION = 1  # of the file's layout


@dataclass(frozen=True)
class Manifest:
    """A read quantrot.json. linears: None for a linear in its own dtype; online: rotations of linears' inputs."""

    data: dict[str, Any]
    linears: dict[str, LinearFormat | None]
    online: dict[str, Rotation]
    attention: Rotation | None


def rotation_entry(rotation: Rotation, online: bool) -> dict[str, Any]:
    """A rotation as JSON, with the checksum that a loader regenerates and compares."""
    return asdict(rotation) | {"online": online, "checksum": checksum(rotation)}


def read_manifest(root: Path) -> Manifest:
    """Read and check quantrot.json: layout version, formats, and every online rotation's checksum."""
    path = root / MANIFEST
    data = read_json(path)
    if data.get("layout") != VERSION:
        raise ValueError(f"{path}: layout is {data.get('layout')!r}; this version reads {VERSION}: upgrade quantrot")
    try:
        linears = {fqn: _format(entry["format"]) for fqn, entry in data["linears"].items()}
        online = {fqn: _rotation(entry["online"]) for fqn, entry in data["linears"].items() if entry["online"]}
        attention = _rotation(data["attention"]) if data["attention"] else None
        rotations = data["rotations"].values()
        stored = [*rotations, *(e["online"] for e in data["linears"].values() if e["online"])]
        checksums = {_rotation(entry): entry["checksum"] for entry in stored if entry["online"]}
        if data["attention"]:
            checksums[_rotation(data["attention"])] = data["attention"]["checksum"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: malformed: {type(error).__name__} at {error}; convert again") from None
    for rotation, expected in checksums.items():
        actual = checksum(rotation)
        if actual != expected:
            raise ValueError(
                f"{path}: the matrix of the online rotation {rotation.name} ({rotation.kind}, block {rotation.block}, seed "
                f"{rotation.seed}) has checksum {actual[:12]}, the weights were turned with {expected[:12]}; convert again"
            )
    return Manifest(data, linears, online, attention)


def _format(entry: dict[str, Any] | None) -> LinearFormat | None:
    if entry is None:
        return None
    weights, activations = entry["weights"], entry["activations"]
    return LinearFormat(
        WeightFormat(weights["kind"], (weights["block"][0], weights["block"][1]), weights["scale_rule"]),
        ActivationFormat(activations["kind"], (activations["block"][0], activations["block"][1]), activations["scale_rule"]),
        entry["hadamard"],
    )


def _rotation(entry: dict[str, Any]) -> Rotation:
    return Rotation(entry["name"], entry["kind"], entry["width"], entry["block"], entry["seed"])


def check_files(root: Path, data: dict[str, Any]) -> None:
    """Every file that the manifest lists is there with its size and sha256; ValueError names the first that is not."""
    for name, entry in data["files"].items():
        path = root / name
        if not path.is_file():
            raise ValueError(f"{path}: missing, although {MANIFEST} lists it; convert again")
        if path.stat().st_size != entry["size"] or sha256_range(path) != entry["sha256"]:
            raise ValueError(f"{path}: differs from what {MANIFEST} lists (size or sha256); convert or download again")


def dump(data: dict[str, Any]) -> bytes:
    """The manifest's bytes."""
    return (json.dumps(data, indent=2) + "\n").encode()
