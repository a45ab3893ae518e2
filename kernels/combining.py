"""Triton kernels that sum over the R reads of a block, or over time for all of them, on tensor cores.

    du_nj = sum_r a_rnj dr_rj + sum_r slope_rnj query_rj
    dquery_rj = sum_n sum_i taps_nj[i] sum_s slope_rnj[s + i] v_n[s]

The first turns the gradients of retrieved streams into those of the sources' streams: per token and stream a matrix
[N, 2 R] of coefficients times one [2 R, D] of rows, the reads' dr and, the same for every token, the queries. A walk
would spend 2 R multiply-adds and as many loads of coefficients per value. Coefficients and rows are fp16 for
half-precision sources, in units that bound the sum. The second needs no stream: a matrix of shifted slopes times the
rows of the source, then the taps; tf32 for half-precision sources.
"""

import triton
import triton.language as tl

from kernels.narrow import GRADIENT_PEAK
from kernels.tiles import first_tap, n_streams, tensor_at, width


@triton.constexpr_function
def padded(count):
    """The next power of two."""
    return 1 << (int(count) - 1).bit_length()


@triton.constexpr_function
def read_rows(reads, taps):
    """Reads of a matrix with `taps` rows per read, at least the 16 rows of a tensor core."""
    return max(1 << (int(reads) - 1).bit_length(), 16 // taps)


@triton.jit(do_not_specialize=["N"])
def combine_kernel(
    p_row_table, p_scaled_weights, p_slope, p_query_peak, p_unit, p_du, N, P, count,
    READS: tl.constexpr, WEIGHTED: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """du [N, P, m, D] in units [N, P, m]; of the slopes' part alone without WEIGHTED.

    One program: BLOCK_T tokens of one stream, all of D.

    Args:
        p_row_table: READS tensors dr [P, m, D] (if WEIGHTED) and READS scaled queries [m, D], all of DTYPE.
        p_scaled_weights: [READS, N, P, m], weights in the units of dr (if WEIGHTED), and p_slope likewise.
        p_query_peak: [READS, m], what a scaled query counts: its largest value.
        count: P m.
    """
    FIRST: tl.constexpr = READS if WEIGHTED else 0  # the first row of a query
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    j = tl.program_id(1)
    o_n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    m_tn = (o_t < P)[:, None] & (o_n < N)[None, :]
    # where a row's coefficients are: weights for the rows of dr, slopes for the queries
    is_slope = (o_k >= FIRST) & (o_k < FIRST + READS)
    read = tl.where(is_slope, o_k - FIRST, tl.minimum(o_k, READS - 1))
    at = (read[None, None, :].to(tl.int64) * N + o_n[None, :, None]) * count + (o_t * M + j)[:, None, None]
    m_slope = m_tn[:, :, None] & is_slope[None, None, :]
    b_peak = tl.load(p_query_peak + read * M + j, mask=is_slope, other=0.0)
    b_weights = tl.zeros([BLOCK_T, BLOCK_N, BLOCK_K], tl.float32)
    if WEIGHTED:
        m_weight = m_tn[:, :, None] & (o_k < FIRST)[None, None, :]
        b_weights = tl.load(p_scaled_weights + at, mask=m_weight, other=0.0)
    b_slopes = tl.load(p_slope + at, mask=m_slope, other=0.0) * b_peak[None, None, :]
    # |dr| is at most GRADIENT_PEAK in its units, a scaled query at most 1: no sum exceeds GRADIENT_PEAK units, and the
    # floor keeps a token without gradient from dividing by zero
    b_bound = tl.sum(tl.abs(b_weights), 2) + tl.sum(tl.abs(b_slopes), 2) / GRADIENT_PEAK
    b_unit = tl.maximum(b_bound, 1e-30)
    tl.store(p_unit + o_n[None, :] * tl.cast(count, tl.int64) + (o_t * M + j)[:, None], b_unit, mask=m_tn)
    b_coefficients = ((b_weights + b_slopes) / b_unit[:, :, None]).to(DTYPE)  # [BLOCK_T, BLOCK_N, BLOCK_K]
    rows = tl.load(p_row_table + tl.minimum(o_k, FIRST + READS - 1)).to(tl.pointer_type(DTYPE))
    rows = tl.multiple_of(rows, 16)
    # the queries' rows are the same for every token
    place = tl.multiple_of(tl.where(o_k < FIRST, M * D, 0)[None, :] * o_t[:, None] + j * D, (8, 8))
    for d in range(0, D, BLOCK_D):
        o_d = d + tl.arange(0, BLOCK_D)
        mask = (o_t < P)[:, None, None] & (o_k < FIRST + READS)[None, :, None] & (o_d < D)[None, None, :]
        p_rows = rows[None, :, None] + (place[:, :, None] + o_d[None, None, :])
        b_rows = tl.load(p_rows, mask=mask, other=0.0)
        b_du = tl.dot(b_coefficients, b_rows, input_precision="ieee")  # [BLOCK_T, BLOCK_N, BLOCK_D]
        p_at = p_du + ((o_n[None, :] * tl.cast(P, tl.int64) + o_t[:, None]) * M + j)[:, :, None] * D
        tl.store(p_at + o_d[None, None, :], b_du.to(DTYPE), mask=m_tn[:, :, None] & (o_d < D)[None, None, :])


@triton.jit(do_not_specialize=["N", "n_segments"])
def dqueries_kernel(
    p_table, p_slope, p_position, p_dqueries, T, N, P, n_segments, SEGMENT,
    SIZES: tl.constexpr, READS: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    PACKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial rows [N, B n_segments, READS, m, D] of the queries' gradients; slopes are [N, P, m, READS].

    One program: SEGMENT rows of one source, BLOCK_D channels of one stream.
    """
    for j in tl.static_range(n_streams(SIZES)):
        if tl.program_id(2) == j:
            dqueries_stream(
                p_table, p_slope, p_position, p_dqueries, T, N, P, n_segments, SEGMENT,
                SIZES, j, READS, D, BLOCK_T, BLOCK_D, PACKED, DTYPE, PRECISION,
            )  # fmt: skip


@triton.jit
def dqueries_stream(
    p_table, p_slope, p_position, p_dqueries, T, N, P, n_segments, SEGMENT,
    SIZES: tl.constexpr, j: tl.constexpr, READS: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Row (r, i) of the matrix of slopes holds those of read r, i tokens later: where tap i carries a row to."""
    M: tl.constexpr = n_streams(SIZES)
    WIDTH: tl.constexpr = width(SIZES, j)
    TAPS: tl.constexpr = padded(WIDTH)
    BLOCK_R: tl.constexpr = read_rows(READS, TAPS)
    n = tl.program_id(0) % N
    chunk = tl.program_id(0) // N
    b = tl.program_id(1) // n_segments
    s_first = (tl.program_id(1) % n_segments) * SEGMENT
    s_end = tl.minimum(s_first + SEGMENT, T)
    o_d = chunk * BLOCK_D + tl.arange(0, BLOCK_D)
    o_row = tl.arange(0, BLOCK_R * TAPS)
    read, tap = o_row // TAPS, o_row % TAPS
    sequence = b.to(tl.int64) * T
    p_source = tensor_at(p_table, n, DTYPE) + sequence * D
    total = tl.zeros([BLOCK_R * TAPS, BLOCK_D], tl.float32)
    for start in range(0, s_end - s_first, BLOCK_T):
        o_s = s_first + start + tl.arange(0, BLOCK_T)
        m_v = (o_s < s_end)[:, None] & (o_d < D)[None, :]
        b_v = tl.load(p_source + o_s[:, None].to(tl.int64) * D + o_d[None, :], mask=m_v, other=0.0)
        t = tap[:, None] + o_s[None, :]
        mask = (read < READS)[:, None] & (tap < WIDTH)[:, None] & (o_s < s_end)[None, :] & (t < T)
        if PACKED:
            mask = mask & (tl.load(p_position + sequence + t, mask=t < T, other=0) >= tap[:, None])
        at = ((n * tl.cast(P, tl.int64) + sequence + t) * M + j) * READS + read[:, None]
        b_slope = tl.load(p_slope + at, mask=mask, other=0.0)
        total = tl.dot(b_slope, b_v.to(tl.float32), total, input_precision=PRECISION)
    by_tap = tl.reshape(total, (BLOCK_R, TAPS, BLOCK_D))
    if WIDTH > 1:
        o_i = tl.arange(0, TAPS)
        p_taps = tensor_at(p_table, N + n, tl.float32) + (first_tap(SIZES, j) + o_i[:, None]) * D + o_d[None, :]
        b_taps = tl.load(p_taps, mask=(o_i < WIDTH)[:, None] & (o_d < D)[None, :], other=0.0)
        by_tap = by_tap * b_taps[None, :, :]
    o_r = tl.arange(0, BLOCK_R)
    program = n.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    p_out = p_dqueries + ((program * READS + o_r[:, None]) * M + j) * D + o_d[None, :]
    tl.store(p_out, tl.sum(by_tap, 1), mask=(o_r < READS)[:, None] & (o_d < D)[None, :])
