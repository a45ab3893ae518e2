"""Cross-entropy of the next token without keeping [tokens, V] logits."""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

IGNORED = -100
"""Target of a masked position."""


def token_losses(hidden: Tensor, head_weight: Tensor, targets: Tensor, chunk_size: int = 4096) -> Tensor:
    """Negative log-likelihood of each target, 0 where the target is masked.

    Logits are made `chunk_size` tokens at a time, in fp32, and made again in the backward.

    Args:
        hidden: [B, T, D], normed.
        head_weight: [V, D].
        targets: [B, T] int64, -100 where masked.
    Returns:
        [B, T] fp32, nats.
    """
    weight = head_weight.to(hidden.dtype)
    rows, flat_targets = hidden.flatten(0, 1), targets.flatten()
    keeps_graph = torch.is_grad_enabled() and rows.shape[0] > chunk_size
    losses = [
        checkpoint(_chunk_losses, h, weight, t, use_reentrant=False) if keeps_graph else _chunk_losses(h, weight, t)
        for h, t in zip(rows.split(chunk_size), flat_targets.split(chunk_size), strict=True)
    ]
    return torch.cat(losses).view_as(targets)


def _chunk_losses(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, ignore_index=IGNORED, reduction="none")
