"""Merged and decoded linears in the hands of accelerate, FSDP, DDP, torch.func and torch.export."""

import copy

import pytest
import torch
import torch.distributed as dist
from accelerate import cpu_offload
from accelerate.utils import set_module_tensor_to_device
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from quantrot.kernels.attention import Granularity
from quantrot.load import merge_projections
from quantrot.modules import QuantizedAttention, QuantizedLinear, train_in_mxfp4
from quantrot.modules.fp8 import Fp8TrainingLinear
from quantrot.modules.merged import Merging
from quantrot.rotation import Rotation
from tests.modules.test_merged import kernels, model

IDS = torch.arange(18).view(2, 9)
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
__all__ = ["kernels"]  # the fixture, for every test here, too: merged where there are kernels


@pytest.fixture(params=["int8", "mxfp4", "int8 decoded", "mxfp4 decoded"])
def pair(request):
    """Two models of a format with other weights, the first merged, decoded where the parameter says so."""
    kind, *decoded = request.param.split()
    llama, other = model(kind), model(kind)
    for linear in linears(other):
        for tensor in linear.stored()[:1]:
            tensor.data = tensor.data.roll(1, 0)
    if decoded:
        for linear in linears(llama):
            linear.decode(torch.float32)
    assert merge_projections(llama) == 4
    return llama, other


def linears(llama) -> list[QuantizedLinear]:
    return [module for module in llama.modules() if isinstance(module, QuantizedLinear)]


def mergers(llama) -> list[Merging]:
    return [module for module in llama.modules() if isinstance(module, Merging)]


def same(llama, other) -> bool:
    with torch.no_grad():
        return torch.allclose(llama(IDS).logits, other(IDS).logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_parameters_written_in_place_count(pair):
    llama, other = pair
    for own, new in zip(llama.parameters(), other.parameters(), strict=True):
        own.copy_(new)
    assert same(llama, other)


def test_adapters_train_behind_linears_that_were_written_in_place(pair):
    """As DDP writes at first, and where a hook has the parts run apart."""
    llama, other = pair
    for each in pair:
        each.requires_grad_(False)
        each.lm_head.weight.requires_grad_(True)
        each.enable_input_require_grads()
    llama.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, y: y)
    with torch.no_grad():
        for own, new in zip(llama.parameters(), other.parameters(), strict=True):
            own.copy_(new)
    for each in pair:
        each(IDS).logits.square().sum().backward()
    torch.testing.assert_close(llama.lm_head.weight.grad, other.lm_head.weight.grad, rtol=1e-4, atol=1e-4)


def test_parameters_that_accelerate_puts_there_count(pair):
    llama, other = pair
    assert not same(llama, other)
    for name, tensor in other.state_dict().items():
        set_module_tensor_to_device(llama, name, "cpu", value=tensor)
    assert same(llama, other)
    assert all(merging.merged is None for merging in mergers(llama))  # and no memory is held by what is not used
    assert all(linear._decoded is None for linear in linears(llama))


def test_tensors_of_a_functional_call_count_while_it_runs(pair):
    llama, other = pair
    before = copy.deepcopy(llama)
    with torch.no_grad():
        given = functional_call(llama, other.state_dict(), (IDS,)).logits
        torch.testing.assert_close(given, other(IDS).logits, rtol=1e-5, atol=1e-5)
    assert all(merging.current() is not None for merging in mergers(llama))
    assert same(llama, before) and not same(llama, other)


def test_nothing_is_sent_to_the_others_at_every_forward(pair):
    """DDP sends what it finds among the buffers."""
    assert {name for name, _ in pair[0].named_buffers()} == {name for name, _ in pair[1].named_buffers()}


@pytest.mark.parametrize("online", [False, True])
def test_accelerate_offloads_a_model_with_its_buffers(online):
    llama = model("mxfp4", online=online)
    with torch.no_grad():
        expected = llama(IDS).logits
        merge_projections(llama)
        cpu_offload(llama, execution_device=torch.device("cpu"), offload_buffers=True)
        torch.testing.assert_close(llama(IDS).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


whole_numbers = pytest.mark.skipif(
    TORCH < (2, 13), reason="this torch's fully_shard takes parameters of floating point alone"
)


@whole_numbers
def test_shards_are_what_a_model_of_fsdp_runs_saves_and_loads(pair, alone):
    llama, other = pair
    expected = copy.deepcopy(llama).state_dict()
    before = copy.deepcopy(llama)
    for each in (llama, other):
        for layer in each.model.layers:
            fully_shard(layer, mesh=alone)
    state = llama.state_dict()
    for name, tensor in expected.items():
        assert isinstance(state[name], DTensor) == (".layers." in name)
        found = state[name].full_tensor() if isinstance(state[name], DTensor) else state[name]
        assert torch.equal(found, tensor)
    assert same(llama, before)
    llama.load_state_dict(other.state_dict())
    assert same(llama, other) and not same(llama, before)


@pytest.mark.parametrize(
    "kind, dtype", [("fp8", torch.bfloat16), pytest.param("int8", torch.float16, marks=whole_numbers)]
)
def test_weights_that_fsdp_casts_are_an_error_that_says_how_to_leave_them(kind, dtype, alone):
    llama = model(kind)
    merge_projections(llama)
    llama.requires_grad_(False).lm_head.weight.requires_grad_(True)
    expected = copy.deepcopy(llama).to(dtype)(IDS).logits.float()
    ignoring = copy.deepcopy(llama)
    for layer in llama.model.layers:
        fully_shard(layer, mesh=alone, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    with pytest.raises(ValueError, match=rf"is {dtype}, not torch\..*: parameters were cast.* ignored_params="):
        llama(IDS)
    stored = {p for x in linears(ignoring) for p in x.parameters() if not p.requires_grad}
    for module in (*ignoring.model.layers, ignoring):
        fully_shard(module, mesh=alone, mp_policy=MixedPrecisionPolicy(param_dtype=dtype), ignored_params=stored)
    found = ignoring(IDS).logits.float()
    assert (found - expected).norm() < 0.1 * expected.norm()
    found.sum().backward()
    assert ignoring.lm_head.weight.grad is not None


def test_what_is_sharded_is_not_made_trainable(alone):
    model = nn.Sequential(nn.Linear(64, 64))
    fully_shard(model, mesh=alone)
    with pytest.raises(ValueError, match=r"0's weight is a DTensor \[64, 64\]; call this before FSDP"):
        train_in_mxfp4(model)
    with pytest.raises(ValueError, match=r"weight is a DTensor \[64, 64\]; call this before FSDP"):
        Fp8TrainingLinear.of(model[0])
    flat = nn.Linear(64, 64)
    flat.weight = nn.Parameter(flat.weight.data.flatten())
    with pytest.raises(ValueError, match=r"weight is a Tensor \[4096\]"):
        Fp8TrainingLinear.of(flat)


def test_an_exported_model_takes_other_numbers_of_tokens(pair):
    llama, _ = pair
    sizes = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    given = {"input_ids": IDS, "use_cache": False}
    with torch.no_grad():
        exported = torch.export.export(
            llama, (), given, strict=False, dynamic_shapes={"input_ids": sizes, "use_cache": None}
        )
        found = exported.module()(input_ids=IDS[:1, :5], use_cache=False).logits
        torch.testing.assert_close(found, llama(IDS[:1, :5]).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "cache, tokens", [("fp8", torch.export.Dim.AUTO), ("bf16", torch.export.Dim("tokens", min=2, max=500))]
)
def test_exported_fp8_attention_takes_other_numbers_of_tokens(cache, tokens):
    """With the numbers of a scale a token. Multiples of 16 have other strides, more than 128 tokens another block."""
    llama = model("int8")
    llama.model.layers = llama.model.layers[:1]
    for layer in llama.model.layers:
        rotation = Rotation("R3", "hadamard", 64, 64, 0)
        layer.self_attn = QuantizedAttention(layer.self_attn, arithmetic="fp8", kv_cache=cache, rotation=rotation)
    given, sizes = {"input_ids": IDS, "use_cache": False}, {0: torch.export.Dim.AUTO, 1: tokens}
    with torch.no_grad():
        exported = torch.export.export(
            llama, (), given, strict=False, dynamic_shapes={"input_ids": sizes, "use_cache": None}
        )
        for layer in llama.model.layers:
            layer.self_attn.granularity = Granularity.token
        for program in (exported, exported.run_decompositions()):
            run = program.module()
            for length in (5, 16, 20, 128, 130, 256):
                ids = torch.arange(3 * length).view(3, length) % 64
                found = run(input_ids=ids, use_cache=False).logits
                expected = llama(ids, use_cache=False).logits
                assert (found - expected).norm() <= 1e-3 * expected.norm()  # sums' last bits may choose other codes
