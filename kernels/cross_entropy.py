"""Triton kernel of the cross-entropy over a large vocabulary: logits become losses and their own gradient, in place.

    loss = log sum_v exp(x_v) - x_target        dx_v = exp(x_v) / sum - [v = target]

One program per row. It reads the row twice, the second time mostly from the L2 cache, and writes it once; plain PyTorch
makes half a dozen passes over fp32 copies.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.tiles import next_power_of_2

BLOCK = 8192
LOWEST = tl.constexpr(-3e38)


@triton.jit
def cross_entropy_kernel(p_logits, p_target, p_loss, V, ignored, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    """Losses [N] of logits [N, V]; GRADIENT: the logits are overwritten with the gradient of the losses' sum."""
    row = tl.program_id(0).to(tl.int64)
    p_row = p_logits + row * V
    target = tl.load(p_target + row)
    is_kept = target != ignored
    # here, ahead of the sums that all warps wait for: below, another warp may have overwritten it
    x_target = tl.load(p_row + tl.where(is_kept, target, 0)).to(tl.float32)
    # every lane has its own running maximum and sum; they are brought together once
    b_peak = tl.full([BLOCK], LOWEST, tl.float32)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        o_v = start + tl.arange(0, BLOCK)
        b_x = tl.load(p_row + o_v, mask=o_v < V, other=float("-inf")).to(tl.float32)
        b_higher = tl.maximum(b_peak, b_x)
        b_sum = b_sum * tl.exp(b_peak - b_higher) + tl.exp(b_x - b_higher)
        b_peak = b_higher
    peak = tl.max(b_peak, 0)
    log_sum = peak + tl.log(tl.sum(b_sum * tl.exp(b_peak - peak), 0))
    tl.store(p_loss + row, tl.where(is_kept, log_sum - x_target, 0.0))
    if GRADIENT:
        share = tl.where(is_kept, 1.0, 0.0)
        for start in range(0, V, BLOCK):
            o_v = start + tl.arange(0, BLOCK)
            b_x = tl.load(p_row + o_v, mask=o_v < V, other=0.0).to(tl.float32)
            b_dx = share * (tl.exp(b_x - log_sum) - tl.where(o_v == target, 1.0, 0.0))
            tl.store(p_row + o_v, b_dx.to(p_logits.dtype.element_ty), mask=o_v < V)


def cross_entropy_(logits: Tensor, targets: Tensor, ignored: int, wants_gradient: bool) -> Tensor:
    """Negative log-likelihood of each target; computed in fp32.

    Args:
        logits: [N, V], contiguous, bf16, fp16 or fp32; with `wants_gradient` overwritten with the gradient of the sum
            of the losses.
        targets: [N] int64, `ignored` where a row does not count.
    Returns:
        [N] fp32, 0 where a row does not count.
    """
    if not logits.is_contiguous():
        raise ValueError("cross_entropy_ works in place on contiguous logits")
    losses = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
    n_rows, V = logits.shape
    if n_rows:
        block = min(BLOCK, next_power_of_2(V))
        cross_entropy_kernel[(n_rows,)](
            logits, targets.contiguous(), losses, V, ignored, GRADIENT=wants_gradient, BLOCK=block,
            num_warps=max(1, min(16, block // 512)),
        )  # fmt: skip
    return losses
