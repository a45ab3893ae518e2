"""Triton kernels on small tensors: softmax over sources, forward and backward, a value per source and stream."""

import triton
import triton.language as tl

BLOCK = 256


@triton.jit
def row_of(rows, n, L: tl.constexpr):
    """Pointer number n of a tuple; as `tiles.pick` without its promise of alignment, rows of logits have none."""
    p_n = rows[0]
    for i in tl.static_range(1, L):
        p_n = tl.where(n == i, rows[i].to(tl.int64), p_n.to(tl.int64)).to(rows[0].dtype)
    return p_n


@triton.jit
def weights_kernel(logits, rstds, p_weights, p_rms, N, count, L: tl.constexpr, BLOCK: tl.constexpr):
    """Softmax over N tensors of `count` logits each: weights [N, count]; and the sources' largest rms [count]."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o < count
    peak = tl.load(logits[0] + o, mask=inside, other=0.0)
    for n in range(1, N):
        peak = tl.maximum(peak, tl.load(row_of(logits, n, L) + o, mask=inside, other=0.0))
    total = tl.zeros([BLOCK], tl.float32)
    smallest = tl.load(rstds[0] + o, mask=inside, other=1.0)
    for n in range(N):
        smallest = tl.minimum(smallest, tl.load(row_of(rstds, n, L) + o, mask=inside, other=1.0))
        total += tl.exp(tl.load(row_of(logits, n, L) + o, mask=inside, other=0.0) - peak)
    tl.store(p_rms + o, 1.0 / smallest, mask=inside)
    for n in range(N):
        b_e = tl.load(row_of(logits, n, L) + o, mask=inside, other=0.0)
        tl.store(p_weights + n * count + o, tl.exp(b_e - peak) / total, mask=inside)


@triton.jit
def slopes_kernel(p_dweights, p_weights, p_logits, p_rstd, p_slope, p_bend, N, n_chunks, count, D, BLOCK: tl.constexpr):
    """Backward of softmax and key norm.

        de_n = a_n (da_n - sum_i a_i da_i)      slope_n = de_n rstd_n      bend_n = slope_n rstd_n e_n / D

    Args:
        p_dweights: [n_chunks, N, count] partial sums of da over channels.
        p_weights, p_logits, p_rstd: [N, count].
        p_slope, p_bend: [N, count], written.
    """
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o < count
    mean = tl.zeros([BLOCK], tl.float32)
    for n in range(N):
        b_da = tl.zeros([BLOCK], tl.float32)
        for c in range(n_chunks):
            b_da += tl.load(p_dweights + (c * N + n) * count + o, mask=inside, other=0.0)
        tl.store(p_slope + n * count + o, b_da, mask=inside)
        mean += b_da * tl.load(p_weights + n * count + o, mask=inside, other=0.0)
    for n in range(N):
        b_a = tl.load(p_weights + n * count + o, mask=inside, other=0.0)
        b_rstd = tl.load(p_rstd + n * count + o, mask=inside, other=0.0)
        # this thread wrote the value itself, so no barrier is needed
        b_slope = b_a * (tl.load(p_slope + n * count + o, mask=inside, other=0.0) - mean) * b_rstd
        tl.store(p_slope + n * count + o, b_slope, mask=inside)
        b_e = tl.load(p_logits + n * count + o, mask=inside, other=0.0)
        tl.store(p_bend + n * count + o, b_slope * b_rstd * b_e / D, mask=inside)
