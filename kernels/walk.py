# ruff: noqa: RUF005  (Triton compiles `+` of tuples, not unpacking)
"""Triton kernel of the walk along time that turns gradients of a source's streams into those of source and taps.

A program owns BLOCK_D channels of one source and walks along a segment of time, the last rows and the rows of dv that
are not complete in registers; what belongs to a channel (gradients of taps and queries) gathers in registers on the
way. Programs of the sources of one place run side by side, so that the L2 serves all but the first reader of dr.
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
    store_rows,
    times,
    zeros_of_rows,
)
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
    zeros,
)


@triton.jit(do_not_specialize=["N", "n_plain", "n_table", "n_segments"], do_not_specialize_on_alignment=["p_table"])
def gradient_kernel(
    p_table, p_dr_table, p_weights, p_slope, p_bend, p_query, p_fit, p_dfit, p_more, p_more_unit, p_position,
    p_sums, T, N, n_plain, n_table, P, n_segments, SEGMENT,
    SIZES: tl.constexpr, READS: tl.constexpr, SHARED: tl.constexpr, BEND: tl.constexpr, QUERY: tl.constexpr,
    MORE: tl.constexpr, MIXED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, UNROLL: tl.constexpr,
    ADD: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr,
    DR_DTYPE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Gradients of sources and taps. One program: SEGMENT tokens of one source, in steps of UNROLL,
    which divides SEGMENT.

        du_nj = sum_r weight_rnj dr_rj + slope_nj query_j - bend_nj u_nj
        dv_n[s] = sum_ji taps_nj[i] du_nj[s + i]      dtaps_nj[i] = sum_t du_nj[t] v_n[t - i]
        dquery_j = sum_nt slope_nj[t] u_nj[t]

    The walk goes on for the widest tap beyond the segment, since later tokens reach back into it; a row's gradient
    is complete, and leaves the window, when the widest tap has passed it. What UNROLL steps load is on its way through
    shared memory STAGES - 1 turns before, see `staged`. EVEN: UNROLL divides T, so that steps of a turn are all inside
    the sequence, and all of a segment, or none.

    COMPUTE fp16: v is multiplied by fit and du by dfit, see `narrow`; sums of UNROLL products of the two, or of slope
    and u, in fp16, of those in fp32.

    Args:
        p_table: sources, taps, taps in the dtype that computes, gradients to add to (if ADD), gradients to write: of
            each N addresses, n_table apart.
        p_dr_table: READS tensors [P, m, D] for all sources, or [P, D] that all streams share (SHARED); READS may be 0.
        p_weights: [N, P, m, READS], in the units of dr.
        p_bend, p_slope: [N - n_plain, P, m], without BEND or QUERY left out; of COMPUTE, as the weights.
        p_query: [m, D], fp32, without QUERY left out.
        p_fit: [N], p_dfit: [2, N], the powers of two in du and in slope; for fp16.
        p_more: with MORE, for one source, [P, D] to add to its gradient times the number p_more_unit.
        MIXED: the first n_plain sources go without BEND, QUERY and MORE. With those in the same launch as the one that
            has them, dr comes from memory once.
        p_sums: [N, B n_segments, K (+ m with QUERY), D], one partial row set per program: of the taps, of the query.
    """
    n = tl.program_id(0) % N
    ROWS: tl.constexpr = first_tap(SIZES, n_streams(SIZES)) + (n_streams(SIZES) if QUERY else 0)
    if MIXED:
        if n < n_plain:
            walk(
                n, p_table, p_dr_table, p_weights, p_slope, p_bend, p_query, p_fit, p_dfit, p_more, p_more_unit,
                p_position, p_sums, T, N, n_plain, n_table, P, n_segments, SEGMENT, SIZES, READS, SHARED, False, False,
                False, ROWS, D, BLOCK_D, UNROLL, ADD, PACKED, EVEN, STAGES, DTYPE, DR_DTYPE, COMPUTE,
            )  # fmt: skip
        else:
            walk(
                n, p_table, p_dr_table, p_weights, p_slope, p_bend, p_query, p_fit, p_dfit, p_more, p_more_unit,
                p_position, p_sums, T, N, n_plain, n_table, P, n_segments, SEGMENT, SIZES, READS, SHARED, BEND, QUERY,
                MORE, ROWS, D, BLOCK_D, UNROLL, ADD, PACKED, EVEN, STAGES, DTYPE, DR_DTYPE, COMPUTE,
            )  # fmt: skip
    else:
        walk(
            n, p_table, p_dr_table, p_weights, p_slope, p_bend, p_query, p_fit, p_dfit, p_more, p_more_unit,
            p_position, p_sums, T, N, n_plain, n_table, P, n_segments, SEGMENT, SIZES, READS, SHARED, BEND, QUERY,
            MORE, ROWS, D, BLOCK_D, UNROLL, ADD, PACKED, EVEN, STAGES, DTYPE, DR_DTYPE, COMPUTE,
        )  # fmt: skip


@triton.jit
def walk(
    n, p_table, p_dr_table, p_weights, p_slope, p_bend, p_query, p_fit, p_dfit, p_more, p_more_unit, p_position,
    p_sums, T, N, n_plain, n_table, P, n_segments, SEGMENT,
    SIZES: tl.constexpr, READS: tl.constexpr, SHARED: tl.constexpr, BEND: tl.constexpr, QUERY: tl.constexpr,
    MORE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, UNROLL: tl.constexpr,
    ADD: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr,
    DR_DTYPE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """The walk of a program of `gradient_kernel` along source n."""
    M: tl.constexpr = n_streams(SIZES)
    K: tl.constexpr = first_tap(SIZES, M)
    PAST: tl.constexpr = widest(SIZES) - 1
    DELAY: tl.constexpr = (PAST + UNROLL - 1) // UNROLL * UNROLL  # until dv of a row is complete
    NARROW: tl.constexpr = COMPUTE == tl.float16
    b = tl.program_id(1) // n_segments
    t_first = (tl.program_id(1) % n_segments) * SEGMENT
    t_end = tl.minimum(t_first + SEGMENT, T)
    o_d = tl.program_id(0) // N * BLOCK_D + tl.arange(0, BLOCK_D)
    sequence = b.to(tl.int64) * T
    p_source = tensor_at(p_table, n, DTYPE) + sequence * D
    p_in = tensor_at(p_table, 3 * n_table + n, DTYPE) + sequence * D
    p_out = tensor_at(p_table, 4 * n_table + n, DTYPE) + sequence * D
    gradients = ()
    for r in tl.static_range(READS):
        gradients = gradients + (tensor_at(p_dr_table, r, DR_DTYPE),)
    if READS > 0:
        p_weights += (n * tl.cast(P, tl.int64) + sequence) * (M * READS)
    if BEND:
        p_bend += ((n - n_plain) * tl.cast(P, tl.int64) + sequence) * M
    if QUERY:
        p_slope += ((n - n_plain) * tl.cast(P, tl.int64) + sequence) * M
    b_taps = load_taps(tensor_at(p_table, (2 if NARROW else 1) * n_table + n, COMPUTE), o_d, D, BLOCK_D, K)
    fit = load_fit(p_fit, n, COMPUTE)
    dfit = load_fit(p_dfit, n, COMPUTE)
    unit = 1.0 / dfit
    slope_fit = load_fit(p_dfit, N + n, COMPUTE)
    if MORE:
        more_unit = tl.load(p_more_unit)
    queries = ()
    if QUERY:
        given = load_rows(p_query, o_d, D, M)
        for j in tl.static_range(M):
            queries = queries + ((given[j] * (dfit / slope_fit)).to(COMPUTE),)
    # dv of the last rows, oldest first
    pending = carried(zeros(DELAY, BLOCK_D, COMPUTE), DELAY, COMPUTE, BLOCK_D)
    dtaps = zeros_of_rows(p_source, o_d, K)
    dquery = zeros_of_rows(p_source, o_d, M if QUERY else 0)
    t_start = t_first.to(tl.int64)
    history = raw_rows(p_source + (t_start - PAST) * D, t_start - PAST, o_d, T, D, PAST, 0, False)
    window = carried(computed(history, fit, PAST, COMPUTE), PAST, COMPUTE, BLOCK_D)
    DR_ROWS: tl.constexpr = UNROLL * (1 if SHARED else M)
    for start in tl.range(0, t_end - t_first + DELAY, UNROLL, num_stages=STAGES):
        t_now = t_start + start
        first = sequence + t_now
        t_done = t_now - DELAY
        # rows beyond the sequence or outside the segment count for nothing: others may stand for them
        t_row = tl.minimum(t_now, T - UNROLL) if EVEN else t_now
        left = T - t_row
        raw = rows_of(load_tile(p_source + t_row * D, o_d, 0, left, D, BLOCK_D, UNROLL, EVEN), UNROLL)
        drs = ()
        for r in tl.static_range(READS):
            p_rows = gradients[r] + (sequence + t_row) * (DR_ROWS // UNROLL) * D
            b_tile = load_tile(p_rows, o_d, 0, left * (DR_ROWS // UNROLL), D, BLOCK_D, DR_ROWS, EVEN)
            drs = drs + (rows_of(b_tile, DR_ROWS),)
        n_values = (T - t_now) * M
        if READS > 0:
            p_factors = p_weights + t_now * (M * READS)
            weights = load_factors(p_factors, n_values * READS, UNROLL * M * READS, COMPUTE, EVEN)
        if BEND:
            bends = load_factors(p_bend + t_now * M, n_values, UNROLL * M, COMPUTE, EVEN)
        if QUERY:
            slopes = load_factors(p_slope + t_now * M, n_values, UNROLL * M, COMPUTE, EVEN)
        t_within = tl.maximum(tl.minimum(t_done, t_end - UNROLL), t_first) if EVEN else t_done
        begin, end = t_first - t_within, t_end - t_within
        earlier = ()
        if ADD:
            earlier = rows_of(load_tile(p_in + t_within * D, o_d, begin, end, D, BLOCK_D, UNROLL, EVEN), UNROLL)
        more = ()
        if MORE:
            p_rows = p_more + (sequence + t_within) * D
            more = rows_of(load_tile(p_rows, o_d, begin, end, D, BLOCK_D, UNROLL, EVEN), UNROLL)
        rows = rows_carried(window, PAST, COMPUTE, BLOCK_D) + computed(raw, fit, UNROLL, COMPUTE)
        ending = rows_carried(pending, DELAY, COMPUTE, BLOCK_D) + zeros(UNROLL, BLOCK_D, COMPUTE)
        positions = ()
        dus = ()
        slope_sums = ()
        for s in tl.static_range(UNROLL):
            if PACKED:
                positions = positions + (tl.load(p_position + first + s, mask=t_now + s < T, other=0),)
            new_sums = ()
            for j in tl.static_range(M):
                if BEND or QUERY:
                    seen = seen_at(rows, p_position, first + s, t_now + s < T, s, PAST + 1, PACKED)
                    b_u = convolved(b_taps, seen, first_tap(SIZES, j), width(SIZES, j))
                if READS > 0:
                    b_du = weighted(drs, weights, s, j, M, READS, SHARED, COMPUTE)
                    if BEND:
                        b_du = plus_times(b_du, bends, s * M + j, -b_u)
                else:
                    b_du = times(bends, s * M + j, -b_u)
                if QUERY:
                    b_du = plus_times(b_du, slopes, s * M + j, queries[j])
                    if s == 0:
                        b_sum = times(slopes, s * M + j, b_u)
                    else:
                        b_sum = plus_times(slope_sums[j], slopes, s * M + j, b_u)
                    new_sums = new_sums + (b_sum,)
                ending = transposed(
                    ending, b_taps, b_du, positions, s, first_tap(SIZES, j), width(SIZES, j), DELAY, UNROLL, PACKED
                )
                dus = dus + (b_du,)
            slope_sums = new_sums
        if t_now < t_end:  # beyond the segment only dv of the rows behind counts
            new_dtaps = ()
            new_dquery = ()
            for j in tl.static_range(M):
                for i in tl.static_range(learned(SIZES, j)):
                    b_total = correlated(dus, rows, positions, i, j, M, PAST, UNROLL, PACKED)
                    new_dtaps = new_dtaps + (dtaps[first_tap(SIZES, j) + i] + b_total,)
            if QUERY:
                for j in tl.static_range(M):
                    new_dquery = new_dquery + (dquery[j] + slope_sums[j].to(tl.float32),)
            dtaps = new_dtaps
            dquery = new_dquery
        done = ()
        for s in tl.static_range(UNROLL):
            b_dv = ending[s].to(tl.float32) * unit
            if MORE:
                b_dv += more[s].to(tl.float32) * more_unit
            if ADD:
                b_dv += earlier[s].to(tl.float32)
            done = done + (b_dv,)
        window = carried(newest(rows, UNROLL, PAST), PAST, COMPUTE, BLOCK_D)
        pending = carried(newest(ending, UNROLL, DELAY), DELAY, COMPUTE, BLOCK_D)
        for s in tl.static_range(UNROLL):
            t = t_done if EVEN else t_done + s
            complete = (t >= t_first) & (t < t_end)
            mask = row_mask(o_d, complete, D, BLOCK_D)
            tl.store(p_out + (t_done + s) * D + o_d, done[s].to(DTYPE), mask=mask)
    sums = ()
    for i in tl.static_range(K):
        sums = sums + (dtaps[i] / (fit * dfit),)
    for j in tl.static_range(M if QUERY else 0):
        sums = sums + (dquery[j] / (fit * slope_fit),)
    N_SUMS: tl.constexpr = K + (M if QUERY else 0)
    p_row = p_sums + (n.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * ROWS * D
    store_rows(p_row, sums, o_d, D, BLOCK_D, N_SUMS)


@triton.jit
def weighted(
    drs, weights, s: tl.constexpr, j: tl.constexpr, M: tl.constexpr, READS: tl.constexpr, SHARED: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """sum_r weight_rj dr_rj of step s."""
    ROW: tl.constexpr = s if SHARED else s * M + j
    FIRST: tl.constexpr = (s * M + j) * READS
    b_du = times(weights, FIRST, drs[0][ROW].to(COMPUTE))
    for r in tl.static_range(1, READS):
        b_du = plus_times(b_du, weights, FIRST + r, drs[r][ROW].to(COMPUTE))
    return b_du


@triton.jit
def reached(b_du, positions, s: tl.constexpr, i: tl.constexpr, PACKED: tl.constexpr):
    """du of step s as tap i carries it back: zero where that is an earlier document."""
    return tl.where(positions[s] >= i, b_du, 0.0) if PACKED and i > 0 else b_du


@triton.jit
def transposed(
    pending, taps, b_du, positions, s: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, PAST: tl.constexpr,
    UNROLL: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Rows of dv, PAST before the steps and one per step, with taps[i] du of step s added i rows before it."""
    rows = ()
    for k in tl.static_range(PAST + UNROLL):
        b_dv = pending[k]
        if k > PAST + s - WIDTH and k <= PAST + s:
            b_back = reached(b_du, positions, s, PAST + s - k, PACKED)
            b_dv = b_dv + b_back if WIDTH == 1 else multiply_add(taps[FIRST + PAST + s - k], b_back, b_dv)
        rows = rows + (b_dv,)
    return rows


@triton.jit
def correlated(
    dus, rows, positions, i: tl.constexpr, j: tl.constexpr, M: tl.constexpr, PAST: tl.constexpr, UNROLL: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """sum_s du_j[s] v[s - i] over the steps, for one tap."""
    total = multiply(reached(dus[j], positions, 0, i, PACKED), rows[PAST - i])
    for s in tl.static_range(1, UNROLL):
        total = multiply_add(reached(dus[s * M + j], positions, s, i, PACKED), rows[PAST + s - i], total)
    return total.to(tl.float32)
