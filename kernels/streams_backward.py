# ruff: noqa: RUF005  (Triton compiles `+` of tuples, not unpacking)
"""Triton kernels of the backward pass over the expanded streams of a source: gradients of everything a read used.

A program owns BLOCK_D channels of one source and walks along a segment of time, the last rows in a window of registers;
what belongs to a channel (gradients of taps and queries) gathers in registers on the way. Programs of the sources of
one place run side by side, so that the L2 serves all but the first reader of dr.
"""

import triton
import triton.language as tl

from kernels.tiles import (
    convolved,
    first_tap,
    history,
    learned,
    load_rows,
    n_streams,
    pushed,
    raw_rows,
    tensor_at,
    visible,
    widest,
    width,
    zeros,
)


@triton.jit
def dweights_kernel(
    p_table, p_dr_table, p_dweights, p_position, T, N, P, n_segments, SEGMENT,
    SIZES: tl.constexpr, READS: tl.constexpr, SHARED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr, DR_DTYPE: tl.constexpr,
):  # fmt: skip
    """Partial sums of dr_rj . u_nj over BLOCK_D channels: [D / BLOCK_D, READS, N, P, m].

    One program: SEGMENT tokens of one stream of one source. dr is a table of READS tensors [P, m, D], or of [P, D] that
    all streams share.
    """
    for j in tl.static_range(n_streams(SIZES)):
        if tl.program_id(2) == j:
            dweights_stream(
                p_table, p_dr_table, p_dweights, p_position, T, N, P, n_segments, SEGMENT,
                SIZES, j, READS, SHARED, D, BLOCK_D, UNROLL, PACKED, DTYPE, DR_DTYPE,
            )  # fmt: skip


@triton.jit
def dweights_stream(
    p_table, p_dr_table, p_dweights, p_position, T, N, P, n_segments, SEGMENT,
    SIZES: tl.constexpr, j: tl.constexpr, READS: tl.constexpr, SHARED: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, UNROLL: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr, DR_DTYPE: tl.constexpr,
):  # fmt: skip
    """UNROLL steps load first and store last: a store keeps the compiler from moving later loads before it."""
    M: tl.constexpr = n_streams(SIZES)
    WIDTH: tl.constexpr = width(SIZES, j)
    n = tl.program_id(0) % N
    b = tl.program_id(1) // n_segments
    t_first = (tl.program_id(1) % n_segments) * SEGMENT
    t_end = tl.minimum(t_first + SEGMENT, T)
    chunk = tl.program_id(0) // N
    o_d = chunk * BLOCK_D + tl.arange(0, BLOCK_D)
    sequence = b.to(tl.int64) * T
    p_source = tensor_at(p_table, n, DTYPE) + sequence * D
    b_taps = load_rows(tensor_at(p_table, N + n, tl.float32) + first_tap(SIZES, j) * D, o_d, D, learned(SIZES, j))
    gradients = ()
    for r in tl.static_range(READS):
        gradients = gradients + (tensor_at(p_dr_table, r, DR_DTYPE),)
    window = history(p_source, t_first.to(tl.int64), o_d, D, WIDTH)
    for start in range(0, t_end - t_first, UNROLL):
        t_now = t_first.to(tl.int64) + start
        first = sequence + t_now
        rows = raw_rows(p_source + t_now * D, t_now, o_d, T, D, 0, UNROLL, False)
        drs = ()
        for s in tl.static_range(UNROLL):
            mask = o_d < tl.where(t_now + s < t_end, D, 0)
            offset = (first + s) * D if SHARED else ((first + s) * M + j) * D
            for r in tl.static_range(READS):
                drs = drs + (tl.load(gradients[r] + offset + o_d, mask=mask, other=0.0),)
        sums = ()
        for s in tl.static_range(UNROLL):
            window = pushed(window, rows[s].to(tl.float32), WIDTH)
            seen = window
            if PACKED:
                seen = visible(window, tl.load(p_position + first + s, mask=t_now + s < t_end, other=0), WIDTH)
            b_u = convolved(b_taps, seen, 0, WIDTH)
            for r in tl.static_range(READS):
                sums = sums + (tl.sum(drs[s * READS + r].to(tl.float32) * b_u),)
        for s in tl.static_range(UNROLL):
            for r in tl.static_range(READS):
                row = ((chunk.to(tl.int64) * READS + r) * N + n) * P + first + s
                tl.store(p_dweights + row * M + j, sums[s * READS + r], mask=t_now + s < t_end)


@triton.jit
def dqueries_kernel(
    p_table, p_slope, p_position, p_dqueries, T, N, P, n_segments, SEGMENT,
    SIZES: tl.constexpr, READS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, UNROLL: tl.constexpr,
    PACKED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """dquery_rj = sum_tn slope_rnj u_nj of several reads: partial rows [N, B n_segments, READS, m, D].

    One program: SEGMENT tokens of one stream of one source.
    """
    for j in tl.static_range(n_streams(SIZES)):
        if tl.program_id(2) == j:
            dqueries_stream(
                p_table, p_slope, p_position, p_dqueries, T, N, P, n_segments, SEGMENT,
                SIZES, j, READS, D, BLOCK_D, UNROLL, PACKED, DTYPE,
            )  # fmt: skip


@triton.jit
def dqueries_stream(
    p_table, p_slope, p_position, p_dqueries, T, N, P, n_segments, SEGMENT,
    SIZES: tl.constexpr, j: tl.constexpr, READS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The sums of all reads stay in registers along time."""
    M: tl.constexpr = n_streams(SIZES)
    WIDTH: tl.constexpr = width(SIZES, j)
    n = tl.program_id(0) % N
    b = tl.program_id(1) // n_segments
    t_first = (tl.program_id(1) % n_segments) * SEGMENT
    t_end = tl.minimum(t_first + SEGMENT, T)
    chunk = tl.program_id(0) // N
    o_d = chunk * BLOCK_D + tl.arange(0, BLOCK_D)
    sequence = b.to(tl.int64) * T
    p_source = tensor_at(p_table, n, DTYPE) + sequence * D
    b_taps = load_rows(tensor_at(p_table, N + n, tl.float32) + first_tap(SIZES, j) * D, o_d, D, learned(SIZES, j))
    window = history(p_source, t_first.to(tl.int64), o_d, D, WIDTH)
    totals = zeros(READS, BLOCK_D)
    for start in range(0, t_end - t_first, UNROLL):
        t_now = t_first.to(tl.int64) + start
        first = sequence + t_now
        rows = raw_rows(p_source + t_now * D, t_now, o_d, T, D, 0, UNROLL, False)
        for s in tl.static_range(UNROLL):
            inside = t_now + s < t_end
            window = pushed(window, rows[s].to(tl.float32), WIDTH)
            seen = window
            if PACKED:
                seen = visible(window, tl.load(p_position + first + s, mask=inside, other=0), WIDTH)
            b_u = convolved(b_taps, seen, 0, WIDTH)
            updated = ()
            for r in tl.static_range(READS):
                p_at = p_slope + ((r * N + n) * P + first + s) * M + j
                updated = updated + (totals[r] + tl.load(p_at, mask=inside, other=0.0) * b_u,)
            totals = updated
    program = n.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    for r in tl.static_range(READS):
        tl.store(p_dqueries + ((program * READS + r) * M + j) * D + o_d, totals[r], mask=o_d < D)


@triton.jit
def gradient_kernel(
    p_table, p_dr_table, p_weights, p_slope, p_bend, p_query, p_position, p_dtaps, p_dquery,
    T, N, P, n_segments, SEGMENT,
    SIZES: tl.constexpr, READS: tl.constexpr, SHARED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr, ADD: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr, DR_DTYPE: tl.constexpr,
):  # fmt: skip
    """Gradients of sources and taps. One program: SEGMENT tokens of one source.

        du_nj = sum_r (weight_rnj dr_rj + slope_rnj query_rj) - bend_nj u_nj
        dv_n[s] = sum_ji taps_nj[i] du_nj[s + i]      dtaps_nj[i] = sum_t du_nj[t] v_n[t - i]

    The walk goes on for the widest tap beyond the segment, since later tokens reach back into it; a row's gradient
    is complete, and leaves the window, when the widest tap has passed it. UNROLL steps load first and store last:
    a store keeps the compiler from moving later loads before it.

    Args:
        p_table: sources, taps, gradients to add to (if ADD), gradients to write.
        p_dr_table: READS tensors [P, m, D], or [P, D] that all streams share (SHARED).
        p_weights, p_slope: [READS, N, P, m], the weights in the units of dr; p_bend: [N, P, m].
        p_query: [READS, m, D].
        p_dtaps: [N, B n_segments, K, D], one partial row set per program.
        p_dquery: likewise [N, B n_segments, 1, m, D], for one read; `dqueries_kernel` does many.
    """
    M: tl.constexpr = n_streams(SIZES)
    K: tl.constexpr = first_tap(SIZES, M)
    WINDOW: tl.constexpr = widest(SIZES)
    n = tl.program_id(0) % N
    b = tl.program_id(1) // n_segments
    t_first = (tl.program_id(1) % n_segments) * SEGMENT
    t_end = tl.minimum(t_first + SEGMENT, T)
    chunk = tl.program_id(0) // N
    o_d = chunk * BLOCK_D + tl.arange(0, BLOCK_D)
    sequence = b.to(tl.int64) * T
    p_source = tensor_at(p_table, n, DTYPE) + sequence * D
    p_in = tensor_at(p_table, 2 * N + n, DTYPE) + sequence * D
    p_out = tensor_at(p_table, 3 * N + n, DTYPE) + sequence * D
    b_taps = load_rows(tensor_at(p_table, N + n, tl.float32), o_d, D, K)
    gradients = ()
    for r in tl.static_range(READS):
        gradients = gradients + (tensor_at(p_dr_table, r, DR_DTYPE),)
    queries = load_rows(p_query, o_d, D, M if READS == 1 else 0)  # those of many reads come from the cache
    pending = zeros(WINDOW, BLOCK_D)  # dv of the last rows, newest first
    dtaps = zeros(K, BLOCK_D)
    dquery = zeros(M if READS == 1 else 0, BLOCK_D)
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
                offset = (first + s) * D if SHARED else ((first + s) * M + j) * D
                for r in tl.static_range(READS):
                    drs = drs + (tl.load(gradients[r] + offset + o_d, mask=mask, other=0.0),)
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
            back = zeros(WINDOW, BLOCK_D)
            if not PACKED:
                back = pushed(pending, tl.zeros([BLOCK_D], tl.float32), WINDOW)
            new_dtaps = ()
            new_dquery = ()
            for j in tl.static_range(M):
                p_at = (n * P + first + s) * M + j
                b_u = convolved(b_taps, seen, first_tap(SIZES, j), width(SIZES, j))
                b_du = -tl.load(p_bend + p_at, mask=exists, other=0.0) * b_u
                for r in tl.static_range(READS):
                    p_of_read = p_at + r * tl.cast(N * P * M, tl.int64)
                    b_dr = drs[(s * M + j) * READS + r].to(tl.float32)
                    if READS == 1:
                        b_query = queries[j]
                    else:
                        b_query = tl.load(p_query + (r * M + j) * D + o_d, mask=o_d < D, other=0.0)
                    b_du += tl.load(p_weights + p_of_read, mask=exists, other=0.0) * b_dr
                    slope = tl.load(p_slope + p_of_read, mask=exists, other=0.0)
                    b_du += slope * b_query
                    if READS == 1:
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
    if READS == 1:
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
