"""quantrot: put a Llama model into few bits.

    quantrot.convert("meta-llama/Llama-3.1-8B-Instruct", "quarot-mxfp4", "out/")
    model = quantrot.load("out/", device_map="auto")

Names are imported when first used, so that `import quantrot` and the command line's help stay fast.
"""

from typing import TYPE_CHECKING, Any

from quantrot.version import __version__

if TYPE_CHECKING:
    from quantrot.convert import convert as convert
    from quantrot.load import load as load
    from quantrot.plan import make_plan as plan
    from quantrot.recipe import Recipe as Recipe
    from quantrot.verify import verify as verify

__all__ = ["Recipe", "__version__", "convert", "load", "plan", "verify"]

_HOMES = {
    "Recipe": ("quantrot.recipe", "Recipe"),
    "plan": ("quantrot.plan", "make_plan"),
    "convert": ("quantrot.convert", "convert"),
    "load": ("quantrot.load", "load"),
    "verify": ("quantrot.verify", "verify"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'quantrot' has no attribute {name!r}")
    import importlib

    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)
