# ruff: noqa: RUF005  (Triton compiles `+` of tuples, not unpacking)
"""Triton kernels of the mix: the gated sum of the streams that a read retrieved, and its backward.

    z_k = scale rstd S_k + bias_k      S_k = sum_j W_kj . r_j      rstd over all m D values      h = sum_j gate_j(z) r_j

With c_k = scale rstd dz_k and f = sum_k c_k S_k rstd^2 / (m D):

    dr_j = gate_j dh + sum_k c_k W_kj - f r_j           dW_kj = sum_t c_k r_j

A program owns whole tokens, so it meets every channel twice; the second time the rows come from the cache. r and dr
are stored in units that keep them in range of fp16: r_j in the largest rms of the sources, dr_j in a bound of its size.
"""

import triton
import triton.language as tl


@triton.jit
def inverse_scales(p_scale, o_t, m_t, M: tl.constexpr):
    """What a stored value of each stream counts, M vectors [BLOCK_T]."""
    units = ()
    for j in tl.static_range(M):
        units = units + (1.0 / tl.load(p_scale + o_t * M + j, mask=m_t, other=1.0),)
    return units


@triton.jit
def gates_of(z, M: tl.constexpr, SOFTMAX: tl.constexpr):
    """The gates of M logit vectors [BLOCK_T]."""
    gates = ()
    if SOFTMAX:
        peak = z[0]
        for k in tl.static_range(1, M):
            peak = tl.maximum(peak, z[k])
        total = tl.exp(z[0] - peak)
        for k in tl.static_range(1, M):
            total += tl.exp(z[k] - peak)
        for k in tl.static_range(M):
            gates = gates + (tl.exp(z[k] - peak) / total,)
    else:
        for k in tl.static_range(M):
            gates = gates + (1.0 / (1.0 + tl.exp(-z[k])),)
    return gates


@triton.jit
def mix_kernel(
    p_r, p_r_scale, p_weight, p_scale, p_bias, p_out, p_statistics, P, eps,
    M: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, SOFTMAX: tl.constexpr,
    MEAN: tl.constexpr,
):  # fmt: skip
    """h [P, D] of r [P, m, D], and rstd and S [P, 1 + m] for the backward pass; MEAN: only the mean of the streams."""
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    m_t = o_t < P
    units = inverse_scales(p_r_scale, o_t, m_t, M)
    gates = ()
    if MEAN:
        for _ in tl.static_range(M):
            gates = gates + (tl.full([BLOCK_T], 1.0 / M, tl.float32),)
    else:
        gates = measured_gates(
            p_r, units, p_weight, p_scale, p_bias, p_statistics, o_t, m_t, eps,
            M, D, BLOCK_T, BLOCK_D, SOFTMAX,
        )  # fmt: skip
    for d in range(0, D, BLOCK_D):
        o_d = d + tl.arange(0, BLOCK_D)
        m_td = m_t[:, None] & (o_d < D)[None, :]
        b_h = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        for j in tl.static_range(M):
            b_r = tl.load(p_r + (o_t * M + j)[:, None] * D + o_d[None, :], mask=m_td, other=0.0).to(tl.float32)
            b_h += (gates[j] * units[j])[:, None] * b_r
        tl.store(p_out + o_t[:, None] * D + o_d[None, :], b_h.to(p_out.dtype.element_ty), mask=m_td)


@triton.jit
def measured_gates(
    p_r, units, p_weight, p_scale, p_bias, p_statistics, o_t, m_t, eps,
    M: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """The gates of the tokens o_t, as M vectors [BLOCK_T]; writes their rstd and S."""
    squares = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    sums = ()
    for _ in tl.static_range(M):
        sums = sums + (tl.zeros([BLOCK_T, BLOCK_D], tl.float32),)
    for d in range(0, D, BLOCK_D):
        o_d = d + tl.arange(0, BLOCK_D)
        m_td = m_t[:, None] & (o_d < D)[None, :]
        for j in tl.static_range(M):
            b_r = tl.load(p_r + (o_t * M + j)[:, None] * D + o_d[None, :], mask=m_td, other=0.0).to(tl.float32)
            b_r *= units[j][:, None]
            squares += b_r * b_r
            updated = ()
            for k in tl.static_range(M):
                b_w = tl.load(p_weight + (k * M + j) * D + o_d, mask=o_d < D, other=0.0)
                updated = updated + (sums[k] + b_r * b_w[None, :],)
            sums = updated
    rstd = tl.rsqrt(tl.sum(squares, 1) / (M * D) + eps)
    tl.store(p_statistics + o_t * (M + 1), rstd, mask=m_t)
    scale = tl.load(p_scale)
    z = ()
    for k in tl.static_range(M):
        total = tl.sum(sums[k], 1)
        tl.store(p_statistics + o_t * (M + 1) + k + 1, total, mask=m_t)
        z = z + (scale * rstd * total + tl.load(p_bias + k),)
    return gates_of(z, M, SOFTMAX)


@triton.jit
def mix_factors_kernel(
    p_r, p_r_scale, p_dh, p_statistics, p_weight_peak, p_scale, p_bias, p_factors, p_unit, p_partial, P,
    M: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """Per token the factors of `mix_gradient_kernel` [P, 5 m], the units of dr [P, m], and per program the sums for
    scale and bias [1 + m].

    dr_j is at most gate_j max|dh| + sum_k |c_k| max|W_kj| + |f| sqrt(D) rms_j; in 2^-14 of that it cannot overflow, and
    keeps fp16's full precision down to 2^-28 of it.
    """
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    m_t = o_t < P
    peaks = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    dots = ()
    for _ in tl.static_range(M):
        dots = dots + (tl.zeros([BLOCK_T, BLOCK_D], tl.float32),)
    for d in range(0, D, BLOCK_D):
        o_d = d + tl.arange(0, BLOCK_D)
        m_td = m_t[:, None] & (o_d < D)[None, :]
        b_dh = tl.load(p_dh + o_t[:, None] * D + o_d[None, :], mask=m_td, other=0.0).to(tl.float32)
        peaks = tl.maximum(peaks, tl.abs(b_dh))
        updated = ()
        for j in tl.static_range(M):
            b_r = tl.load(p_r + (o_t * M + j)[:, None] * D + o_d[None, :], mask=m_td, other=0.0).to(tl.float32)
            updated = updated + (dots[j] + b_r * b_dh,)
        dots = updated
    r_units = inverse_scales(p_r_scale, o_t, m_t, M)
    scale = tl.load(p_scale)
    rstd = tl.load(p_statistics + o_t * (M + 1), mask=m_t, other=0.0)
    sums = ()
    z = ()
    for k in tl.static_range(M):
        sums = sums + (tl.load(p_statistics + o_t * (M + 1) + k + 1, mask=m_t, other=0.0),)
        z = z + (scale * rstd * sums[k] + tl.load(p_bias + k),)
    gates = gates_of(z, M, SOFTMAX)
    dgates = ()
    mean = tl.zeros([BLOCK_T], tl.float32)
    for k in tl.static_range(M):
        dgates = dgates + (tl.sum(dots[k], 1) * r_units[k],)
        mean += gates[k] * dgates[k]
    f = tl.zeros([BLOCK_T], tl.float32)
    dscale = tl.zeros([BLOCK_T], tl.float32)
    slopes = ()
    p_program = p_partial + tl.program_id(0).to(tl.int64) * (M + 1)
    for k in tl.static_range(M):
        dz = gates[k] * (dgates[k] - mean) if SOFTMAX else gates[k] * (1.0 - gates[k]) * dgates[k]
        dz = tl.where(m_t, dz, 0.0)
        slopes = slopes + (scale * rstd * dz,)
        f += scale * dz * sums[k]
        dscale += dz * sums[k] * rstd
        tl.store(p_program + 1 + k, tl.sum(dz))
    tl.store(p_program, tl.sum(dscale))
    f = f * rstd * rstd * rstd / (M * D)
    peak = tl.max(peaks, 1)
    p_factor = p_factors + o_t * (5 * M)
    for j in tl.static_range(M):
        bound = gates[j] * peak + tl.abs(f) * r_units[j] * tl.sqrt(D + 0.0)
        for k in tl.static_range(M):
            bound += tl.abs(slopes[k]) * tl.load(p_weight_peak + k * M + j)
        # the floor keeps a token without gradient from dividing by zero
        unit = tl.maximum(bound, 1e-30) / 16384.0
        tl.store(p_unit + o_t * M + j, unit, mask=m_t)
        tl.store(p_factor + j, gates[j] / unit, mask=m_t)
        tl.store(p_factor + M + j, f * r_units[j] / unit, mask=m_t)
        tl.store(p_factor + 2 * M + j, slopes[j], mask=m_t)
        tl.store(p_factor + 3 * M + j, 1.0 / unit, mask=m_t)
        tl.store(p_factor + 4 * M + j, r_units[j], mask=m_t)


@triton.jit
def mix_rows(p_r, p_dh, t_first, o_d, t_end, M: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr):
    """The m streams and dh of BLOCK_T tokens: M + 1 tiles [BLOCK_T, BLOCK_D] in their own dtypes."""
    o_t = t_first + tl.arange(0, BLOCK_T)
    m_td = (o_t < t_end)[:, None] & (o_d < D)[None, :]
    rows = ()
    for j in tl.static_range(M):
        rows = rows + (tl.load(p_r + (o_t * M + j)[:, None] * D + o_d[None, :], mask=m_td, other=0.0),)
    return rows + (tl.load(p_dh + o_t[:, None] * D + o_d[None, :], mask=m_td, other=0.0),)


@triton.jit
def mix_gradient_kernel(
    p_r, p_dr, p_dh, p_weight, p_factors, p_dweight, p_dots, P, tokens,
    M: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, DOTS: tl.constexpr,
):  # fmt: skip
    """dr [P, m, D] in its units, which may overwrite r; one partial dW [m, m, D] per program of `tokens` tokens.

    DOTS: also dr_j . r_j in the units of both, summed over the program's channels: [D / BLOCK_D, P, m].
    """
    o_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    first = tl.program_id(1).to(tl.int64) * tokens
    weight = ()
    dweight = ()
    for kj in tl.static_range(M * M):
        weight = weight + (tl.load(p_weight + kj * D + o_d, mask=m_d, other=0.0),)
        dweight = dweight + (tl.zeros([BLOCK_T, BLOCK_D], tl.float32),)
    upcoming = mix_rows(p_r, p_dh, first, o_d, tl.minimum(first + tokens, P), M, D, BLOCK_T)
    for start in range(0, tokens, BLOCK_T):
        o_t = first + start + tl.arange(0, BLOCK_T)
        m_t = o_t < tl.minimum(first + tokens, P)
        m_td = m_t[:, None] & m_d[None, :]
        rows = upcoming
        # the next tokens' rows are under way before this step's store, which later loads could not pass
        upcoming = mix_rows(p_r, p_dh, first + start + BLOCK_T, o_d, tl.minimum(first + tokens, P), M, D, BLOCK_T)
        b_dh = rows[M].to(tl.float32)
        p_factor = p_factors + o_t * (5 * M)
        slopes = ()
        for k in tl.static_range(M):
            slopes = slopes + (tl.load(p_factor + 2 * M + k, mask=m_t, other=0.0),)
        updated = ()
        for j in tl.static_range(M):
            b_through_gates = slopes[0][:, None] * weight[j][None, :]
            for k in tl.static_range(1, M):
                b_through_gates += slopes[k][:, None] * weight[k * M + j][None, :]
            b_dr = tl.load(p_factor + j, mask=m_t, other=0.0)[:, None] * b_dh
            b_dr -= tl.load(p_factor + M + j, mask=m_t, other=0.0)[:, None] * rows[j].to(tl.float32)
            b_dr += tl.load(p_factor + 3 * M + j, mask=m_t, other=0.0)[:, None] * b_through_gates
            b_stored = b_dr.to(p_dr.dtype.element_ty)
            tl.store(p_dr + (o_t * M + j)[:, None] * D + o_d[None, :], b_stored, mask=m_td)
            if DOTS:
                p_dot = p_dots + (tl.program_id(0).to(tl.int64) * P + o_t) * M + j
                tl.store(p_dot, tl.sum(b_stored.to(tl.float32) * rows[j].to(tl.float32), 1), mask=m_t)
        units = ()
        for j in tl.static_range(M):
            units = units + (tl.load(p_factor + 4 * M + j, mask=m_t, other=0.0),)
        for k in tl.static_range(M):
            for j in tl.static_range(M):
                updated = updated + (dweight[k * M + j] + (slopes[k] * units[j])[:, None] * rows[j].to(tl.float32),)
        dweight = updated
    p_partial = p_dweight + tl.program_id(1).to(tl.int64) * M * M * D
    for kj in tl.static_range(M * M):
        tl.store(p_partial + kj * D + o_d, tl.sum(dweight[kj], 0), mask=m_d)
