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
    raw_rows,
    seen_at,
    tensor_at,
    widest,
    width,
    zeros_per_warp,
)


@triton.constexpr_function
def tiles_at_once(compute):
    """Tiles of channels whose products are added in fp16 before fp32 takes over: see `narrow` for the bound."""
    return 2 if compute == tl.float16 else 1


@triton.jit
def pair_sums(b_x, WARPS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Sums of neighbouring channels: the two of a lane take one register."""
    return tl.sum(tl.reshape(b_x, (WARPS, BLOCK_D // 2, 2)), 2)


@triton.jit(do_not_specialize=["N", "n_tiles"], do_not_specialize_on_alignment=["p_dr_table"])
def dweights_kernel(
    p_table, p_dr_table, p_fit, p_dweights, p_position, T, N, P, n_tiles,
    SIZES: tl.constexpr, READS: tl.constexpr, SHARED: tl.constexpr, D: tl.constexpr, STEPS: tl.constexpr,
    WARPS: tl.constexpr, BLOCK_D: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr,
    DR_DTYPE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """dr_rj . u_nj [READS, N, P, m]; dr is a table of READS tensors [P, m, D], or [P, D] that all streams share.

    One program: STEPS tokens per warp of one source, all of D, expanded once for all the reads. As in
    `score_read_kernel` the products stay spread over the lanes until the last channel: a sum across lanes per token,
    stream and tile of channels costs more than they do.
    """
    M: tl.constexpr = n_streams(SIZES)
    WINDOW: tl.constexpr = widest(SIZES)
    TILES: tl.constexpr = tiles_at_once(COMPUTE)
    n = tl.program_id(0) % N  # the sources of a place side by side: all but one find its dr in the cache
    tile = tl.program_id(0) // N
    b = tile // n_tiles
    t_warp = tile % n_tiles * (WARPS * STEPS) + tl.arange(0, WARPS) * STEPS
    t_first = t_warp[:, None]
    t_oldest = t_first - (WINDOW - 1)
    first = b.to(tl.int64) * T + t_first
    p_oldest = tensor_at(p_table, n, DTYPE) + (b.to(tl.int64) * T + t_oldest) * D
    p_taps = tensor_at(p_table, (2 if COMPUTE == tl.float16 else 1) * N + n, COMPUTE)
    gradients = ()
    for r in tl.static_range(READS):
        gradients = gradients + (tensor_at(p_dr_table, r, DR_DTYPE) + (first if SHARED else first * M) * D,)
    fit = load_fit(p_fit, n, COMPUTE)
    dots = zeros_per_warp(M * STEPS * READS, WARPS, BLOCK_D // 2)
    for d in range(0, D, TILES * BLOCK_D):
        rows = ()
        for k in tl.static_range(TILES):
            o_d = d + k * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
            raw = raw_rows(p_oldest, t_oldest, o_d, T, D, WINDOW - 1, STEPS, EVEN)
            rows = rows + (computed(raw, fit, WINDOW - 1 + STEPS, COMPUTE),)
        updated = ()
        for j in tl.static_range(M):
            b_taps = ()
            for k in tl.static_range(TILES):
                o_d = d + k * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
                b_taps = b_taps + (load_rows(p_taps + first_tap(SIZES, j) * D, o_d, D, learned(SIZES, j)),)
            for s in tl.static_range(STEPS):
                streams = ()
                for k in tl.static_range(TILES):
                    window = seen_at(rows[k], p_position, first + s, t_first + s < T, s, WINDOW, PACKED)
                    streams = streams + (convolved(b_taps[k], window, 0, width(SIZES, j)),)
                for r in tl.static_range(READS):
                    p_row = gradients[r] + (s if SHARED else s * M + j) * D
                    b_products = tl.zeros([WARPS, BLOCK_D], COMPUTE)
                    for k in tl.static_range(TILES):
                        o_d = d + k * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
                        mask = o_d < (D if EVEN else tl.where(t_first + s < T, D, 0))
                        b_dr = tl.load(p_row + o_d, mask=mask, other=0.0).to(COMPUTE)
                        if k == 0:
                            b_products = multiply(streams[k], b_dr)
                        else:
                            b_products = multiply_add(streams[k], b_dr, b_products)
                    b_dot = pair_sums(b_products.to(tl.float32), WARPS, BLOCK_D)
                    updated = updated + (dots[(j * STEPS + s) * READS + r] + b_dot,)
        dots = updated
    for s in tl.static_range(STEPS):
        for j in tl.static_range(M):
            for r in tl.static_range(READS):
                at = (tl.cast(r * N + n, tl.int64) * P + b.to(tl.int64) * T + t_warp + s) * M + j
                total = tl.sum(dots[(j * STEPS + s) * READS + r], 1) / fit
                tl.store(p_dweights + at, total, mask=t_warp + s < T)
