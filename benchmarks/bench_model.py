"""A whole model: decode and prefill of a recipe's linears against the same model in bfloat16, in one run.

    python benchmarks/bench_model.py --recipe int8-weight-only --batch 1 8 --prefill 512 2048
    python benchmarks/bench_model.py --recipe fp8-block --recipe quarot-mxfp4    # several, one after another
    python benchmarks/bench_model.py --device cpu --tiny                         # its logic, without a GPU

Weights are random, in the shape of Llama-3.1-8B (--config config.json: any other Llama's): time does not depend on
their values. The bfloat16 model is timed first; then each linear that the recipe quantizes is replaced by quantrot's
module, with the same weight quantized, those of one input are merged as `quantrot.load` does, and the model is timed
again. What a recipe fuses into weights costs nothing at run time and is left out; what it runs online is there. The
recipe "bf16" leaves the linears alone: what quantrot's attention does to them all, and what is not quantization's.

Both are compiled with mode="reduce-overhead". Decode is one token after a prompt, in a static cache; the time is the
mean of --steps consecutive tokens, synchronized at both ends (--eager: the least of three). Prefill is a forward over a
prompt that gives its keys and values and the last token's logits, the median of five. --eager times both without
compilation instead, where the host sets the pace, and decodes into the growing cache that `generate` takes by itself:
tokens and prompts of lengths that the process has seen, and "new" ones of lengths that it has not, for each of which
cuDNN's attention makes a plan. --profile lists the kernels of each, and the gaps between them. The floor reads every
weight once at copy speed. `error` is the relative error of the logits to the bfloat16 model's: of random weights, so of
interest to find broken modules only.
"""

import argparse
import copy
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from timing import copy_gbps, write_results  # noqa: E402

from quantrot import engines, formats, llama  # noqa: E402
from quantrot.load import merge_projections  # noqa: E402
from quantrot.modules import LINEARS, OnlineHadamard, QuantizedAttention, QuantizedLinear, RotatedLinear  # noqa: E402
from quantrot.modules.cache import cache_name  # noqa: E402
from quantrot.modules.sdpa import leave_masks_out  # noqa: E402
from quantrot.plan import _assign, _online, _rotations  # noqa: E402
from quantrot.recipe import load_recipe, shipped_recipes  # noqa: E402
from quantrot.rotation import Rotation, turn_input  # noqa: E402

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
TINY = LLAMA_8B | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}
WIDE = "bf16"  # no recipe: wide linears in quantrot's attention
QUANTIZED_ROWS = 4096  # quantized at a time: the reference quantizers make float32 copies
WARM_TOKENS = 8  # compilation, recording, and the caches
PROFILED = 4  # tokens, or prompts
NEW = itertools.count(1)  # of lengths
KERNELS_SHOWN = 24


# --- The model -------------------------------------------------------------------------------------------------------


def random_model(config: dict[str, Any], device: torch.device) -> Any:
    """A causal language model of this shape in bfloat16, weights normal with variance 1 / in_features."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    model.to_empty(device=device)
    with device:  # its buffers are computed, not random
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=p.shape[-1] ** -0.5) if p.dim() > 1 else p.fill_(1)
    return model.eval()


def replace_linears(model: Any, config: dict[str, Any], name: str) -> int:
    """Every linear that the recipe quantizes or turns becomes quantrot's module; the count of quantized ones."""
    if name == WIDE:
        for layer in model.model.layers:
            layer.self_attn = QuantizedAttention(layer.self_attn)
        return 0
    recipe, arch = load_recipe(name), llama.from_config(config)
    errors: list[str] = []
    rotations = _rotations(recipe, arch, None, errors)
    linears = _assign(recipe, arch, rotations, errors, [])
    if errors:
        raise ValueError("\n".join(errors))
    online = _online(arch, linears, rotations)
    native = engines.is_native(linears, bool(online) or "R3" in rotations)
    for fqn, fmt in linears.items():
        rotation = online.get(fqn)
        if fmt is None and rotation is None:
            continue
        old = model.get_submodule(fqn)
        turn = OnlineHadamard(rotation, engines.is_stored(rotation)).to(old.weight.device) if rotation else None
        shape = old.in_features, old.out_features, old.bias is not None, old.weight.dtype
        if fmt is None:
            assert turn is not None and rotation is not None
            new: nn.Module = RotatedLinear(*shape, online=turn).to(old.weight.device)
            with torch.no_grad():
                new.weight.copy_(turn_input(old.weight.float(), rotation))
        else:
            new = LINEARS[fmt.weights.kind](*shape, fmt, native_fp8=native, online=turn).to(old.weight.device)
            fill(new, old, fmt.weights, rotation)
        if old.bias is not None:
            with torch.no_grad():
                new.bias.copy_(old.bias)
        model.set_submodule(fqn, new)
    kind = {"arithmetic": recipe.attention, "kv_cache": recipe.kv_cache}
    if "R3" in rotations or set(kind.values()) != {"bf16"}:
        for layer in model.model.layers:
            layer.self_attn = QuantizedAttention(layer.self_attn, rotation=rotations.get("R3"), **kind).to(model.device)
    return sum(fmt is not None for fmt in linears.values())


@torch.no_grad()
def fill(new: QuantizedLinear, old: nn.Linear, weights: formats.WeightFormat, rotation: Rotation | None) -> None:
    """The stored tensors of `new` from the weight of `old`, turned where the input will be, rows at a time."""
    rows = QUANTIZED_ROWS
    for start in range(0, old.out_features, rows):
        w = old.weight[start : start + rows].float()
        parts = formats.quantize_rows(weights, turn_input(w, rotation) if rotation else w)
        for name, part in zip(new.tensor_names, parts, strict=True):
            stored = getattr(new, name)
            first = start * stored.shape[0] // old.out_features
            stored[first : first + part.shape[0]].copy_(part)


def decode_where_no_kernel(model: nn.Module) -> None:
    """What `quantrot.load` does: modules without a kernel for the device multiply by a dequantized weight."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear) and not module.runs_packed(next(module.parameters()).device):
            module.decode(torch.bfloat16)


def weight_bytes(model: nn.Module) -> int:
    """Bytes that one token reads: every parameter but the embedding's table."""
    table = {id(p) for p in model.model.embed_tokens.parameters()}
    return sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in table)


# --- Times -----------------------------------------------------------------------------------------------------------


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


@torch.no_grad()
def decode_us(model: Any, batch: int, asked: argparse.Namespace, step: Callable[..., Any], new: bool = False) -> float:
    """Microseconds a step: `batch` sequences, one token each. new: behind a prompt of a length of its own."""
    device, prompt, steps = model.device, asked.prompt, asked.steps
    prompt += new * next(NEW) * (WARM_TOKENS + 3 * steps + PROFILED)
    most = prompt + WARM_TOKENS + steps + PROFILED  # of a static cache, which has one trial
    cache = DynamicCache(config=model.config) if asked.eager else StaticCache(config=model.config, max_cache_len=most)
    ids = torch.randint(0, model.config.vocab_size, (batch, prompt), device=device)
    held = {cache_name(model): cache}
    model(ids, **held, logits_to_keep=1)
    token = ids[:, -1:].clone()

    def tokens(count: int) -> None:
        for _ in range(count):
            step(token, **held, logits_to_keep=1)

    tokens(WARM_TOKENS)
    trials = 3 if asked.eager else 1
    us = min(seconds(lambda: tokens(steps), device) for _ in range(trials)) / steps * 1e6
    if asked.profile:
        print_kernels(f"decode, batch {batch}", lambda: tokens(1))
    return us


@torch.no_grad()
def prefill_us(
    model: Any, tokens: int, asked: argparse.Namespace, forward: Callable[..., Any], new: bool = False
) -> float:
    """Microseconds a prompt. new: each some tokens longer, so that none was seen before."""

    def run() -> None:
        ids = torch.randint(0, model.config.vocab_size, (1, tokens + new * next(NEW)), device=model.device)
        forward(ids, use_cache=True, logits_to_keep=1)

    for _ in range(3):  # compiles, records, replays
        run()
    us = statistics.median(seconds(run, model.device) for _ in range(5)) * 1e6
    if asked.profile:
        print_kernels(f"prefill, {tokens} tokens", run)
    return us


def print_kernels(title: str, run: Callable[[], Any]) -> None:
    """A line a kernel, the longest first: its microseconds in one run, its launches, its name; then the gaps."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(PROFILED):
            run()
        torch.cuda.synchronize()
    kernels = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    by_name: dict[str, list[float]] = {}
    for kernel in kernels:
        by_name.setdefault(kernel.name, []).append(kernel.time_range.elapsed_us())
    span = max(k.time_range.end for k in kernels) - min(k.time_range.start for k in kernels)
    print(f"\n{title}: us a run, launches, kernel")
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:KERNELS_SHOWN]:
        print(f"{sum(times) / PROFILED:10.1f} {len(times) / PROFILED:6.1f}  {name[:100]}")
    print(f"{sum(map(sum, by_name.values())) / PROFILED:10.1f} {len(kernels) / PROFILED:6.1f}  all kernels")
    print(f"{span / PROFILED:10.1f}         from the first one's start to the last one's end\n", flush=True)


def compiled(model: Any) -> Callable[..., Any]:
    """The model's forward, on a GPU compiled and recorded."""
    if model.device.type != "cuda":
        return model.forward
    torch._dynamo.reset()
    return torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)


def measure(model: Any, asked: argparse.Namespace) -> dict[tuple[str, int], float]:
    """("decode", batch) and ("prefill", tokens), of --eager "eager decode" and "eager prefill" -> microseconds."""

    def step() -> Callable[..., Any]:
        return model.forward if asked.eager else compiled(model)

    how = "eager " if asked.eager else ""
    found = {(f"{how}decode", batch): decode_us(model, batch, asked, step()) for batch in asked.batch}
    found |= {(f"{how}prefill", tokens): prefill_us(model, tokens, asked, step()) for tokens in asked.prefill}
    if asked.eager:
        found["eager new decode", 1] = decode_us(model, 1, asked, step(), new=True)
        new = {
            ("eager new prefill", tokens): prefill_us(model, tokens, asked, step(), new=True)
            for tokens in asked.prefill
        }
        found |= new
    return found


# --- The table -------------------------------------------------------------------------------------------------------

HEADER = (
    "recipe                   phase          batch/tokens           us      bf16        x     floor     error\n"
    + "-" * 102
)


def main(asked: argparse.Namespace) -> list[dict[str, Any]]:
    device = torch.device(asked.device)
    config = TINY if asked.tiny else json.loads(asked.config.read_text()) if asked.config else LLAMA_8B
    gbps = copy_gbps() if device.type == "cuda" else 10.0
    torch.manual_seed(0)
    model = random_model(config, device)
    probe = torch.randint(0, config["vocab_size"], (1, 64), device=device)
    with torch.no_grad():
        exact = model(probe, use_cache=False).logits.float()
    if asked.eager:  # cuDNN makes its plans for the lengths that are seen again
        measure(model, asked)
    wide = measure(model, asked)
    rows = []
    print(HEADER)
    for recipe in asked.recipe:
        quantized = random_twin(model) if len(asked.recipe) > 1 else model
        count = replace_linears(quantized, config, recipe)
        decode_where_no_kernel(quantized)
        merge_projections(quantized)
        leave_masks_out(quantized)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        with torch.no_grad():
            logits = quantized(probe, use_cache=False).logits.float()
        error = ((logits - exact).norm() / exact.norm()).item()
        for (phase, size), us in measure(quantized, asked).items():
            row = {
                "op": "model",
                "case": {"recipe": recipe, "phase": phase, "size": size, "prompt": asked.prompt, "linears": count},
                "us": us,
                "floor_us": weight_bytes(quantized) / gbps / 1e3,
                "peers_us": {"bf16": wide[phase, size]},
                "error": error,
            }
            rows.append(row)
            print(
                f"{recipe:24s} {phase:17s} {size:9d} {us:12.1f} {wide[phase, size]:9.1f} {wide[phase, size] / us:8.2f} "
                f"{row['floor_us']:9.1f} {error:9.2e}",
                flush=True,
            )
        del quantized
        if device.type == "cuda":  # after each: what ends a long run loses the others alone
            write_results("bench_model", gbps, rows, asked.out)
        elif asked.out:
            asked.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    return rows


def random_twin(model: Any) -> Any:
    """A copy whose linears can be replaced; parameters are shared, so it costs nothing until then."""
    shared = {id(p): p for p in model.parameters()} | {id(b): b for b in model.buffers()}
    return copy.deepcopy(model, shared)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", action="append", help=f"a file, or one of {', '.join([WIDE, *shipped_recipes()])}")
    parser.add_argument("--batch", type=int, nargs="*", default=[1], help="sequences to decode together")
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 2048, 8192], help="tokens")
    parser.add_argument("--eager", action="store_true", help="both without compilation")
    parser.add_argument("--profile", action="store_true", help="list the kernels that a token and a prompt take")
    parser.add_argument("--prompt", type=int, default=128, help="tokens in the cache before the first decoded one")
    parser.add_argument("--steps", type=int, default=64, help="tokens to decode")
    parser.add_argument("--config", type=Path, help="config.json of another Llama")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of a few hundred kilobytes")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    asked.recipe = asked.recipe or ["int8-weight-only"]
    if asked.tiny:
        asked.prefill, asked.prompt, asked.steps = [16], 8, 4
    main(asked)
