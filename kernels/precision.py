"""The precision that residual operations compute in."""

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for half precision, the dtype itself otherwise."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def raised(x: Tensor) -> Tensor:
    """`x` in its accumulation dtype."""
    return x.to(accumulation_dtype(x.dtype))
