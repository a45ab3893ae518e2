"""The kernel that turns the gradients of R reads' retrieved streams into those of N sources' streams.

    du_nj = sum_r a_rnj dr_rj + sum_r slope_rnj query_rj

Per token and stream that is a matrix [N, 2 R] of coefficients times one [2 R, D] of rows, the reads' dr and, the same
for every token, the queries: a product on tensor cores, where a walk would spend 2 R multiply-adds and as many loads of
coefficients per value. Coefficients and rows are fp16 for half-precision sources, in units that bound the sum.
"""

import triton
import triton.language as tl


@triton.jit
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
    # |dr| is at most 2^14 in its units, a scaled query at most 1: no sum exceeds 2^14 units, and the floor keeps a
    # token without gradient from dividing by zero
    b_bound = tl.sum(tl.abs(b_weights), 2) + tl.sum(tl.abs(b_slopes), 2) / 16384.0
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
