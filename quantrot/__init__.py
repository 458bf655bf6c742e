"""quantrot: put a Llama model into few bits.

    quantrot.convert("meta-llama/Llama-3.1-8B-Instruct", "quarot-mxfp4", "out/")
    model = quantrot.load("out/", device_map="auto")

Names are imported when first used, so that the command line's help does not wait for torch.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from quantrot.version import __version__

if TYPE_CHECKING:
    from quantrot.calibration import Calibration as Calibration
    from quantrot.convert import convert as convert
    from quantrot.learn import learn as learn
    from quantrot.load import load as load
    from quantrot.plan import plan as plan
    from quantrot.recipe import Recipe as Recipe
    from quantrot.verify import verify as verify

__all__ = ["Calibration", "Recipe", "__version__", "convert", "learn", "load", "plan", "verify"]

_FUNCTIONS = ("plan", "convert", "learn", "load", "verify")  # each lives in the module of its own name


class _Package(ModuleType):
    """Keeps `quantrot.convert` the function: importing the module of that name would put the module there."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _FUNCTIONS and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'quantrot' has no attribute {name!r}")
    return getattr(importlib.import_module(f"quantrot.{name.lower()}"), name)
