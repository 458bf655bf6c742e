"""The whole-model benchmark: what it puts together runs, for every recipe."""

import importlib
from pathlib import Path

import pytest
import torch

from quantrot.recipe import shipped_recipes


@pytest.fixture(scope="module")
def bench():
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    yield importlib.import_module("bench_model")
    patch.undo()


@pytest.mark.parametrize("recipe", ["bf16", *shipped_recipes()])
def test_every_recipes_model_runs(bench, recipe):
    torch.manual_seed(0)
    model = bench.random_model(bench.TINY, torch.device("cpu"))
    ids = torch.arange(12)[None]
    with torch.no_grad():
        exact = model(ids).logits
        count = bench.replace_linears(model, bench.TINY, recipe)
        found = model(ids).logits
    assert (count > 0) == (recipe not in ("bf16", "rotate-only", "fp8-attention", "fp8-attention-rotated"))
    assert torch.nn.functional.cosine_similarity(found.float().flatten(), exact.float().flatten(), dim=0) > 0.5
