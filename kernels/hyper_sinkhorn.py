# ruff: noqa: RUF005  (Triton compiles `+` of tuples, not unpacking)
"""Sinkhorn and its gradient in Triton, on matrices in registers [BLOCK_T, N, N] (mHC Eq. 9).

M <- M / column sums        M <- M / row sums        ROUNDS times, from exp; the backward pass keeps every M
"""

import triton
import triton.language as tl


@triton.jit
def sums(b_m, AXIS: tl.constexpr, shift, b_pad, PADDED: tl.constexpr):
    """What a step divides by: sums along rows (2) or columns (1) [BLOCK_T, N, N]; b_pad is 1 where they are empty."""
    b_sum = tl.sum(b_m, AXIS, keep_dims=True) + shift
    if PADDED:
        b_sum += b_pad
    return b_sum


@triton.jit
def sinkhorn_history(b_z, exists, pad_i, pad_j, shift, PADDED: tl.constexpr, ROUNDS: tl.constexpr):
    """Every matrix on the way to the doubly stochastic one, which comes last: columns, rows, columns, .. rows.

    Args:
        b_z: [BLOCK_T, N, N] logits by (lane written, lane read).
        exists, pad_i, pad_j: [BLOCK_T, N, N], whether an entry exists, and 1 in rows and columns that do not; unused
            unless PADDED.
    """
    if PADDED:
        b_z = tl.where(exists, b_z, -1e30)
    b_m = tl.exp(b_z - tl.max(b_z, 1, keep_dims=True))
    if PADDED:
        b_m = tl.where(exists, b_m, 0.0)
    b_m = b_m / sums(b_m, 1, 0.0, pad_j, PADDED) + shift
    if PADDED:
        b_m = tl.where(exists, b_m, 0.0)
    history = (b_m,)
    for step in tl.static_range(2 * ROUNDS - 1):
        if step % 2 == 0:
            b_m = b_m / sums(b_m, 2, shift, pad_i, PADDED)
        else:
            b_m = b_m / sums(b_m, 1, shift, pad_j, PADDED)
        history = history + (b_m,)
    return history


@triton.jit
def sinkhorn_gradient(history, b_d, exists, pad_i, pad_j, shift, PADDED: tl.constexpr, ROUNDS: tl.constexpr):
    """dz from the gradient of the last matrix: y = x / s gives dx = (dy - sum dy y) / s, along the step's axis."""
    LAST: tl.constexpr = 2 * ROUNDS - 1
    for step in tl.static_range(LAST):
        before = history[LAST - step - 1]
        after = history[LAST - step]
        if step % 2 == 0:
            b_d = (b_d - tl.sum(b_d * after, 2, keep_dims=True)) / sums(before, 2, shift, pad_i, PADDED)
        else:
            b_d = (b_d - tl.sum(b_d * after, 1, keep_dims=True)) / sums(before, 1, shift, pad_j, PADDED)
    softmax = history[0] - shift
    if PADDED:
        softmax = tl.where(exists, softmax, 0.0)
    return softmax * (b_d - tl.sum(b_d * softmax, 1, keep_dims=True))
