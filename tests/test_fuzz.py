"""Readers of files that anybody may have written: whatever the bytes, a value or a ValueError with a message."""

import copy
import json
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantrot.checkpoint import INDEX, SINGLE, Checkpoint, open_checkpoint, read_header
from quantrot.convert import convert
from quantrot.llama import Llama, from_config
from quantrot.manifest import MANIFEST, Manifest, check_files, read_manifest
from quantrot.recipe import SHIPPED, Recipe, parse_recipe

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "100"))
fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES <= 1000,
    database=None,
    suppress_health_check=list(HealthCheck),
)

NUMBERS = st.integers() | st.integers(-2, 300) | st.sampled_from([0, 1, 2**31, 2**62, 2**63, 2**64, -(2**63), 10**25])
LEAVES = st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=8)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def ends_well(read, name, kind):
    """A value of this kind, or a ValueError whose message names the file."""
    try:
        value = read()
    except ValueError as error:
        assert name in str(error), f"{type(error).__name__}: {error}"
        assert type(error) is ValueError, f"{type(error).__name__}: {error}"
        return None
    assert isinstance(value, kind)
    return value


def places(tree, path=()):
    """The path of every node of a tree of dicts and lists."""
    yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


@st.composite
def mutated(draw, trees, values=JSON, most=3):
    """One of the trees with some nodes replaced, removed, renamed or moved to another place."""
    tree = copy.deepcopy(draw(st.sampled_from(trees)))
    for _ in range(draw(st.integers(1, most))):
        found = [path for path in places(tree) if path]
        if not found:
            break
        path = draw(st.sampled_from(found))
        parent = tree
        for part in path[:-1]:
            parent = parent[part]
        what = draw(st.sampled_from(["replace", "replace", "remove", "rename", "copy"]))
        if what == "replace":
            parent[path[-1]] = draw(values)
        elif what == "remove":
            del parent[path[-1]]
        elif what == "rename" and isinstance(parent, dict):
            parent[draw(st.text(max_size=8))] = parent.pop(path[-1])
        else:
            other = tree
            for part in draw(st.sampled_from(found)):
                other = other[part]
            parent[path[-1]] = copy.deepcopy(other)
    return tree


@st.composite
def damaged(draw, files):
    """One of the files with bytes replaced, cut out, doubled, or cut off at the end."""
    raw = bytearray(draw(st.sampled_from(files)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(raw) - 1, 0)))
        length = draw(st.integers(0, 8))
        raw[at : at + length] = draw(st.binary(max_size=8) | st.just(bytes(raw[at : at + 40])))
    if draw(st.booleans()):
        del raw[draw(st.integers(0, len(raw))) :]
    return bytes(raw)


# --- Recipes ---------------------------------------------------------------------------------------------------------

RECIPES = [path.read_bytes() for path in sorted(SHIPPED.glob("*.yaml"))]
RECIPE_TREES = [yaml.safe_load(text) for text in RECIPES]
WORDS = [
    "R1",
    "R4",
    "kind",
    "block",
    "full",
    "hadamard",
    "random-orthogonal",
    "fp8",
    "mxfp4",
    "int8",
    "none",
    "channel",
]


@fuzz
@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_recipe_reader_takes_any_bytes(text):
    ends_well(lambda: parse_recipe(text, "r.yaml"), "r.yaml", Recipe)


@fuzz
@given(st.text(alphabet="{}[]:,-?!&*|>%@`'\"#\n\t ~<=.0123456789abckR", max_size=60))
def test_recipe_reader_takes_any_punctuation(text):
    ends_well(lambda: parse_recipe(text.encode(), "r.yaml"), "r.yaml", Recipe)


@fuzz
@given(damaged(RECIPES))
def test_recipe_reader_takes_damaged_recipes(text):
    ends_well(lambda: parse_recipe(text, "r.yaml"), "r.yaml", Recipe)


@fuzz
@given(mutated(RECIPE_TREES, JSON | st.sampled_from(WORDS)))
def test_recipe_reader_takes_mutated_recipes(tree):
    recipe = ends_well(lambda: parse_recipe(yaml.safe_dump(tree).encode(), "r.yaml"), "r.yaml", Recipe)
    if recipe is not None:
        json.dumps(recipe.resolved(), allow_nan=False).encode()


# --- Checkpoints -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tiny, tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("fuzz") / "model", hidden=8, intermediate=8, layers=1, heads=2, vocab=8)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("place")


def header_of(raw):
    length = int.from_bytes(raw[:8], "little")
    return raw[8 : 8 + length], raw[8 + length :]


def check_entries(file: Path):
    """A header that is accepted lies within the file, without holes or overlaps."""
    found = ends_well(lambda: read_header(file), file.name, list)
    end = None
    for info in sorted(found or [], key=lambda info: (info.start, info.nbytes)):
        assert (
            info.start == (end if end is not None else info.start) and info.start + info.nbytes <= file.stat().st_size
        )
        end = info.start + info.nbytes


@fuzz
@given(raw=st.binary(max_size=100) | st.binary(max_size=90).map(lambda b: len(b).to_bytes(8, "little") + b))
def test_header_reader_takes_any_bytes(place, raw):
    file = place / "any.safetensors"
    file.write_bytes(raw)
    check_entries(file)


@fuzz
@given(data=st.data())
def test_header_reader_takes_damaged_files(checkpoint, place, data):
    file = place / "damaged.safetensors"
    file.write_bytes(data.draw(damaged([(checkpoint / SINGLE).read_bytes()])))
    check_entries(file)


@fuzz
@given(tree=JSON, size=st.integers(0, 64))
def test_header_reader_takes_any_json(place, tree, size):
    file = place / "json.safetensors"
    text = json.dumps(tree).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    check_entries(file)


@fuzz
@given(data=st.data())
def test_header_reader_takes_mutated_headers(checkpoint, place, data):
    text, weights = header_of((checkpoint / SINGLE).read_bytes())
    text = json.dumps(data.draw(mutated([json.loads(text)]))).encode()
    file = place / "mutated.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + weights)
    check_entries(file)


@fuzz
@given(
    index=mutated(
        [{"metadata": {}, "weight_map": {"a": SINGLE, "b": SINGLE}}], JSON | st.sampled_from(["..", "/", "."])
    )
)
def test_checkpoint_reader_takes_any_index(checkpoint, place, index):
    root = place / "indexed"
    root.mkdir(exist_ok=True)
    (root / "config.json").write_text("{}")
    (root / SINGLE).write_bytes((checkpoint / SINGLE).read_bytes())
    (root / INDEX).write_text(json.dumps(index))
    ends_well(lambda: open_checkpoint(root), str(root), Checkpoint)


@fuzz
@given(text=st.binary(max_size=40) | JSON.map(lambda tree: json.dumps(tree).encode()))
def test_checkpoint_reader_takes_any_config(checkpoint, place, text):
    root = place / "configured"
    root.mkdir(exist_ok=True)
    (root / SINGLE).write_bytes((checkpoint / SINGLE).read_bytes())
    (root / "config.json").write_bytes(text)
    ends_well(lambda: open_checkpoint(root), "config.json", Checkpoint)


CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
    "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
}


@fuzz
@given(st.dictionaries(st.sampled_from([*CONFIG, "quantization_config"]) | st.text(max_size=4), JSON))
def test_config_reader_takes_any_object(config):
    ends_well(lambda: from_config(config), "config.json", Llama)


@fuzz
@given(mutated([CONFIG]))
def test_config_reader_takes_mutated_configs(config):
    model = ends_well(lambda: from_config(config), "config.json", Llama)
    if model is not None:
        assert model.heads % model.kv_heads == 0 and model.head_dim > 0


# --- Manifests -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manifest(tiny, tmp_path_factory):
    """A manifest with online rotations and a quantized linear of every kind, for one layer."""
    root = tmp_path_factory.mktemp("manifest")
    weights = [{"format": "fp8", "block": "channel"}, {"format": "mxfp4"}, {"format": "int8", "group": "channel"}]
    recipe = {
        "rotations": {name: {"kind": "random-hadamard", "seed": 1} for name in ("R1", "R3", "R4")},
        "linear": [{"match": f"{m}_proj", "weights": w} for m, w in zip("qko", weights, strict=True)],
    }
    convert(tiny(root / "model", layers=1, hidden=32, heads=2, kv_heads=1, intermediate=32), recipe, root / "out")
    return json.loads((root / "out" / MANIFEST).read_bytes())


@fuzz
@given(data=JSON.map(lambda tree: {"layout": 1, "linears": {}, "rotations": {}, "attention": tree}) | JSON)
def test_manifest_reader_takes_any_json(place, data):
    (place / MANIFEST).write_text(json.dumps(data))
    ends_well(lambda: read_manifest(place), MANIFEST, Manifest)


@fuzz
@given(data=st.data())
def test_manifest_reader_takes_mutated_manifests(manifest, place, data):
    kept = {
        key: manifest[key] for key in ("layout", "rotations", "attention", "arithmetic", "kv_cache", "linears", "files")
    }
    (place / MANIFEST).write_text(json.dumps(data.draw(mutated([kept]))))
    ends_well(lambda: read_manifest(place), MANIFEST, Manifest)


@fuzz
@given(files=JSON)
def test_file_checker_takes_any_list_of_files(place, files):
    ends_well(lambda: check_files(place, {"files": files}), MANIFEST, type(None))
