# ruff: noqa: RUF005  (Triton compiles `+` of tuples, not unpacking)
"""Triton kernels over the expanded streams of a source, which exist in registers only: score, retrieve, gradients.

    u_nj[t] = sum_i taps_nj[i] v_n[t - i]         e_nj = rstd_nj query_j . u_nj        r_j = sum_n a_nj u_nj

A program owns BLOCK_D channels and unrolls time: the last rows of a source are a window of registers, so a row is read
once (and again, from the cache, by the tile after it) and not once per tap. Every loop over taps, streams and the
time steps of a tile is unrolled while compiling.
"""

import triton
import triton.language as tl

from kernels.tiles import (
    convolved,
    first_tap,
    history,
    load_row,
    load_rows,
    n_streams,
    pick,
    pushed,
    visible,
    widest,
    width,
    zeros,
)


@triton.jit
def score_kernel(
    sources, taps, p_query, p_position, p_logits, p_rstd, T, N, P, n_tiles, eps,
    SIZES: tl.constexpr, L: tl.constexpr, D: tl.constexpr, STEPS: tl.constexpr, BLOCK_D: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Logits and rstd [N, P, m] of N sources. One program: STEPS tokens of one source, all of D.

    Squares and dot products stay spread over the lanes until the last channel, then each is summed once.
    """
    M: tl.constexpr = n_streams(SIZES)
    K: tl.constexpr = first_tap(SIZES, M)
    WINDOW: tl.constexpr = widest(SIZES)
    n = tl.program_id(1)
    b = tl.program_id(0) // n_tiles
    t_first = (tl.program_id(0) % n_tiles) * STEPS
    p_source = pick(sources, n, L) + b.to(tl.int64) * T * D
    p_taps = pick(taps, n, L)
    squares = zeros(M * STEPS, BLOCK_D)
    dots = zeros(M * STEPS, BLOCK_D)
    for d in range(0, D, BLOCK_D):
        o_d = d + tl.arange(0, BLOCK_D)
        b_taps = load_rows(p_taps, o_d, D, K)
        b_query = load_rows(p_query, o_d, D, M)
        window = history(p_source, t_first.to(tl.int64), o_d, D, WINDOW)
        new_squares = ()
        new_dots = ()
        for s in tl.static_range(STEPS):
            t = t_first + s
            window = pushed(window, load_row(p_source + t.to(tl.int64) * D, o_d, t < T, D), WINDOW)
            seen = window
            if PACKED:
                seen = visible(window, tl.load(p_position + b * T + t, mask=t < T, other=0), WINDOW)
            for j in tl.static_range(M):
                b_u = convolved(b_taps, seen, first_tap(SIZES, j), width(SIZES, j))
                new_squares = new_squares + (squares[s * M + j] + b_u * b_u,)
                new_dots = new_dots + (dots[s * M + j] + b_u * b_query[j],)
        squares = new_squares
        dots = new_dots
    for s in tl.static_range(STEPS):
        for j in tl.static_range(M):
            t = t_first + s
            row = (n.to(tl.int64) * P + b * T + t) * M + j
            rstd = tl.rsqrt(tl.sum(squares[s * M + j]) / D + eps)
            tl.store(p_rstd + row, rstd, mask=t < T)
            tl.store(p_logits + row, tl.sum(dots[s * M + j]) * rstd, mask=t < T)


@triton.jit
def retrieve_kernel(
    sources, taps, p_weights, p_rms, p_position, p_out, T, N, P, n_tiles,
    SIZES: tl.constexpr, L: tl.constexpr, D: tl.constexpr, STEPS: tl.constexpr, BLOCK_D: tl.constexpr,
    PACKED: tl.constexpr, EVEN: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """r [P, m, D] from softmax weights [N, P, m] known beforehand. One program: STEPS tokens of BLOCK_D channels.

    Needs nothing from other channels, so D is split over programs freely. EVEN: STEPS divides T. SCALED: r is divided
    by the largest rms among the sources [P, m], below sqrt(D) then, which fp16 holds with 8 times bf16's precision.
    """
    M: tl.constexpr = n_streams(SIZES)
    K: tl.constexpr = first_tap(SIZES, M)
    WINDOW: tl.constexpr = widest(SIZES)
    b = tl.program_id(0) // n_tiles
    t_first = (tl.program_id(0) % n_tiles) * STEPS
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = (b * T + t_first).to(tl.int64)
    retrieved = zeros(M * STEPS, BLOCK_D)
    for n in range(N):
        p_source = pick(sources, n, L) + b.to(tl.int64) * T * D
        b_taps = load_rows(pick(taps, n, L), o_d, D, K)
        window = history(p_source, t_first.to(tl.int64), o_d, D, WINDOW)
        p_rows = p_source + t_first.to(tl.int64) * D
        p_a = p_weights + (n * P + first) * M
        updated = ()
        for s in tl.static_range(STEPS):
            inside = True if EVEN else t_first + s < T
            window = pushed(window, load_row(p_rows + s * D, o_d, inside, D), WINDOW)
            seen = window
            if PACKED:
                seen = visible(window, tl.load(p_position + first + s, mask=inside, other=0), WINDOW)
            for j in tl.static_range(M):
                a = tl.load(p_a + s * M + j, mask=inside, other=0.0)
                b_u = convolved(b_taps, seen, first_tap(SIZES, j), width(SIZES, j))
                updated = updated + (retrieved[s * M + j] + a * b_u,)
        retrieved = updated
    p_rows = p_out + first * M * D + o_d
    for s in tl.static_range(STEPS):
        inside = True if EVEN else t_first + s < T
        for j in tl.static_range(M):
            b_r = retrieved[s * M + j]
            if SCALED:
                b_r = b_r / tl.load(p_rms + (first + s) * M + j, mask=inside, other=1.0)
            tl.store(p_rows + (s * M + j) * D, b_r.to(p_out.dtype.element_ty), mask=o_d < tl.where(inside, D, 0))


@triton.jit
def gradient_kernel(
    sources, taps, gradients_in, gradients_out,
    p_weights, p_dr, p_dr_unit, p_dweights, p_slope, p_bend, p_query, p_position, p_dtaps, p_dquery,
    T, N, P, n_segments, first_n, SEGMENT,
    SIZES: tl.constexpr, L: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, UNROLL: tl.constexpr,
    VALUES: tl.constexpr, DR: tl.constexpr, SCORES: tl.constexpr, DWEIGHTS: tl.constexpr, ADD: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Gradients of sources, taps and query, and the weights' gradient. One program: SEGMENT tokens of one source.

        du_nj = a_nj dr_j + slope_nj query_j - bend_nj u_nj
        dv_n[s] = sum_ji taps_nj[i] du_nj[s + i]      dtaps_nj[i] = sum_t du_nj[t] v_n[t - i]
        da_nj = dr_j . u_nj                           dquery_j = sum_tn slope_nj u_nj

    The walk goes on for the widest tap beyond the segment, since later tokens reach back into it; a row's gradient
    is complete, and leaves the window, when the widest tap has passed it.

    Args:
        p_weights, p_slope, p_bend: [N, P, m].
        p_dr: [P, m, D] in units of p_dr_unit [P, m], or one dh [P, D] for all streams; DR says which: "scaled", "plain"
            (no units) or "mean" (dr_j = dh / m).
        p_dweights: [D / BLOCK_D, N, P, m] partial sums of da.
        p_dtaps, p_dquery: [N, B n_segments, K or m, D], one partial row set per program.
        VALUES, SCORES: which terms of du there are. DWEIGHTS: "none", "too", or "only" (then nothing but da).
    """
    M: tl.constexpr = n_streams(SIZES)
    K: tl.constexpr = first_tap(SIZES, M)
    WINDOW: tl.constexpr = widest(SIZES)
    BACK: tl.constexpr = DWEIGHTS != "only"
    n = first_n + tl.program_id(2)
    b = tl.program_id(1) // n_segments
    t_first = (tl.program_id(1) % n_segments) * SEGMENT
    t_end = tl.minimum(t_first + SEGMENT, T)
    o_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    sequence = b.to(tl.int64) * T
    p_source = pick(sources, n, L) + sequence * D
    b_taps = load_rows(pick(taps, n, L), o_d, D, K)
    if SCORES:
        b_query = load_rows(p_query, o_d, D, M)
        dquery = zeros(M, BLOCK_D)
    if BACK:
        p_in = pick(gradients_in, n, L) + sequence * D
        p_dv = pick(gradients_out, n, L) + sequence * D
        pending = zeros(WINDOW, BLOCK_D)  # dv of the last rows, newest first
        dtaps = zeros(K, BLOCK_D)
    window = history(p_source, t_first.to(tl.int64), o_d, D, WINDOW)
    n_steps = t_end - t_first + (WINDOW - 1 if BACK else 0)
    for start in range(0, n_steps, UNROLL):
        for s in tl.static_range(UNROLL):
            t = t_first + start + s
            row = sequence + t
            inside = t < t_end  # this program's own token; beyond it only dv of the rows behind counts
            exists = t < T
            own = tl.where(inside, 1.0, 0.0)
            window = pushed(window, load_row(p_source + t.to(tl.int64) * D, o_d, exists, D), WINDOW)
            seen = window
            if PACKED:
                position = tl.load(p_position + row, mask=exists, other=0)
                seen = visible(window, position, WINDOW)
            p_at = (n * P + row) * M
            # unpacked, a multiply-add per tap goes straight into the pending rows; packed, a mask comes between
            back = zeros(WINDOW, BLOCK_D)
            if BACK and not PACKED:
                back = pushed(pending, tl.zeros([BLOCK_D], tl.float32), WINDOW)
            new_dtaps = ()
            new_dquery = ()
            for j in tl.static_range(M):
                b_u = convolved(b_taps, seen, first_tap(SIZES, j), width(SIZES, j))
                b_du = tl.zeros([BLOCK_D], tl.float32)
                if VALUES:
                    b_dr = load_row(p_dr + (row if DR == "mean" else row * M + j) * D, o_d, exists, D)
                    unit = 1.0 / M if DR == "mean" else 1.0
                    if DR == "scaled":
                        unit = tl.load(p_dr_unit + row * M + j, mask=exists, other=0.0)
                    if DWEIGHTS != "none":
                        da = tl.sum(b_dr * b_u) * unit
                        p_da = p_dweights + tl.program_id(0).to(tl.int64) * N * P * M + p_at + j
                        tl.store(p_da, da, mask=inside)
                    b_du += (tl.load(p_weights + p_at + j, mask=exists, other=0.0) * unit) * b_dr
                if SCORES:
                    slope = tl.load(p_slope + p_at + j, mask=exists, other=0.0)
                    b_du += slope * b_query[j] - tl.load(p_bend + p_at + j, mask=exists, other=0.0) * b_u
                    new_dquery = new_dquery + (dquery[j] + (own * slope) * b_u,)
                if BACK:
                    back = transposed(back, b_taps, b_du, first_tap(SIZES, j), width(SIZES, j), WINDOW)
                    if width(SIZES, j) > 1:
                        b_own = own * b_du
                        for i in tl.static_range(width(SIZES, j)):
                            new_dtaps = new_dtaps + (dtaps[first_tap(SIZES, j) + i] + b_own * seen[i],)
            if SCORES:
                dquery = new_dquery
            if BACK:
                dtaps = new_dtaps
                if PACKED:
                    back = delayed(pending, visible(back, position, WINDOW), WINDOW)
                pending = back
                t_done = t - (WINDOW - 1)
                complete = (t_done >= t_first) & (t_done < t_end)
                b_dv = pending[WINDOW - 1]
                if ADD:
                    b_dv += load_row(p_in + t_done.to(tl.int64) * D, o_d, complete, D)
                p_done = p_dv + t_done.to(tl.int64) * D + o_d
                tl.store(p_done, b_dv.to(p_dv.dtype.element_ty), mask=o_d < tl.where(complete, D, 0))
    program = (n - first_n).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    if BACK:
        for i in tl.static_range(K):
            tl.store(p_dtaps + (program * K + i) * D + o_d, dtaps[i], mask=o_d < D)
    if SCORES:
        for j in tl.static_range(M):
            tl.store(p_dquery + (program * M + j) * D + o_d, dquery[j], mask=o_d < D)


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
