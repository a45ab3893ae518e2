# ruff: noqa: RUF005  (Triton compiles `+` of tuples, not unpacking)
"""Triton kernels of the backward pass over the expanded streams of a source: gradients of everything a read used.

A program owns BLOCK_D channels of one source and walks along a segment of time, the last rows in a window of registers;
what belongs to a channel (gradients of taps and queries) gathers in registers on the way. Programs of the sources of
one place run side by side, so that the L2 serves all but the first reader of dr.
"""

import triton
import triton.language as tl

from kernels.tiles import (
    computed,
    convolved,
    first_tap,
    learned,
    load_fit,
    load_rows,
    multiply,
    multiply_add,
    n_streams,
    pair_sums,
    raw_rows,
    seen_at,
    tensor_at,
    widest,
    width,
    zeros_per_warp,
)


@triton.constexpr_function
def tiles_at_once(compute, sources):
    """Tiles of channels whose products are added in fp16 before fp32 takes over: see `narrow` for the bound."""
    return 2 if compute == tl.float16 and int(sources) == 1 else 1


@triton.jit
def row_products(streams, rows, TILES: tl.constexpr):
    """Products of as many row tiles, added in their dtype."""
    b_products = multiply(streams[0], rows[0])
    for k in tl.static_range(1, TILES):
        b_products = multiply_add(streams[k], rows[k], b_products)
    return b_products


@triton.jit(do_not_specialize=["N", "n_tiles"], do_not_specialize_on_alignment=["p_dr_table"])
def dweights_kernel(
    p_table, p_dr_table, p_r, p_fit, p_dweights, p_means, p_position, T, N, P, n_tiles,
    SIZES: tl.constexpr, READS: tl.constexpr, AT_ONCE: tl.constexpr, SHARED: tl.constexpr, MEANS: tl.constexpr,
    D: tl.constexpr, STEPS: tl.constexpr, WARPS: tl.constexpr, BLOCK_D: tl.constexpr, PACKED: tl.constexpr,
    EVEN: tl.constexpr, DTYPE: tl.constexpr, DR_DTYPE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """dr_rj . u_nj [READS, N, P, m]; dr is a table of READS tensors [P, m, D], or [P, D] that all streams share.

    One program: STEPS tokens per warp of AT_ONCE sources, all of D. A source is expanded once for all the reads, and
    what is read of dr serves all the sources: dr from the L2 is what bounds this kernel. As in `score_kernel` the
    products stay spread over the lanes until the last channel: a sum across lanes per token, stream and tile of
    channels costs more than they do.

    Args:
        p_r: with MEANS, for one read, r [P, m, D] in the dtype of dr; p_means [P, m], dr_j . r_j, is written.
    """
    tl.static_assert(READS == 1 or not MEANS)
    M: tl.constexpr = n_streams(SIZES)
    WINDOW: tl.constexpr = widest(SIZES)
    TILES: tl.constexpr = tiles_at_once(COMPUTE, AT_ONCE)
    n_groups = tl.cdiv(N, AT_ONCE)
    n_first = tl.program_id(0) % n_groups * AT_ONCE  # sources of a place side by side: all but one find dr in the cache
    tile = tl.program_id(0) // n_groups
    b = tile // n_tiles
    t_warp = tile % n_tiles * (WARPS * STEPS) + tl.arange(0, WARPS) * STEPS
    t_first = t_warp[:, None]
    t_oldest = t_first - (WINDOW - 1)
    first = b.to(tl.int64) * T + t_first
    sources = ()
    taps = ()
    fits = ()
    for q in tl.static_range(AT_ONCE):
        n = tl.minimum(n_first + q, N - 1)  # the last source twice where N is odd
        sources = sources + (tensor_at(p_table, n, DTYPE) + (b.to(tl.int64) * T + t_oldest) * D,)
        taps = taps + (tensor_at(p_table, (2 if COMPUTE == tl.float16 else 1) * N + n, COMPUTE),)
        fits = fits + (load_fit(p_fit, n, COMPUTE),)
    gradients = ()
    for r in tl.static_range(READS):
        gradients = gradients + (tensor_at(p_dr_table, r, DR_DTYPE) + (first if SHARED else first * M) * D,)
    dots = zeros_per_warp(M * STEPS * READS * AT_ONCE, WARPS, BLOCK_D // 2)
    means = zeros_per_warp(M * STEPS if MEANS else 0, WARPS, BLOCK_D // 2)
    for d in range(0, D, TILES * BLOCK_D):
        rows = ()
        for q in tl.static_range(AT_ONCE):
            tiles = ()
            for k in tl.static_range(TILES):
                o_d = d + k * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
                raw = raw_rows(sources[q], t_oldest, o_d, T, D, WINDOW - 1, STEPS, EVEN)
                tiles = tiles + (computed(raw, fits[q], WINDOW - 1 + STEPS, COMPUTE),)
            rows = rows + (tiles,)
        new_dots = ()
        new_means = ()
        for j in tl.static_range(M):
            b_taps = ()
            for q in tl.static_range(AT_ONCE):
                tiles = ()
                for k in tl.static_range(TILES):
                    o_d = d + k * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
                    p_first = taps[q] + first_tap(SIZES, j) * D
                    tiles = tiles + (load_rows(p_first, o_d, D, learned(SIZES, j)),)
                b_taps = b_taps + (tiles,)
            for s in tl.static_range(STEPS):
                streams = ()
                for q in tl.static_range(AT_ONCE):
                    tiles = ()
                    for k in tl.static_range(TILES):
                        window = seen_at(rows[q][k], p_position, first + s, t_first + s < T, s, WINDOW, PACKED)
                        tiles = tiles + (convolved(b_taps[q][k], window, 0, width(SIZES, j)),)
                    streams = streams + (tiles,)
                for r in tl.static_range(READS):
                    b_drs = ()
                    b_rs = ()
                    for k in tl.static_range(TILES):
                        o_d = d + k * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
                        mask = o_d < (D if EVEN else tl.where(t_first + s < T, D, 0))
                        p_row = gradients[r] + (s if SHARED else s * M + j) * D
                        b_drs = b_drs + (tl.load(p_row + o_d, mask=mask, other=0.0).to(COMPUTE),)
                        if MEANS:
                            p_row = p_r + first * M * D + (s * M + j) * D
                            b_rs = b_rs + (tl.load(p_row + o_d, mask=mask, other=0.0).to(COMPUTE),)
                    for q in tl.static_range(AT_ONCE):
                        b_dot = pair_sums(row_products(streams[q], b_drs, TILES))
                        new_dots = new_dots + (dots[((j * STEPS + s) * READS + r) * AT_ONCE + q] + b_dot,)
                    if MEANS:
                        b_mean = pair_sums(row_products(b_rs, b_drs, TILES))
                        new_means = new_means + (means[j * STEPS + s] + b_mean,)
        dots = new_dots
        means = new_means
    for s in tl.static_range(STEPS):
        for j in tl.static_range(M):
            row = (b.to(tl.int64) * T + t_warp + s) * M + j
            for r in tl.static_range(READS):
                for q in tl.static_range(AT_ONCE):
                    n = tl.minimum(n_first + q, N - 1)
                    total = tl.sum(dots[((j * STEPS + s) * READS + r) * AT_ONCE + q], 1) / fits[q]
                    tl.store(p_dweights + tl.cast(r * N + n, tl.int64) * P * M + row, total, mask=t_warp + s < T)
            if MEANS:
                tl.store(p_means + row, tl.sum(means[j * STEPS + s], 1), mask=t_warp + s < T)
