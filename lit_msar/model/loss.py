"""Cross-entropy of the next token without keeping [tokens, V] logits."""

from typing import NamedTuple

import torch
from torch import Tensor

IGNORED = -100
"""Target of a masked position."""

CHUNK_BYTES = 2**31
"""Of the logits made at once: in the compute dtype on a GPU, else in fp32."""
CHUNK_MULTIPLE = 256
"""Rows of a chunk, for the products' sake."""


class Losses(NamedTuple):
    """Cross-entropy in nats."""

    total: Tensor
    """[] fp32, the sum over unmasked targets; this is what is differentiated."""
    each: Tensor
    """[B, T] fp32, 0 where the target is masked; carries no gradient."""


def cross_entropy(hidden: Tensor, head_weight: Tensor, targets: Tensor, chunk_size: int | None = None) -> Losses:
    """Negative log-likelihood of each target under logits `hidden head_weight^T`.

    Logits are made a chunk of tokens at a time, used in fp32, and turned at once into the gradients of the sum, so that
    the backward makes none again: three products over V in all, and no [tokens, V] tensor is kept.

    Args:
        hidden: [B, T, D], normed.
        head_weight: [V, D]; used in the dtype of `hidden`.
        targets: [B, T] int64, -100 where masked.
        chunk_size: tokens at a time; None makes up to 2 GiB of logits.
    """
    chunk_size = chunk_size or chunk_rows(targets.numel(), head_weight.shape[0], logit_bytes(hidden))
    total, each = _CrossEntropy.apply(hidden.flatten(0, 1), head_weight, targets.flatten(), chunk_size)
    return Losses(total, each.view_as(targets))


def chunk_rows(n_tokens: int, vocab_size: int, n_bytes: int) -> int:
    """Tokens at a time, for logits of `n_bytes` each: equal chunks, as few as `CHUNK_BYTES` allows."""
    most = max(1, CHUNK_BYTES // (n_bytes * vocab_size))
    n_chunks = max(1, -(-n_tokens // most))
    even = max(1, -(-n_tokens // n_chunks))
    rounded = -(-even // CHUNK_MULTIPLE) * CHUNK_MULTIPLE
    return rounded if rounded <= most else even


def logit_bytes(hidden: Tensor) -> int:
    """Of one logit while it is turned into its gradient."""
    return hidden.element_size() if hidden.is_cuda else torch.promote_types(hidden.dtype, torch.float32).itemsize


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
                _add_product(dweight, dlogits.T, rows[part])
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


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b; on a GPU the product is added in fp32 as it is made."""
    if total.is_cuda and total.dtype != a.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def _chunk(rows: Tensor, weight: Tensor, targets: Tensor, wants_gradient: bool) -> tuple[Tensor, Tensor | None]:
    """Losses [n] in the wide dtype, and the gradient of their sum by the logits [n, V] in the rows' dtype."""
    logits = rows @ weight.T
    if logits.is_cuda and logits.dtype != torch.float64:
        from kernels.cross_entropy import cross_entropy_  # needs triton

        losses = cross_entropy_(logits, targets, IGNORED, wants_gradient)
        return losses, logits if wants_gradient else None
    return plain_cross_entropy(logits, targets, wants_gradient)


def plain_cross_entropy(logits: Tensor, targets: Tensor, wants_gradient: bool) -> tuple[Tensor, Tensor | None]:
    """As `kernels.cross_entropy.cross_entropy_`, which it defines; fp32 logits are overwritten by the way.

    Returns:
        Losses [n], fp32 or wider, and the gradient of their sum by the logits [n, V] in their dtype.
    """
    dtype = logits.dtype
    logits = logits.to(torch.promote_types(dtype, torch.float32))
    kept = targets != IGNORED
    index = targets.clamp(min=0).unsqueeze(1)  # a masked row picks any column; it is zeroed below
    log_sum = logits.logsumexp(1, keepdim=True)
    losses = (log_sum - logits.gather(1, index)).squeeze(1).where(kept, 0.0)
    if not wants_gradient:
        return losses, None
    probabilities = logits.sub_(log_sum).exp_()
    probabilities.scatter_add_(1, index, torch.full_like(log_sum, -1.0))
    return losses, probabilities.mul_(kept.unsqueeze(1)).to(dtype)
