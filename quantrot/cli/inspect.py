"""quantrot inspect: what a converted directory is, from its manifest and headers, and whether its files look whole."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from quantrot.cli.common import console, line, size, table

HASHED = 50_000_000  # bytes of a file that is hashed for this: 0.1 s


def command(output: Annotated[Path, typer.Argument(help="A directory that convert wrote.", metavar="OUT")]) -> None:
    """Formats, rotations, bits per weight, and what each engine can do with it."""
    from quantrot import engines, formats
    from quantrot.checkpoint import open_checkpoint
    from quantrot.manifest import check_files, read_manifest
    from quantrot.rotation import Rotation

    manifest = read_manifest(output)
    checkpoint = open_checkpoint(output)
    kinds: Counter[tuple[str, str, str]] = Counter()
    weights = bits = 0.0
    for fqn, fmt in manifest.linears.items():
        shape = manifest.data["linears"][fqn]["shape"]
        if fmt is None:
            kinds[fqn.rpartition(".")[2], "its own dtype", "-"] += 1
            continue
        each = formats.bits_per_weight(fmt.weights, *shape)
        weights, bits = weights + shape[0] * shape[1], bits + each * shape[0] * shape[1]
        kinds[fqn.rpartition(".")[2], formats.label(fmt), f"{each:.3f}"] += 1
    out = console()
    data = manifest.data
    rows = [[name, str(count), label, each] for (name, label, each), count in kinds.items()]
    title = (
        f"{data['source']['model']} by {data['recipe_name']} (quantrot {data['quantrot']}), {size(checkpoint.nbytes)}"
    )
    table(title, ["linears", "count", "format", "bits a weight"], rows)
    if weights:
        out.print(f"{weights / 1e6:.0f} M quantized weights at {bits / weights:.3f} bits")
    for name, r in data["rotations"].items():
        width = Rotation(name, r["kind"], r["width"], r["block"], r["seed"], turned=r.get("turned", -1)).extent
        where = "online" if r["online"] else "fused"
        out.print(f"{name}: {r['kind']}, {width}, {where}, checksum {r['checksum'][:12]}", markup=False)
    narrow = (manifest.arithmetic, manifest.kv_cache) != ("bf16", "bf16")
    if narrow:
        out.print(f"attention: {manifest.arithmetic}; KV cache: {_cache(manifest.kv_cache, checkpoint.config)}")
    support = engines.support(manifest.linears, manifest.online, manifest.attention, checkpoint.biased, narrow)
    table("Engines", ["engine", "runs it", "as"], [[s.engine, s.runs, s.note] for s in support])
    try:
        check_files(output, data, HASHED)
    except ValueError as error:
        line(f"warning: {error}")
    else:
        line(f"sizes, and hashes of files up to {size(HASHED)}, are as converted; `quantrot verify` checks all hashes")
    line(engines.serve_command(support, manifest.linears, manifest.online, str(output)))


def _cache(kind: Any, config: dict[str, Any]) -> str:
    """The KV cache's format, and what a token takes in it."""
    from quantrot import llama
    from quantrot.modules.cache import bits_per_value

    arch = llama.from_config({key: value for key, value in config.items() if key != "quantization_config"})
    bits = 16.0 if kind == "bf16" else bits_per_value(kind, arch.head_dim)
    values = 2 * arch.layers * arch.kv_heads * arch.head_dim
    return f"{kind}, {bits:.2f} bits a value, {size(values * bits / 8)} a token"
