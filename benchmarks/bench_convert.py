"""Conversion and `verify` of its result: time and peak memory of whole processes, quantrot beside llm-compressor, on
checkpoints of real shapes.

    python benchmarks/bench_convert.py --work DIR [--peer-python PYTHON] [--runs 3] [--shapes 1b 8b-8-layers]

PYTHON is the interpreter of an environment that has llmcompressor. quantrot rotates (R1, R2) and quantizes to MXFP4
with the `mse` search; llm-compressor quantizes to MXFP4 without rotation, by `oneshot` and by its model-free path. The
runs alternate. Weights are random (a conversion's time does not depend on them); files are in the page cache. With
--verify each of quantrot's conversions is verified. On a GPU (--device cuda --name h200) the first run, which compiles
its kernels, is a row of its own.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
SHAPES = {
    "1b": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, head_dim=64),
    "1b-32-layers": dict(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=32, num_attention_heads=32, head_dim=64
    ),
    "8b-3-layers": dict(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=3, num_attention_heads=32, head_dim=128
    ),
    "8b-8-layers": dict(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=8, num_attention_heads=32, head_dim=128
    ),
}
TIED = {"1b": True, "1b-32-layers": True, "8b-3-layers": False, "8b-8-layers": False}

ONESHOT = """
import sys
from transformers import AutoModelForCausalLM
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
oneshot(model=model, recipe=QuantizationModifier(targets="Linear", scheme="MXFP4", ignore=["lm_head"]))
model.save_pretrained(sys.argv[2], save_compressed=True)
"""
MODEL_FREE = """
import sys
from llmcompressor import model_free_ptq
model_free_ptq(sys.argv[1], sys.argv[2], scheme="MXFP4", ignore=["lm_head"], max_workers=2, device="cpu")
"""


def make_checkpoint(path: Path, shape: str, tokenizer: Path | None = None) -> Path:
    """A random Llama of this shape in bfloat16, sharded, written a tensor at a time; tokenizer: else the demo's."""
    if (path / "config.json").exists():
        return path
    import torch
    from transformers import LlamaConfig

    from quantrot import llama
    from quantrot.checkpoint import index_json, lay_out, tensor_bytes
    from quantrot.source import open_source
    from quantrot.tokenizer import open_tokenizer

    path.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        **SHAPES[shape],
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        tie_word_embeddings=TIED[shape],
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    shapes = llama.tensors(llama.from_config(config.to_dict()))
    shards = lay_out([(name, "BF16", dims) for name, dims in shapes.items()], 1_000_000_000)
    generator = torch.Generator().manual_seed(0)
    for shard in shards:
        with (path / shard.name).open("wb") as file:
            file.write(shard.header)
            for info in shard.tensors:
                if "norm" in info.name:
                    tensor = torch.ones(info.shape, dtype=torch.bfloat16)
                else:
                    tensor = torch.randn(info.shape, generator=generator).mul_(0.02).to(torch.bfloat16)
                file.write(tensor_bytes(tensor))
    (path / "model.safetensors.index.json").write_bytes(index_json(shards))
    open_tokenizer(tokenizer or open_source("demo").path).save_pretrained(path)
    config.save_pretrained(path)  # last: it says that the rest is there
    return path


def run(command: list[str]) -> tuple[float, float, float, str]:
    """(wall seconds, CPU seconds, peak resident MB, output) of a process; raises if it fails."""
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{command[:4]} failed:\n{output[-3000:]}")
    return time.monotonic() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, output


def commands(source: Path, out: Path, recipes: list[str], device: str, peer: str | None) -> dict[str, list[str]]:
    quantrot = [sys.executable, "-m", "quantrot", "convert", str(source), "-o", str(out), "--overwrite"]
    found = {f"quantrot {name}": [*quantrot, "--device", device, "-r", name] for name in recipes}
    if peer:
        found["llm-compressor oneshot"] = [peer, "-c", ONESHOT, str(source), str(out)]
        found["llm-compressor model-free"] = [peer, "-c", MODEL_FREE, str(source), str(out)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--peer-python")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--peer-runs", type=int, default=1)
    parser.add_argument("--shapes", nargs="+", default=["1b"], choices=list(SHAPES))
    parser.add_argument("--recipes", nargs="+", default=["quarot-mxfp4", "quarot-mxfp4-full"])
    parser.add_argument("--verify", action="store_true", help="verify each conversion of quantrot's")
    parser.add_argument("--device", default="cpu", help="of quantrot's commands")
    parser.add_argument("--tokenizer", type=Path, help="a directory's, where the demo is not installed")
    parser.add_argument("--only-make", action="store_true", help="write the checkpoints and stop")
    parser.add_argument("--name", default="cpu", help="of the results file")
    parser.add_argument("--out", type=Path, help="the results file itself")
    options = parser.parse_args()
    if options.only_make:
        for shape in options.shapes:
            make_checkpoint(options.work / shape, shape, options.tokenizer)
        return
    # In a process of its own: a child's peak memory starts from its parent's.
    subprocess.run([sys.executable, __file__, "--only-make", *sys.argv[1:]], check=True)
    rows = []
    for shape in options.shapes:
        source, out = options.work / shape, options.work / "out"
        largest = max(dims[0] * dims[1] * 2 for dims in _shapes(source).values() if len(dims) == 2) / 2**20
        timings: dict[str, list[tuple[float, float, float, str]]] = {}
        for turn in range(max(options.runs, options.peer_runs)):
            for name, command in commands(source, out, options.recipes, options.device, options.peer_python).items():
                if turn < (options.peer_runs if "llm-compressor" in name else options.runs):
                    shutil.rmtree(out, ignore_errors=True)
                    timings.setdefault(name, []).append(run(command))
                    print(name, shape, [round(x, 1) for x in timings[name][-1][:3]], flush=True)
                    if options.verify and name.startswith("quantrot"):
                        check = name.replace("quantrot", "quantrot verify")
                        command = [sys.executable, "-m", "quantrot", "verify", str(out), "--device", options.device]
                        timings.setdefault(check, []).append(run(command))
                        print(check, shape, [round(x, 1) for x in timings[check][-1][:3]], flush=True)
        if options.device != "cpu":
            again = {name: taken[1:] for name, taken in timings.items() if taken[1:]}
            timings = {f"{name}, first": taken[:1] for name, taken in timings.items()} | again
        for name, taken in timings.items():
            row = {
                "op": "verify" if "verify" in name else "convert",
                "case": {"shape": shape, "tool": name},
                "seconds": statistics.median(t[0] for t in taken),
                "cpu_seconds": statistics.median(t[1] for t in taken),
                "peak_mb": max(t[2] for t in taken),
                "bound_mb": 0.9e9 / 2**20 + 2 * largest,
                "runs": len(taken),
            }
            if name.startswith("quantrot") and row["op"] == "convert" and options.device == "cpu":
                row["predicted_mb"] = _predicted(source, name.split()[1])
            rows.append(row)
    shutil.rmtree(options.work / "out", ignore_errors=True)
    result = {
        "cpu": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "command": "python benchmarks/bench_convert.py " + " ".join(sys.argv[1:]),
        "rows": rows,
    }
    if options.device != "cpu":
        import torch

        result["gpu"] = torch.cuda.get_device_name(options.device)
    out = options.out or RESULTS / f"bench_convert-{options.name}.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(json.dumps(row))


def _shapes(source: Path) -> dict[str, tuple[int, ...]]:
    from quantrot.checkpoint import open_checkpoint

    return {name: info.shape for name, info in open_checkpoint(source).tensors.items()}


def _predicted(source: Path, recipe: str) -> float:
    """The peak that `quantrot plan` predicts, in MB, from a process of its own."""
    code = (
        "import os,sys; import quantrot; p = quantrot.plan(sys.argv[1], sys.argv[2]);"
        "print(p.peak_bytes(len(os.sched_getaffinity(0))) / 2**20)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(source), recipe], capture_output=True, text=True, check=True)
    return float(done.stdout)


if __name__ == "__main__":
    main()
