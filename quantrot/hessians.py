"""Collect the Hessians that GPTQ rounds by (gptq.py), layer by layer while a conversion advances.

A layer's Hessians are of the inputs that reach its linears in the converted model: the layers before it are read back
as they were written, and every input is turned and rounded as its linear will do it. Only the layer's own linears are
still exact. (Attention runs in float32, whatever the recipe makes of it.) So calibration holds all windows' hidden
states, which it takes through one layer at a time; a conversion that resumes takes them through the layers that are
done, to the same bits: a window is run by one thread, always with the same others, and Hessians are summed in the order
of the windows. A GPU multiplies in TF32, whose inputs have three bits more than those of the bfloat16 in which the
model runs.
"""

import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel

from quantrot import formats, gptq, llama
from quantrot.calibration import lanes
from quantrot.checkpoint import look_up, read_rows
from quantrot.formats import WIDE
from quantrot.gptq import Feedback
from quantrot.meta import parameters_on_meta
from quantrot.modules.linear import fused_hadamard, quantize_dequantize
from quantrot.plan import Plan, Step, network_order
from quantrot.rotation import turn_input
from quantrot.transform import one_threaded, starts, transform, turned_rows

ENDS = (llama.EMBEDDING, llama.HEAD)  # rows of one are looked up, and nobody needs the other's logits
SLAB = 256  # rows of a Hessian that one thread sums
# Not what this network has: a type for every layer, a Qwen's window (llama.py refuses those that use it), a caller.
DESCRIBED = ("layer_types", "use_sliding_window", "attn_implementation", "_attn_implementation", "return_dict")
_SEEN = threading.local()  # .inputs: a window's, of its linears, by Step.hessian


def stages(
    plan: Plan, done: Collection[int], out: Path, workers: int, report: Callable[[str], None]
) -> Iterator[tuple[list[int], dict[str, Feedback]]]:
    """The steps to do, in order, some at a time, each time with the feedback of the Hessians that they name.

    What one yield gives must be in `out` when the next is asked for. report: is told what is being calibrated.
    """
    waiting = [i for i, step in enumerate(plan.steps) if step.hessian and i not in done]
    network = Network(plan, out, workers) if waiting else None
    for _, stage in groupby(range(len(plan.steps)), lambda i: network_order(plan.steps[i])):
        found = list(stage)
        todo = [i for i in found if i not in done]
        if network is None or found[0] > waiting[-1]:
            yield todo, {}
            continue
        steps = [plan.steps[i] for i in found]
        report(f"calibrating {steps[0].name}")
        network.place(steps)
        yield todo, network.feedback({plan.steps[i].hessian for i in todo} - {""})
        if found[-1] < waiting[-1]:
            network.advance(steps)


class Network:
    """The decoder with one layer, or with the head alone, and what all windows are before it, [n, S, hidden] of those
    that go through it together."""

    def __init__(self, plan: Plan, out: Path, workers: int) -> None:
        assert plan.windows is not None
        self.plan = plan
        self.workers, self.together = lanes(plan.device, workers, plan.windows.shape[1])
        self.tokens = plan.windows.numel()
        infos = [info for shard in plan.shards for info in shard.tensors]
        self.written = {info.name: replace(info, file=out / info.file) for info in infos}
        self.hidden: list[Tensor] = []
        self.decoder = _decoder(plan.checkpoint.config)
        self.decoder.rotary_emb.to(plan.device)
        self.layer, self.norm = self.decoder.layers[0], self.decoder.norm
        self.decoder.embed_tokens, self.decoder.norm = nn.Identity(), nn.Identity()
        self.head: Linear | None = None

    def place(self, steps: list[Step]) -> None:
        """Make the layer of these steps the decoder's, its weights as they are before they are quantized."""
        for step in steps:
            if step.name == llama.HEAD and step.source:
                self.decoder.layers, self.decoder.norm = nn.ModuleList(), self.norm
                self.head = Linear(self.plan, step)
            elif len(step.shape) == 2 and step.source and step.name != llama.EMBEDDING:
                self.layer.set_submodule(_inside(step.name), Linear(self.plan, step))
        with one_threaded(self.workers) as pool:
            list(pool.map(self._place, (step for step in steps if step.source and step.name not in ENDS)))

    def feedback(self, names: set[str]) -> dict[str, Feedback]:
        """The feedback of the inputs that have these names, by name."""
        with one_threaded(self.workers) as pool:
            hessians = self._hessians(sorted(names), pool) if names else {}
            order = list(hessians)
            made = pool.map(lambda name: gptq.feedback(hessians.pop(name), self.tokens), order)
            return dict(zip(order, made, strict=True))

    def _hessians(self, names: list[str], pool: ThreadPoolExecutor) -> dict[str, Tensor]:
        """The upper triangles of what these inputs' products sum to over all windows, float32 [K, K]."""
        sums = {}
        for name in names:
            width = next(step.shape[1] for step in self.plan.steps if step.hessian == name)
            sums[name] = torch.zeros(width, width, dtype=torch.float32, device=self.plan.device)
        with _tf32():
            for i in range(0, len(self.hidden), self.workers):
                seen = [inputs for _, inputs in pool.map(self._run, self.hidden[i : i + self.workers])]
                for name, hessian in sums.items():
                    found = [weighed(inputs.pop(name)) for inputs in seen]
                    list(pool.map(partial(_add, hessian, found), range(0, len(hessian), SLAB)))
        for name, hessian in sums.items():
            if not torch.isfinite(hessian).all():
                raise ValueError(f"calibration: the inputs of {name} are not finite when squared; repair the model")
        return sums

    def advance(self, steps: list[Step]) -> None:
        """Take every window through the layer of these steps, or through the embedding, as it was written."""
        with one_threaded(self.workers) as pool:
            if not self.hidden:
                self.hidden = self._embedded()
                return
            list(pool.map(self._replace, (step for step in steps if step.format is not None)))
            with _tf32():
                for i, after in enumerate(pool.map(lambda hidden: self._run(hidden)[0], self.hidden)):
                    self.hidden[i] = after

    def _embedded(self) -> list[Tensor]:
        assert self.plan.windows is not None
        rows = look_up(self.written[f"{llama.EMBEDDING}.weight"], self.plan.windows)
        return list(rows.to(self.plan.device, torch.float32).split(self.together))

    def _place(self, step: Step) -> None:
        plan = self.plan
        if step.format is not None:
            value = turned_rows(plan, step, read_rows(plan.checkpoint.tensors[step.source]))
        else:
            value = torch.cat([transform(plan, step, start).outputs[0] for start in starts(step)])
        self._set(step, value)

    def _replace(self, step: Step) -> None:
        assert step.format is not None
        stored = [read_rows(self.written[name]).to(self.plan.device) for name, _, _ in step.outputs]
        self._set(step, formats.dequantize(step.format.weights, stored, step.shape[1], torch.float32))

    def _set(self, step: Step, value: Tensor) -> None:
        places = {llama.HEAD: self.head, llama.FINAL_NORM: self.norm}
        module = places[step.name] if step.name in places else self.layer.get_submodule(_inside(step.name))
        kind = "bias" if len(step.shape) == 1 and isinstance(module, Linear) else "weight"
        setattr(module, kind, nn.Parameter(value.to(self.plan.device, torch.float32), requires_grad=False))

    @torch.no_grad()
    def _run(self, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """(windows [n, S, hidden] after the layer, its linears' inputs by name)."""
        _SEEN.inputs = {}
        after = self.decoder(inputs_embeds=hidden, use_cache=False).last_hidden_state
        if self.head is not None:
            self.head.inputs(after)
        return after, _SEEN.__dict__.pop("inputs")


def _decoder(config: dict[str, Any]) -> Any:
    """The model of this config.json with one layer, on the meta device. ValueError where transformers cannot build it,
    with which it says what it likes."""
    described = {key: value for key, value in config.items() if key not in DESCRIBED}
    try:
        with parameters_on_meta():
            made = AutoConfig.for_model(**described | {"num_hidden_layers": 1})
            decoder = AutoModel.from_config(made, dtype=torch.float32, attn_implementation="sdpa")
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"config.json: transformers cannot build the model to calibrate it: {what:.300}") from None
    return decoder.requires_grad_(False).eval()


class Linear(nn.Module):
    """x -> Q(x R) W^T + b as the converted linear will have it; what it multiplies is noted for its Hessian."""

    def __init__(self, plan: Plan, step: Step) -> None:
        super().__init__()
        self.format, self.online = step.format, plan.online.get(step.name)
        self.hessian = step.hessian if step.hessian == step.name else ""  # the first of those that read the same
        self.weight: Tensor | None
        self.bias: Tensor | None
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)

    def inputs(self, x: Tensor) -> Tensor:
        """What the weight multiplies."""
        activations = WIDE if self.format is None else self.format.activations
        hadamard = 0 if self.online is None else fused_hadamard(self.online, activations)
        x = x if self.online is None or hadamard else turn_input(x, self.online)
        x = quantize_dequantize(x, activations, hadamard)
        if self.hessian:
            _SEEN.inputs[self.hessian] = x.flatten(0, -2)
        return x

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return F.linear(self.inputs(x), self.weight, self.bias)


@contextmanager
def _tf32() -> Iterator[None]:
    """A GPU's float32 products by TF32's tensor cores."""
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _inside(fqn: str) -> str:
    """The name within a layer."""
    return fqn.split(".", 3)[3]


def weighed(x: Tensor) -> Tensor:
    """Inputs [tokens, K] of which no token counts for more than the middle one. Attention's sinks, whose inputs of a
    down_proj are up to a hundred times as large as others' (squared), would have all feedback for themselves."""
    sizes = x.square().sum(1, keepdim=True)
    return x * (sizes.median() / sizes.clamp(min=torch.finfo(torch.float32).tiny)).clamp_(max=1).sqrt_()


def _add(hessian: Tensor, found: list[Tensor], row: int) -> None:
    """Add the products of inputs [tokens, K], one thread's after the other's, to SLAB rows of the upper triangle."""
    for x in found:
        hessian[row : row + SLAB, row:].addmm_(x[:, row : row + SLAB].T, x[:, row:])
