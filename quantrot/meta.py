"""Modules whose parameters take no memory, built by one thread while others build theirs.

accelerate's init_empty_weights replaces a method of nn.Module for the whole process: what other threads built meanwhile
had no memory either, and two of them at once left it replaced for good. A hook of torch's that asks whose the module is
does neither.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

_THREAD = threading.local()
_ONE = threading.Lock()  # transformers sets torch's default dtype while it builds, for all threads


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters of modules that this thread builds are on the meta device; buffers are real. Other threads that want
    the same wait."""
    with _ONE:
        _THREAD.building = True
        try:
            yield
        finally:
            _THREAD.building = False


def _without_memory(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    if not getattr(_THREAD, "building", False):
        return None
    return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)


# Never removed: others may be going through the hooks. (torch's own annotation has it that a hook returns nothing.)
register_module_parameter_registration_hook(_without_memory)  # type: ignore[arg-type]
