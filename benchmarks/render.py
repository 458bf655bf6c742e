"""Write the tables of README.md and docs/, between their markers, and the pictures of docs/, from benchmarks/results/.

    python benchmarks/render.py [--check]

A marker names the table and the results, `<!-- table: accuracy smollm2-135m -->`, and `<!-- end -->` closes it;
tables.py and plots.py make them. --check writes nothing and fails if anything is not what the results say.
"""

import json
import re
import sys
from pathlib import Path

from plots import PLOTS
from tables import FILES, TABLES

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"


def tables_of(text: str) -> str:
    """The text with every marked table made anew."""

    def table(match: re.Match[str]) -> str:
        kind, name = match[1], match[2]
        result = json.loads((RESULTS / f"{FILES.get(kind, f'bench_{kind}')}-{name}.json").read_text())
        return "\n".join([f"<!-- table: {kind} {name} -->", *TABLES[kind](result), "<!-- end -->"])

    return re.sub(r"<!-- table: (\w+) ([\w.-]+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


def rendered() -> dict[Path, str]:
    """What each page and picture should hold."""
    pages = {path: tables_of(path.read_text()) for path in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]}
    plots = {
        DOCS / name: plot(json.loads((RESULTS / f"{results}.json").read_text()))
        for name, (results, plot) in PLOTS.items()
    }
    return pages | plots


def main() -> None:
    stale = [(path, new) for path, new in rendered().items() if not path.exists() or path.read_text() != new]
    for path, new in stale if "--check" not in sys.argv else []:
        path.write_text(new)
    names = ", ".join(path.name for path, _ in stale)
    print(f"{names or 'nothing'} {'stale' if '--check' in sys.argv else 'rewritten'}")
    if stale and "--check" in sys.argv:
        sys.exit(1)


if __name__ == "__main__":
    main()
