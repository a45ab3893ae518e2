# ruff: noqa: RUF005  (Triton compiles `+` of tuples, not unpacking)
"""Triton kernels over the expanded streams of a source, which exist in registers only: score and retrieve.

    u_nj[t] = sum_i taps_nj[i] v_n[t - i]         e_nj = rstd_nj query_j . u_nj        r_j = sum_n a_nj u_nj

A program owns BLOCK_D channels and unrolls time: the last rows of a source are a window of registers, so a row is read
once (and again, from the cache, by the tile after it) and not once per tap. Every loop over taps, streams and the
time steps of a tile is unrolled while compiling. A table of addresses [rows, N] names the tensors: sources, taps.
"""

import triton
import triton.language as tl

from kernels.staged import (
    carried,
    load_factors,
    load_taps,
    load_tile,
    newest,
    plus_times,
    row_mask,
    rows_carried,
    rows_of,
    times,
)
from kernels.tiles import (
    computed,
    convolved,
    first_tap,
    learned,
    load_fit,
    load_rows,
    load_values,
    multiply_add,
    n_streams,
    prefetch,
    prefetch_rows,
    raw_rows,
    seen_at,
    tensor_at,
    widest,
    width,
    zeros_per_warp,
)


@triton.jit(do_not_specialize=["N", "n_tiles"])
def score_kernel(
    p_table, p_query, p_position, p_logits, p_rstd, T, N, P, n_tiles, eps,
    SIZES: tl.constexpr, QUERY: tl.constexpr, D: tl.constexpr, STEPS: tl.constexpr, WARPS: tl.constexpr,
    BLOCK_D: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """rstd [N, P, m] of N sources and, with QUERY, their logits [N, P, m] for one query [m, D].

    One program: STEPS tokens per warp of one source, all of D. The warps meet the same taps at the same time, so that
    one of them fetches these from the L2 for all: with a warp to a program that was twice what the L2 can give.
    Squares and dot products stay spread over the lanes until the last channel, then each is summed once.
    """
    M: tl.constexpr = n_streams(SIZES)
    WINDOW: tl.constexpr = widest(SIZES)
    n = tl.program_id(1)
    b = tl.program_id(0) // n_tiles
    t_warp = tl.program_id(0) % n_tiles * (WARPS * STEPS) + tl.arange(0, WARPS) * STEPS
    t_first = t_warp[:, None]
    t_oldest = t_first - (WINDOW - 1)
    p_oldest = tensor_at(p_table, n, DTYPE) + (b.to(tl.int64) * T + t_oldest) * D
    p_taps = tensor_at(p_table, N + n, tl.float32)
    squares = zeros_per_warp(M * STEPS, WARPS, BLOCK_D)
    dots = zeros_per_warp(M * STEPS if QUERY else 0, WARPS, BLOCK_D)
    for d in range(0, D, BLOCK_D):
        o_d = d + tl.arange(0, BLOCK_D)
        raw = raw_rows(p_oldest, t_oldest, o_d[None, :], T, D, WINDOW - 1, STEPS, EVEN)
        rows = computed(raw, 1.0, WINDOW - 1 + STEPS, tl.float32)
        new_squares = ()
        new_dots = ()
        for j in tl.static_range(M):
            b_taps = load_rows(p_taps + first_tap(SIZES, j) * D, o_d, D, learned(SIZES, j))
            if QUERY:
                b_query = tl.load(p_query + j * D + o_d, mask=o_d < D, other=0.0)
            for s in tl.static_range(STEPS):
                window = seen_at(rows, p_position, b * T + t_first + s, t_first + s < T, s, WINDOW, PACKED)
                b_u = convolved(b_taps, window, 0, width(SIZES, j))
                new_squares = new_squares + (tl.fma(b_u, b_u, squares[j * STEPS + s]),)
                if QUERY:
                    new_dots = new_dots + (tl.fma(b_u, b_query, dots[j * STEPS + s]),)
        squares = new_squares
        dots = new_dots
    for s in tl.static_range(STEPS):
        for j in tl.static_range(M):
            row = (n.to(tl.int64) * P + b * T + t_warp + s) * M + j
            inside = t_warp + s < T
            rstd = tl.rsqrt(tl.sum(squares[j * STEPS + s], 1) / D + eps)
            tl.store(p_rstd + row, rstd, mask=inside)
            if QUERY:
                tl.store(p_logits + row, tl.sum(dots[j * STEPS + s], 1) * rstd, mask=inside)


@triton.jit(do_not_specialize=["N", "n_tiles"], do_not_specialize_on_alignment=["p_out_table"])
def retrieve_kernel(
    p_table, p_weights, p_fit, p_scale, p_position, p_out_table, T, N, P, n_tiles,
    SIZES: tl.constexpr, READS: tl.constexpr, D: tl.constexpr, STEPS: tl.constexpr, WARPS: tl.constexpr,
    BLOCK_D: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr, SCALED: tl.constexpr, DTYPE: tl.constexpr,
    OUT_DTYPE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """READS tensors r [P, m, D] from softmax weights [N, P, m, READS] known beforehand; sources are expanded once.

    One program: STEPS tokens per warp of BLOCK_D channels; its warps share taps and rows in the L1.

    Needs nothing from other channels, so D is split over programs freely. EVEN: tiles divide T. SCALED: r times the
    sources' smallest rstd [P, m], which is at most sqrt(D), so that fp16 holds it with 8 times bf16's precision.
    COMPUTE fp16: two channels an instruction; weights are fp16 too, p_scale and 1 / p_fit [N] already in them.
    """
    M: tl.constexpr = n_streams(SIZES)
    K: tl.constexpr = first_tap(SIZES, M)
    WINDOW: tl.constexpr = widest(SIZES)
    PAST: tl.constexpr = WINDOW - 1
    NARROW: tl.constexpr = COMPUTE == tl.float16
    N_CHANNEL_TILES: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    tile = tl.program_id(0) // N_CHANNEL_TILES  # tokens side by side, so that whole rows come and go
    b = tile // n_tiles
    t_tile = tile % n_tiles * (WARPS * STEPS)
    t_first = t_tile + (tl.arange(0, WARPS) * STEPS)[:, None]
    d_tile = tl.program_id(0) % N_CHANNEL_TILES * BLOCK_D
    o_d = d_tile + tl.arange(0, BLOCK_D)[None, :]
    sequence = b.to(tl.int64) * T
    first = sequence + t_first
    t_oldest = t_first - (WINDOW - 1)
    oldest = (sequence + t_oldest) * D
    retrieved = zeros_per_warp(M * STEPS * READS, WARPS, BLOCK_D, COMPUTE)
    for n in range(N):
        raw = raw_rows(tensor_at(p_table, n, DTYPE) + oldest, t_oldest, o_d, T, D, WINDOW - 1, STEPS, EVEN)
        rows = computed(raw, load_fit(p_fit, n, COMPUTE), WINDOW - 1 + STEPS, COMPUTE)
        p_taps = tensor_at(p_table, (2 if NARROW else 1) * N + n, COMPUTE)
        # what the next source needs: its loads come a few at a time, as registers allow, and each few would wait
        later = tl.minimum(n + 1, N - 1)
        p_later = tensor_at(p_table, later, DTYPE) + (sequence + t_tile - PAST) * D
        prefetch_rows(p_later, d_tile, PAST - t_tile, PAST + T - t_tile, D, PAST + WARPS * STEPS, BLOCK_D, WARPS)
        p_later = tensor_at(p_table, (2 if NARROW else 1) * N + later, COMPUTE)
        prefetch_rows(p_later, d_tile, 0, K, D, K, BLOCK_D, WARPS)
        o_a = tl.arange(0, 32 * WARPS) * (32 // (COMPUTE.primitive_bitwidth // 8))
        is_later = o_a < tl.minimum(WARPS * STEPS, T - t_tile) * (M * READS)
        prefetch(p_weights + (later * P + sequence + t_tile) * (M * READS) + o_a, is_later)
        # constant offsets from one address: a weight costs its load and nothing else
        p_a = p_weights + (n * P + first) * (M * READS)
        weights = ()
        if NARROW:
            for s in tl.static_range(STEPS):
                inside = True if EVEN else t_first + s < T
                weights = weights + (load_values(p_a + s * M * READS, inside, M * READS, COMPUTE),)
        updated = ()
        for j in tl.static_range(M):  # a stream at a time: only its taps are in registers
            b_taps = load_rows(p_taps + first_tap(SIZES, j) * D, o_d, D, learned(SIZES, j))
            for s in tl.static_range(STEPS):
                inside = True if EVEN else t_first + s < T
                window = seen_at(rows, p_position, first + s, inside, s, WINDOW, PACKED)
                b_u = convolved(b_taps, window, 0, width(SIZES, j))
                for r in tl.static_range(READS):
                    if NARROW:
                        a = weights[s][j * READS + r]
                    else:
                        a = tl.load(p_a + (s * M + j) * READS + r, mask=inside, other=0.0)
                    updated = updated + (multiply_add(a, b_u, retrieved[(j * STEPS + s) * READS + r]),)
        retrieved = updated
    finished = ()
    for s in tl.static_range(STEPS):
        inside = True if EVEN else t_first + s < T
        for j in tl.static_range(M):
            scale = 1.0
            if SCALED and not NARROW:
                scale = tl.load(p_scale + (first + s) * M + j, mask=inside, other=1.0)
            for r in tl.static_range(READS):
                b_r = retrieved[(j * STEPS + s) * READS + r]
                if SCALED and not NARROW:
                    b_r = b_r * scale
                finished = finished + (b_r.to(OUT_DTYPE),)
    for s in tl.static_range(STEPS):  # apart from the loads above, which no store may precede
        mask = o_d < tl.where(True if EVEN else t_first + s < T, D, 0)
        for j in tl.static_range(M):
            for r in tl.static_range(READS):
                p_r = tensor_at(p_out_table, r, OUT_DTYPE) + ((first + s) * M + j) * D + o_d
                tl.store(p_r, finished[(s * M + j) * READS + r], mask=mask)


@triton.jit(do_not_specialize=["n_segments"])
def add_source_kernel(
    p_table, p_weights, p_fit, p_base, p_base_weight, p_position, p_out, T, n_segments, SEGMENT,
    SIZES: tl.constexpr, D: tl.constexpr, FIRST: tl.constexpr, BLOCK_D: tl.constexpr, UNROLL: tl.constexpr,
    PACKED: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr, OUT_DTYPE: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """One more source for a read: weight_j u_j + base_weight_j base_j, [P, m, D].

    One program walks along SEGMENT tokens of BLOCK_D channels, UNROLL at a time (EVEN: they divide T), the last rows in
    registers, the next on their way through shared memory, see `staged`.

    Args:
        p_table: the source, its taps, and its taps in the dtype that computes.
        p_weights: [P, m] in that dtype, p_base_weight: [P, m], fp32: of what is stored, scales in them.
        p_fit: [1], what rows are multiplied by, for fp16.
        FIRST: channel from which on.
    """
    M: tl.constexpr = n_streams(SIZES)
    K: tl.constexpr = first_tap(SIZES, M)
    PAST: tl.constexpr = widest(SIZES) - 1
    b = tl.program_id(1) // n_segments
    t_first = tl.program_id(1) % n_segments * SEGMENT
    o_d = FIRST + tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    sequence = b.to(tl.int64) * T
    p_source = tensor_at(p_table, 0, DTYPE) + sequence * D
    b_taps = load_taps(tensor_at(p_table, 2 if COMPUTE == tl.float16 else 1, COMPUTE), o_d, D, BLOCK_D, K)
    fit = load_fit(p_fit, 0, COMPUTE)
    p_base += sequence * M * D
    p_out += sequence * M * D
    p_weights += sequence * M
    p_base_weight += sequence * M
    t_start = t_first.to(tl.int64)
    history = raw_rows(p_source + (t_start - PAST) * D, t_start - PAST, o_d, T, D, PAST, 0, False)
    window = carried(computed(history, fit, PAST, COMPUTE), PAST, COMPUTE, BLOCK_D)
    for start in tl.range(0, tl.minimum(SEGMENT, T - t_first), UNROLL, num_stages=STAGES):
        t_now = t_start + start
        left = T - t_now
        raw = rows_of(load_tile(p_source + t_now * D, o_d, 0, left, D, BLOCK_D, UNROLL, EVEN), UNROLL)
        b_tile = load_tile(p_base + t_now * M * D, o_d, 0, left * M, D, BLOCK_D, UNROLL * M, EVEN)
        base = rows_of(b_tile, UNROLL * M)
        weights = load_factors(p_weights + t_now * M, left * M, UNROLL * M, COMPUTE, EVEN)
        kept = load_factors(p_base_weight + t_now * M, left * M, UNROLL * M, tl.float32, EVEN)
        rows = rows_carried(window, PAST, COMPUTE, BLOCK_D) + computed(raw, fit, UNROLL, COMPUTE)
        finished = ()
        for s in tl.static_range(UNROLL):
            for j in tl.static_range(M):
                seen = seen_at(rows, p_position, sequence + t_now + s, t_now + s < T, s, PAST + 1, PACKED)
                b_u = convolved(b_taps, seen, first_tap(SIZES, j), width(SIZES, j))
                b_r = times(weights, s * M + j, b_u).to(tl.float32)
                b_r = plus_times(b_r, kept, s * M + j, base[s * M + j].to(tl.float32))
                finished = finished + (b_r.to(OUT_DTYPE),)
        window = carried(newest(rows, UNROLL, PAST), PAST, COMPUTE, BLOCK_D)
        for s in tl.static_range(UNROLL):
            mask = row_mask(o_d, t_now + s < T, D, BLOCK_D)
            for j in tl.static_range(M):
                tl.store(p_out + ((t_now + s) * M + j) * D + o_d, finished[s * M + j], mask=mask)
