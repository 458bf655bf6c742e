"""Ways to break a checkpoint directory in place, and what its tests share."""

import json
import shutil

from safetensors.torch import load_file, save_file

from quantrot.checkpoint import INDEX, SINGLE

ROTATE = {"rotations": {"R1": {"kind": "hadamard"}}}
FP8 = {"linear": [{"match": "*", "weights": {"format": "fp8", "block": "channel"}}]}
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
GAIN = "model.layers.0.input_layernorm.weight"


def contents(root):
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def copy(model, tmp_path):
    return shutil.copytree(model, tmp_path / "model")


def config(drop=(), **changes):
    def edit(root):
        path = root / "config.json"
        data = json.loads(path.read_bytes()) | changes
        path.write_text(json.dumps({k: v for k, v in data.items() if k not in drop}))

    return edit


def config_bytes(data):
    return lambda root: (root / "config.json").write_bytes(data)


def index_bytes(data):
    """This index in the place of the one file."""

    def edit(root):
        (root / "model.safetensors").unlink(missing_ok=True)
        (root / INDEX).write_bytes(data)

    return edit


def index(change):
    def edit(root):
        data = json.loads((root / INDEX).read_bytes())
        change(data["weight_map"])
        (root / INDEX).write_text(json.dumps(data))

    return edit


def remove(*names):
    return lambda root: [(root / name).unlink() for name in names]


def file(name, data):
    return lambda root: (root / name).write_bytes(data)


def split(raw):
    length = int.from_bytes(raw[:8], "little")
    return raw[8 : 8 + length], raw[8 + length :]


def join(header, data):
    return len(header).to_bytes(8, "little") + header + data


def weights_bytes(change):
    """Change the bytes of model.safetensors."""

    def edit(root):
        path = root / SINGLE
        path.write_bytes(change(path.read_bytes()))

    return edit


def raw_header(change):
    """Change the header's JSON text."""
    return weights_bytes(lambda raw: join(change(split(raw)[0]), split(raw)[1]))


def header(change):
    """Change the header's JSON tree."""

    def edit(text):
        tree = json.loads(text)
        change(tree)
        return json.dumps(tree).encode()

    return raw_header(edit)


def entry(name=Q_PROJ, **changes):
    """Change one tensor's entry in the header."""
    return header(lambda tree: tree[name].update(changes))


def moved(first, last):
    """Move the ends of a tensor's bytes."""

    def change(tree):
        start, stop = tree[Q_PROJ]["data_offsets"]
        tree[Q_PROJ]["data_offsets"] = [start + first, stop + last]

    return header(change)


def tensors(change):
    """Change the tensors and write a healthy file."""

    def edit(root):
        found = load_file(root / SINGLE)
        change(found)
        save_file(found, root / SINGLE, metadata={"format": "pt"})

    return edit


def poison(name, value, at=(-1, -1)):
    def change(found):
        found[name][at] = value

    return tensors(change)


def only_pickles(root):
    (root / SINGLE).unlink()
    (root / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'touch pwned'\ntR.")


def both(*edits):
    return lambda root: [edit(root) for edit in edits]


def nothing(root):
    pass
