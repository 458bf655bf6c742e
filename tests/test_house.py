"""The house rules that a machine can check: names at the root, imports, what may import what."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "quantrot"
# Each may import only what stands below it
LAYERS = [
    {"cli"},
    {"verify", "learn"},
    {"evals"},
    {"load", "convert", "streamed"},
    {"card", "hessians"},
    {"transform"},
    {"plan", "manifest"},
    {"engines", "learned"},
    {"modules", "gptq"},
    {"formats", "rotation"},
    {"recipe", "patterns"},
    {"calibration"},
    {"llama"},
    {"kernels", "checkpoint", "source", "tokenizer"},
    {"demo"},
    {"orthogonal", "device", "process", "version", "meta"},
]


@pytest.mark.parametrize("name", ["kernels", "cli", "evals", "recipes"])
def test_root_entries_are_links_into_the_package(name):
    assert (ROOT / name).is_symlink() and (ROOT / name).resolve() == PACKAGE / name


def test_kernels_never_shadows_another_package():
    """A package named `kernels` at the root would be imported by transformers in place of Hugging Face's."""
    assert not (PACKAGE / "kernels" / "__init__.py").exists()
    for file in [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        assert not re.search(r"^\s*(from|import) kernels\b", file.read_text(), re.MULTILINE), file


IMPORTS = """import quantrot, quantrot.convert, quantrot.plan, quantrot.load, quantrot.verify
assert all(callable(getattr(quantrot, n)) for n in ('Recipe', 'plan', 'convert', 'load', 'verify'))
print("functions")
import importlib
from pathlib import Path
for file in sorted(Path().glob("*.py")):
    importlib.import_module(file.stem)
    print(file.stem)
"""


@pytest.fixture(scope="module")
def imports():
    """In a process of their own: one of the benchmarks has Triton interpreted where there is no GPU."""
    return subprocess.run([sys.executable, "-c", IMPORTS], cwd=ROOT / "benchmarks", capture_output=True, text=True)


def test_public_names_are_functions_even_after_their_modules_are_imported(imports):
    assert "functions" in imports.stdout.split(), imports.stderr


def test_benchmarks_import_what_there_is(imports):
    names = {file.stem for file in (ROOT / "benchmarks").glob("*.py")}
    assert names and imports.returncode == 0 and names <= {*imports.stdout.split()}, imports.stderr


def test_tests_are_no_package():
    assert not list((ROOT / "tests").rglob("__init__.py"))


def level(module):
    return next(i for i, names in enumerate(LAYERS) if module in names)


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_point_down(file):
    own = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own in ("__init__", "__main__"):
        return
    imported = set(re.findall(r"^\s*(?:from|import) quantrot\.(\w+)", file.read_text(), re.MULTILINE))
    for line in re.findall(r"^\s*from quantrot import (.*)$", file.read_text(), re.MULTILINE):
        imported |= set(re.findall(r"\w+", line))
    for module in imported - {own, "as"}:
        assert level(own) < level(module), f"{own} imports {module}"


def test_only_kernels_import_gpu_compilers():
    for file in PACKAGE.rglob("*.py"):
        if "kernels" not in file.relative_to(PACKAGE).parts:
            assert not re.search(r"^\s*(from|import) (triton|cuda)\b", file.read_text(), re.MULTILINE), file


def test_help_does_not_import_torch():
    code = "import sys; from quantrot.cli.main import app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_an_installed_package_has_every_file():
    globs = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["quantrot"]
    packed = {path for glob in ["**/*.py", *globs] for path in PACKAGE.glob(glob)}
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert len(packed) > 100 and files == packed


def test_the_project_speaks_of_itself_alone():
    words = re.compile(r"(?<![\w-])/work/|\bissue #?\d|\bthis session\b", re.IGNORECASE)
    listed = ["git", "ls-files", "*.py", "*.md", "*.yaml", "*.cu", "*.cuh"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True)
    assert files.stdout
    for name in files.stdout.split():
        if name != "tests/test_house.py" and (ROOT / name).is_file():
            assert not words.search((ROOT / name).read_text()), name
