"""quantrot.json: the contract between convert and load.

It holds the resolved recipe, what the source was, every rotation with the checksum of its matrix, every linear's
format, the hash of each file but the card, and versions. It has no times and no paths of the output, so that the same
conversion gives the same bytes.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from quantrot.checkpoint import INDEX, SINGLE, first_differing, read_json, sha256_range
from quantrot.formats import ActivationFormat, LinearFormat, WeightFormat
from quantrot.recipe import Arithmetic, KVCache
from quantrot.rotation import Rotation, checksum

MANIFEST = "quantrot.json"
VERSION = 1  # of the file's layout
WEIGHT_KINDS, ACTIVATION_KINDS = (get_args(get_type_hints(t)["kind"]) for t in (WeightFormat, ActivationFormat))
ONLINE_KINDS = ("hadamard", "random-hadamard")
MAX_WIDTH = 1 << 24  # past every model's


@dataclass(frozen=True)
class Manifest:
    """A read quantrot.json. linears: None for a linear in its own dtype; online: rotations of linears' inputs;
    attention: R3; arithmetic: of attention."""

    data: dict[str, Any]
    linears: dict[str, LinearFormat | None]
    online: dict[str, Rotation]
    attention: Rotation | None
    arithmetic: Arithmetic
    kv_cache: KVCache


def rotation_entry(rotation: Rotation, online: bool) -> dict[str, Any]:
    """A rotation as JSON, with the checksum that a loader regenerates and compares."""
    entry = asdict(rotation)
    del entry["matrices"]
    entry["channels"] = "by-gain" if entry.pop("permutation") else "natural"
    entry["turned"] = entry["turned"] if entry["turned"] >= 0 else entry["width"]
    return entry | {"online": online, "checksum": checksum(rotation)}


def read_manifest(root: Path) -> Manifest:
    """Read and check quantrot.json: layout version, formats, and every online rotation's checksum and place."""
    path = root / MANIFEST
    if not path.exists():
        raise ValueError(f"{path}: missing; give a directory that `quantrot convert` wrote (no hub id)")
    data = read_json(path)
    if "layout" not in data:
        raise ValueError(f"{path}: malformed: KeyError at 'layout'; convert again")
    if data["layout"] != VERSION:
        raise ValueError(f"{path}: layout is {data['layout']!r}; this version reads {VERSION}: upgrade quantrot")
    try:
        linears = {fqn: _format(entry["format"]) for fqn, entry in data["linears"].items()}
        online = {fqn: _rotation(entry["online"]) for fqn, entry in data["linears"].items() if entry["online"]}
        attention = _rotation(data["attention"]) if data["attention"] else None
        _check_fields(data)
        arithmetic, kv_cache = data.get("arithmetic", "bf16"), data.get("kv_cache", "bf16")
        if arithmetic not in get_args(Arithmetic) or kv_cache not in get_args(KVCache):
            raise ValueError(f"arithmetic {arithmetic!r:.40}, kv_cache {kv_cache!r:.40}")
        rotations = data["rotations"].values()
        stored = [*rotations, *(e["online"] for e in data["linears"].values() if e["online"])]
        stored += [data["attention"]] if data["attention"] else []
        checksums = [(_rotation(entry), str(entry["checksum"])) for entry in stored if entry["online"]]
        wanted = [(rotation, checksum(rotation), expected) for rotation, expected in dict.fromkeys(checksums)]
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: malformed: {type(error).__name__} at {error}; convert again") from None
    for rotation, actual, expected in wanted:
        if actual != expected:
            raise ValueError(
                f"{path}: the matrix of the online rotation {rotation.name} ({rotation.kind}, block {rotation.block}, "
                f"seed {rotation.seed}) has checksum {actual[:12]}, the weights were turned with {expected[:12]}; "
                "convert again"
            )
    manifest = Manifest(data, linears, online, attention, arithmetic, kv_cache)
    if lost := _lost(manifest):
        raise ValueError(f"{path}: {lost}, which the weights were made for; convert again")
    return manifest


def _lost(manifest: Manifest) -> str | None:
    """What the recipe and the rotations say that is done at run time, and nothing would do."""
    apart = {fqn: fmt for fqn, fmt in manifest.linears.items() if fqn not in manifest.online}
    turned = {name for name, entry in manifest.data["rotations"].items() if entry["online"]}
    if "R3" in turned and manifest.attention is None:
        return "attention is without R3"
    for fqn, fmt in apart.items():
        if "R4" in turned and fqn.endswith(".down_proj"):
            return f"{fqn} is without R4"
        if fmt is not None and fmt.hadamard:
            return f"{fqn} is without its Hadamard of {fmt.hadamard}"
    for name, found in (("attention", manifest.arithmetic), ("kv_cache", manifest.kv_cache)):
        if (asked := manifest.data["recipe"].get(name, found)) != found:
            return f"{name} is {found}, not {asked}"
    return None


def _check_fields(data: dict[str, Any]) -> None:
    """KeyError, TypeError or AttributeError where something is missing that `verify` and `inspect` read and nothing
    else here does."""
    wanted = [(data, ("recipe", "recipe_name", "quantrot")), (data["source"], ("model", "revision"))]
    wanted += [(entry, ("kind", "block", "width", "checksum")) for entry in data["rotations"].values()]
    wanted += [(entry, ("shape",)) for entry in data["linears"].values()]
    for entry, names in wanted:
        for name in names:
            entry[name]
    data["source"]["tensors"].items()
    data["recipe"].items()
    weights_of(data)


def _format(entry: dict[str, Any] | None) -> LinearFormat | None:
    if entry is None:
        return None
    weights, activations, hadamard = entry["weights"], entry["activations"], entry["hadamard"]
    if weights["kind"] not in WEIGHT_KINDS or activations["kind"] not in ACTIVATION_KINDS:
        raise ValueError(f"weights of kind {weights['kind']!r:.40}, activations of kind {activations['kind']!r:.40}")
    (m, k), (t, f) = weights["block"], activations["block"]
    if any(type(n) is not int or not 0 <= n <= MAX_WIDTH for n in (m, k, t, f, hadamard)):
        raise ValueError(f"blocks [{m!r:.20}, {k!r:.20}] and [{t!r:.20}, {f!r:.20}], hadamard {hadamard!r:.20}")
    return LinearFormat(
        WeightFormat(weights["kind"], (m, k), str(weights["scale_rule"]), str(weights.get("rounding", "nearest"))),
        ActivationFormat(activations["kind"], (t, f), str(activations["scale_rule"])),
        hadamard,
    )


def _rotation(entry: dict[str, Any]) -> Rotation:
    """An online rotation from its entry, whose values an edited file may have made anything."""
    name, kind, width, block, seed = (entry[key] for key in ("name", "kind", "width", "block", "seed"))
    if not isinstance(name, str) or kind not in ONLINE_KINDS:
        raise ValueError(f"rotation {name!r:.40}, kind {kind!r:.40}; online kinds: {', '.join(ONLINE_KINDS)}")
    sizes = width, block, seed
    if any(type(n) is not int or not 0 <= n < 1 << 63 for n in sizes) or not 2 <= block <= width <= MAX_WIDTH:
        raise ValueError(f"rotation {name!r:.40}, width {width!r:.40}, block {block!r:.40}, seed {seed!r:.40}")
    if width % block:
        raise ValueError(f"rotation {name!r:.40}, block {block}, which does not divide the width {width}")
    return Rotation(name, kind, width, block, seed)


def check_files(root: Path, data: dict[str, Any], largest: float = math.inf) -> None:
    """Every file that the manifest lists is there with its size and, one of up to `largest` bytes, its sha256, and no
    other that loaders take for the weights; ValueError names the first that is not so. Hashes come last: they take
    long."""
    try:
        listed = {str(name): (entry["size"], entry["sha256"]) for name, entry in data["files"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        where = f"{root / MANIFEST}: malformed: {type(error).__name__} at {error}"
        raise ValueError(f"{where}, in files; convert again") from None
    for name, (size, _) in listed.items():
        path = root / name
        if not path.is_file():
            raise ValueError(f"{path}: missing, although {MANIFEST} lists it; convert again")
        if path.stat().st_size != size:
            raise ValueError(_differs(path))
    for name in {SINGLE, INDEX} - set(listed):
        if (root / name).exists():
            raise ValueError(
                f"{root / name}: {MANIFEST} does not list it, and loaders take it for the weights; move it"
            )
    wanted = {root / name: sha256 for name, (size, sha256) in listed.items() if size <= largest}
    if differing := first_differing(sha256_range, wanted):
        raise ValueError(_differs(differing))


def _differs(path: Path) -> str:
    return f"{path}: differs from what {MANIFEST} lists (size or sha256); convert or download again"


def weights_of(data: dict[str, Any]) -> str:
    """The file that holds the weights, or says which do; KeyError where the manifest lists none."""
    if INDEX in data["files"]:
        return INDEX
    data["files"][SINGLE]
    return SINGLE


def dump(data: dict[str, Any]) -> bytes:
    """The manifest's bytes."""
    return (json.dumps(data, indent=2) + "\n").encode()
