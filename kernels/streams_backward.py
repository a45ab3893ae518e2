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
    history,
    learned,
    load_rows,
    n_streams,
    pushed,
    raw_rows,
    seen_at,
    tensor_at,
    visible,
    widest,
    width,
    zeros,
)


@triton.jit
def dweights_read_kernel(
    p_table, p_dr, p_dweights, p_position, T, N, P, n_tiles,
    SIZES: tl.constexpr, SHARED: tl.constexpr, D: tl.constexpr, STEPS: tl.constexpr, BLOCK_D: tl.constexpr,
    PACKED: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """dr_j . u_nj [N, P, m] of one read; dr is [P, m, D], or [P, D] that all streams share.

    One program: STEPS tokens of one source, all of D. As in `score_read_kernel` the products stay spread over the lanes
    until the last channel: a sum across lanes per token, stream and tile of channels costs more than the products.
    """
    M: tl.constexpr = n_streams(SIZES)
    WINDOW: tl.constexpr = widest(SIZES)
    n = tl.program_id(0) % N  # the sources of a place side by side: all but one find its dr in the cache
    tile = tl.program_id(0) // N
    b = tile // n_tiles
    t_first = (tile % n_tiles) * STEPS
    t_oldest = t_first - (WINDOW - 1)
    first = b.to(tl.int64) * T + t_first
    p_oldest = tensor_at(p_table, n, DTYPE) + (b.to(tl.int64) * T + t_oldest) * D
    p_taps = tensor_at(p_table, N + n, tl.float32)
    dots = zeros(M * STEPS, BLOCK_D, tl.float32)
    for d in range(0, D, BLOCK_D):
        o_d = d + tl.arange(0, BLOCK_D)
        raw = raw_rows(p_oldest, t_oldest, o_d, T, D, WINDOW - 1, STEPS, EVEN)
        rows = computed(raw, 1.0, WINDOW - 1 + STEPS, tl.float32)
        updated = ()
        for j in tl.static_range(M):
            b_taps = load_rows(p_taps + first_tap(SIZES, j) * D, o_d, D, learned(SIZES, j))
            for s in tl.static_range(STEPS):
                window = seen_at(rows, p_position, first + s, t_first + s < T, s, WINDOW, PACKED)
                b_u = convolved(b_taps, window, 0, width(SIZES, j))
                row = s if SHARED else s * M + j
                p_row = p_dr + (first if SHARED else first * M) * D + row * D
                b_dr = tl.load(p_row + o_d, mask=o_d < (D if EVEN else tl.where(t_first + s < T, D, 0)), other=0.0)
                updated = updated + (dots[j * STEPS + s] + b_u * b_dr.to(tl.float32),)
        dots = updated
    for s in tl.static_range(STEPS):
        for j in tl.static_range(M):
            at = (n.to(tl.int64) * P + first + s) * M + j
            tl.store(p_dweights + at, tl.sum(dots[j * STEPS + s]), mask=t_first + s < T)


@triton.jit
def dweights_kernel(
    p_table, p_dr_table, p_dweights, p_position, T, N, P, n_tiles,
    SIZES: tl.constexpr, READS: tl.constexpr, D: tl.constexpr, STEPS: tl.constexpr, BLOCK_D: tl.constexpr,
    PACKED: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr, DR_DTYPE: tl.constexpr,
):  # fmt: skip
    """dr_rj . u_nj [READS, N, P, m] of several reads; dr is a table of READS tensors [P, m, D].

    One program: STEPS tokens of one stream of one source, all of D.
    """
    for j in tl.static_range(n_streams(SIZES)):
        if tl.program_id(1) == j:
            dweights_stream(
                p_table, p_dr_table, p_dweights, p_position, T, N, P, n_tiles,
                SIZES, j, READS, D, STEPS, BLOCK_D, PACKED, EVEN, DTYPE, DR_DTYPE,
            )  # fmt: skip


@triton.jit
def dweights_stream(
    p_table, p_dr_table, p_dweights, p_position, T, N, P, n_tiles,
    SIZES: tl.constexpr, j: tl.constexpr, READS: tl.constexpr, D: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_D: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr, DR_DTYPE: tl.constexpr,
):  # fmt: skip
    """Products of all reads spread over the lanes, as in `dweights_read_kernel`."""
    M: tl.constexpr = n_streams(SIZES)
    WIDTH: tl.constexpr = width(SIZES, j)
    n = tl.program_id(0) % N
    tile = tl.program_id(0) // N
    b = tile // n_tiles
    t_first = (tile % n_tiles) * STEPS
    t_oldest = t_first - (WIDTH - 1)
    first = b.to(tl.int64) * T + t_first
    p_oldest = tensor_at(p_table, n, DTYPE) + (b.to(tl.int64) * T + t_oldest) * D
    p_taps = tensor_at(p_table, N + n, tl.float32) + first_tap(SIZES, j) * D
    gradients = ()
    for r in tl.static_range(READS):
        gradients = gradients + (tensor_at(p_dr_table, r, DR_DTYPE) + (first * M + j) * D,)
    dots = zeros(READS * STEPS, BLOCK_D, tl.float32)
    for d in range(0, D, BLOCK_D):
        o_d = d + tl.arange(0, BLOCK_D)
        raw = raw_rows(p_oldest, t_oldest, o_d, T, D, WIDTH - 1, STEPS, EVEN)
        rows = computed(raw, 1.0, WIDTH - 1 + STEPS, tl.float32)
        b_taps = load_rows(p_taps, o_d, D, learned(SIZES, j))
        updated = ()
        for s in tl.static_range(STEPS):
            window = seen_at(rows, p_position, first + s, t_first + s < T, s, WIDTH, PACKED)
            b_u = convolved(b_taps, window, 0, WIDTH)
            mask = o_d < (D if EVEN else tl.where(t_first + s < T, D, 0))
            for r in tl.static_range(READS):
                b_dr = tl.load(gradients[r] + s * M * D + o_d, mask=mask, other=0.0).to(tl.float32)
                updated = updated + (dots[s * READS + r] + b_u * b_dr,)
        dots = updated
    for s in tl.static_range(STEPS):
        for r in tl.static_range(READS):
            at = ((tl.cast(r * N + n, tl.int64)) * P + first + s) * M + j
            tl.store(p_dweights + at, tl.sum(dots[s * READS + r]), mask=t_first + s < T)


@triton.jit
def gradient_kernel(
    p_table, p_dr_table, p_weights, p_slope, p_bend, p_query, p_position, p_dtaps, p_dquery,
    T, N, P, n_segments, SEGMENT,
    SIZES: tl.constexpr, PER_SOURCE: tl.constexpr, SHARED: tl.constexpr, BEND: tl.constexpr, QUERY: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, UNROLL: tl.constexpr, ADD: tl.constexpr, PACKED: tl.constexpr,
    DTYPE: tl.constexpr, DR_DTYPE: tl.constexpr,
):  # fmt: skip
    """Gradients of sources and taps. One program: SEGMENT tokens of one source.

        du_nj = weight_nj dr_j + slope_nj query_j - bend_nj u_nj
        dv_n[s] = sum_ji taps_nj[i] du_nj[s + i]      dtaps_nj[i] = sum_t du_nj[t] v_n[t - i]

    The walk goes on for the widest tap beyond the segment, since later tokens reach back into it; a row's gradient
    is complete, and leaves the window, when the widest tap has passed it. UNROLL steps load first and store last:
    a store keeps the compiler from moving later loads before it.

    Args:
        p_table: sources, taps, taps in the dtype that computes, gradients to add to (if ADD), gradients to write.
        p_dr_table: one tensor [P, m, D] for all sources, or one per source (PER_SOURCE); or [P, D] that all streams
            share (SHARED).
        p_weights: [N, P, m], in the units of dr.
        p_bend: [N, P, m], without BEND left out; p_slope: [N, P, m], p_query: [m, D], without QUERY left out.
        p_dtaps: [N, B n_segments, K, D], one partial row set per program; p_dquery: likewise [N, B n_segments, m, D].
    """
    M: tl.constexpr = n_streams(SIZES)
    K: tl.constexpr = first_tap(SIZES, M)
    WINDOW: tl.constexpr = widest(SIZES)
    n = tl.program_id(0) % N
    b = tl.program_id(1) // n_segments
    t_first = (tl.program_id(1) % n_segments) * SEGMENT
    t_end = tl.minimum(t_first + SEGMENT, T)
    o_d = tl.program_id(0) // N * BLOCK_D + tl.arange(0, BLOCK_D)
    sequence = b.to(tl.int64) * T
    p_source = tensor_at(p_table, n, DTYPE) + sequence * D
    p_in = tensor_at(p_table, 3 * N + n, DTYPE) + sequence * D
    p_out = tensor_at(p_table, 4 * N + n, DTYPE) + sequence * D
    p_dr = tensor_at(p_dr_table, n if PER_SOURCE else 0, DR_DTYPE)
    b_taps = load_rows(tensor_at(p_table, N + n, tl.float32), o_d, D, K)
    queries = ()
    if QUERY:
        queries = load_rows(p_query, o_d, D, M)
    pending = zeros(WINDOW, BLOCK_D, tl.float32)  # dv of the last rows, newest first
    dtaps = zeros(K, BLOCK_D, tl.float32)
    dquery = zeros(M if QUERY else 0, BLOCK_D, tl.float32)
    window = history(p_source, t_first.to(tl.int64), o_d, D, WINDOW)
    for start in range(0, t_end - t_first + WINDOW - 1, UNROLL):
        t_now = t_first.to(tl.int64) + start
        first = sequence + t_now
        t_done = t_now - (WINDOW - 1)
        rows = raw_rows(p_source + t_now * D, t_now, o_d, T, D, 0, UNROLL, False)
        drs = ()
        for s in tl.static_range(UNROLL):
            mask = o_d < tl.where(t_now + s < T, D, 0)
            for j in tl.static_range(M):
                if not SHARED:
                    drs = drs + (tl.load(p_dr + ((first + s) * M + j) * D + o_d, mask=mask, other=0.0),)
                elif j == 0:
                    drs = drs + (tl.load(p_dr + (first + s) * D + o_d, mask=mask, other=0.0),)
        earlier = ()
        if ADD:
            earlier = rows_within(p_in + t_done * D, t_done, o_d, t_first, t_end, D, UNROLL)
        done = ()
        for s in tl.static_range(UNROLL):
            exists = t_now + s < T
            # 1 for this program's own tokens; beyond them only dv of the rows behind counts
            own = tl.where(t_now + s < t_end, 1.0, 0.0)
            window = pushed(window, rows[s].to(tl.float32), WINDOW)
            seen = window
            position = 0
            if PACKED:
                position = tl.load(p_position + first + s, mask=exists, other=0)
                seen = visible(window, position, WINDOW)
            # unpacked, a multiply-add per tap goes straight into the pending rows; packed, a mask comes between
            back = zeros(WINDOW, BLOCK_D, tl.float32)
            if not PACKED:
                back = pushed(pending, tl.zeros([BLOCK_D], tl.float32), WINDOW)
            new_dtaps = ()
            new_dquery = ()
            for j in tl.static_range(M):
                p_at = (n * P + first + s) * M + j
                b_dr = drs[s if SHARED else s * M + j].to(tl.float32)
                b_du = tl.load(p_weights + p_at, mask=exists, other=0.0) * b_dr
                if BEND or QUERY:
                    b_u = convolved(b_taps, seen, first_tap(SIZES, j), width(SIZES, j))
                if BEND:
                    b_du -= tl.load(p_bend + p_at, mask=exists, other=0.0) * b_u
                if QUERY:
                    slope = tl.load(p_slope + p_at, mask=exists, other=0.0)
                    b_du += slope * queries[j]
                    new_dquery = new_dquery + (dquery[j] + (own * slope) * b_u,)
                back = transposed(back, b_taps, b_du, first_tap(SIZES, j), width(SIZES, j), WINDOW)
                if width(SIZES, j) > 1:
                    b_own = own * b_du
                    for i in tl.static_range(width(SIZES, j)):
                        new_dtaps = new_dtaps + (dtaps[first_tap(SIZES, j) + i] + b_own * seen[i],)
            dtaps = new_dtaps
            dquery = new_dquery
            if PACKED:
                back = delayed(pending, visible(back, position, WINDOW), WINDOW)
            pending = back
            b_dv = pending[WINDOW - 1]
            if ADD:
                b_dv += earlier[s].to(tl.float32)
            done = done + (b_dv,)
        for s in tl.static_range(UNROLL):
            complete = (t_done + s >= t_first) & (t_done + s < t_end)
            mask = o_d < tl.where(complete, D, 0)
            tl.store(p_out + (t_done + s) * D + o_d, done[s].to(DTYPE), mask=mask)
    program = n.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    for i in tl.static_range(K):
        tl.store(p_dtaps + (program * K + i) * D + o_d, dtaps[i], mask=o_d < D)
    if QUERY:
        for j in tl.static_range(M):
            tl.store(p_dquery + (program * M + j) * D + o_d, dquery[j], mask=o_d < D)


@triton.jit
def rows_within(p_first, t_first, o_d, t_start, t_end, D: tl.constexpr, COUNT: tl.constexpr):
    """COUNT rows from row t_first at p_first on; zeros outside [t_start, t_end)."""
    rows = ()
    for i in tl.static_range(COUNT):
        inside = (t_first + i >= t_start) & (t_first + i < t_end)
        rows = rows + (tl.load(p_first + i * D + o_d, mask=o_d < tl.where(inside, D, 0), other=0.0),)
    return rows


@triton.jit
def transposed(back, taps, b_du, FIRST: tl.constexpr, WIDTH: tl.constexpr, LENGTH: tl.constexpr):
    """Adds taps[i] du to row i steps back, for one stream."""
    rows = ()
    for i in tl.static_range(LENGTH):
        if i >= WIDTH:
            rows = rows + (back[i],)
        elif WIDTH == 1:
            rows = rows + (back[i] + b_du,)
        else:
            rows = rows + (back[i] + taps[FIRST + i] * b_du,)
    return rows


@triton.jit
def delayed(pending, back, LENGTH: tl.constexpr):
    """The pending rows one step later, with this step's contributions."""
    rows = (back[0],)
    for i in tl.static_range(1, LENGTH):
        rows = rows + (pending[i - 1] + back[i],)
    return rows
