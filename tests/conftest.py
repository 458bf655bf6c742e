"""Fixtures for all tests: small random checkpoints, `torch.empty` full of NaN, gpu tests left out and counted."""

import math
import os
import sys
from pathlib import Path

import pytest
import torch

from tests.scripts import scripts

LEFT_OUT: list[int] = []  # gpu tests that do not run here, as each process found


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "ignore:.*does not have a deterministic implementation.*:UserWarning")
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    threads = max(1, torch.get_num_threads() // workers)  # more would wait for each other, busily
    torch.set_num_threads(threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # of the processes that tests start


@pytest.hookimpl(trylast=True)  # of those that -k and -m leave
def pytest_collection_modifyitems(config, items):
    """Without a GPU its tests are left out and counted: four thousand skips took xdist 10 s."""
    if not torch.cuda.is_available():
        left_out = [item for item in items if item.get_closest_marker("gpu")]
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=left_out)
        LEFT_OUT.append(len(left_out))


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # what a worker of xdist tells the process that prints
        session.config.workeroutput["left_out"] = max(LEFT_OUT, default=0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    LEFT_OUT.append(getattr(node, "workeroutput", {}).get("left_out", 0))


def pytest_terminal_summary(terminalreporter):
    if count := max(LEFT_OUT, default=0):
        terminalreporter.write_line(f"{count} gpu tests left out: no CUDA GPU here")


@pytest.fixture(scope="session", autouse=True)
def nan_filled_empty():
    """What is allocated and never written becomes NaN (or the largest integer), so that a test sees it."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # the filling works in this mode only
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(2).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture(autouse=True)
def compiled_for_itself():
    """What other tests of a worker have compiled counts for a function's recompilations, of which 8 are allowed."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def save_tokenizer(path: Path, vocab: int) -> None:
    """One token a byte: <s>, </s>, and every byte that UTF-8 has, as far as `vocab` reaches."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {"þ", "ÿ"})  # 0xFE and 0xFF never occur in UTF-8
    words = ["<s>", "</s>", *letters][:vocab]
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="</s>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(path)


def save_tiny(
    path: Path | str,
    *,
    hidden: int = 64,
    intermediate: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    vocab: int = 256,
    tied: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    dtype: torch.dtype = torch.float32,
    model_type: str = "llama",
    max_shard_size: str = "5GB",
    seed: int = 0,
) -> Path:
    """Write a random checkpoint with transformers' own save_pretrained: every gain, bias and weight matters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": tied,
    }
    if head_dim is not None:
        sizes["head_dim"] = head_dim
    if model_type == "llama":
        sizes |= {"attention_bias": attention_bias, "mlp_bias": mlp_bias}
    else:
        assert not attention_bias and not mlp_bias, "Llama's to choose"
    if model_type == "mistral":
        sizes["sliding_window"] = None
    if model_type == "qwen3":
        sizes.setdefault("head_dim", hidden // heads)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))
    model.to(dtype).to_empty(device="cpu")
    model.tie_weights()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                values = 1 + 0.3 * values
            elif parameter.dim() == 2 and "embed_tokens" not in name:
                values /= math.sqrt(parameter.shape[1])
            parameter.copy_(values)
    path = Path(path)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    save_tokenizer(path, vocab)
    return path


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """`alone(code, *args)` -> what became of a script with these arguments, in a process of its own."""
    with scripts("import torch, quantrot.convert, quantrot.cli.main\n", tmp_path_factory.mktemp("alone")) as run:
        yield run


@pytest.fixture(scope="session")
def tiny():
    """`tiny(path, hidden=..., ...) -> Path`: see `save_tiny`."""
    return save_tiny


@pytest.fixture(scope="session")
def single(tmp_path_factory):
    """A small checkpoint in one file, for all who only read it."""
    return save_tiny(tmp_path_factory.mktemp("single") / "model")
