"""quantrot inspect: what a converted directory is, from its manifest and headers alone."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from quantrot.cli.common import console, grid, size


def command(output: Annotated[Path, typer.Argument(help="A directory that convert wrote.", metavar="OUT")]) -> None:
    """Formats, rotations, bits per weight, and what each engine can do with it."""
    from quantrot import engines, formats
    from quantrot.checkpoint import open_checkpoint
    from quantrot.manifest import read_manifest

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
    out.print(grid(title, ["linears", "count", "format", "bits a weight"], rows))
    if weights:
        out.print(f"{weights / 1e6:.0f} M quantized weights at {bits / weights:.3f} bits")
    for name, r in data["rotations"].items():
        width = "full width" if r["block"] == r["width"] else f"blocks of {r['block']}"
        out.print(
            f"{name}: {r['kind']}, {width}, {'online' if r['online'] else 'fused'}, checksum {r['checksum'][:12]}"
        )
    support = engines.support(manifest.linears, manifest.online, manifest.attention)
    out.print(grid("Engines", ["engine", "runs it", "as"], [[s.engine, s.runs, s.note] for s in support]))
    out.print(engines.serve_command(manifest.linears, manifest.online, manifest.attention), markup=False)
