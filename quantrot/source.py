"""Where a model comes from: a local directory, a Hugging Face hub id, or `demo`."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

DEMO = "HuggingFaceTB/SmolLM2-135M-Instruct"  # what the embedded demo model is
COPIED = (  # beginnings of the names of what a conversion copies
    "tokenizer",
    "tekken",
    "special_tokens",
    "added_tokens",
    "vocab",
    "merges",
    "chat_template",
    "generation_config",
)
TEMPLATES = "additional_chat_templates"  # where transformers puts a tokenizer's other templates
LICENCES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")  # in capitals or not
FETCHED = ["*.safetensors", "*.json", "*.jinja", "README.md", "quantrot.rotations"]
FETCHED += [f"{name}*" for name in (*COPIED, *LICENCES, *map(str.lower, LICENCES))]
TWICE = ["consolidated*"]  # Mistral's own layout of the same weights
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


@dataclass(frozen=True)
class Source:
    """A model on disk: the name that finds it again, the hub's revision ("" for others), and its directory."""

    name: str
    revision: str
    path: Path

    @property
    def is_public(self) -> bool:
        """Whether `base_model` is a hub id."""
        return bool(self.revision) or self.name == "demo"

    @property
    def base_model(self) -> str:
        """What a model card calls it."""
        return DEMO if self.name == "demo" else self.name


def open_source(model: str | Path) -> Source:
    """Find a model: an existing directory, `demo`, or a hub id `owner/name`, optionally `owner/name@revision`."""
    if not isinstance(model, str | os.PathLike):
        raise ValueError(f"model is a {type(model).__name__}; save it with save_pretrained and give the directory")
    text = str(model)
    if text == "demo":
        from quantrot.demo import demo_model

        return Source("demo", "", demo_model())
    path = Path(os.path.expanduser(text))
    if text and path.is_dir():
        return Source(os.path.abspath(path), "", path)  # a relative one is none for who reads the manifest elsewhere
    if text and path.exists():
        raise ValueError(f"model {text!r} is a file; give the directory that holds config.json and the weights")
    if not HUB_ID.fullmatch(text):
        raise ValueError(f"model {text!r} is no directory; give one, a hub id such as meta-llama/Llama-3.2-1B, or demo")
    return _from_hub(text)


def copied_files(root: Path) -> tuple[Path, ...]:
    """Tokenizer, chat template, generation config and licence files: copied byte for byte. ValueError for a link to
    nothing, as a cache that was cleared has them, and for what may not be read."""
    names = [p for p in root.iterdir() if p.name.startswith(COPIED) or p.name.upper().startswith(LICENCES)]
    names += (root / TEMPLATES).glob("*.jinja")
    for path in names:
        if not path.exists():
            raise ValueError(f"{path}: links to {os.readlink(path)}, which is not there; download it again")
        if path.is_file() and not os.access(path, os.R_OK):
            raise ValueError(f"{path}: no permission to read it, and it is copied; change that (chmod), or move it")
    return tuple(sorted(path for path in names if path.is_file()))


def _from_hub(text: str) -> Source:
    """Download what a conversion reads (no pickles, no code) into the hub's own cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name, _, revision = text.partition("@")
    try:
        path = Path(snapshot_download(name, revision=revision or None, allow_patterns=FETCHED, ignore_patterns=TWICE))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise ValueError(f"model {name!r}: no such directory, and the hub did not give it{offline}: {reason}") from None
    if not any(path.glob("*.safetensors")) and os.environ.get("HF_HUB_OFFLINE"):
        held = f"no safetensors of it in the cache, {path} (HF_HUB_OFFLINE is set)"
        raise ValueError(f"model {name!r}: {held}; download it")
    return Source(name, path.name, path)
