# ruff: noqa: RUF005  (Triton compiles `+` of tuples, not unpacking)
"""Triton kernels of the backward pass of the mix (`mixing`), for dh [P, D].

With c_k = scale rstd dz_k and f = sum_k c_k S_k rstd^2 / (m D):

    dr_j = gate_j dh + sum_k c_k W_kj - f r_j           dW_kj = sum_t c_k r_j

One kernel reads whole tokens for the factors of both lines, which are fp32 values per token and stream; the other owns
some channels of many tokens and takes both sums over k and t as products on the tensor cores. dr_j is stored in units
per token and stream, of a bound of its size.

Products of fp16 streams take their small operands in two parts whose sum is as good as fp32: bf16 parts of c and W,
which may be of any size, and fp16 parts of what multiplies r, in units of the largest of the program's tokens.
"""

import triton
import triton.language as tl

from kernels.mixing import gates_of
from kernels.narrow import GRADIENT_PEAK
from kernels.tiles import product


@triton.jit
def inverse_scales(p_scale, o_t, m_t, M: tl.constexpr):
    """What a stored value of each stream counts, M vectors [BLOCK_T]."""
    units = ()
    for j in tl.static_range(M):
        units = units + (1.0 / tl.load(p_scale + o_t * M + j, mask=m_t, other=1.0),)
    return units


@triton.jit
def weight_kernel(p_weight, p_parts, p_peak, D: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """The largest |W_kj| [m m], and with two PARTS W [m m, D] as bf16 [2, m m, D]: rounded, and what rounding lost."""
    row = tl.program_id(0)
    peaks = tl.zeros([BLOCK], tl.float32)
    for d in range(0, D, BLOCK):
        o = d + tl.arange(0, BLOCK)
        b_w = tl.load(p_weight + row * D + o, mask=o < D, other=0.0)
        peaks = tl.maximum(peaks, tl.abs(b_w))
        if PARTS == 2:
            b_high = b_w.to(tl.bfloat16)
            tl.store(p_parts + row * D + o, b_high, mask=o < D)
            p_low = p_parts + (tl.num_programs(0) + row) * D
            tl.store(p_low + o, (b_w - b_high.to(tl.float32)).to(tl.bfloat16), mask=o < D)
    tl.store(p_peak + row, tl.max(peaks, 0))


@triton.jit
def factors_kernel(
    p_r, p_r_scale, p_dh, p_statistics, p_weight_peak, p_scale, p_bias, p_factors, p_unit, p_mean, p_partial, P,
    M: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
    SOFTMAX: tl.constexpr, MEANS: tl.constexpr,
):  # fmt: skip
    """Per token the factors of `gradient_kernel` [P, 5 m] and the units of dr [P, m]; per program [2 + m, programs] the
    largest |c_k| times a stream's unit, and sums for scale and bias.

    With MEANS also dr_j . r_j [P, m], which is gate_j dh . r_j + sum_k c_k W_kj . r_j - f |r_j|^2: the mean of the
    gradients of a read's weights over its sources.

    dr_j is at most gate_j max|dh| + sum_k |c_k| max|W_kj| + |f| sqrt(D) rms_j, which is GRADIENT_PEAK units: what is
    multiplied with it in fp16 stays in range too (`narrow`), and it keeps full precision down to 2^-17 of the bound.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK_T
    o_t = tl.arange(0, BLOCK_T)
    m_t = o_t < P - first
    p_r += first * M * D
    p_dh += first * D
    peaks = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    dots = ()
    for _ in tl.static_range(M):
        dots = dots + (tl.zeros([BLOCK_T, BLOCK_D], tl.float32),)
    for d in tl.range(0, D, BLOCK_D, num_stages=STAGES):
        o_d = d + tl.arange(0, BLOCK_D)
        m_td = m_t[:, None] & (o_d < D)[None, :]
        b_dh = tl.load(p_dh + o_t[:, None] * D + o_d[None, :], mask=m_td, other=0.0).to(tl.float32)
        peaks = tl.maximum(peaks, tl.abs(b_dh))
        updated = ()
        for j in tl.static_range(M):
            b_r = tl.load(p_r + (o_t * M + j)[:, None] * D + o_d[None, :], mask=m_td, other=0.0).to(tl.float32)
            updated = updated + (dots[j] + b_r * b_dh,)
        dots = updated
    r_units = inverse_scales(p_r_scale + first * M, o_t, m_t, M)
    scale = tl.load(p_scale)
    N_STATISTICS: tl.constexpr = (1 + M) * (1 + M) if MEANS else 1 + M
    p_token = p_statistics + (first + o_t) * N_STATISTICS
    rstd = tl.load(p_token, mask=m_t, other=0.0)
    sums = ()
    z = ()
    for k in tl.static_range(M):
        sums = sums + (tl.load(p_token + k + 1, mask=m_t, other=0.0),)
        z = z + (scale * rstd * sums[k] + tl.load(p_bias + k),)
    gates = gates_of(z, M, SOFTMAX)
    dgates = ()
    mean = tl.zeros([BLOCK_T], tl.float32)
    largest_unit = r_units[0]
    for k in tl.static_range(M):
        dgates = dgates + (tl.sum(dots[k], 1) * r_units[k],)
        mean += gates[k] * dgates[k]
        largest_unit = tl.maximum(largest_unit, r_units[k])
    f = tl.zeros([BLOCK_T], tl.float32)
    dscale = tl.zeros([BLOCK_T], tl.float32)
    largest = tl.zeros([BLOCK_T], tl.float32)
    slopes = ()
    p_program = p_partial + tl.program_id(0)
    n_programs = tl.cast(tl.num_programs(0), tl.int64)
    for k in tl.static_range(M):
        dz = gates[k] * (dgates[k] - mean) if SOFTMAX else gates[k] * (1.0 - gates[k]) * dgates[k]
        dz = tl.where(m_t, dz, 0.0)
        slopes = slopes + (scale * rstd * dz,)
        largest = tl.maximum(largest, tl.abs(slopes[k]))
        f += scale * dz * sums[k]
        dscale += dz * sums[k] * rstd
        tl.store(p_program + (2 + k) * n_programs, tl.sum(dz))
    tl.store(p_program, tl.max(largest * largest_unit, 0))
    tl.store(p_program + n_programs, tl.sum(dscale))
    f = f * rstd * rstd * rstd / (M * D)
    for j in tl.static_range(M if MEANS else 0):
        b_mean = gates[j] * dgates[j] - f * tl.load(p_token + 1 + M + j, mask=m_t, other=0.0)
        for k in tl.static_range(M):
            b_mean += slopes[k] * tl.load(p_token + 1 + 2 * M + j * M + k, mask=m_t, other=0.0)
        tl.store(p_mean + (first + o_t) * M + j, b_mean, mask=m_t)
    peak = tl.max(peaks, 1)
    p_factor = p_factors + (first + o_t) * (5 * M)
    for j in tl.static_range(M):
        bound = gates[j] * peak + tl.abs(f) * r_units[j] * tl.sqrt(D + 0.0)
        for k in tl.static_range(M):
            bound += tl.abs(slopes[k]) * tl.load(p_weight_peak + k * M + j)
        # the floor keeps a token without gradient from dividing by zero
        unit = tl.maximum(bound, 1e-30) / GRADIENT_PEAK
        tl.store(p_unit + (first + o_t) * M + j, unit, mask=m_t)
        tl.store(p_factor + j, gates[j] / unit, mask=m_t)
        tl.store(p_factor + M + j, f * r_units[j] / unit, mask=m_t)
        tl.store(p_factor + 2 * M + j, slopes[j], mask=m_t)
        tl.store(p_factor + 3 * M + j, 1.0 / unit, mask=m_t)
        tl.store(p_factor + 4 * M + j, r_units[j], mask=m_t)


@triton.jit
def part(b_x, second, DTYPE: tl.constexpr):
    """x rounded to DTYPE, or where `second` what rounding lost."""
    b_high = b_x.to(DTYPE)
    return tl.where(second, (b_x - b_high.to(tl.float32)).to(DTYPE), b_high)


@triton.jit
def products_unit(p_peak, PARTS: tl.constexpr):
    """The unit of what multiplies r, of which `p_peak` is the largest, so that fp16 holds two PARTS of it."""
    unit = 1.0
    if PARTS == 2:
        unit = tl.maximum(tl.load(p_peak), 1e-30) / 16384.0
    return unit


@triton.jit
def parts_kernel(
    p_factors, p_peak, p_c, p_of_r, P,
    M: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The small operands of the products of `gradient_kernel`, as it takes them.

    Args:
        p_factors: [P, 5 m] of `factors_kernel`, p_peak: the largest of its peaks.
        p_c: [P, WIDTH PARTS PARTS], written: c_k, every part of it as often as W has parts.
        p_of_r: [P, m, 16], written: c_k times the unit of stream j in `products_unit`, every part in columns of 8.
    """
    unit = products_unit(p_peak, PARTS)
    first = tl.program_id(0).to(tl.int64) * BLOCK_T
    o_t = tl.arange(0, BLOCK_T)[:, None]
    m_t = o_t < P - first
    p_factor = p_factors + (first + o_t) * (5 * M)
    o_row = tl.arange(0, WIDTH * PARTS * PARTS)[None, :]
    k = o_row % WIDTH
    b_c = tl.load(p_factor + 2 * M + k, mask=m_t & (k < M), other=0.0)
    if PARTS == 2:
        b_c = part(b_c, o_row // WIDTH % PARTS == 1, tl.bfloat16)
    tl.store(p_c + (first + o_t) * (WIDTH * PARTS * PARTS) + o_row, b_c, mask=m_t)
    o_col = tl.arange(0, 16)[None, :]
    k = o_col % 8
    b_c = tl.load(p_factor + 2 * M + k, mask=m_t & (k < M) & ((PARTS == 2) | (o_col < 8)), other=0.0) / unit
    for j in tl.static_range(M):
        b_of_r = b_c * tl.load(p_factor + 4 * M + j, mask=m_t, other=0.0)
        if PARTS == 2:
            b_of_r = part(b_of_r, o_col >= 8, tl.float16)
        tl.store(p_of_r + ((first + o_t) * M + j) * 16 + o_col, b_of_r, mask=m_t)


@triton.jit
def gradient_kernel(
    p_r, p_dr, p_dh, p_parts, p_factors, p_peak, p_c, p_of_r, p_dweight, P, tokens,
    M: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, DOT: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dr [P, m, D] in its units, which may overwrite r; one partial dW [m, m, D] per program of `tokens` tokens.

    Args:
        p_parts: W [m m, D] in fp32, or with two PARTS as `weight_kernel` wrote them.
        p_factors: of `factors_kernel`; p_peak, p_c, p_of_r: of `parts_kernel`.
        WIDTH: columns that hold m of them, in `DOT` products at least 16 for all pairs of PARTS.
        EVEN: BLOCK_T divides P.
    """
    o_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    begin = tl.program_id(1).to(tl.int64) * tokens
    o_t = tl.arange(0, BLOCK_T)
    # gates' sum over k: every part of c times every part of W
    o_row = tl.arange(0, WIDTH * PARTS * PARTS)
    k_row = o_row % WIDTH
    weight_row = o_row // (WIDTH * PARTS) * (M * M) + k_row * M
    weight = ()
    for j in tl.static_range(M):
        p_w = p_parts + (weight_row + j)[:, None] * D + o_d[None, :]
        weight = weight + (tl.load(p_w, mask=(k_row < M)[:, None] & m_d[None, :], other=0.0),)
    # dW's sum over tokens: every part of what multiplies r, in columns of 8
    o_col = tl.arange(0, 16)
    dweight = ()
    for _ in tl.static_range(M):
        dweight = dweight + (tl.zeros([BLOCK_D, 16], tl.float32),)
    for start in tl.range(0, tl.minimum(tokens, P - begin), BLOCK_T, num_stages=STAGES):
        first = begin + start
        m_t = o_t < (BLOCK_T if EVEN else P - first)
        m_td = m_t[:, None] & m_d[None, :]
        ALL: tl.constexpr = EVEN and D % BLOCK_D == 0
        p_factor = p_factors + first * (5 * M) + o_t * (5 * M)
        b_dh = loaded(p_dh + first * D + (o_t[:, None] * D + o_d[None, :]), m_td, ALL).to(tl.float32)
        N_C: tl.constexpr = WIDTH * PARTS * PARTS
        p_rows = p_c + first * N_C + (o_t[:, None] * N_C + o_row[None, :])
        b_c = loaded(p_rows, m_t[:, None] & (o_row >= 0)[None, :], EVEN)
        updated = ()
        for j in tl.static_range(M):
            o_j = (o_t * M + j)[:, None] * D + o_d[None, :]
            b_r = loaded(p_r + first * (M * D) + o_j, m_td, ALL)
            b_sum = product(b_c, weight[j], tl.zeros([BLOCK_T, BLOCK_D], tl.float32), DOT)
            b_dr = loaded(p_factor + j, m_t, EVEN)[:, None] * b_dh
            b_dr -= loaded(p_factor + M + j, m_t, EVEN)[:, None] * b_r.to(tl.float32)
            b_dr += loaded(p_factor + 3 * M + j, m_t, EVEN)[:, None] * b_sum
            p_rows = p_of_r + first * (M * 16) + ((o_t * M + j)[:, None] * 16 + o_col[None, :])
            b_of_r = loaded(p_rows, m_t[:, None] & (o_col >= 0)[None, :], EVEN)
            updated = updated + (product(tl.trans(b_r), b_of_r, dweight[j], DOT),)
            b_dr = b_dr.to(p_dr.dtype.element_ty)
            if ALL:
                tl.store(p_dr + first * (M * D) + o_j, b_dr)
            else:
                tl.store(p_dr + first * (M * D) + o_j, b_dr, mask=m_td)
        dweight = updated
    unit = products_unit(p_peak, PARTS)
    p_program = p_dweight + tl.program_id(1).to(tl.int64) * M * M * D
    o_k = tl.arange(0, 8)
    for j in tl.static_range(M):
        b_sum = tl.sum(tl.reshape(dweight[j], [BLOCK_D, 2, 8]), 1) * unit
        p_row = p_program + (o_k * M + j)[None, :] * D + o_d[:, None]
        tl.store(p_row, b_sum, mask=(o_k < M)[None, :] & m_d[:, None])


@triton.jit
def loaded(p_values, mask, EVEN: tl.constexpr):
    """A tile, with EVEN whole."""
    if EVEN:
        out = tl.load(p_values)
    else:
        out = tl.load(p_values, mask=mask, other=0.0)
    return out
