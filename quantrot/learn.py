"""Learn R1 and R2: the orthogonal matrices with which the quantized model's next-token distributions are nearest to the
original's on a text, found by gradient descent.

Every weight stays; only the matrices move, R1's blocks, which the whole network shares, and R2's of every layer and
value head. A step runs the network as the recipe would run it: weights turned and rounded to their formats, inputs
turned online where a rule says so, and rounded. (Attention runs in float32, whatever the recipe makes of it.)

Gradients. Without rounding a rotation changes nothing, so all of a gradient is due to rounding errors. To keep an error
as it is while the matrices move (the straight-through gradient) is true of small steps alone. What lasts is its size,
which is the scale's, which is the group's largest magnitude's: so that one's gradient gets the group's sum of gradient
times error, divided by the magnitude (`_slope`). SmolLM2-135M after 15 steps: KL 1.016 without it, 1.001 with it.

Steps. For a matrix R with gradient G, the tangent R (R^T G - G^T R) stays among orthogonal matrices; Adam makes a skew
A of it, and the step is Cayley's transform, R (I - A/2)^-1 (I + A/2), which is orthogonal up to float64's rounding. The
idea is SpinQuant's (arXiv:2405.16406), the transform on manifolds Li et al.'s (arXiv:2002.01113).

Memory: the model in float32, twice (turned weights are kept for the backward), and what a window's backward needs.
"""

import hashlib
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantrot import formats, llama
from quantrot.checkpoint import DTYPES, resolved
from quantrot.device import known_device
from quantrot.formats import ActivationFormat, WeightFormat
from quantrot.learned import digest, purpose, write
from quantrot.load import open_model
from quantrot.modules import quantize_dequantize
from quantrot.modules.linear import fused_hadamard
from quantrot.plan import Plan
from quantrot.plan import plan as make_plan
from quantrot.process import Progress, counted
from quantrot.recipe import RecipeLike, load_recipe
from quantrot.rotation import block_matrices, permutation, split_gain, turn_input
from quantrot.tokenizer import windows as cut
from quantrot.version import __version__

BETAS, EPSILON = (0.9, 0.99), 1e-12
CHECKS = 4  # times on the way that the held-out windows are run; the best matrices of these are kept
SCALED = ("mxfp4", "int8")  # formats whose errors are of the size of the scale; e4m3's are of each element's
LEARNABLE = ("R1", "R2")


@dataclass(frozen=True)
class Learning:
    """What was learned: KL(original || quantized) in nats a token on the held-out windows, at the start and of what was
    written, which is of this step (0: the start, where nothing was better)."""

    out: Path
    names: tuple[str, ...]
    kl_before: float
    kl_after: float
    best_step: int
    held_out: int
    seq_len: int
    windows: int  # of the text, those held out among them


def learn(
    model: str | Path,
    recipe: RecipeLike,
    out: str | Path,
    *,
    text: str,
    steps: int = 100,
    seq_len: int = 256,
    windows: int | None = None,
    held_out: int = 8,
    rate: float = 0.003,
    seed: int = 0,
    device: str = "auto",
    progress: Progress | None = None,
) -> Learning:
    """Learn the recipe's R1 and R2, from what it has there as a start, and write them to `out` for `kind: learned`.

    text: cut into windows of `seq_len` tokens, the first `windows` of them are used, and of these the last `held_out`
    only to choose the best matrices with; the others are run one a step, in the seed's order. rate: how far an entry of
    A may go in the first step, in radians; it falls to 0 along a cosine. ValueError for what a user can mend.
    What ends it early, KeyboardInterrupt too, passes through when what was better than the start by then is written.
    """
    target = Path(os.path.expanduser(out))
    _check_options(target, steps, held_out, rate, seed)
    plan = make_plan(model, load_recipe(recipe).nearest())
    _check_plan(plan)
    network, tokenizer = open_model(model, known_device(device), "float32")
    ids = cut(tokenizer, text, seq_len, windows, plan.llama.max_positions, plan.llama.vocab_size).to(network.device)
    if len(ids) <= held_out:
        remedy = "a longer text" if windows is None or len(ids) < windows else "more windows"
        raise ValueError(
            f"text: {counted(len(ids), 'window')} of {seq_len} tokens, {held_out} are held out; give {remedy} or less "
            "held_out"
        )
    order = torch.randperm(len(ids) - held_out, generator=torch.Generator().manual_seed(seed)).tolist()
    turns = Turns(plan, network.device)
    make_turned(network, plan, turns)
    train = (ids[order[i % len(order)]] for i in range(steps))
    checkpoint = digest(plan.checkpoint, plan.llama)  # which may be gone in hours
    kl, best, step, ended = _descend(network, turns, train, steps, ids[-held_out:], rate, progress or (lambda *_: None))
    about = {
        "quantrot": __version__,
        "model": plan.source.base_model,
        "revision": plan.source.revision,
        "digest": checkpoint,
        "recipe": purpose(plan.recipe),
        "start": {name: plan.rotations[name].kind for name in turns.matrices},
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "steps": steps,
        "best_step": step,
        "interrupted": ended is not None,
        "seq_len": seq_len,
        "windows": len(ids),
        "held_out": held_out,
        "rate": rate,
        "seed": seed,
        "kl_before": kl[0],
        "kl_after": kl[1],
    }
    _keep(target, {name: matrices.float().cpu().contiguous() for name, matrices in best.items()}, about)
    if isinstance(ended, KeyboardInterrupt):
        raise KeyboardInterrupt(f"interrupted; {target} holds the best matrices until then, those of step {step}")
    if ended is not None:
        ended.add_note(f"{target} holds the best matrices until this error, those of step {step}")
        raise ended
    return Learning(target, tuple(best), *kl, step, held_out, seq_len, len(ids))


def _keep(target: Path, matrices: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write the file, or where the disk refuses, another one that the error names: what was learned took hours."""
    try:
        if target.exists():
            raise OSError(f"{target} was made by another meanwhile")
        write(target, matrices, about)
    except OSError as error:
        saved = Path(tempfile.mkdtemp(prefix="quantrot-learn-")) / target.name
        write(saved, matrices, about)
        raise OSError(f"{error}\nwhat was learned is in {saved} instead; move it from there") from None


def _check_options(target: Path, steps: int, held_out: int, rate: float, seed: int) -> None:
    """What can be said now, not when all is learned."""
    for name, value in (("steps", steps), ("held_out", held_out)):
        if value < 1:
            raise ValueError(f"{name} is {value}; a positive number is needed")
    if not 0 <= seed < 1 << 63:
        raise ValueError(f"seed is {seed}; a whole number from 0 to 2^63 - 1 is needed")
    if not 0 < rate < 1:
        raise ValueError(f"rate is {rate}; a number of radians between 0 and 1 is needed, such as 0.003")
    place = resolved(target)  # of what a link is to
    if place.exists() or not place.parent.is_dir():
        what = "exists; choose another name" if place.exists() else "is in no directory; make that first"
        raise ValueError(f"output {target} {what}")
    if not os.access(place.parent, os.W_OK):
        raise ValueError(f"output {target} is in a directory that cannot be written to; choose another")


def _check_plan(plan: Plan) -> None:
    """That there is something to learn, and something to learn it from."""
    found = [plan.rotations[name] for name in LEARNABLE if name in plan.rotations]
    if not any(rotation.block > 1 and rotation.turned for rotation in found):
        raise ValueError(
            f"recipe {plan.recipe.name}: R1 and R2 turn nothing, nothing else is learned; give them a kind and a block "
            "to start from"
        )
    if not any(plan.linears.values()):
        raise ValueError(f"recipe {plan.recipe.name}: it quantizes no linear, so that every rotation is as good")


def _descend(
    network: Any, turns: "Turns", train: Iterator[Tensor], steps: int, held: Tensor, rate: float, progress: Progress
) -> tuple[tuple[float, float], dict[str, Tensor], int, BaseException | None]:
    """((KL of the start, of the best), the best matrices, their step, what ended it early). Raises that where the start
    is the best."""
    first = lowest = held_out_kl(network, turns, held)
    if not math.isfinite(first):  # nothing is less than NaN: all steps would be for nothing
        raise ValueError(f"KL at the start is {first}: the model computes NaN or infinity; repair its checkpoint")
    best, best_step, done, checked = turns.copy(), 0, 0, 0
    optimizer = Cayley(list(turns.matrices.values()))
    ended: BaseException | None = None

    def check() -> None:
        nonlocal lowest, best, best_step, checked
        reached, checked = held_out_kl(network, turns, held), done
        if reached < lowest:
            lowest, best, best_step = reached, turns.copy(), done

    try:
        for i, ids in enumerate(train):
            turns.refresh()
            loss = kl(network, turns, ids)
            if not math.isfinite(loss.item()):
                raise ValueError(f"KL is {loss.item()} in step {done + 1} of {steps}; give a lower rate than {rate:g}")
            loss.backward()
            optimizer.step(rate * 0.5 * (1 + math.cos(math.pi * i / steps)))
            done = i + 1
            progress(f"KL {loss.item():.4f}, held out {lowest:.4f}", done, steps)
            if (i + 1) * CHECKS // steps > i * CHECKS // steps:
                check()
    except KeyboardInterrupt as error:
        ended = error
        if done > checked:
            with suppress(KeyboardInterrupt):  # whoever is in a hurry gets what was best before
                check()
        if best_step == 0:
            raise KeyboardInterrupt(
                f"interrupted; nothing was written: until step {done} the held-out windows prefer the start"
            ) from None
    except Exception as error:  # such as memory that is full: hours may lie behind it
        if best_step == 0:
            raise
        ended = error
    return (first, lowest), best, best_step, ended


def kl(network: Any, turns: "Turns", ids: Tensor) -> Tensor:
    """KL(original || quantized) in nats a token over a window ids [S]."""
    turns.exact = True
    with torch.no_grad():
        wanted = F.log_softmax(network(input_ids=ids[None], use_cache=False).logits[0], -1)
    turns.exact = False
    got = F.log_softmax(network(input_ids=ids[None], use_cache=False).logits[0], -1)
    return F.kl_div(got, wanted, reduction="none", log_target=True).sum(-1).mean()


@torch.no_grad()
def held_out_kl(network: Any, turns: "Turns", held: Tensor) -> float:
    """The mean over windows [n, S]."""
    turns.refresh()
    return sum(kl(network, turns, ids).item() for ids in held) / len(held)


class Cayley:
    """Adam for orthogonal matrices [..., b, b]: its moments are of the skew R^T G - G^T R, its steps Cayley's."""

    def __init__(self, matrices: list[Tensor]) -> None:
        self.matrices, self.count = matrices, 0
        self.first, self.second = ([torch.zeros_like(m) for m in matrices] for _ in range(2))

    @torch.no_grad()
    def step(self, rate: float) -> None:
        self.count += 1
        for r, m, v in zip(self.matrices, self.first, self.second, strict=True):
            assert r.grad is not None
            slope, r.grad = r.mT @ r.grad, None
            skew = slope - slope.mT
            m.lerp_(skew, 1 - BETAS[0])
            v.lerp_(skew * skew, 1 - BETAS[1])
            deviation = (v / (1 - BETAS[1] ** self.count)).sqrt_().add_(EPSILON)
            half = m / (1 - BETAS[0] ** self.count) / deviation * (-rate / 2)
            eye = torch.eye(r.shape[-1], dtype=r.dtype, device=r.device)
            r.copy_(r @ torch.linalg.solve(eye - half, eye + half))


# --- The network, turned and rounded ---------------------------------------------------------------------------------


class Turns:
    """The matrices that a network turns by. matrices: by name, float64, the optimizer's: R1 [n, block, block], R2
    [layers, kv_heads, n, block, block]. exact: run the original instead, neither turned nor rounded."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan, self.exact = plan, False
        self.matrices: dict[str, Tensor] = {}
        arch = plan.llama
        for name in LEARNABLE:
            if name in plan.rotations:
                start = block_matrices(plan.rotations[name])
                if name == "R2":
                    units = arch.layers, arch.kv_heads, arch.head_dim // plan.rotations[name].block
                    start = start.expand(arch.layers * arch.kv_heads, *start.shape) if len(start) == units[2] else start
                    start = start.reshape(*units, *start.shape[-2:])
                self.matrices[name] = start.to(device, copy=True).requires_grad_()
        r1 = plan.rotations.get("R1")
        self.turned = 0 if r1 is None else (r1.turned if r1.turned >= 0 else r1.width) // r1.block
        self.refresh()

    def refresh(self) -> None:
        """Take the matrices as they are now, in float32."""
        self.now = {name: matrices.float() for name, matrices in self.matrices.items()}

    def copy(self) -> dict[str, Tensor]:
        return {name: matrices.detach().clone() for name, matrices in self.matrices.items()}

    def blocks(self, side: str, layer: int, repeat: int = 1) -> Tensor | None:
        """What turns a side in this layer, float32 [n, block, block]; None for nothing."""
        if self.exact or side not in self.now:
            return None
        if side == "R1":
            return self.now["R1"][: self.turned]
        return self.now["R2"][layer].repeat_interleave(repeat, 0).flatten(0, 1)


def turn(x: Tensor, blocks: Tensor | None) -> Tensor:
    """x [..., m] times blocks [n, b, b] on the diagonal; columns past n * b stay."""
    if blocks is None:
        return x
    n, b, _ = blocks.shape
    turned = torch.einsum("...nb,nbc->...nc", x[..., : n * b].unflatten(-1, (n, b)), blocks).flatten(-2)
    return turned if n * b == x.shape[-1] else torch.cat([turned, x[..., n * b :]], -1)


def kept_in(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as a checkpoint of this dtype holds it; the gradient goes straight through."""
    return x.to(dtype).to(x.dtype).detach() + (x - x.detach())


class TurnedEmbedding(nn.Module):
    """stored: the dtype of the table on disk."""

    def __init__(self, weight: Tensor, turns: Turns, stored: torch.dtype) -> None:
        super().__init__()
        self.weight, self.turns, self.stored = weight, turns, stored

    def forward(self, ids: Tensor) -> Tensor:
        return kept_in(turn(F.embedding(ids, self.weight), self.turns.blocks("R1", 0)), self.stored)


class TurnedLinear(nn.Module):
    """One linear. weight, bias: with its norm's gain, in the order of channels that R1 has them in."""

    def __init__(self, place: llama.Linear, weight: Tensor, bias: Tensor | None, turns: Turns) -> None:
        super().__init__()
        plan, self.turns, self.weight, self.bias = turns.plan, turns, weight, bias
        self.format, self.online = plan.linears[place.fqn], plan.online.get(place.fqn)
        info = plan.checkpoint.tensors.get(f"{place.fqn}.bias")
        self.stored = torch.float32 if info is None else DTYPES[info.dtype]
        layer = int(place.fqn.split(".")[2]) if place.fqn != llama.HEAD else 0
        self.inside = partial(turns.blocks, place.input_side, layer, plan.llama.heads // plan.llama.kv_heads)
        self.outside = partial(turns.blocks, place.output_side, layer)

    def forward(self, x: Tensor) -> Tensor:
        inside, outside = self.inside(), self.outside()
        if self.turns.exact or self.format is None:  # unrounded, all bases give the same: turn the fewer
            back = None if inside is None else inside.mT
            return turn(F.linear(turn(x, back), self.weight, self.bias), outside)
        weight, activations, plain, hadamard = turn(self.weight, inside), self.format.activations, x, 0
        if self.online is not None:
            x, weight = turn_input(x, self.online), turn_input(weight, self.online)
            hadamard = fused_hadamard(self.online, activations)
        weight = turn(weight.T, outside).T.contiguous()
        x = _RoundedInput.apply(x, plain if hadamard else x, activations, hadamard)
        y: Tensor = _RoundedProduct.apply(x, weight, self.format.weights)
        return y if self.bias is None else y + kept_in(turn(self.bias, outside), self.stored)


@torch.no_grad()
def make_turned(network: Any, plan: Plan, turns: Turns) -> None:
    """Put turned modules in the place of a network's own, with its weights."""
    r1 = plan.rotations.get("R1")
    order = permutation(r1).to(network.device) if r1 is not None and r1.permutation else slice(None)
    for place in llama.linears(plan.llama):
        old = network.get_submodule(place.fqn)
        weight, bias = old.weight.data, None if old.bias is None else old.bias.data
        if place.norm and r1 is not None:
            weight = weight * split_gain(network.get_submodule(place.norm).weight.data, r1)[0]
        weight = weight[:, order] if place.input_side == "R1" else weight
        if place.output_side == "R1":
            weight, bias = weight[order], None if bias is None else bias[order]
        network.set_submodule(place.fqn, TurnedLinear(place, weight.contiguous(), bias, turns))
    if r1 is not None:
        for name in llama.norms(plan.llama):
            gain = network.get_submodule(name).weight
            gain.data = split_gain(gain.data, r1)[1]
    table = network.get_submodule(llama.EMBEDDING).weight.data
    stored = DTYPES[plan.checkpoint.tensors[f"{llama.EMBEDDING}.weight"].dtype]
    network.set_submodule(llama.EMBEDDING, TurnedEmbedding(table[:, order], turns, stored))
    network.requires_grad_(False)


class _RoundedInput(torch.autograd.Function):
    """x [..., K] as the product sees it. plain: what the quantizer takes, x before it was turned where it turns it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plain: Tensor, activations: ActivationFormat, hadamard: int) -> Tensor:
        y = quantize_dequantize(plain, activations, hadamard)
        ctx.activations = activations
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        x, y = ctx.saved_tensors
        return _slope(grad, x, y, ctx.activations), None, None, None


class _RoundedProduct(torch.autograd.Function):
    """x W^T of the rounded W, which is rounded to the tensors on disk and kept as those."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fmt: WeightFormat) -> Tensor:
        stored = formats.quantize_rows(fmt, weight)
        ctx.format = fmt
        ctx.save_for_backward(x, weight, *stored)
        return F.linear(x, formats.dequantize(fmt, stored, x.shape[-1], x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, *stored = ctx.saved_tensors
        rounded = formats.dequantize(ctx.format, stored, x.shape[-1], grad.dtype)
        slope = grad.flatten(0, -2).T @ x.flatten(0, -2)
        return grad @ rounded, _slope(slope, weight, rounded, ctx.format), None


def _slope(grad: Tensor, x: Tensor, rounded: Tensor, fmt: WeightFormat | ActivationFormat) -> Tensor:
    """The gradient of x [..., K] from its rounded self's: straight through, and through the scale."""
    if fmt.kind not in SCALED:
        return grad
    g, v, error = (t.unflatten(-1, (-1, fmt.block[1] or t.shape[-1])) for t in (grad, x, rounded - x))
    where = v.abs().argmax(-1, keepdim=True)
    largest = v.gather(-1, where)
    push = (g * error).sum(-1, keepdim=True) / torch.where(largest == 0, 1.0, largest)
    return g.scatter_add(-1, where, push).flatten(-2)
