"""GPTQ's damping, and tokens that count alike: the errors of linears' outputs on a text that was not calibrated on.

    python benchmarks/bench_gptq_error.py --model DIR --calibration TEXT --text TEXT [--layers 2 14 25]
        [--windows 16] [--tokens N] [--seq-len 512] [--hadamard 32]

Each linear is rounded to MXFP4 (`mse`) alone, on the original's inputs, which are rounded as `even` rounds them behind
a Hadamard of that width, and stay wide without. Errors are of squares, of the outputs of tokens that are no sinks
(inputs at most five times as large as the middle token's, with whose square the largest one's is compared). A table on
stdout.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantrot import formats
from quantrot.formats import WeightFormat
from quantrot.gptq import damping_of, feedback, round_rows
from quantrot.hessians import weighed
from quantrot.kernels.hadamard import hadamard_transform
from quantrot.kernels.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from quantrot.load import open_model
from quantrot.tokenizer import windows

LINEARS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
FORMAT = WeightFormat("mxfp4", (1, 32), "mse")
ROWS = 768  # of a weight: they do not know of each other
DAMPINGS = (0.01, 0.05, 0.2, 1.0)


@torch.no_grad()
def inputs_of(model: Any, names: list[str], ids: Tensor) -> dict[str, Tensor]:
    """Of these linears, [tokens, K]."""
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, to=found[name]: to.append(args[0][0]))
    for window in ids:
        model.get_decoder()(input_ids=window[None], use_cache=False)
    return {name: torch.cat(parts) for name, parts in found.items()}


def rounded_inputs(x: Tensor) -> Tensor:
    return dequantize_mxfp4(*quantize_mxfp4(x, "even"), torch.float32)


def error(found: list[Tensor], w: Tensor, x: Tensor, y: Tensor) -> float:
    """Percent."""
    rounded = formats.dequantize(FORMAT, found, w.shape[1], torch.float32)
    sizes = x.square().sum(1)
    usual = sizes <= 25 * sizes.median()
    return 100 * ((x @ rounded.T - y)[usual].square().sum() / y[usual].square().sum()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--layers", type=int, nargs="*", default=[2, 14, 25])
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--tokens", type=int, help="of the windows', the first")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--hadamard", type=int, default=0)
    options = parser.parse_args()
    model, tokenizer = open_model(options.model, "cpu", "float32")
    texts = [(options.calibration, options.windows), (options.text, 4)]
    ids = torch.cat([windows(tokenizer, path.read_text(), options.seq_len, count) for path, count in texts])
    names = [f"model.layers.{layer}.{linear}" for layer in options.layers for linear in LINEARS]
    columns = [f"{damping:g}" for damping in DAMPINGS] + ["the rule's"]
    print(
        "linear, columns a token",
        "largest token",
        "to nearest",
        *(f"{c}, weighed" for c in columns),
        *columns,
        sep=" | ",
    )
    for name, found in inputs_of(model, names, ids).items():
        w = model.get_submodule(name).weight.detach()[:ROWS]
        seen, test = found.split([options.windows * options.seq_len, 4 * options.seq_len])
        seen = seen[: options.tokens]
        if options.hadamard:
            seen, test, w = (hadamard_transform(t, block=options.hadamard) for t in (seen, test, w))
        y = test @ w.T
        if options.hadamard:
            seen, test = rounded_inputs(seen), rounded_inputs(test)
        k = w.shape[1]
        sizes = seen.square().sum(1)
        line = [f"{name}, {k / len(seen):.2f}", f"{(sizes.max() / sizes.median()).item():.0f}"]
        line += [f"{error(formats.quantize_rows(FORMAT, w), w, test, y):.2f}"]
        for x in (weighed(seen, seen)[0], seen):
            hessian = x.T @ x
            for damping in (*DAMPINGS, damping_of(k, len(seen))):
                by = feedback(hessian, k / (2 * damping))  # so many tokens have this damping
                line.append(f"{error(round_rows(FORMAT, w, by), w, test, y):.2f}")
        print(*line, sep=" | ", flush=True)


if __name__ == "__main__":
    main()
