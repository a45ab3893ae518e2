# ruff: noqa: RUF005  (Triton compiles `+` of tuples, not unpacking)
"""Dot products of many queries with the streams of one source, as matrix products on the tensor cores; both passes.

    q_rj . u_j[t] = sum_i z_rji[t - i]                      z_rji[s] = sum_d (q_rj taps_ji)[d] v[s, d]
    s_rji[s] = slope_rj[s + i]                              dv[s] = sum_rji s_rji[s] (q_rj taps_ji)
    dz_rji = sum_s s_rji[s] v[s]     dq_rj = sum_i taps_ji dz_rji     dtaps_ji = sum_r q_rj dz_rji

A column c = (r, j, i), C in all, is a read's query times one tap of a stream (times 1 for an identity stream). The
products are the library's; the kernels here make their operands and sum what they give along time. Operands that must
be as good as fp32 are two parts of the sources' half precision, each in units of the column's largest value.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference import n_taps
from kernels.tiles import cdiv, first_tap, learned, load_rows, n_streams, next_power_of_2, width

LOW_PART = tl.constexpr(256.0)  # what the second of two parts is multiplied by: the first leaves 2^-9 or less
OUT_PEAK = 2.0**14  # bound of a sum over all columns in fp16
BLOCK_T = 512
BLOCK_D = 512
SLOPES_BLOCK = 128
PARAMETER_BLOCK = 64


@triton.constexpr_function
def first_column(kernel_sizes, j):
    """Of one read, where stream j's columns begin; for j = m how many a read has."""
    return sum(int(size) for size in list(kernel_sizes)[:j])


@triton.jit
def place_of(column, SIZES: tl.constexpr):
    """Stream and tap of a read's column, and the row of that tap in the stacked taps, -1 for an identity stream."""
    stream, tap, row = 0, column, -1
    for j in tl.static_range(n_streams(SIZES)):
        later = column - first_column(SIZES, j)
        inside = (later >= 0) & (later < width(SIZES, j))
        stream = tl.where(inside, j, stream)
        tap = tl.where(inside, later, tap)
        if learned(SIZES, j) > 0:
            row = tl.where(inside, first_tap(SIZES, j) + later, row)
    return stream, tap, row


@triton.jit
def store_parts(p_out, offsets, rows_apart, b_x, mask, PARTS: tl.constexpr):
    """Values as PARTS numbers of the output's dtype, `rows_apart` elements apart."""
    b_high = b_x.to(p_out.dtype.element_ty)
    tl.store(p_out + offsets, b_high, mask=mask)
    if PARTS == 2:
        b_low = (b_x - b_high.to(tl.float32)) * LOW_PART
        tl.store(p_out + rows_apart + offsets, b_low.to(p_out.dtype.element_ty), mask=mask)


@triton.jit
def joined_parts(p_in, offsets, rows_apart, mask, PARTS: tl.constexpr):
    """What `store_parts` stored, or a product of it."""
    b_x = tl.load(p_in + offsets, mask=mask, other=0.0)
    if PARTS == 2:
        b_x += tl.load(p_in + rows_apart + offsets, mask=mask, other=0.0) / LOW_PART
    return b_x


@triton.jit
def column_values(p_row, p_taps, row, o_d, SIZES: tl.constexpr, D: tl.constexpr):
    """A query's row times row `row` of the taps, none for -1."""
    b_x = tl.load(p_row + o_d, mask=o_d < D, other=0.0)
    if first_tap(SIZES, n_streams(SIZES)) > 0:
        b_x *= tl.load(p_taps + row * D + o_d, mask=o_d < tl.where(row >= 0, D, 0), other=1.0)
    return b_x


@triton.jit
def columns_kernel(
    p_query, p_taps, p_columns, p_narrow, p_peaks,
    SIZES: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Columns q_rj taps_ji over their largest value: [PARTS, C, D] in the sources' dtype and [C, D] for `dv`.

    Args:
        p_query: [R, m, D]; p_taps: [K, D], left out where K is 0; p_peaks: [C], written.
    """
    M: tl.constexpr = n_streams(SIZES)
    column, r = tl.program_id(0), tl.program_id(1)
    stream, _, row = place_of(column, SIZES)
    c = (r * tl.num_programs(0) + column).to(tl.int64)
    rows_apart = (tl.num_programs(0) * tl.num_programs(1)).to(tl.int64) * D
    p_row = p_query + (r * M + stream) * D
    b_peak = tl.full([BLOCK], 1e-30, tl.float32)
    for first in range(0, D, BLOCK):
        o_d = first + tl.arange(0, BLOCK)
        b_x = column_values(p_row, p_taps, row, o_d, SIZES, D)
        b_peak = tl.maximum(b_peak, tl.abs(b_x))
    peak = tl.max(b_peak, 0)
    tl.store(p_peaks + c, peak)
    for first in range(0, D, BLOCK):
        o_d = first + tl.arange(0, BLOCK)
        b_x = column_values(p_row, p_taps, row, o_d, SIZES, D)
        b_x /= peak
        store_parts(p_columns, c * D + o_d, rows_apart, b_x, o_d < D, PARTS)
        tl.store(p_narrow + c * D + o_d, b_x.to(p_narrow.dtype.element_ty), mask=o_d < D)


@triton.jit
def logits_kernel(
    p_z, p_peaks, p_rstd, p_position, p_logits, T, P, n_reads,
    SIZES: tl.constexpr, PARTS: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Logits [R, P, m]: rstd times the sum of a stream's columns z [PARTS, C, P], each read as far back as its tap."""
    M: tl.constexpr = n_streams(SIZES)
    COLUMNS: tl.constexpr = first_column(SIZES, M)
    r = tl.program_id(1)
    o_p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o_p < P
    reach = o_p % T  # how many tokens of its own document, or sequence, a token has before it
    if PACKED:
        reach = tl.minimum(reach, tl.load(p_position + o_p, mask=inside, other=0))
    rows_apart = tl.cast(n_reads, tl.int64) * COLUMNS * P
    for j in tl.static_range(M):
        b_sum = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(width(SIZES, j)):
            c = r * COLUMNS + first_column(SIZES, j) + i
            b_z = joined_parts(p_z, c.to(tl.int64) * P + o_p - i, rows_apart, inside & (reach >= i), PARTS)
            b_sum += b_z * tl.load(p_peaks + c)
        b_rstd = tl.load(p_rstd + o_p * M + j, mask=inside, other=0.0)
        tl.store(p_logits + (r * tl.cast(P, tl.int64) + o_p) * M + j, b_sum * b_rstd, mask=inside)


@triton.jit
def slopes_kernel(
    p_dlogits, p_logits, p_rstd, p_slope, p_bend, p_peaks, P, n_reads, D,
    M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """slope_r = rstd dlogit_r [R, P, m] and bend = sum_r slope_r logit_r rstd / D [P, m]; of every tile of tokens the
    largest |slope_r| [R, m, tiles]."""
    o_p = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_m = tl.arange(0, BLOCK_M)
    mask = (o_p < P)[:, None] & (o_m < M)[None, :]
    at = o_p[:, None] * M + o_m[None, :]
    b_rstd = tl.load(p_rstd + at, mask=mask, other=0.0)
    b_bend = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
    for r in range(n_reads):
        of_read = at + r * tl.cast(P, tl.int64) * M
        b_slope = tl.load(p_dlogits + of_read, mask=mask, other=0.0) * b_rstd
        tl.store(p_slope + of_read, b_slope, mask=mask)
        b_bend += b_slope * tl.load(p_logits + of_read, mask=mask, other=0.0)
        p_peak = p_peaks + (r * M + o_m) * tl.num_programs(0) + tl.program_id(0)
        tl.store(p_peak, tl.max(tl.abs(b_slope), 0), mask=o_m < M)
    tl.store(p_bend + at, b_bend * b_rstd / D, mask=mask)


@triton.jit
def units_kernel(
    p_peaks, p_slope_peaks, p_unit, p_factors, count, out_peak,
    SIZES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What a stored value of dv counts, so that no sum exceeds `out_peak`, and columns' largest values in it [C]."""
    M: tl.constexpr = n_streams(SIZES)
    COLUMNS: tl.constexpr = first_column(SIZES, M)
    o_c = tl.arange(0, BLOCK)
    stream, _, _ = place_of(o_c % COLUMNS, SIZES)
    b_peak = tl.load(p_peaks + o_c, mask=o_c < count, other=0.0)
    b_slope = tl.load(p_slope_peaks + o_c // COLUMNS * M + stream, mask=o_c < count, other=0.0)
    unit = tl.maximum(tl.sum(b_peak * b_slope, 0), 1e-30) / out_peak
    tl.store(p_unit, unit)
    tl.store(p_factors + o_c, b_peak / unit, mask=o_c < count)


@triton.jit
def spread_kernel(
    p_slope, p_slope_peaks, p_factors, p_position, p_parts, p_weighted, T, P,
    SIZES: tl.constexpr, PARTS: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Columns s_rji of slopes [R, P, m]: over their largest value [PARTS, C, P], and times their factor [C, P]."""
    M: tl.constexpr = n_streams(SIZES)
    column, r = tl.program_id(1), tl.program_id(2)
    stream, tap, _ = place_of(column, SIZES)
    c = (r * tl.num_programs(1) + column).to(tl.int64)
    rows_apart = (tl.num_programs(1) * tl.num_programs(2)).to(tl.int64) * P
    o_p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = o_p < P
    reached = inside & (o_p % T + tap < T)
    if PACKED:
        reached = reached & (tl.load(p_position + o_p + tap, mask=reached, other=0) >= tap)
    at = (r * tl.cast(P, tl.int64) + o_p + tap) * M + stream
    b_slope = tl.load(p_slope + at, mask=reached, other=0.0)
    b_weighted = b_slope * tl.load(p_factors + c)
    tl.store(p_weighted + c * P + o_p, b_weighted.to(p_weighted.dtype.element_ty), mask=inside)
    b_slope /= tl.maximum(tl.load(p_slope_peaks + r * M + stream), 1e-30)
    store_parts(p_parts, c * P + o_p, rows_apart, b_slope, inside, PARTS)


@triton.jit
def parameters_kernel(
    p_dz, p_slope_peaks, p_query, p_taps, p_dquery, p_dtaps, n_reads,
    SIZES: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of queries [R, m, D] and taps [K, D] from dz [PARTS, C, D] over the slopes' largest values.

    One program: a stream, BLOCK channels.
    """
    for j in tl.static_range(n_streams(SIZES)):
        if tl.program_id(1) == j:
            parameters_of_stream(
                p_dz, p_slope_peaks, p_query, p_taps, p_dquery, p_dtaps, n_reads, j, SIZES, D, PARTS, BLOCK
            )


@triton.jit
def parameters_of_stream(
    p_dz, p_slope_peaks, p_query, p_taps, p_dquery, p_dtaps, n_reads,
    j: tl.constexpr, SIZES: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = n_streams(SIZES)
    COLUMNS: tl.constexpr = first_column(SIZES, M)
    o_d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = o_d < D
    rows_apart = n_reads * COLUMNS * D
    if learned(SIZES, j) > 0:
        b_taps = load_rows(p_taps + first_tap(SIZES, j) * D, o_d, D, learned(SIZES, j))
    dtaps = ()
    for _ in tl.static_range(learned(SIZES, j)):
        dtaps = dtaps + (tl.zeros([BLOCK], tl.float32),)
    for r in range(n_reads):
        b_query = tl.load(p_query + (r * M + j) * D + o_d, mask=mask, other=0.0)
        peak = tl.load(p_slope_peaks + r * M + j)
        b_dquery = tl.zeros([BLOCK], tl.float32)
        updated = ()
        for i in tl.static_range(width(SIZES, j)):
            at = (r * COLUMNS + first_column(SIZES, j) + i) * D + o_d
            b_dz = joined_parts(p_dz, at, rows_apart, mask, PARTS) * peak
            if learned(SIZES, j) > 0:
                updated = updated + (dtaps[i] + b_query * b_dz,)
                b_dz *= b_taps[i]
            b_dquery += b_dz
        dtaps = updated
        tl.store(p_dquery + (r * M + j) * D + o_d, b_dquery, mask=mask)
    for i in tl.static_range(learned(SIZES, j)):
        tl.store(p_dtaps + (first_tap(SIZES, j) + i) * D + o_d, dtaps[i], mask=mask)


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b summed in fp32, stored as `dtype`."""
    with torch.autocast(a.device.type, enabled=False):
        if not a.is_cuda:  # the interpreter's
            return (a.float() @ b.float()).to(dtype)
        return a @ b if a.dtype == dtype else torch.mm(a, b, out_dtype=dtype)


class Columns(NamedTuple):
    """Queries times taps, C columns, for a source of some dtype.

    Attributes:
        parts: [PARTS C, D] in the source's dtype, over `peaks` [C].
        narrow: [C, D] in fp16 for half-precision sources, likewise.
    """

    parts: Tensor
    narrow: Tensor
    peaks: Tensor

    @classmethod
    def of(cls, queries: Tensor, taps: Tensor | None, kernel_sizes: tuple[int, ...], dtype: torch.dtype) -> "Columns":
        """For queries [R, m, D] and taps [K, D], both fp32."""
        R, _, D = queries.shape
        C, n_parts = R * sum(kernel_sizes), parts_of(dtype)
        columns = cls(
            queries.new_empty(n_parts * C, D, dtype=dtype),
            queries.new_empty(C, D, dtype=weighted_dtype(dtype)),
            queries.new_empty(C),
        )
        columns_kernel[(sum(kernel_sizes), R)](
            queries, taps, *columns, SIZES=kernel_sizes, D=D, PARTS=n_parts, BLOCK=BLOCK_D, num_warps=4
        )
        return columns


def parts_of(dtype: torch.dtype) -> int:
    """How many numbers of the sources' dtype stand for one of fp32."""
    return 1 if dtype == torch.float32 else 2


def weighted_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the operands and the result of dv: 8 times as precise as bf16, in units that keep it in range."""
    return torch.float32 if dtype == torch.float32 else torch.float16


def logits(
    source: Tensor, taps: Tensor | None, queries: Tensor, rstd: Tensor, kernel_sizes: tuple[int, ...],
    position: Tensor | None,
) -> Tensor:  # fmt: skip
    """rstd q . u [R, P, m]; on the way a column takes 8 bytes per token for half-precision sources.

    Args:
        source: [B, T, D]; taps: [K, D], fp32, None where K is 0.
        queries: [R, m, D], fp32.
        rstd: [P, m], of the streams.
        position: [B, T], int32, of packed documents.
    """
    (_, T, D), (R, m, _), P = source.shape, queries.shape, len(rstd)
    columns = Columns.of(queries, taps, kernel_sizes, source.dtype)
    z = product(columns.parts, source.view(P, D).t(), torch.float32)
    out = rstd.new_empty(R, P, m)
    logits_kernel[(cdiv(P, BLOCK_T), R)](
        z, columns.peaks, rstd, position, out, T, P, R,
        SIZES=kernel_sizes, PARTS=parts_of(source.dtype), PACKED=position is not None, BLOCK=BLOCK_T, num_warps=4,
    )  # fmt: skip
    return out


class Gradients(NamedTuple):
    """Of logits rstd q . u.

    Attributes:
        bend: [P, m], what rstd leaves for the streams: du -= bend u.
        source: [P, D] and what its values count, one number, through the dot products.
        queries: [R, m, D]; taps: [K, D], through the dot products.
    """

    bend: Tensor
    source: tuple[Tensor, Tensor]
    queries: Tensor
    taps: Tensor


def backward(
    source: Tensor, taps: Tensor | None, queries: Tensor, scores: tuple[Tensor, Tensor], dlogits: Tensor,
    kernel_sizes: tuple[int, ...], position: Tensor | None,
) -> Gradients:  # fmt: skip
    """The backward pass of `logits` for dlogits [R, P, m]; scores are the logits and rstd [P, m]."""
    (_, T, D), (R, P, m), C = source.shape, dlogits.shape, sum(kernel_sizes)
    n_parts, packed = parts_of(source.dtype), position is not None
    columns = Columns.of(queries, taps, kernel_sizes, source.dtype)
    slope, bend = torch.empty_like(scores[0]), torch.empty_like(scores[1])
    peaks = slope.new_empty(R, m, cdiv(P, SLOPES_BLOCK))
    slopes_kernel[(peaks.shape[2],)](
        dlogits, *scores, slope, bend, peaks, P, R, D,
        M=m, BLOCK_T=SLOPES_BLOCK, BLOCK_M=next_power_of_2(m), num_warps=4,
    )  # fmt: skip
    slope_peaks, factors, unit = peaks.amax(2), slope.new_empty(R * C), slope.new_empty(1)
    units_kernel[(1,)](
        columns.peaks, slope_peaks, unit, factors, R * C, OUT_PEAK,
        SIZES=kernel_sizes, BLOCK=next_power_of_2(R * C), num_warps=4,
    )  # fmt: skip
    spread = source.new_empty(n_parts * R * C, P)
    weighted = columns.narrow.new_empty(R * C, P)
    spread_kernel[(cdiv(P, BLOCK_T), C, R)](
        slope, slope_peaks, factors, position, spread, weighted, T, P,
        SIZES=kernel_sizes, PARTS=n_parts, PACKED=packed, BLOCK=BLOCK_T, num_warps=4,
    )  # fmt: skip
    dsource = product(weighted.t(), columns.narrow, weighted.dtype)
    dz = product(spread, source.view(P, D), torch.float32)
    dqueries, dtaps = torch.empty_like(queries), slope.new_empty(n_taps(kernel_sizes), D)
    parameters_kernel[(cdiv(D, PARAMETER_BLOCK), m)](
        dz, slope_peaks, queries, taps, dqueries, dtaps, R,
        SIZES=kernel_sizes, D=D, PARTS=n_parts, BLOCK=PARAMETER_BLOCK, num_warps=1,
    )  # fmt: skip
    return Gradients(bend, (dsource, unit), dqueries, dtaps)
