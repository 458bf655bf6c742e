"""Rotations are exact: in float32 they change a model's logits by rounding alone."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quantrot import convert, load
from quantrot.llama import SUPPORTED
from quantrot.orthogonal import hadamard, random_orthogonal
from quantrot.recipe import RotationSpec, load_recipe
from quantrot.rotation import Rotation, by_gain, checksum, rotation_from_spec, signs, turn_input, turn_output

FUSED = {"R1": {"kind": "random-hadamard"}, "R2": {"kind": "hadamard"}}
ONLINE = {"R3": {"kind": "random-hadamard", "seed": 3}, "R4": {"kind": "random-hadamard", "seed": 4}}
TOLERANCE = 1e-4  # of the largest logit; float32 rounding alone measures 2e-6 to 2e-5

# Every hidden and intermediate size of the families, each once, beside small ones
SHAPES = [
    dict(hidden=192, intermediate=28672, heads=3, kv_heads=1, tied=True),
    dict(hidden=2048, intermediate=1536, heads=8, kv_heads=2, head_dim=64, tied=True),
    dict(hidden=3072, intermediate=384, heads=6, kv_heads=2, head_dim=128),
    dict(hidden=5120, intermediate=384, heads=10, kv_heads=2, head_dim=128, attention_bias=True),
    dict(hidden=576, intermediate=11008, heads=9, kv_heads=9, mlp_bias=True),
    dict(hidden=192, intermediate=13824, heads=6, kv_heads=2, attention_bias=True, mlp_bias=True),
    dict(hidden=192, intermediate=14336, heads=3, kv_heads=1),
    dict(hidden=192, intermediate=18944, heads=4, kv_heads=2, head_dim=96, attention_bias=True, tied=True),
]


def matrix(rotation):
    """The rotation as a dense float64 matrix, from its definition."""
    if rotation.kind == "random-orthogonal":
        block = random_orthogonal(rotation.block, rotation.seed)
    else:
        block = hadamard(rotation.block).double() / rotation.block**0.5
    dense = torch.block_diag(*[block] * (rotation.width // rotation.block))
    s = signs(rotation)
    return dense if s is None else s.double()[:, None] * dense


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


def relative_change(a, b):
    return ((a - b).abs().max() / a.abs().max()).item()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s['hidden']}x{s['intermediate']}")
def test_logits_stay(tiny, tmp_path, shape):
    source = tiny(tmp_path / "model", layers=1, **shape)
    ids = torch.arange(20).view(2, 10) * 7 % 256
    before = logits(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), ids)
    both = {"online": FUSED | ONLINE, "fused": FUSED}
    for name, rotations in list(both.items())[: 2 if shape["hidden"] < 1000 else 1]:
        convert(source, {"rotations": rotations}, tmp_path / name)
        after = logits(load(tmp_path / name, device_map="cpu", check_hashes=False), ids)
        assert relative_change(before, after) < TOLERANCE, name
        shutil.rmtree(tmp_path / name)


@pytest.mark.parametrize("kind", ["hadamard", "random-hadamard", "random-orthogonal"])
@pytest.mark.parametrize("block", ["full", 16])
@pytest.mark.parametrize("model_type", SUPPORTED)
def test_every_kind_and_block_keeps_a_deep_model(tiny, tmp_path, kind, block, model_type):
    source = tiny(tmp_path / "model", layers=3, model_type=model_type)
    spec = {"kind": kind, "block": block, "seed": 5}
    online = {"kind": "hadamard", "block": block}
    recipe = {"rotations": {"R1": spec, "R2": {"kind": kind}, "R3": {"kind": "hadamard"}, "R4": online}}
    convert(source, recipe, tmp_path / "out")
    ids = torch.arange(30).view(1, 30)
    before = logits(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), ids)
    assert relative_change(before, logits(load(tmp_path / "out", device_map="cpu"), ids)) < TOLERANCE


def test_a_rotation_left_out_is_seen(tiny, tmp_path):
    """The bound above means something: one missing half breaks it by orders of magnitude."""
    source = tiny(tmp_path / "model")
    convert(source, {"rotations": FUSED | ONLINE}, tmp_path / "out")
    model = load(tmp_path / "out", device_map="cpu")
    ids = torch.arange(30).view(1, 30)
    right = logits(model, ids)
    down = model.model.layers[0].mlp.down_proj
    setattr(down, down.online_name, torch.nn.Identity())
    assert relative_change(right, logits(model, ids)) > 100 * TOLERANCE


@pytest.mark.parametrize("kind", ["hadamard", "random-hadamard", "random-orthogonal"])
@pytest.mark.parametrize("width, block", [(48, 48), (96, 12), (64, 32)])
def test_turns_are_products_with_the_matrix(kind, width, block):
    rotation = Rotation("R1", kind, width, block, 1)
    r = matrix(rotation)
    assert (r @ r.T - torch.eye(width, dtype=torch.float64)).abs().max() < 1e-12
    w = torch.randn(2 * width, width)
    assert (turn_input(w, rotation) - w.double() @ r).abs().max() < 1e-5
    twice = torch.block_diag(r, r)
    assert (turn_output(w.clone(), rotation) - twice.T @ w.double()).abs().max() < 1e-5


def test_rows_can_be_turned_block_by_block():
    rotation = Rotation("R1", "random-hadamard", 96, 12, 1)
    w = torch.randn(96, 40)
    pieces = [turn_output(w[start : start + 24].clone(), rotation, start) for start in range(0, 96, 24)]
    assert torch.equal(torch.cat(pieces), turn_output(w.clone(), rotation))


def test_checksum_tells_matrices_apart():
    base = Rotation("R4", "random-hadamard", 96, 32, 1)
    others = [Rotation("R4", "random-hadamard", 96, 32, 2), Rotation("R4", "hadamard", 96, 32, 1)]
    others += [Rotation("R4", "random-hadamard", 96, 96, 1), Rotation("R4", "random-orthogonal", 96, 32, 1)]
    others += [Rotation("R1", "learned", 64, 32, 0, matrices=bytes(8 * 32**2 - 1) + bytes([last])) for last in (0, 1)]
    assert len({checksum(r) for r in [base, *others]}) == 7
    assert checksum(base) == checksum(Rotation("R4", "random-hadamard", 96, 32, 1))


def test_spec_with_a_block_that_does_not_fit():
    with pytest.raises(ValueError, match="R1.block is 48, which does not divide the width 64"):
        rotation_from_spec("R1", RotationSpec(kind="hadamard", block=48), 64)
    with pytest.raises(ValueError, match=r"R4: no Hadamard matrix of order 188 .*`block: 4`"):
        rotation_from_spec("R4", RotationSpec(kind="hadamard"), 188)
    with pytest.raises(ValueError, match="R1.block is <=8, and no Hadamard block up to 8 divides the width 63"):
        rotation_from_spec("R1", RotationSpec(kind="hadamard", block="<=8"), 63)
    assert rotation_from_spec("R1", RotationSpec(kind="none"), 7) is None


@pytest.mark.parametrize("width, block", [(64, 32), (48, 24), (16, 16), (576, 32), (20, 20), (188, 4)])
def test_a_bounded_block_is_the_largest_that_fits(width, block):
    assert rotation_from_spec("R1", RotationSpec(kind="hadamard", block="<=32"), width).block == block


def test_channels_by_gain_are_exact_and_alike_within_blocks(tiny, tmp_path):
    source = tiny(tmp_path / "model", layers=3, hidden=128, tied=True, mlp_bias=True)
    spec = {"kind": "random-hadamard", "block": 16, "channels": "by-gain"}
    convert(source, {"rotations": {"R1": spec, "R2": {"kind": "hadamard"}}}, tmp_path / "out")
    ids = torch.arange(30).view(1, 30)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert relative_change(logits(model, ids), logits(load(tmp_path / "out", device_map="cpu"), ids)) < TOLERANCE

    gains = torch.rand(1, 128, generator=torch.Generator().manual_seed(0)) + 0.1
    turned = by_gain(Rotation("R1", "hadamard", 128, 16, 0), gains)
    order = torch.frombuffer(bytearray(turned.permutation), dtype=torch.int32).long()
    assert torch.equal(order.sort().values, torch.arange(128))
    assert gains[0, order].view(8, 16).std(1).mean() < 0.2 * gains[0].view(8, 16).std(1).mean()
    assert checksum(turned) != checksum(Rotation("R1", "hadamard", 128, 16, 0))


def test_blocks_of_unlike_gains_keep_them_and_are_not_turned(tiny, tmp_path):
    source = tiny(tmp_path / "model", layers=2, hidden=128)
    tensors = load_file(source / "model.safetensors")
    odd = torch.tensor([3, 17, 40, 41, 77, 90, 101, 120])
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensors[name] = 1 + 0.05 * (tensor - 1)
            tensors[name][odd] = torch.logspace(-4, -1, 8)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    spec = {"kind": "random-hadamard", "block": 8, "channels": "by-gain"}
    convert(source, {"rotations": {"R1": spec}}, tmp_path / "out")
    norm = load_file(tmp_path / "out/model.safetensors")["model.layers.0.input_layernorm.weight"]
    assert (norm[:120] == 1).all() and set(norm[120:].tolist()) == set(torch.logspace(-4, -1, 8).tolist())
    ids = torch.arange(30).view(1, 30)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert relative_change(logits(model, ids), logits(load(tmp_path / "out", device_map="cpu"), ids)) < TOLERANCE


def test_channels_by_gain_none_of_which_are_alike(tiny, tmp_path):
    source = tiny(tmp_path / "model", hidden=128)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensors[name] = torch.exp(0.7 * torch.randn(tensor.shape, generator=torch.manual_seed(0)))
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    recipe = {"rotations": {"R1": {"kind": "random-hadamard", "channels": "by-gain"}}}
    plan = convert(source, recipe, tmp_path / "out").plan
    assert plan.rotations["R1"].extent.endswith("full width, 0 of 128 channels turned")
    assert any(
        "0 of 128 channels turned: in the other blocks, norms' gains are not alike" in note for note in plan.notes
    )
    ids = torch.arange(30).view(1, 30)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert relative_change(logits(model, ids), logits(load(tmp_path / "out", device_map="cpu"), ids)) < TOLERANCE


def test_gains_are_read_anew_by_every_conversion(tiny, tmp_path):
    source, recipe = tiny(tmp_path / "model"), {"rotations": {"R1": {"kind": "hadamard"}}}
    convert(source, recipe, tmp_path / "first")
    doubled = {k: t * 2 if "norm" in k else t for k, t in load_file(source / "model.safetensors").items()}
    save_file(doubled, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, recipe, tmp_path / "second")
    shutil.copytree(source, tmp_path / "elsewhere")
    convert(tmp_path / "elsewhere", recipe, tmp_path / "third")
    first, second, third = ((tmp_path / out / "model.safetensors").read_bytes() for out in ("first", "second", "third"))
    assert first != second == third


def test_channels_by_gain_in_blocks_of_one(tiny, tmp_path):
    source = tiny(tmp_path / "model")
    spec = {"kind": "hadamard", "block": 1, "channels": "by-gain"}
    convert(source, {"rotations": {"R1": spec}}, tmp_path / "out")
    ids = torch.arange(30).view(1, 30)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert relative_change(logits(model, ids), logits(load(tmp_path / "out", device_map="cpu"), ids)) < TOLERANCE


def test_channels_by_gain_are_for_r1_alone():
    with pytest.raises(ValueError, match="R2.channels is by-gain, which R1 alone can have"):
        load_recipe({"rotations": {"R2": {"kind": "hadamard", "channels": "by-gain"}}})
