"""Operations of the residual strategies: tensors in, tensors out; `reference` defines each one.

`reference`, `compiled` and the Triton modules offer the same functions under the same names. Importing this package
needs neither triton nor a GPU.
"""

import functools
import logging
from types import ModuleType
from typing import Literal, get_args

import torch

_logger = logging.getLogger(__name__)

Kernels = Literal["auto", "triton", "reference", "compiled"]
MAX_READS = 16  # that the Triton kernels of MSAR compute together
MAX_LANES = 8  # of Hyper-Connections that the Triton kernels take


def check(kernels: str) -> None:
    """Raise ValueError unless `kernels` is one of the choices."""
    if kernels not in get_args(Kernels):
        raise ValueError(f"kernels must be one of {', '.join(get_args(Kernels))}, got {kernels!r}")


def implementation(kernels: Kernels, device: torch.device, has_triton: bool = False) -> ModuleType:
    """The module that holds the operations for an explicit choice.

    Args:
        kernels: `reference` is plain PyTorch, `compiled` the same through torch.compile, `triton` the GPU kernels;
            `auto` is Triton on CUDA where the caller's operations have kernels, the reference elsewhere.
        device: where the tensors are; on the meta device, which only has shapes, the reference gives them.
        has_triton: whether there are Triton kernels for what the caller runs.
    Raises:
        ValueError: unknown choice, or `triton` where there are no kernels.
    """
    check(kernels)
    if kernels == "triton" and not has_triton:
        raise ValueError("kernels=triton: no Triton kernels for this strategy; use kernels=auto, reference or compiled")
    chosen = kernels
    if device.type == "meta":  # shapes alone
        chosen = "reference"
    elif kernels == "auto":
        chosen = "triton" if has_triton and device.type == "cuda" else "reference"
        _log_once(chosen, device.type)
    if chosen == "triton":
        from kernels import fused

        return fused
    if chosen == "compiled":
        from kernels import compiled

        return compiled
    from kernels import reference

    return reference


@functools.cache
def _log_once(chosen: str, device: str) -> None:
    _logger.info("kernels=auto on %s: %s", device, chosen)
