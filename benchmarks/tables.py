"""What a results file says, as Markdown: a function a kind of table, from the file's contents to lines of text.

render.py puts them between the markers of README.md and docs/.
"""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Result = dict[str, Any]
Row = dict[str, Any]


def grid(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    head = list(head)
    return [_cells(head), "|---" * len(head) + "|", *map(_cells, rows)]


def _cells(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def source(result: Result) -> str:
    """Where and by what command it was measured."""
    return (
        f"{result['gpu']}, driver {result['driver']}, torch {result['torch']}, triton {result['triton']}, copy "
        f"{result['copy_gbps']:.0f} GB/s: `{result['command']}`, commit {result['commit']}"
    )


def _windows(result: Result) -> str:
    text = f"{result['windows']} windows of {result['seq_len']} tokens of {result['text']}; {result['device']}"
    return f"{text}, torch {result['torch']}: `{result['command']}`"


def _of(result: Result, op: str) -> list[Row]:
    return [row for row in result["rows"] if row["op"] == op]


def _floor(row: Row) -> str:
    return f"{row['floor_us'] / row['us']:.2f}"


def _times(row: Row, peer: str) -> str:
    """How many times longer the peer takes; nothing where it was not measured."""
    us = row["peers_us"].get(peer)
    return f"{us / row['us']:.2f}" if us else ""


def _ratios(rows: list[Row], peer: str) -> list[float]:
    return [row["peers_us"][peer] / row["us"] for row in rows if peer in row["peers_us"]]


def _mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _by_tokens(rows: list[Row], cell: Callable[[Row], str]) -> list[str]:
    """Products: tokens down, the weight's shapes across."""
    cells = {(row["case"]["m"], row["case"]["n"], row["case"]["k"]): cell(row) for row in rows}
    shapes = list(dict.fromkeys((n, k) for _, n, k in cells))
    tokens = sorted({m for m, *_ in cells})
    return grid(
        ["tokens", *(f"{n} x {k}" for n, k in shapes)],
        ([str(m), *(cells.get((m, *shape), "") for shape in shapes)] for m in tokens),
    )


# --- Accuracy and conversion -----------------------------------------------------------------------------------------


def accuracy(result: Result) -> list[str]:
    """A recipe a row, best KL first."""
    rows = [["the original", "16", f"{result['rows'][0]['baseline_ppl']:.2f}", "0", "1", ""]]
    for row in sorted(result["rows"], key=lambda row: row["kl"]):
        name = row["case"]["recipe"]
        shown = (name if ":" in name else f"`{name}`") + (f" ({row['device']})" if "device" in row else "")
        rows.append([shown, f"{row['bits']:.2f}", *_scores(row), f"{row['seconds']:.1f}"])
    head = ["recipe", "bits a weight", "perplexity", "KL (nats a token)", "top-1", "seconds to convert"]
    return [*grid(head, rows), "", _windows(result)]


def recipes(result: Result) -> list[str]:
    """The same of shipped recipes alone, without how long they took."""
    shipped = [row for row in result["rows"] if ":" not in row["case"]["recipe"]]
    rows = [["the original", "16", f"{result['rows'][0]['baseline_ppl']:.2f}", "0", "1"]]
    for row in sorted(shipped, key=lambda row: row["kl"]):
        rows.append([f"`{row['case']['recipe']}`", f"{row['bits']:.2f}", *_scores(row)])
    return grid(["recipe", "bits a weight", "perplexity", "KL (nats a token)", "top-1"], rows)


def _scores(row: Row) -> list[str]:
    return [f"{row['ppl']:.2f}", f"{row['kl']:.4f} ± {row['kl_stderr']:.4f}", f"{row['top1']:.3f}"]


def fp8_accuracy(result: Result) -> list[str]:
    """A choice of blocks a row, best KL first."""
    rows = [["the original", f"{result['rows'][0]['baseline_ppl']:.2f}", "0", "1", ""]]
    for row in sorted(result["rows"], key=lambda row: row["kl"]):
        rows.append([row["case"]["blocks"], *_scores(row), f"{row['batch_kl']:.4f}"])
    head = ["weights by activations", "perplexity", "KL (nats a token)", "top-1"]
    return [*grid([*head, "KL of a prompt alone to it in a batch"], rows), "", _windows(result)]


def conversion(result: Result) -> list[str]:
    """A tool and shape a row: time, peak memory, the plan's prediction."""
    rows = []
    for row in result["rows"]:
        measured = (f"{row[name]:.0f}" for name in ("seconds", "cpu_seconds", "peak_mb"))
        predicted = f"{row['predicted_mb']:.0f}" if "predicted_mb" in row else ""
        rows.append([row["case"]["shape"], row["case"]["tool"], *measured, predicted])
    head = ["checkpoint", "tool", "seconds", "CPU seconds", "peak MB", "predicted MB"]
    machine = f"{result['cores']} cores" + (f" and an {result['gpu']}" if "gpu" in result else "")
    return [*grid(head, rows), "", f"Whole processes on {machine}: `{result['command']}`"]


def mmlu(result: Result) -> list[str]:
    """A recipe a row: accuracy, and the paired difference to the first."""
    rows = []
    for name in result["results"]["recipes"]:
        score, change = result["results"]["mmlu"][name]["overall"], result["results"]["differences"].get(name)
        cells = [f"`{name}`", f"{score['acc']:.4f} ± {score['stderr']:.4f}"]
        if change:
            cells += [f"{change['difference']:+.4f} ± {change['stderr']:.4f}", str(change["only_model"])]
            p = change["p_value"]
            cells += [str(change["only_baseline"]), f"{p:.3f}" if p >= 0.001 else "< 0.001"]
        rows.append(cells + [""] * (6 - len(cells)))
    head = ["recipe", "MMLU", "difference", "right only with it", "only without", "McNemar p"]
    asked = f"{score['n']} questions, {result['settings']['fewshot']}-shot, lm-eval {result['versions']['lm_eval']}"
    run = f"{asked}, {result['device']}, torch {result['versions']['torch']}: `{result['command']}`"
    return [*grid(head, rows), "", run]


def attention_error(result: Result) -> list[str]:
    """A shape a row: what each scheme's error is, and what a rotation divides per-tensor e4m3's by."""
    names = list(result["rows"][0]["error"])
    rows = []
    for row in result["rows"]:
        e = row["error"]
        gains = e["per tensor"] / e["rotated"], e["per tensor"] / e["int8, rotated"]
        cells = [*map(str, row["case"].values()), *(f"{e[n]:.3f}" for n in names)]
        rows.append([*cells, *(f"{g:.2f}" for g in gains)])
    head = ["data", "head_dim", "tokens", "causal", *names, "per tensor / rotated", "/ int8, rotated"]
    run = f"Means over {result['seeds']} seeds, torch {result['torch']}: `{result['command']}`"
    return [*grid(head, rows), "", run]


def finetune(result: Result) -> list[str]:
    """A run a row, and the perplexities that `evaluations` of the file holds."""
    rows = []
    for run in result["runs"]:
        first, last = run["validation"][0][1], run["validation"][-1]
        tail = sum(run["loss"][-20:]) / len(run["loss"][-20:])
        pace = run.get("median_seconds", run["seconds"] / len(run["loss"]))
        rows.append([f"{run['kind']}, {last[0]} steps", f"{first:.3f}", f"{last[1]:.3f}", f"{tail:.3f}", f"{pace:.2g}"])
    head = ["run", "validation loss, first", "last", "mean of the last 20 training losses", "seconds a step"]
    text = (
        f"{Path(result['model']).name}, {result['batch']} x {result['seq_len']} tokens a step of {result['text']}, "
        f"AdamW, learning rate {result['lr']:g}; {run['trained_parameters'] / 1e6:.1f} million parameters of "
        f"{run['mxfp4_linears']} linears and the norms train, embeddings stay. {result['device']}, torch "
        f"{result['torch']}."
    )
    lines = [*grid(head, rows), "", text]
    if found := result.get("evaluations"):
        one = next(iter(found.values()))
        saved = ([name, f"{entry['ppl']:.2f} ± {entry['stderr']:.2f}"] for name, entry in found.items())
        lines += ["", *grid(["saved model", "perplexity"], saved), ""]
        lines.append(f"`quantrot eval ppl`: {one['windows']} windows of {one['seq_len']} tokens of {one['text']}.")
    return lines


# --- Whole models ----------------------------------------------------------------------------------------------------


def model(result: Result) -> list[str]:
    """A recipe, phase and size a row, against transformers' bfloat16 model and against that in quantrot's attention."""
    attention = {place(row): row["us"] for row in result["rows"] if row["case"]["recipe"] == "bf16"}
    rows = []
    for row in result["rows"]:
        wide, us = row["peers_us"]["bf16"], row["us"]
        if row["case"]["recipe"] != "bf16":
            alone = f"{wide / attention[place(row)]:.2f}" if attention else ""
            numbers = [f"{us:.0f}", f"{wide:.0f}", f"{wide / us:.2f}", alone]
            rows.append([f"`{row['case']['recipe']}`", *map(str, place(row)), *numbers])
    head = ["recipe", "phase", "sequences or tokens", "us", "bfloat16, us", "faster by", "its attention alone"]
    return [*grid(head, rows), "", source(result)]


def eager(result: Result) -> list[str]:
    """A recipe a row: milliseconds a token of so many sequences, and a prompt of so many tokens."""
    places = list(dict.fromkeys(map(place, result["rows"])))
    ms: dict[str, dict[tuple[str, int], float]] = {"transformers, bfloat16": {}}
    for row in result["rows"]:
        ms["transformers, bfloat16"][place(row)] = row["peers_us"]["bf16"] / 1e3
        ms.setdefault(f"`{row['case']['recipe']}`", {})[place(row)] = row["us"] / 1e3
    lines = ([name, *(f"{found[at]:.1f}" for at in places)] for name, found in ms.items())
    new = (", new" if "new" in phase else "" for phase, _ in places)
    what = (f"a prompt of {size}" if phase.endswith("prefill") else f"a token of {size}" for phase, size in places)
    head = map("".join, zip(what, new, strict=True))
    return [*grid(["ms", *head], lines), "", source(result)]


def train(result: Result) -> list[str]:
    """A shape and an arithmetic a row: milliseconds a step, and how much of bfloat16's compiled that is."""
    found: dict[tuple[Any, ...], dict[bool, Row]] = {}
    for row in result["rows"]:
        case = row["case"]
        found.setdefault((case["shape"], case["arithmetic"]), {})[case["compiled"]] = row
    rows = []
    for (shape, arithmetic), row in found.items():
        eager, compiled = row[False], row[True]
        what = f"{shape.upper()}, {compiled['case']['layers']} layers, {compiled['case']['tokens']} tokens"
        ms = [f"{each['us'] / 1e3:.1f}" for each in (eager, compiled)]
        off = ["" if arithmetic == "bf16" else f"{each['error']:.3f}" for each in (eager, compiled)]
        rows.append([what, arithmetic, *ms, f"{compiled['us'] / compiled['peers_us']['bf16']:.2f}", *off])
    head = ["model", "arithmetic", "eager, ms", "compiled, ms", "of bfloat16 compiled", "gradients off", "compiled"]
    return [*grid(head, rows), "", source(result)]


def cpu(result: Result) -> list[str]:
    """A recipe and phase a row: milliseconds, and how many times the original's in bfloat16 that is."""
    rows = []
    for row in result["rows"]:
        case, ms, wide = row["case"], row["ms"], row["peers_ms"]["bf16"]
        numbers = [f"{ms:.0f}", f"{wide:.0f}", f"{ms / wide:.2f}"]
        rows.append([f"`{case['recipe']}`", case["phase"], str(case["tokens"]), *numbers])
    head = ["recipe", "phase", "tokens", "ms", "bfloat16, ms", "of it"]
    return [*grid(head, rows), "", f"{result['threads']} threads, torch {result['torch']}: `{result['command']}`"]


def place(row: Row) -> tuple[str, int]:
    return row["case"]["phase"], row["case"]["size"]


def tokens(result: Result) -> list[str]:
    """A number of tokens a row: bfloat16's microseconds a layer, each format's, and times faster."""
    us = {(row["case"]["format"], row["case"]["m"]): row["us"] for row in result["rows"]}
    first, *others = dict.fromkeys(name for name, _ in us)
    rows = []
    for m in dict.fromkeys(m for _, m in us):
        wide = us[first, m]
        rows.append([str(m), f"{wide:.0f} us", *(f"{us[o, m]:.0f} us, {wide / us[o, m]:.2f}" for o in others)])
    return [*grid(["tokens", first, *others], rows), "", source(result)]


# --- The Hadamard transform ------------------------------------------------------------------------------------------


def hadamard_summary(result: Result) -> list[str]:
    """2^25 elements: an order a row, fraction of a copy's speed in each dtype."""
    dtypes = ("bfloat16", "float16", "float32")
    found = _transforms(result)
    rows = []
    for n in (32, 128, 1024, 4096, 8192, 12288, 14336, 16384, 28672, 32768, 53248):
        cells = [_of_copy(found.get((n, 1 << 25, dtype))) for dtype in dtypes]
        rows.append([str(n), *cells, _package(found[n, 1 << 25, "bfloat16"])])
    return grid(["n", *dtypes, "fast-hadamard-transform, bfloat16"], rows)


def hadamard(result: Result) -> list[str]:
    """Powers of two, the other orders, and in place."""
    found = _transforms(result)
    columns = [("bfloat16", bits) for bits in (20, 23, 25, 27)]
    columns += [("float16", 25), ("float16", 27), ("float32", 25)]
    sizes = sorted({n for n, elements, _ in found if elements == 1 << 25})
    powers = []
    for n in (n for n in sizes if n & (n - 1) == 0):
        cells = [_of_copy(found.get((n, 1 << bits, dtype))) for dtype, bits in columns]
        powers.append([str(n), *cells, _package(found[n, 1 << 25, "bfloat16"])])
    others = []
    for n in (n for n in sizes if n & (n - 1)):
        row = found[n, 1 << 25, "bfloat16"]
        factors, dense = " x ".join(map(str, row["factors"])), f"{row['peers_us']['dense_gemm'] / row['us']:.0f}"
        others.append([str(n), factors, f"{row['us']:.1f}", _of_copy(row), dense, f"{row['error']:.2e}"])
    inplace = [row for row in result["rows"] if row["case"]["inplace"]]
    heads = [f"{dtype}, 2^{bits}" for dtype, bits in columns]
    return [
        source(result),
        "",
        "Powers of two, fraction of the speed of a copy:",
        "",
        *grid(["n", *heads, "package, bfloat16, 2^25"], powers),
        "",
        "K * 2^m, 2^25 elements of bfloat16:",
        "",
        *grid(["n", "factors", "us", "of copy", "dense product / ours", "error"], others),
        "",
        "In place, 2^24 elements of bfloat16 that stay in L2, over the out-of-place copy: "
        + ", ".join(f"{_of_copy(row)} (n = {row['case']['n']})" for row in inplace)
        + ".",
    ]


def _transforms(result: Result) -> dict[tuple[int, int, str], Row]:
    """Not in place, by order, elements and dtype."""
    cases = ((row["case"], row) for row in result["rows"])
    return {(case["n"], case["elements"], case["dtype"]): row for case, row in cases if not case["inplace"]}


def _of_copy(row: Row | None) -> str:
    return f"{row['peers_us']['copy'] / row['us']:.2f}" if row else ""


def _package(row: Row) -> str:
    """Of a copy's speed, too; nothing where it was not installed."""
    package = row["peers_us"].get("fast_hadamard_transform")
    return f"{row['peers_us']['copy'] / package:.2f}" if package else ""


# --- FP8 -------------------------------------------------------------------------------------------------------------


def fp8_quantize(result: Result) -> list[str]:
    """A block a row, n x n across."""
    rows = _of(result, "quantize")
    sizes = sorted({row["case"]["cols"] for row in rows})
    lines: dict[str, list[str]] = {}
    for row in rows:
        down, across = row["case"]["block"]
        name = f"{down} x {across}" if across else "a token"
        lines.setdefault(name, []).append(f"{row['us']:.1f} us, {_floor(row)}")
        for peer, shown in (("two_pass", "GridQuant's two passes, 256 x 256"), ("read_twice", "256 x 256, read twice")):
            if peer in row["peers_us"]:
                lines.setdefault(shown, []).append(f"{row['peers_us'][peer]:.1f} us")
    table = grid(["block", *map(str, sizes)], ([name, *cells] for name, cells in lines.items()))
    return [*table, "", source(result)]


def fp8_both_ways(result: Result) -> list[str]:
    """A matrix a row."""
    rows = []
    for row in _of(result, "both_ways"):
        case = row["case"]
        block = " x ".join(map(str, case["block"]))
        times = _times(row, "triton"), _times(row, "two_kernels")
        rows.append([f"{case['rows']} x {case['cols']}", block, f"{row['us']:.1f}", _floor(row), *times])
    head = ["matrix", "block", "us", "of the floor", "Triton / ours", "two kernels / ours"]
    return [*grid(head, rows), "", source(result)]


def fp8_hadamard(result: Result) -> list[str]:
    """An order a row, whole rows or blocks of 4096 columns; numbers of elements, about powers of two, side by side."""
    found: dict[tuple[int, int], dict[int, Row]] = {}
    for row in _of(result, "hadamard_quantize"):
        case = row["case"]
        found.setdefault((case["n"], case["cols"]), {})[round(math.log2(case["rows"] * case["cols"]))] = row
    sizes = sorted({size for by_size in found.values() for size in by_size})
    shown = {"us": lambda row: f"{row['us']:.1f}", "of the floor": _floor}
    shown["two kernels / ours"] = lambda row: _times(row, "two_ops")
    rows = []
    for (n, columns), by_size in found.items():
        order = str(n) if n == columns else f"{n}, in blocks of {columns} columns"
        cells = (cell(by_size[size]) for cell in shown.values() for size in sizes)
        rows.append([order, *cells, f"{by_size[sizes[0]]['error']:.1e}"])
    head = [f"{what}, 2^{size}" for what in shown for size in sizes]
    return [*grid(["n", *head, "error"], rows), "", source(result)]


def fp8_gemm(result: Result) -> list[str]:
    """Each pair of scales: few tokens, then many."""
    peers = {"cublas_block": "cuBLAS in blocks", "cublas_tensorwise": "cuBLAS a tensor", "bf16": "bfloat16"}
    lines = ["Up to 64 tokens: microseconds (of the weight-read floor); more: TFLOP/s. Then times cuBLAS in 1 x 128 by"]
    lines += ["128 x 128, times cuBLAS with one scale a tensor and fast accumulation, times bfloat16.", ""]
    for scales in dict.fromkeys(row["case"]["scales"] for row in _of(result, "gemm")):
        rows = [row for row in _of(result, "gemm") if row["case"]["scales"] == scales]
        lines += [f"{scales}:", "", *_by_tokens(rows, _fp8_cell), ""]
        for which, few in (("Up to 64 tokens", True), ("More", False)):
            here = [row for row in rows if (row["case"]["m"] <= 64) == few]
            means = (f"{_mean(_ratios(here, peer)):.2f} {name}" for peer, name in peers.items())
            lines += [f"{which}, geometric mean of times: {', '.join(means)}.", ""]
    return [*lines, source(result)]


def _fp8_cell(row: Row) -> str:
    few = f"{row['us']:.1f} us ({_floor(row)})"
    shown = few if row["case"]["m"] <= 64 else f"{_tflops(row):.0f}"
    return ", ".join([shown, *(_times(row, peer) for peer in ("cublas_block", "cublas_tensorwise", "bf16"))])


def _tflops(row: Row) -> float:
    return 2 * row["case"]["m"] * row["case"]["n"] * row["case"]["k"] / row["us"] / 1e6


def fp8_layer(result: Result) -> list[str]:
    """Quantization and product: tokens and shape a row."""
    rows = []
    for row in _of(result, "layer"):
        case, peers = row["case"], row["peers_us"]
        shown = [f"{peers[name]:.1f}" if name in peers else "" for name in ("two", "cublas", "bf16")]
        parts = f"{peers['quantizer']:.1f}, {peers['product']:.1f}"
        us = [f"{row['us']:.1f}", _times(row, "bf16")]
        rows.append([str(case["m"]), f"{case['n']} x {case['k']}", *us, *shown, parts])
    head = ["tokens", "N x K", "us", "times bfloat16", "two kernels", "with cuBLAS's product", "bfloat16"]
    return [*grid([*head, "quantizer, product alone"], rows), "", source(result)]


# --- MXFP4 -----------------------------------------------------------------------------------------------------------

ACTIVATIONS = {"none": "W4A16", "mxfp4": "W4A4", "fp8": "W4A8"}


def mxfp4_quantize(result: Result) -> list[str]:
    """An operation a row."""
    rows = []
    for row in (row for row in result["rows"] if row["case"].get("rows")):
        case = ", ".join(f"{k} {v}" for k, v in row["case"].items() if k not in ("rows", "cols"))
        rows.append([row["op"], case, f"{row['us']:.1f}", _floor(row)])
    return [*grid(["op", "", "us", "of the byte floor"], rows), "", source(result)]


def mxfp4_normed(result: Result) -> list[str]:
    """Tokens and their numbers a row; in one kernel and in two, without an addition and with one."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in _of(result, "normed"):
        case = row["case"]
        cells = found.setdefault((ACTIVATIONS[case["activations"]], str(case["tokens"]), str(case["k"])), [])
        cells += [f"{row['us']:.1f} ({_floor(row)})", f"{row['peers_us']['two']:.1f}"]
    head = ["", "tokens", "numbers", "one kernel", "two", "added: one kernel", "two"]
    rows = [[*key, *cells] for key, cells in found.items()]
    return [*grid(head, sorted(rows, key=lambda row: row[0] == "W4A8")), "", source(result)]


def mxfp4_gemm(result: Result) -> list[str]:
    """Each type of activations, then products of activations that are ready, and what PyTorch's int4 takes."""
    rows = _of(result, "gemm")
    lines = ["bfloat16 by `F.linear`, us:", "", *_by_tokens(rows, lambda r: f"{r['peers_us']['bf16']:.1f}")]
    for ready in (False, True):
        for kind, name in ACTIVATIONS.items():
            case = {"activations": kind, "activations_ready": ready}
            found = [r for r in rows if case.items() <= r["case"].items()]
            if found:
                shown = f"{name}{', activations ready' * ready}: us, and bfloat16's time over it"
                small = kind == "none"
                lines += ["", shown + (", up to 32 tokens of the weight-read floor:" if small else ":"), ""]
                lines += _by_tokens(found, lambda r, s=small: _product(r, s and r["case"]["m"] <= 32))
    lines += ["", "The time of PyTorch's int4 product (tinygemm, groups of 128) over W4A16's:", ""]
    found = [r for r in rows if r["case"]["activations"] == "none" and "tinygemm" in r["peers_us"]]
    lines += [*_by_tokens(found, lambda r: _times(r, "tinygemm")), ""]
    return [*lines, *mxfp4_means(rows), "", source(result)]


def _product(row: Row, floor: bool) -> str:
    return f"{row['us']:.1f}, {_times(row, 'bf16')}" + (f" ({_floor(row)})" if floor else "")


def mxfp4_means(rows: list[Row]) -> list[str]:
    """Of bfloat16's time over ours: prompts, and each number of fewer tokens."""
    groups: dict[tuple[str, str], list[float]] = {}
    for row in (row for row in rows if row["op"] == "gemm"):
        case = row["case"]
        name = ACTIVATIONS[case["activations"]] + ", activations ready" * case["activations_ready"]
        for which in [f"{case['m']} tokens"] if case["m"] < 1024 else ["1024 and more", "4096 and more"]:
            if which != "4096 and more" or case["m"] >= 4096:
                groups.setdefault((name, which), []).append(row["peers_us"]["bf16"] / row["us"])
    shown = ([name, which, f"{_mean(each):.2f}", f"{min(each):.2f}"] for (name, which), each in groups.items())
    return grid(["", "tokens", "geometric mean", "worst"], shown)


def mxfp4_training(result: Result) -> list[str]:
    rows = []
    for row in (row for row in result["rows"] if row["op"].startswith("training")):
        case = ", ".join(f"{k} {v}" for k, v in row["case"].items())
        of = [f"{row['us'] / us:.2f}" if us else "" for us in map(row["peers_us"].get, ("bf16", "hadamard"))]
        rows.append([row["op"], case, f"{row['us']:.0f}", *of])
    return [*grid(["", "", "us", "of bfloat16's time", "of `HadamardGemm`'s"], rows), "", source(result)]


# --- The mixed-input product -----------------------------------------------------------------------------------------


def mixed(result: Result) -> list[str]:
    """The paper's eight variants, then the shapes of Llama 3.1 8B and 70B, tokens down and shapes across."""
    paper = []
    for row in (row for row in result["rows"] if row["case"]["m"] == 3456):
        case = row["case"]
        us = [f"{row['us']:.1f}", f"{row['peers_us']['same_type_cublas']:.1f}", f"{row['of_cublas']:.2f}"]
        paper.append([case["narrow"], case["wide"], case["narrow_operand"], *us, f"{row['error']:.1e}"])
    head = ["narrow", "wide", "narrow operand", "us", "cuBLAS, equal types", "of cuBLAS", "error"]
    lines = ["The eight variants of the paper's shape, m = 3456, n = 4096, k = 2048, and e4m3:", ""]
    lines += [*grid(head, paper), ""]
    lines.append("Weights by bfloat16 tokens: time, of cuBLAS, and up to 64 tokens the fraction of the floor.")
    weights = [row for row in result["rows"] if row["case"]["m"] != 3456]
    kinds = {("packed", 0): "As on disk, one scale a channel", ("packed", 128): "As on disk, groups of 128"}
    for (narrow, group), name in (kinds | {("e4m3", 0): "e4m3, one scale a channel"}).items():
        found = [row for row in weights if (row["case"]["narrow"], row["case"]["group"]) == (narrow, group)]
        found.sort(key=lambda row: (row["case"]["n"], row["case"]["k"]))
        lines += ["", f"{name}:", "", *_by_tokens(found, _mixed_cell)]
    return [*lines, "", source(result)]


def _mixed_cell(row: Row) -> str:
    floor = f" ({_floor(row)})" if row["case"]["m"] <= 64 else ""
    return f"{row['us']:.1f} us, {row['of_cublas']:.2f}{floor}"


# --- Attention -------------------------------------------------------------------------------------------------------


def attention(result: Result) -> list[str]:
    """Prompts, the kernels that prepare operands and store tokens, decoded tokens."""
    lines = [source(result)]
    ops = dict.fromkeys(row["op"] for row in result["rows"])
    for op in ops:
        found = _of(result, op)
        peers, rate = list(found[0]["peers_us"]), ["TFLOP/s"] if op == "prefill" else []
        rows = []
        for row in found:
            cells = [*map(str, row["case"].values()), f"{row['us']:.1f}"]
            cells += [f"{row['tflops']:.0f}"] if rate else []
            rows.append([*cells, _floor(row), *(_times(row, peer) for peer in peers), f"{row['error']:.1e}"])
        last = "codes that differ" if op.startswith("rope") else "error"
        head = [*found[0]["case"], "us", *rate, "of the floor", *(f"{peer} / ours" for peer in peers), last]
        lines += ["", f"{op}:", "", *grid(head, rows)]
    return lines


FILES = {  # a kind of table: its results file, without the name; the others are bench_<kind>
    "recipes": "bench_accuracy",
    "eager": "bench_model",
    "conversion": "bench_convert",
    "hadamard_summary": "bench_hadamard",
    "fp8_quantize": "bench_fp8",
    "fp8_both_ways": "bench_fp8",
    "fp8_hadamard": "bench_fp8",
    "fp8_gemm": "bench_fp8",
    "fp8_layer": "bench_fp8",
    "mxfp4_quantize": "bench_mxfp4",
    "mxfp4_normed": "bench_mxfp4",
    "mxfp4_gemm": "bench_mxfp4",
    "mxfp4_training": "bench_mxfp4",
    "finetune": "finetune_mxfp4",
}
KINDS = (accuracy, recipes, fp8_accuracy, conversion, mmlu, attention_error, finetune, train, model, eager)
KINDS += (cpu, tokens)
KINDS += (hadamard_summary, hadamard, fp8_quantize, fp8_both_ways, fp8_hadamard, fp8_gemm, fp8_layer)
KINDS += (mxfp4_quantize, mxfp4_normed, mxfp4_gemm, mxfp4_training, mixed)
TABLES: dict[str, Callable[[Result], list[str]]] = {kind.__name__: kind for kind in (*KINDS, attention)}
