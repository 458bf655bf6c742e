"""README.md and docs/: their tables are what was measured, their links lead somewhere, their examples run."""

import re
from pathlib import Path

import pytest
import torch

from quantrot.recipe import parse_recipe

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
HUB_MODEL = "meta-llama/Llama-3.2-1B-Instruct"


def fenced(page, language):
    """The text of a page's code blocks in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def anchors(page):
    """What GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_tables_and_pictures_are_what_was_measured(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from render import rendered

    stale = [str(path.relative_to(ROOT)) for path, made in rendered().items() if path.read_text() != made]
    assert not stale, "python benchmarks/render.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_marked_table_is_closed(page):
    text = page.read_text()
    assert len(re.findall(r"<!-- table: \w+ [\w.-]+ -->\n.*?<!-- end -->", text, re.DOTALL)) == text.count("<!-- ") // 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        if ":" not in name:
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", [p for p in PAGES if fenced(p, "python")], ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_run(page, single, tmp_path, monkeypatch):
    """A page's blocks one after the other, on the CPU; a small random checkpoint stands for the hub's."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    code = "".join(fenced(page, "python")).replace(HUB_MODEL, str(single))
    exec(compile(code, page.name, "exec"), {})


@pytest.mark.parametrize("page", [p for p in PAGES if fenced(p, "yaml")], ids=lambda p: str(p.relative_to(ROOT)))
def test_recipes_are_valid(page):
    for text in fenced(page, "yaml"):
        parse_recipe(text.encode())
