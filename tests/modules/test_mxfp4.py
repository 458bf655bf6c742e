"""MXFP4 linears: the packed path is the dequantized one up to rounding, and the training linear trains."""

import copy
import itertools

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from quantrot import convert, formats
from quantrot.formats import ActivationFormat, LinearFormat, WeightFormat
from quantrot.kernels.mxfp4 import dequantize_mxfp4, hadamard_quantize_mxfp4
from quantrot.modules import Mxfp4Linear, Mxfp4TrainingLinear, OnlineHadamard, train_in_mxfp4
from quantrot.modules import mxfp4 as modules_mxfp4
from quantrot.recipe import load_recipe, shipped_recipes
from quantrot.rotation import Rotation

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
NONE, TOKEN, MXFP4 = (
    ActivationFormat("none", (0, 0), ""),
    ActivationFormat("fp8", (1, 0), "exact"),
    ActivationFormat("mxfp4", (1, 32), "even"),
)


def linear(activations=MXFP4, online=None, bias=True, n=96, k=256) -> Mxfp4Linear:
    generator = torch.Generator().manual_seed(0)
    fmt = LinearFormat(WeightFormat("mxfp4", (1, 32), "mse"), activations)
    module = Mxfp4Linear(k, n, bias, torch.float32, fmt, online=online)
    stored = formats.quantize_rows(fmt.weights, torch.randn(n, k, generator=generator))
    for name, value in zip(module.tensor_names, stored, strict=True):
        getattr(module, name).data = value
    if bias:
        module.bias.data = torch.randn(n, generator=generator)
    return module


@pytest.mark.parametrize("activations", [NONE, TOKEN, MXFP4], ids=lambda a: a.kind)
@pytest.mark.parametrize("shape", [(256,), (3, 256), (2, 70, 256), (0, 256)])
def test_packed_is_the_dequantized_product(monkeypatch, activations, shape):
    module, x = linear(activations), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = module(x)
    monkeypatch.setattr(modules_mxfp4, "has_kernels", lambda device: True)
    assert module.runs_packed(x.device)
    y = module(x)
    assert y.shape == expected.shape and y.dtype == x.dtype
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("activations", [NONE, TOKEN, MXFP4], ids=lambda a: a.kind)
def test_vmap_is_one_after_another(activations):
    module, x = linear(activations), torch.randn(3, 4, 256, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(torch.vmap(module)(x), torch.stack([module(each) for each in x]))
    x.requires_grad_()
    (given,) = torch.autograd.grad(module(x).square().sum(), x)
    torch.testing.assert_close(torch.func.grad(lambda t: module(t).square().sum())(x.detach()), given)


@pytest.mark.parametrize(
    ("rotation", "fused"),
    [
        (Rotation("R4", "hadamard", 256, 64, 0), 64),
        (Rotation("R4", "hadamard", 256, 256, 0), 0),
        (Rotation("R4", "random-hadamard", 256, 32, 0), 0),
    ],
)
@pytest.mark.parametrize("activations", [NONE, MXFP4], ids=lambda a: a.kind)
def test_an_online_rotation_rides_along(monkeypatch, rotation, fused, activations):
    module, x = linear(activations, OnlineHadamard(rotation)), torch.randn(9, 256)
    expected = module(x)  # of the wide path, whose operands are the kernels'
    if fused and activations is MXFP4:
        operand = dequantize_mxfp4(*hadamard_quantize_mxfp4(x, hadamard=fused)[:2], dtype=torch.float32)
        assert torch.equal(module.operand(x), operand)
    monkeypatch.setattr(modules_mxfp4, "has_kernels", lambda device: True)
    assert module.fused_hadamard() == (fused if activations is MXFP4 else 0)
    error = (module(x) - expected).norm() / expected.norm()
    assert error < 1e-6


@pytest.mark.parametrize(
    ("activations", "rotation", "decoded", "in_one"),
    [
        (MXFP4, Rotation("R4", "hadamard", 256, 64, 0), False, True),
        (MXFP4, None, False, True),
        (MXFP4, Rotation("R4", "hadamard", 256, 256, 0), False, False),
        (MXFP4, None, True, False),
        (TOKEN, None, False, False),
        (NONE, None, False, False),
    ],
)
def test_gate_and_up_are_left_to_a_quantizer_of_mxfp4(monkeypatch, activations, rotation, decoded, in_one):
    online = None if rotation is None else OnlineHadamard(rotation)
    module, x = linear(activations, online), torch.randn(5, 512, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(modules_mxfp4, "has_kernels", lambda device: True)
    if decoded:
        module.decode(torch.float32)
    expected, calls = module(F.silu(x[:, :256]) * x[:, 256:]), []

    def product(x, *rest, of=modules_mxfp4.mxfp4_gemm, **options):
        calls.append(options.get("gated", False))
        return of(x, *rest, **options)

    monkeypatch.setattr(modules_mxfp4, "mxfp4_gemm", product)
    assert torch.equal(module.multiply_gated(x), expected)
    assert calls == ([] if decoded else [in_one])


def test_norms_belong_to_the_quantizers_of_many_bfloat16_tokens(monkeypatch):
    """As `fused` asks them to, with a bias; what is decoded, turned apart or not quantized has none."""
    monkeypatch.setattr(modules_mxfp4, "has_kernels", lambda device: True)
    monkeypatch.setattr(modules_mxfp4, "has_normed", lambda n, k, device: (n, k) == (96, 256))
    generator, norm = torch.Generator().manual_seed(1), LlamaRMSNorm(256, 1e-5).bfloat16()
    x, added = (torch.randn(2, 20, 256, generator=generator).bfloat16() for _ in "12")
    norm.weight.data.uniform_(0.5, 1.5, generator=generator)
    decoded, apart = linear(), OnlineHadamard(Rotation("R4", "hadamard", 256, 256, 0))
    decoded.decode(torch.bfloat16)
    assert not any(other.norms(x) for other in (decoded, linear(online=apart), linear(NONE), linear(n=48)))
    for module in (linear(), linear(TOKEN), linear(online=OnlineHadamard(Rotation("R4", "hadamard", 256, 64, 0)))):
        module.bias.data = module.bias.data.bfloat16()
        assert module.norms(x) and not module.norms(x[:, :16]) and not module.norms(x.half())
        with torch.no_grad():
            y, total = module.normed(x, norm, added)
            assert torch.equal(total, x + added) and torch.equal(y, module(norm(x + added)))
            assert torch.equal(module.fused(x, norm=norm), module(norm(x)))


def test_fp8_activations_in_blocks_take_the_wide_path(monkeypatch):
    monkeypatch.setattr(modules_mxfp4, "has_kernels", lambda device: True)
    module = linear(ActivationFormat("fp8", (1, 128), "bf16"))
    assert not module.runs_packed(torch.device("cpu")) and module(torch.randn(3, 256)).shape == (3, 96)


def test_what_is_shipped_runs_packed(monkeypatch):
    monkeypatch.setattr(modules_mxfp4, "has_kernels", lambda device: True)
    rules = [rule for name in shipped_recipes() for rule in load_recipe(name).linear]
    shipped = {fmt.activations for fmt in map(formats.from_rule, rules) if fmt.weights.kind == "mxfp4"}
    assert {activations.kind for activations in shipped} == {"none", "fp8", "mxfp4"}
    assert all(linear(activations).runs_packed(torch.device("cpu")) for activations in shipped)


# --- Training --------------------------------------------------------------------------------------------------------


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32, bias=False))


def train(net: nn.Module, steps: int = 60) -> float:
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(32, 64, generator=generator)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        x = torch.randn(128, 64, generator=generator)
        loss = F.mse_loss(net(x), torch.tanh(x @ teacher.T))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / sum(losses[:10])


def test_it_learns_nearly_as_a_wide_linear_does():
    wide, narrow = model(), model()
    assert train_in_mxfp4(narrow) == ["0", "2"]
    plain = train(wide)
    assert plain < 0.8 and train(narrow) < plain + 0.1


def test_other_widths_of_the_transform_are_errors():
    for make in (
        lambda: train_in_mxfp4(nn.Sequential(), hadamard=48),
        lambda: Mxfp4TrainingLinear(96, 96, hadamard=48),
    ):
        with pytest.raises(ValueError, match="hadamard: 48; allowed: 32, 64, 128"):
            make()
    with pytest.raises(
        ValueError, match="model: 1 nn.Linear of no multiples of 128, 1 Mxfp4Linear, so nothing is repl"
    ):
        train_in_mxfp4(nn.Sequential(nn.Linear(64, 64), linear()), hadamard=128)


def gradients(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    net.zero_grad()
    net(x).square().sum().backward()
    return [p.grad.clone() for p in net.parameters()]


def test_a_seed_repeats_and_steps_differ():
    x, net = torch.randn(40, 64), model()
    train_in_mxfp4(net)
    torch.manual_seed(7)
    first, second = gradients(net, x), gradients(net, x)
    assert not torch.equal(first[0], second[0])
    torch.manual_seed(7)
    again = gradients(net, x)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    still = copy.deepcopy(net)
    for module in still.modules():
        if isinstance(module, Mxfp4TrainingLinear):
            module.stochastic = False
    one, two = (gradients(still, x) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_what_goes_on_from_a_checkpoint_repeats_what_went_on_without():
    """Parameters and torch's generator are all there is, however the model was made; an evaluation leaves no trace."""
    x, net = torch.randn(40, 64), model()
    train_in_mxfp4(net)
    gradients(net, x)
    state, saved = net.state_dict(), torch.get_rng_state()
    net.eval()
    with torch.no_grad():
        net(x)
    expected = gradients(net.train(), x)
    torch.manual_seed(99)
    resumed = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32, bias=False))
    train_in_mxfp4(resumed)
    resumed.load_state_dict(state)
    torch.set_rng_state(saved)
    assert all(torch.equal(a, b) for a, b in zip(gradients(resumed, x), expected, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_gradient_and_repeats_no_number(reentrant):
    x, net = torch.randn(40, 64, requires_grad=True), model()
    train_in_mxfp4(net)

    def step() -> torch.Tensor:
        net.zero_grad()
        checkpoint(net, x, use_reentrant=reentrant).square().sum().backward()
        return net[0].weight.grad.clone()

    torch.manual_seed(7)
    plain = [gradients(net, x)[0] for _ in range(2)]
    torch.manual_seed(7)
    assert all(torch.equal(step(), expected) for expected in plain) and not torch.equal(*plain)


@pytest.mark.parametrize("graph", [False, True])
def test_ranks_have_random_numbers_of_their_own(monkeypatch, graph):
    """With one seed for all, as Trainer sets it: what the mean over ranks is to take away would else stay."""
    net, x = model(), torch.randn(40, 64)
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: graph)
    train_in_mxfp4(net)
    found = []
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    for rank in range(3):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        torch.manual_seed(7)
        found.append(gradients(copy.deepcopy(net), x)[0])
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(found, 2))


def test_a_step_that_a_cuda_graph_records_draws_on_the_device(monkeypatch):
    linear, x = Mxfp4TrainingLinear(64, 32), torch.randn(4, 64)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    for recording in (False, True):
        monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda recording=recording: recording)
        assert isinstance(linear._draw(x), torch.Tensor) == recording
    assert linear.eval()._draw(x) is not None and linear.requires_grad_(False)._draw(x) is None


class Attention(nn.Module):
    """Of which torch.compile computes parts again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = F.silu(self.first(x)).view(2, 16, 2, 32).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return self.last(y.transpose(1, 2).reshape(2, 16, 64))


class Checkpointed(Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@devices
@pytest.mark.parametrize("kind", [Attention, Checkpointed])
def test_a_compiled_step_is_one_graph_that_draws_anew(device, kind):
    """As far from the exact gradient as an eager one, each its own way, and again where the generator is put back; but
    torch has generators of its own for what a GPU's checkpoint draws twice."""
    torch.manual_seed(0)
    net, x = kind().to(device), torch.randn(2, 16, 64, device=device)
    exact = gradients(net, x)
    train_in_mxfp4(net)
    run = torch.compile(net, fullgraph=True)

    def step(seed):
        torch.manual_seed(seed)
        return gradients(run, x), gradients(run, x)

    (a, b), again = step(7), step(7)
    if kind is Attention or device == "cpu":
        assert all(torch.equal(p, q) for p, q in zip((*a, *b), (*again[0], *again[1]), strict=True))
    eager = gradients(net, x)
    for i, (name, _) in enumerate(net.named_parameters()):
        error, other, usual = ((got[i] - exact[i]).norm() / exact[i].norm() for got in (a, b, eager))
        assert error < 1.3 * usual and other < 1.3 * usual, name
        assert name.endswith("bias") or not torch.equal(a[i], b[i])


def test_a_step_compiles_with_sizes_and_numbers_as_symbols():
    net = model()
    train_in_mxfp4(net)
    run = torch.compile(net, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (40, 7, 64):
        x = torch.randn(tokens, 64)
        reference = gradients(net, x)
        found = gradients(run, x)
        for a, b in zip(found, reference, strict=True):
            assert a.norm() > 0 and (a - b).norm() < b.norm()  # of other random numbers


def test_what_was_trained_is_served_by_nearly_the_codes_it_was_trained_with(tiny, tmp_path):
    model = tiny(tmp_path / "model", hidden=256, intermediate=512, dtype=torch.bfloat16)
    convert(model, "trained-mxfp4", tmp_path / "out")
    trained, served = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out"))
    for kind in ("self_attn.q_proj", "mlp.down_proj"):
        name = f"model.layers.0.{kind}.weight"
        codes, scale, _ = hadamard_quantize_mxfp4(trained[name], "quest", hadamard=32)
        ours = served[f"{name}_packed"], served[f"{name}_scale"]
        differ = [(a != b).float().mean().item() for a, b in zip(ours, (codes, scale), strict=True)]
        assert differ[0] < 0.005 and differ[1] < 0.002  # the yaml says of codes 0.2%, of which a byte holds two
