"""Arithmetic in fp16 for bf16 sources: two channels an instruction, and the exact scales that keep it in range.

Expansions and their transposes are computed in fp16 with 8 times the precision of bf16; logits and norms, whose error
is an error of a whole row, stay in fp32. Powers of two, one per source and measured on the device, put it in range:

    |v| fit <= PEAK        |u| fit, partial sums of u too <= PEAK taps        taps = sum of |taps| of a channel + m
    |du| dfit <= PEAK      |dv| dfit, partial sums of dv too <= PEAK taps
    |slope| times a power of two of its own <= SLOPE_PEAK

With PEAK taps <= 2^12, products of gradients in units (at most GRADIENT_PEAK) and u stay below 2^15, and so do sums of
eight products of du and v, or of four of slope and u. A row 2^-18 times as large as the source's largest keeps fp16's
11 bits, a smaller one loses a bit per octave.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.tiles import cdiv, next_power_of_2

PEAK = tl.constexpr(64.0)
TAPS_PEAK = tl.constexpr(64.0)  # sources with larger taps are scaled down
GRADIENT_PEAK = tl.constexpr(8.0)  # the largest value of a stream's gradient in its units
SLOPE_PEAK = tl.constexpr(2.0)  # four products with u stay in range
FP16_MAX = tl.constexpr(65504.0)
MAX_SOURCES = 32  # every source rounds the sums over sources once more
TAPS_BLOCK = 64
BLOCK = 128
PEAK_BLOCK = 1024
RSTD_BLOCK = 4096


@triton.jit(do_not_specialize=["N"])
def narrow_taps_kernel(p_table, p_taps, p_norms, N, K, D, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr):
    """Taps [G, K, D] in fp16, and the largest sum over the K taps of a channel, per tile of channels: [G, tiles].

    Args:
        p_table: sources, fp32 taps.
    """
    g = tl.program_id(0)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    p_given = tl.load(p_table + N + g).to(tl.pointer_type(tl.float32))
    p_out = p_taps + g.to(tl.int64) * K * D
    o_k = tl.arange(0, BLOCK_K)
    at = o_k[:, None] * D + o_d[None, :]
    mask = (o_k < K)[:, None] & (o_d < D)[None, :]
    b_taps = tl.load(p_given + at, mask=mask, other=0.0)
    tl.store(p_out + at, b_taps.to(tl.float16), mask=mask)
    tl.store(p_norms + g * tl.num_programs(1) + tl.program_id(1), tl.max(tl.sum(tl.abs(b_taps), 0)))


@triton.jit
def power_of_two(x):
    """The largest power of two up to x, positive, within what fp32 and its inverse hold."""
    x = tl.minimum(tl.maximum(x, 1e-30), 1e30)
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def fit_kernel(
    p_rstd, p_norms, p_fit, P, group_step, n_norms, M, D, LEARNED: tl.constexpr, NORMS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`fit` of every source and the factor min(1, TAPS_PEAK / taps), [2, N].

    |v| is bounded by its norm: rstd of the identity stream is at most 1 / rms, and |v| <= sqrt(D) rms.

    Args:
        p_rstd: [N, P, M], the first of M streams the identity.
        p_norms: [G, n_norms], group_step 1 for G = N and 0 for G = 1; left out without LEARNED taps.
    """
    n = tl.program_id(0)
    b_smallest = tl.full([BLOCK], float("inf"), tl.float32)
    for start in range(0, P, BLOCK):
        o = start + tl.arange(0, BLOCK)
        b_rstd = tl.load(p_rstd + (n.to(tl.int64) * P + o) * M, mask=o < P, other=float("inf"))
        b_smallest = tl.minimum(b_smallest, b_rstd)
    taps = M + 0.0  # an identity stream's tap is 1; one too many for the others does no harm
    if LEARNED:
        o = tl.arange(0, NORMS)
        taps += tl.max(tl.load(p_norms + n * group_step * n_norms + o, mask=o < n_norms, other=0.0))
    room = tl.minimum(1.0 / taps * TAPS_PEAK, 1.0)  # triton 3.7 interprets no constant over a tensor
    tl.store(p_fit + n, power_of_two(tl.min(b_smallest, 0) * (room * PEAK / tl.sqrt(D + 0.0))))
    tl.store(p_fit + tl.num_programs(0) + n, room)


@triton.jit(do_not_specialize=["N"])
def narrow_weights_kernel(
    p_weights, p_scale, p_fit, p_narrow, N, count, READS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Weights for a retrieval in fp16 [N, count, READS], with the scale of r and the inverse of `fit` in them.

    Args:
        p_weights: [READS, N, count]; p_scale: [count]; p_fit: [N].
    """
    n = tl.program_id(1)
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_factor = tl.load(p_scale + o, mask=o < count, other=0.0) / tl.load(p_fit + n)
    for r in tl.static_range(READS):
        at = (tl.cast(r * N, tl.int64) + n) * count + o
        b_weight = tl.load(p_weights + at, mask=o < count, other=0.0) * b_factor
        # beyond fp16 only where a row is 2^-17 of the source's largest: finite then
        b_weight = tl.minimum(b_weight, FP16_MAX).to(tl.float16)
        tl.store(p_narrow + (n.to(tl.int64) * count + o) * READS + r, b_weight, mask=o < count)


@triton.jit(do_not_specialize=["N", "n_plain"])
def gradient_peaks_kernel(
    p_weights, p_slope, p_bend, p_query_peak, p_rstd, p_peaks, N, n_plain, count, apart, D,
    READS: tl.constexpr, M: tl.constexpr, BEND: tl.constexpr, QUERY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of every tile of tokens and streams [N, tiles] a bound of |du| and (QUERY) the largest |slope|: two of them.

    Args:
        p_weights: READS times [N, count], `apart` from each other.
        p_slope (QUERY), p_bend (BEND): [N - n_plain, count]; the first n_plain sources have none. p_rstd: [N, count].
        p_query_peak: [M], the query's largest values.
    """
    n = tl.program_id(1)
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = n.to(tl.int64) * count + o
    b_peak = tl.zeros([BLOCK], tl.float32)
    scored, at_scored = o < tl.where(n >= n_plain, count, 0), at - n_plain * tl.cast(count, tl.int64)
    if BEND:
        b_bend = tl.load(p_bend + at_scored, mask=scored, other=0.0)
        b_peak += tl.abs(b_bend) * tl.sqrt(D + 0.0) / tl.load(p_rstd + at, mask=o < count, other=1.0)
    for r in tl.static_range(READS):
        of_read = at + r * tl.cast(apart, tl.int64)
        b_peak += tl.abs(tl.load(p_weights + of_read, mask=o < count, other=0.0)) * GRADIENT_PEAK
    if QUERY:
        b_slopes = tl.abs(tl.load(p_slope + at_scored, mask=scored, other=0.0))
        b_peak += b_slopes * tl.load(p_query_peak + o % M, mask=o < count, other=0.0)
    p_tile = p_peaks + n * tl.num_programs(0) + tl.program_id(0)
    tl.store(p_tile, tl.max(b_peak))
    if QUERY:
        tl.store(p_tile + tl.num_programs(0) * tl.num_programs(1), tl.max(b_slopes))


@triton.jit
def peak_of(p_values, count, BLOCK: tl.constexpr):
    """The largest of `count` values, none of them negative."""
    b_peak = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        o = start + tl.arange(0, BLOCK)
        b_peak = tl.maximum(b_peak, tl.load(p_values + o, mask=o < count, other=0.0))
    return tl.max(b_peak, 0)


@triton.jit(do_not_specialize=["N", "n_plain"])
def narrow_gradients_kernel(
    p_weights, p_slope, p_bend, p_peaks, p_fit, p_room, p_narrow_weights, p_narrow_slope, p_narrow_bend, p_dfit, N,
    n_plain, count, apart, n_tiles,
    READS: tl.constexpr, BEND: tl.constexpr, QUERY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What a walk weights by, in fp16: weights and bend for du times `dfit`, slope in units of its own.

    A slope also multiplies u, for the query's gradient, which it must give however small the query is: zero at the
    start of training. So the query takes what is left of `dfit`.

    Args:
        p_weights, p_slope, p_bend: as for `gradient_peaks_kernel`, whose peaks [2, N, n_tiles] p_peaks are.
        p_fit, p_room: [N], of `fit_kernel`.
        p_narrow_weights: [N, count, READS], p_narrow_slope, p_narrow_bend: [N - n_plain, count], written.
        p_dfit: [2, N], written: what du and (QUERY) slopes are multiplied by.
    """
    n = tl.program_id(1)
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dfit = power_of_two(tl.load(p_room + n) * PEAK / tl.maximum(peak_of(p_peaks + n * n_tiles, n_tiles, BLOCK), 1e-30))
    slope_fit = 1.0
    if QUERY:
        peak = peak_of(p_peaks + (N + n) * n_tiles, n_tiles, BLOCK)
        slope_fit = power_of_two(1.0 / tl.maximum(peak, 1e-30) * SLOPE_PEAK)
    if tl.program_id(0) == 0:
        tl.store(p_dfit + n, dfit)
        tl.store(p_dfit + N + n, slope_fit)
    at = n.to(tl.int64) * count + o
    scored, at_scored = o < tl.where(n >= n_plain, count, 0), at - n_plain * tl.cast(count, tl.int64)
    if BEND:  # of u times fit; beyond fp16 only where a row is far smaller than the source's largest
        b_bend = tl.load(p_bend + at_scored, mask=scored, other=0.0) * (dfit / tl.load(p_fit + n))
        b_bend = tl.minimum(tl.maximum(b_bend, -FP16_MAX), FP16_MAX)
        tl.store(p_narrow_bend + at_scored, b_bend.to(tl.float16), mask=scored)
    for r in tl.static_range(READS):
        of_read = at + r * tl.cast(apart, tl.int64)
        b_weight = tl.load(p_weights + of_read, mask=o < count, other=0.0) * dfit
        tl.store(p_narrow_weights + at * READS + r, b_weight.to(tl.float16), mask=o < count)
    if QUERY:
        b_slope = tl.load(p_slope + at_scored, mask=scored, other=0.0) * slope_fit
        tl.store(p_narrow_slope + at_scored, b_slope.to(tl.float16), mask=scored)


def narrow_taps(table: Tensor, taps: Tensor, n_sources: int) -> Tensor:
    """Fill `taps` [G, K, D] in fp16 from the table's fp32 taps; the largest sums of |taps| of a channel [G, tiles]."""
    G, K, D = taps.shape
    tiles = cdiv(D, TAPS_BLOCK)
    norms = table.new_empty(G, tiles, dtype=torch.float32)
    block_k = next_power_of_2(K)
    narrow_taps_kernel[(G, tiles)](
        table, taps, norms, n_sources, K, D, BLOCK_K=block_k, BLOCK_D=TAPS_BLOCK, num_warps=4
    )
    return norms


def fit(rstd: Tensor, norms: Tensor | None, width: int) -> tuple[Tensor, Tensor]:
    """What rows of each source are multiplied by [N], and the share of the range that its taps leave [N].

    Args:
        rstd: [N, P, m].
        norms: [G, tiles] of `narrow_taps`, None without taps.
        width: D.
    """
    N, P, m = rstd.shape
    out = rstd.new_empty(2, N)
    step, count = (0, 1) if norms is None else (int(len(norms) > 1), norms.shape[1])
    fit_kernel[(N,)](
        rstd, norms, out, P, step, count, m, width,
        LEARNED=norms is not None, NORMS=next_power_of_2(count), BLOCK=RSTD_BLOCK, num_warps=16,
    )  # fmt: skip
    return out[0], out[1]


def narrow_weights(weights: Tensor, scale: Tensor, fit: Tensor) -> Tensor:
    """Weights [N, P, m, R] of retrievals in fp16, from weights [R, N, P, m], the scale of r [P, m] and `fit` [N]."""
    R, N, P, m = weights.shape
    narrow = weights.new_empty(N, P, m, R, dtype=torch.float16)
    narrow_weights_kernel[(cdiv(P * m, BLOCK), N)](
        weights, scale, fit, narrow, N, P * m, READS=R, BLOCK=BLOCK, num_warps=4
    )
    return narrow


def narrow_gradients(
    weights: Tensor | None, slope: Tensor | None, bend: Tensor | None, query: Tensor | None, rstd: Tensor,
    fits: tuple[Tensor, Tensor], width: int, n_plain: int = 0,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]:  # fmt: skip
    """What a walk over N sources takes in fp16, None for what is not given.

    Args:
        weights: [R, N, P, m], the reads apart in any way; rstd: [N, P, m].
        slope, bend: [N - n_plain, P, m]; the first n_plain sources have none.
        query: [m, D], given with slope.
        fits: of these sources, from `fit`.
        width: D.
    Returns:
        Weights [N, P, m, R], slope and bend [N - n_plain, P, m]; the powers of two in them [2, N]: of weights and bend,
        of slope.
    """
    N, P, m = rstd.shape
    R, half = 0 if weights is None else len(weights), torch.float16
    peak = None if query is None else torch.linalg.vector_norm(query, torch.inf, dim=-1)
    apart = 0 if weights is None else weights.stride(0)
    by_read = None if weights is None else weights.new_empty(N, P, m, R, dtype=half)
    narrow_slope, narrow_bend = (None if x is None else torch.empty_like(x, dtype=half) for x in (slope, bend))
    options = {"READS": R, "BEND": bend is not None, "QUERY": query is not None, "num_warps": 4}
    peaks, dfit = rstd.new_empty(2, N, cdiv(P * m, PEAK_BLOCK)), rstd.new_empty(2, N)
    gradient_peaks_kernel[(peaks.shape[2], N)](
        weights, slope, bend, peak, rstd, peaks, N, n_plain, P * m, apart, width, M=m, BLOCK=PEAK_BLOCK, **options
    )
    narrow_gradients_kernel[(cdiv(P * m, BLOCK), N)](
        weights, slope, bend, peaks, *fits, by_read, narrow_slope, narrow_bend, dfit, N, n_plain, P * m,
        apart, peaks.shape[2], BLOCK=BLOCK, **options,
    )  # fmt: skip
    return by_read, narrow_slope, narrow_bend, dfit
