"""Operations of the residual strategies: tensors in, tensors out; `reference` defines each one.

`reference`, `compiled` and the Triton modules offer the same functions under the same names. Importing this package
needs neither triton nor a GPU.
"""

from types import ModuleType
from typing import Literal, get_args

import torch

Kernels = Literal["auto", "triton", "reference", "compiled"]


def check(kernels: str) -> None:
    """Raise ValueError unless `kernels` is one of the choices."""
    if kernels not in get_args(Kernels):
        raise ValueError(f"kernels must be one of {', '.join(get_args(Kernels))}, got {kernels!r}")


def implementation(kernels: Kernels, device: torch.device) -> ModuleType:
    """The module that holds the operations for an explicit choice.

    Args:
        kernels: `reference` is plain PyTorch, `compiled` the same through torch.compile, `auto` the reference.
        device: where the tensors are.
    Raises:
        ValueError: unknown choice.
    """
    check(kernels)
    if kernels == "triton":
        raise ValueError("kernels=triton: no Triton kernels in this version; use kernels=reference or compiled")
    if kernels == "compiled":
        from kernels import compiled

        return compiled
    from kernels import reference

    return reference
