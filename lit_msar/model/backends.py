"""Which kernel computes attention: PyTorch's backends in order of preference, FlashAttention over packed documents."""

import inspect
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.varlen import varlen_attn

Choice = Literal["auto", "cudnn", "flash", "efficient", "math"]

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
HOPPER = (9, 0)
"""From this compute capability on cuDNN has kernels of its own generation, and PyTorch's FlashAttention of the last."""
AMPERE = (8, 0)
"""The first with FlashAttention."""

_VARLEN_OPTIONS = frozenset(inspect.signature(varlen_attn).parameters)  # they differ between versions of torch


def preference(choice: Choice, device: torch.device) -> tuple[str, ...]:
    """Backends to try, in order, without a mask; () leaves the choice to PyTorch, as on a CPU."""
    if choice != "auto":
        return (choice,)
    if device.type != "cuda":
        return ()
    fastest = ("cudnn", "flash") if torch.cuda.get_device_capability(device) >= HOPPER else ("flash", "cudnn")
    return (*fastest, "efficient", "math")


def with_mask(backends: tuple[str, ...]) -> tuple[str, ...]:
    """The same for attention under a dense mask, which FlashAttention cannot take on a GPU."""
    return backends and tuple(dict.fromkeys((*backends, "efficient", "math")))


def can_run(
    backend: str, n_heads: int, n_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether a backend computes causal attention of this shape, and its gradients."""
    if backend == "math":
        return True
    if device.type == "cpu":
        return backend == "flash"
    q = torch.empty(1, n_heads, 128, head_dim, dtype=dtype, device=device, requires_grad=True)
    k = torch.empty(1, n_kv_heads, 128, head_dim, dtype=dtype, device=device, requires_grad=True)
    checks = {
        "cudnn": torch.backends.cuda.can_use_cudnn_attention,
        "flash": torch.backends.cuda.can_use_flash_attention,
        "efficient": torch.backends.cuda.can_use_efficient_attention,
    }
    return checks[backend](torch.backends.cuda.SDPAParams(q, k, k, None, 0.0, True, True))


def takes_boundaries(choice: Choice, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether packed documents go to FlashAttention by their boundaries, without a dense mask."""
    return (
        choice in ("auto", "flash")
        and device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(device) >= AMPERE
    )


def packed_attention(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor) -> Tensor:
    """Causal attention within documents.

    Args:
        q: [B, T, H, head_dim].
        k, v: [B, T, H_kv, head_dim].
        boundaries: [n + 1] int32, where documents begin and end in the B T tokens laid end to end; none crosses a
            sequence, and those past the last are empty.
    Returns:
        [B, T, H, head_dim].
    """
    B, T, H, _ = q.shape
    options = {"window_size": (-1, 0)} if "window_size" in _VARLEN_OPTIONS else {"is_causal": True}
    if H != k.shape[2]:
        if "enable_gqa" in _VARLEN_OPTIONS:
            options["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(H // x.shape[2], dim=2) for x in (k, v))
    # T bounds every document's length; the true longest one would have to be read from the device
    rows = (x.flatten(0, 1) for x in (q, k, v))
    y = varlen_attn(*rows, boundaries, boundaries, T, T, **options)
    return y.unflatten(0, (B, T))
