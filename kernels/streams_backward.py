# ruff: noqa: RUF005  (Triton compiles `+` of tuples, not unpacking)
"""Triton kernel of the gradients of a read's weights, over the expanded streams of its sources.

A program owns tokens of one source and goes through its channels, as `streams.score_kernel` does. Programs of the
sources of one place run side by side, so that the L2 serves all but the first reader of dr.
"""

import triton
import triton.language as tl

from kernels.tensor_sums import (
    converted,
    no_sums,
    numbers,
    on_tensor_cores,
    selections,
    tile_count,
    totals,
    with_products,
)
from kernels.tiles import (
    convolved,
    first_tap,
    learned,
    load_fit,
    load_rows,
    multiply,
    n_streams,
    raw_rows,
    seen_at,
    tensor_at,
    widest,
    width,
)


@triton.jit(do_not_specialize=["N", "n_tiles"], do_not_specialize_on_alignment=["p_dr_table"])
def dweights_kernel(
    p_table, p_dr_table, p_fit, p_dweights, p_position, T, N, P, n_tiles,
    SIZES: tl.constexpr, READS: tl.constexpr, SHARED: tl.constexpr, D: tl.constexpr,
    STEPS: tl.constexpr, WARPS: tl.constexpr, BLOCK_D: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
    DTYPE: tl.constexpr, DR_DTYPE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """dr_rj . u_nj [READS, N, P, m]; dr is a table of READS tensors [P, m, D], or [P, D] that all streams share.

    One program: STEPS tokens per warp of one source, all of D. A source is expanded once for all the reads. The tensor
    cores add products over the channels where fp16 computes, see `tensor_sums`; otherwise they stay spread over the
    lanes until the last channel.
    """
    M: tl.constexpr = n_streams(SIZES)
    WINDOW: tl.constexpr = widest(SIZES)
    FAST: tl.constexpr = on_tensor_cores(COMPUTE, BLOCK_D)
    COUNT: tl.constexpr = STEPS * READS  # sums of a stream
    n = tl.program_id(0) % N  # sources of a place side by side: all but one find dr in the cache
    tile = tl.program_id(0) // N
    b = tile // n_tiles
    t_warp = tile % n_tiles * (WARPS * STEPS) + tl.arange(0, WARPS) * STEPS
    t_first = t_warp[:, None]
    t_oldest = t_first - (WINDOW - 1)
    first = b.to(tl.int64) * T + t_first
    p_source = tensor_at(p_table, n, DTYPE) + (b.to(tl.int64) * T + t_oldest) * D
    p_taps = tensor_at(p_table, (2 if COMPUTE == tl.float16 else 1) * N + n, COMPUTE)
    fit = load_fit(p_fit, n, COMPUTE)
    gradients = ()
    for r in tl.static_range(READS):
        gradients = gradients + (tensor_at(p_dr_table, r, DR_DTYPE) + (first if SHARED else first * M) * D,)
    selected = selections(BLOCK_D, FAST)
    dots = no_sums(M, COUNT, WARPS, BLOCK_D, FAST)
    for d in range(0, D, BLOCK_D):
        o_d = d + tl.arange(0, BLOCK_D)[None, :]
        raw = raw_rows(p_source, t_oldest, o_d, T, D, WINDOW - 1, STEPS, EVEN)
        rows = converted(raw, fit, WINDOW - 1 + STEPS, COMPUTE, BLOCK_D, FAST)
        for j in tl.static_range(M):
            b_taps = load_rows(p_taps + first_tap(SIZES, j) * D, o_d, D, learned(SIZES, j))
            products = ()
            for s in tl.static_range(STEPS):
                window = seen_at(rows, p_position, first + s, t_first + s < T, s, WINDOW, PACKED)
                b_u = convolved(b_taps, window, 0, width(SIZES, j))
                mask = o_d < (D if EVEN else tl.where(t_first + s < T, D, 0))
                for r in tl.static_range(READS):
                    p_row = gradients[r] + (s if SHARED else s * M + j) * D
                    b_dr = tl.load(p_row + o_d, mask=mask, other=0.0).to(COMPUTE)
                    products = products + (multiply(b_u, b_dr),)
            dots = with_products(dots, products, selected, j, M, COUNT, FAST)
    if FAST:
        for i in tl.static_range(tile_count(M, COUNT, FAST)):
            j, at = numbers(i, COUNT)
            s, r = at // READS, at % READS
            row = tl.cast(r * N + n, tl.int64) * P + first + s
            tl.store(p_dweights + row * M + j, totals(dots[i]) / fit, mask=(j < M) & (t_first + s < T))
    else:
        for s in tl.static_range(STEPS):
            inside = t_warp + s < T
            for j in tl.static_range(M):
                row = (b.to(tl.int64) * T + t_warp + s) * M + j
                for r in tl.static_range(READS):
                    total = tl.sum(dots[(j * STEPS + s) * READS + r], 1) / fit
                    tl.store(p_dweights + tl.cast(r * N + n, tl.int64) * P * M + row, total, mask=inside)
