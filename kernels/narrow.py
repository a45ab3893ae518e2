"""Arithmetic in fp16 for bf16 sources: two channels an instruction, and the exact scales that keep it in range.

Expansions and their transposes are computed in fp16 with 8 times the precision of bf16; logits and norms, whose error
is an error of a whole row, stay in fp32. Powers of two, one per source and measured on the device, put it in range:

    |v| fit <= PEAK        |u|, |partial sums of u| <= PEAK taps        taps = sum of |taps| of a channel + m <= 2^9

A row that is 2^-18 of the source's largest, in norm, still keeps fp16's 11 bits; smaller ones lose a bit per octave.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PEAK = tl.constexpr(64.0)
TAPS_PEAK = tl.constexpr(
    512.0
)  # of a channel's taps, beyond which sources are scaled down: PEAK TAPS_PEAK is half of fp16's range
MAX_SOURCES = 32  # every source rounds the sums over sources once more
TAPS_BLOCK = 128
BLOCK = 128


@triton.jit
def narrow_taps_kernel(p_table, p_taps, p_norms, N, K, D, BLOCK_D: tl.constexpr):
    """Taps [G, K, D] in fp16, and the largest sum over the K taps of a channel, per tile of channels: [G, tiles].

    Args:
        p_table: sources, fp32 taps.
    """
    g = tl.program_id(0)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    p_given = tl.load(p_table + N + g).to(tl.pointer_type(tl.float32))
    p_out = p_taps + g.to(tl.int64) * K * D
    total = tl.zeros([BLOCK_D], tl.float32)
    for i in range(K):
        b_tap = tl.load(p_given + i * D + o_d, mask=o_d < D, other=0.0)
        total += tl.abs(b_tap)
        tl.store(p_out + i * D + o_d, b_tap.to(tl.float16), mask=o_d < D)
    tl.store(p_norms + g * tl.num_programs(1) + tl.program_id(1), tl.max(total))


@triton.jit
def power_of_two(x):
    """The largest power of two up to x, positive, within what bf16 and its inverse hold."""
    x = tl.minimum(tl.maximum(x, 1e-30), 1e30)
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def channel_taps(p_norms, group, n_norms, M: tl.constexpr, LEARNED: tl.constexpr, NORMS: tl.constexpr):
    """The largest sum of |taps| of a channel over all streams, an identity stream's tap being 1 (or counted as 1)."""
    total = M + 0.0
    if LEARNED:
        o = tl.arange(0, NORMS)
        total += tl.max(tl.load(p_norms + group * n_norms + o, mask=o < n_norms, other=0.0))
    return total


@triton.jit
def narrow_weights_kernel(
    p_weights, p_scale, p_smallest_rstd, p_norms, p_narrow, p_fit, N, count, group_step, n_norms, D,
    READS: tl.constexpr, M: tl.constexpr, LEARNED: tl.constexpr, NORMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Weights for a retrieval in fp16 [N, count, READS], with the scale of r and the inverse of `fit` in them.

    The bound of |v| is that of its norm: rstd of the identity stream is at most 1 / rms, and |v| <= sqrt(D) rms.

    Args:
        p_weights: [READS, N, count]; p_scale: [count].
        p_smallest_rstd: [N], of the identity stream; p_norms: [G, n_norms], group_step 1 for G = N and 0 for G = 1.
        p_fit: [N], written: what the sources' values are multiplied by.
    """
    n = tl.program_id(1)
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    taps = channel_taps(p_norms, n * group_step, n_norms, M, LEARNED, NORMS)
    fit = power_of_two(
        tl.load(p_smallest_rstd + n) / tl.sqrt(D + 0.0) * PEAK * tl.minimum(TAPS_PEAK / taps, 1.0)
    )  # fmt: skip
    if tl.program_id(0) == 0:
        tl.store(p_fit + n, fit)
    b_factor = tl.load(p_scale + o, mask=o < count, other=0.0) / fit
    for r in tl.static_range(READS):
        at = (tl.cast(r * N, tl.int64) + n) * count + o
        b_weight = tl.load(p_weights + at, mask=o < count, other=0.0) * b_factor
        # beyond fp16 only where a row is 2^-17 of the source's largest: finite then
        b_weight = tl.minimum(b_weight, 65504.0).to(tl.float16)
        tl.store(p_narrow + (n.to(tl.int64) * count + o) * READS + r, b_weight, mask=o < count)


def narrow_taps(table: Tensor, taps: Tensor, n_sources: int) -> Tensor:
    """Fill `taps` [G, K, D] in fp16 from the table's fp32 taps; the largest sums of |taps| of a channel [G, tiles]."""
    G, K, D = taps.shape
    tiles = triton.cdiv(D, TAPS_BLOCK)
    norms = table.new_empty(G, tiles, dtype=torch.float32)
    narrow_taps_kernel[(G, tiles)](table, taps, norms, n_sources, K, D, BLOCK_D=TAPS_BLOCK, num_warps=4)
    return norms


def narrow_weights(
    weights: Tensor, scale: Tensor, rstd: Tensor, norms: Tensor | None, width: int
) -> tuple[Tensor, Tensor]:
    """What `streams.retrieve_kernel` takes in fp16.

    Args:
        weights: [R, N, P, m]; scale: [P, m]; rstd: [N, P, m].
        norms: [G, tiles] of `narrow_taps`, None without taps.
        width: D.
    Returns:
        [N, P, m, R] in fp16, and the sources' scales [N].
    """
    R, N, P, m = weights.shape
    narrow, fit = weights.new_empty(N, P, m, R, dtype=torch.float16), weights.new_empty(N)
    narrow_weights_kernel[(triton.cdiv(P * m, BLOCK), N)](
        weights, scale, rstd[..., 0].amin(1), norms, narrow, fit, N, P * m, *group_of(norms), width,
        READS=R, M=m, BLOCK=BLOCK, **norm_options(norms),
    )  # fmt: skip
    return narrow, fit


def group_of(norms: Tensor | None) -> tuple[int, int]:
    """Groups of taps from one source to the next, and norms per group."""
    return (0, 1) if norms is None else (int(len(norms) > 1), norms.shape[1])


def norm_options(norms: Tensor | None) -> dict:
    count = 1 if norms is None else norms.shape[1]
    return {"LEARNED": norms is not None, "NORMS": triton.next_power_of_2(count), "num_warps": 4}
