"""The reference operations through `torch.compile`: one graph per number of sources, no hand-written kernel."""

import functools
from collections.abc import Callable

import torch

from kernels import reference

# One graph per number of sources, conv owner and shape; the default limit of 8 is passed at 9 sources.
_RECOMPILE_LIMIT = 256


@functools.cache
def _compiled(name: str) -> Callable:
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _RECOMPILE_LIMIT)
    return torch.compile(getattr(reference, name), dynamic=False)


def __getattr__(name: str) -> Callable:
    if name.startswith("_") or not callable(getattr(reference, name, None)):
        raise AttributeError(f"module {__name__!r} has no operation {name!r}")
    return _compiled(name)
