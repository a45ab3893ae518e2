"""Cross-entropy of the next token without keeping [tokens, V] logits."""

from typing import NamedTuple

import torch
from torch import Tensor

IGNORED = -100
"""Target of a masked position."""

CHUNK_LOGITS = 2**28
"""Logits made at once: 1 GiB in fp32."""


class Losses(NamedTuple):
    """Cross-entropy in nats."""

    total: Tensor
    """[] fp32, the sum over unmasked targets; this is what is differentiated."""
    each: Tensor
    """[B, T] fp32, 0 where the target is masked; carries no gradient."""


def cross_entropy(hidden: Tensor, head_weight: Tensor, targets: Tensor, chunk_size: int | None = None) -> Losses:
    """Negative log-likelihood of each target under logits `hidden head_weight^T`.

    Logits are made a chunk of tokens at a time, in fp32 after the product, and turned at once into the gradients of the
    sum, so that the backward makes none again: three products over V in all, and no [tokens, V] tensor is kept.

    Args:
        hidden: [B, T, D], normed.
        head_weight: [V, D]; used in the dtype of `hidden`.
        targets: [B, T] int64, -100 where masked.
        chunk_size: tokens at a time; None makes about 1 GiB of logits.
    """
    chunk_size = chunk_size or max(1, CHUNK_LOGITS // head_weight.shape[0])
    total, each = _CrossEntropy.apply(hidden.flatten(0, 1), head_weight, targets.flatten(), chunk_size)
    return Losses(total, each.view_as(targets))


class _CrossEntropy(torch.autograd.Function):
    """Rows [N, D], weight [V, D] and targets [N] to the sum of losses and the losses [N]."""

    @staticmethod
    def forward(ctx, rows: Tensor, head_weight: Tensor, targets: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
        weight = head_weight.to(rows.dtype)
        wants_rows, wants_weight = ctx.needs_input_grad[:2]
        wide = torch.promote_types(rows.dtype, torch.float32)
        drows = torch.empty_like(rows) if wants_rows else None
        dweight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        each = torch.empty(targets.shape, dtype=wide, device=rows.device)
        for start in range(0, targets.numel(), chunk_size):
            part = slice(start, start + chunk_size)
            each[part], dlogits = _chunk(rows[part], weight, targets[part], wants_rows or wants_weight)
            if wants_rows:
                drows[part] = dlogits @ weight
            if wants_weight:
                dweight += dlogits.T @ rows[part]
        ctx.save_for_backward(drows, dweight)
        ctx.weight_dtype = head_weight.dtype
        ctx.mark_non_differentiable(each)
        return each.sum(), each

    @staticmethod
    def backward(ctx, dtotal: Tensor, _):
        drows, dweight = ctx.saved_tensors
        return (
            None if drows is None else drows * dtotal.to(drows.dtype),
            None if dweight is None else (dweight * dtotal).to(ctx.weight_dtype),
            None,
            None,
        )


def _chunk(rows: Tensor, weight: Tensor, targets: Tensor, wants_gradient: bool) -> tuple[Tensor, Tensor | None]:
    """Losses [n] in the wide dtype, and the gradient of their sum by the logits [n, V] in the rows' dtype."""
    logits = (rows @ weight.T).to(torch.promote_types(rows.dtype, torch.float32))
    kept = targets != IGNORED
    index = targets.clamp(min=0).unsqueeze(1)  # a masked row picks any column; it is zeroed below
    log_sum = logits.logsumexp(1, keepdim=True)
    losses = (log_sum - logits.gather(1, index)).squeeze(1).where(kept, 0.0)
    if not wants_gradient:
        return losses, None
    probabilities = logits.sub_(log_sum).exp_()
    probabilities.scatter_add_(1, index, torch.full_like(log_sum, -1.0))
    return losses, probabilities.mul_(kept.unsqueeze(1)).to(rows.dtype)
