"""What puts training linears in the places of a model's linears."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification

from quantrot.modules import Fp8TrainingLinear, Mxfp4TrainingLinear, fp8, train_in_fp8, train_in_mxfp4

KINDS = {train_in_fp8: Fp8TrainingLinear, train_in_mxfp4: Mxfp4TrainingLinear}


@pytest.fixture(params=KINDS, ids=lambda f: f.__name__)
def train_in(request):
    return request.param


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32, bias=False))


def test_a_replaced_linear_keeps_its_mode_and_loses_no_hook(train_in):
    net = model().eval()
    train_in(net)
    assert not any(module.training for module in net.modules())
    watched, changed = model(), model()
    watched[2].register_forward_hook(lambda *_: None)
    changed[2].forward = lambda x: x
    for other in (watched, changed):
        with pytest.raises(ValueError, match="model: 2 has hooks or a forward of its own, which would be lost"):
            train_in(other)
        assert type(other[0]) is nn.Linear


def test_replacing_keeps_the_parameters_and_the_state_dict(train_in):
    net = model()
    before, keys = list(net.parameters()), list(net.state_dict())
    train_in(net)
    assert all(a is b for a, b in zip(net.parameters(), before, strict=True)) and list(net.state_dict()) == keys
    assert type(net[0]) is type(net[2]) is KINDS[train_in] and net[0].bias is not None and net[2].bias is None


def test_what_does_not_fit_or_is_named_stays(train_in):
    net = nn.ModuleDict({"a": nn.Linear(64, 40), "b": nn.Linear(64, 64), "lm_head": nn.Linear(64, 64)})
    assert train_in(net) == ["b"] and type(net["a"]) is nn.Linear and type(net["lm_head"]) is nn.Linear


def test_the_head_of_a_classifier_stays(train_in):
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, vocab_size=32)
    net = LlamaForSequenceClassification(LlamaConfig(**sizes, num_labels=64))
    assert len(train_in(net)) == 7 and type(net.score) is nn.Linear
    assert train_in(LlamaForSequenceClassification(LlamaConfig(**sizes, num_labels=64)), skip=())[-1] == "score"


def block(**linears: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict({"attn": nn.ModuleDict(linears), "mlp": nn.ModuleDict({"up": nn.Linear(64, 64)})})


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        ("q_proj", ["0.attn.q_proj", "1.attn.q_proj"]),
        ("attn.*_proj", ["0.attn.q_proj", "0.attn.v_proj", "1.attn.q_proj", "1.attn.v_proj"]),
        ("mlp", ["0.mlp.up", "1.mlp.up"]),
        (("layers.0.*", "attn.v_proj"), ["0.attn.q_proj", "0.attn.v_proj", "0.mlp.up", "1.attn.v_proj"]),
        ([], []),
    ],
    ids=str,  # lists: a set has another order in every worker
)
def test_skip_takes_a_recipes_patterns_and_any_component(train_in, skip, left):
    net = nn.ModuleDict(
        {"layers": nn.ModuleList(block(q_proj=nn.Linear(64, 64), v_proj=nn.Linear(64, 32)) for _ in "12")}
    )
    names = {name for name, module in net.named_modules() if type(module) is nn.Linear}
    assert set(train_in(net, skip=skip)) == names - {f"layers.{name}" for name in left}


def test_adapters_stay(train_in):
    """Of peft, whose linear is the base_layer of a module of that name; of any rank."""
    adapter = nn.ModuleDict({"default": nn.Linear(64, 64, bias=False)})
    net = block(q_proj=nn.ModuleDict({"base_layer": nn.Linear(64, 64), "lora_A": adapter, "lora_B": adapter}))
    assert train_in(net) == ["attn.q_proj.base_layer", "mlp.up"]


def test_a_pattern_for_nothing_and_a_model_without_a_linear_to_replace_are_errors(train_in):
    net = block(q_proj=nn.Linear(64, 64))
    for skip, meant in (("q_porj", "did you mean 'q_proj'"), (("mlp", "zzz"), "there are attn, mlp, q_proj, up")):
        with pytest.raises(ValueError, match=rf"skip: '\w+' matches no module of this model \({meant}"):
            train_in(net, skip=skip)
    with pytest.raises(ValueError, match="model: 2 nn.Linear that skip names, so nothing is replaced"):
        train_in(net, skip="*")
    with pytest.raises(ValueError, match="model: no linear in it, so nothing is replaced; allowed: nn.Linear with"):
        train_in(nn.Sequential(nn.GELU()))


def test_a_linear_in_two_places_stays_one(train_in):
    shared = nn.Linear(64, 64)
    net = nn.ModuleDict({"a": shared, "b": shared})
    assert train_in(net, skip="lm_head") == ["a", "b"]  # no letter of a word is a name to skip
    assert net["a"] is net["b"] and net["a"].weight is shared.weight and len(list(net.parameters())) == 2


def test_a_linear_itself_is_an_error(train_in):
    with pytest.raises(ValueError, match="model: a linear itself; give a module that holds it"):
        train_in(nn.Linear(64, 64))


@pytest.mark.parametrize("linear", [Fp8TrainingLinear, Mxfp4TrainingLinear])
def test_of_a_frozen_weight_nothing_is_kept_that_only_its_gradient_reads(linear):
    torch.manual_seed(0)
    layer = linear(512, 256)
    x, grad = torch.randn(300, 512, requires_grad=True), torch.randn(300, 256)

    def step(frozen):
        """The bytes that are kept for the backward pass, and the gradient of x."""
        kept = []
        layer.weight.requires_grad_(not frozen)
        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.nbytes), t)[1], lambda t: t):
            y = layer(x)
        return sum(kept), y, torch.autograd.grad(y, x, grad)[0]

    (trained, y, dx), (frozen, again, same) = step(False), step(True)
    assert torch.equal(y, again) and torch.equal(dx, same)
    assert frozen <= 0.75 * trained  # of x one byte or 5/8 of one a number, which the weight's gradient needs
    layer.weight.requires_grad_(True)
    dw = torch.autograd.grad(layer(x.detach()), layer.weight, grad)[0]  # and an x without a gradient needs no weight
    assert (dw - grad.T @ x.detach()).norm() < 0.5 * (grad.T @ x.detach()).norm()


def test_a_frozen_weights_gradient_is_not_prepared_for(monkeypatch):
    """Of x and of what comes back no transpose is quantized, which only the weight's gradient is a product of."""
    layer, real, shapes = Fp8TrainingLinear(512, 256), fp8.quantize_fp8_both_ways, []
    monkeypatch.setattr(fp8, "quantize_fp8_both_ways", lambda x, *a, **k: shapes.append(x.shape) or real(x, *a, **k))
    for trained in (True, False):
        layer.weight.requires_grad_(trained)
        layer(torch.randn(300, 512, requires_grad=True)).sum().backward()
    assert shapes == [(300, 512), (256, 512), (300, 256), (256, 512)]


def test_a_weights_gradient_is_rounded_to_its_own_dtype_alone():
    torch.manual_seed(0)
    layer = Mxfp4TrainingLinear(128, 64)
    layer(torch.randn(96, 128).bfloat16()).float().square().sum().backward()
    assert layer.weight.grad.dtype == torch.float32 and layer.weight.grad.isfinite().all()
    assert (layer.weight.grad != layer.weight.grad.bfloat16()).float().mean() > 0.5


@pytest.mark.parametrize("lead", [(32,), (2, 16)])
def test_a_result_may_be_written_in_place(train_in, lead):
    torch.manual_seed(0)
    net, x, gradients = nn.Sequential(nn.Linear(64, 96, bias=False)), torch.randn(*lead, 64), []
    train_in(net)
    for relu in (nn.ReLU(), nn.ReLU(inplace=True)):
        torch.manual_seed(1)
        y = relu(net(x))
        assert y.shape == (*lead, 96) and y.min() == 0
        gradients += torch.autograd.grad(y.sum(), net[0].weight)
    assert torch.equal(*gradients)
