# ruff: noqa: RUF005  (Triton compiles `+` of tuples, not unpacking)
"""Triton kernels of the Hyper-Connections read: the coefficients of a token, the weighted sum of its lanes, and back.

    hc       value = static + gate tanh(raw rstd_j)                        one norm per lane j
    static   value = static
    mhc      z = gate raw rstd + static      pre = sigmoid(z) + shift      post = 2 sigmoid(z)      res = Sinkhorn(z)
    head     pre of mhc alone

`projected` holds the products raw = W x in front of the norm, and the sum of squares in a last column: [P, COLS + 1]
with COLS = n n + 2 n (pre, post, res by rows), or n for the head; for hc [P, n, n + 3], lane j's pre, post and column
of res. P tokens, n lanes, N the next power of two; coefficients live in tiles [BLOCK_T, N] and [BLOCK_T, N, N], so that
Sinkhorn's sums cost shuffles and its whole history stays in registers.
"""

import triton
import triton.language as tl

from kernels.hyper_sinkhorn import sinkhorn_gradient, sinkhorn_history


@triton.constexpr_function
def n_columns(KIND, n):
    """Products per row of `projected`."""
    return {"hc": n + 2, "static": 0, "mhc": n * n + 2 * n, "head": n}[str(KIND)]


@triton.constexpr_function
def norm_width(KIND, n, D):
    """Values under one norm."""
    return D if KIND == "hc" else n * D


@triton.jit
def tanh(x):
    """Exact to fp32 rounding near zero too, where the quotient cancels."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 - square * (17.0 / 315))))
    small = tl.exp(-2.0 * tl.abs(x))
    quotient = (1.0 - small) / (1.0 + small)
    return tl.where(square < 0.01, series, tl.where(x < 0, -quotient, quotient))


@triton.jit
def logistic(x):
    return 1.0 / (1.0 + tl.exp(-x))


# ------------------------------------------------------------------------------------------------- addresses


@triton.jit
def row_of(o_t, o_j, KIND: tl.constexpr, n: tl.constexpr):
    """The row of `projected` that holds what concerns lane j of a token."""
    if KIND == "hc":
        row = o_t * n + o_j
    else:
        row = o_t + 0 * o_j
    return row


@triton.jit
def column_of_pre(o_j, KIND: tl.constexpr):
    if KIND == "hc":
        column = 0 * o_j
    else:
        column = o_j
    return column


@triton.jit
def column_of_post(o_j, KIND: tl.constexpr, n: tl.constexpr):
    if KIND == "hc":
        column = 0 * o_j + 1
    else:
        column = n + o_j
    return column


@triton.jit
def entries(n: tl.constexpr, N: tl.constexpr):
    """Row, column and offset [1, N N] of the entries of an n by n matrix in a tile of N by N, and which exist."""
    o_ij = tl.arange(0, N * N)[None, :]
    o_i = o_ij // N
    o_j = o_ij % N
    if n != N:
        # where they are equal, the compiler has to see that entries lie side by side
        o_ij = o_i * n + o_j
    return o_i, o_j, o_ij, (o_i < n) & (o_j < n)


@triton.jit
def column_of_res(o_i, o_ij, KIND: tl.constexpr, n: tl.constexpr):
    if KIND == "hc":
        column = 2 + o_i
    else:
        column = 2 * n + o_ij
    return column


@triton.jit
def rstd_at(p_projected, row, mask, eps, KIND: tl.constexpr, n: tl.constexpr, D: tl.constexpr):
    """rstd of rows of `projected`, in their shape."""
    COLS: tl.constexpr = n_columns(KIND, n)
    if KIND == "static":
        squares = 1.0
    else:
        squares = tl.load(p_projected + row * (COLS + 1) + COLS, mask=mask, other=1.0)
    return tl.rsqrt(squares / norm_width(KIND, n, D) + eps)


@triton.jit
def rstd_of(p_projected, o_t, m_t, o_j, mask, eps, KIND: tl.constexpr, n: tl.constexpr, D: tl.constexpr):
    """rstd [BLOCK_T, 1], or for hc a tile of what o_j says."""
    if KIND == "hc":
        rstd = rstd_at(p_projected, row_of(o_t[:, None], o_j, KIND, n), mask, eps, KIND, n, D)
    else:
        # loaded as a vector: as a tile it would bend the layout of everything that meets it
        rstd = rstd_at(p_projected, o_t, m_t, eps, KIND, n, D)
        if KIND != "static":
            rstd = rstd[:, None]
    return rstd


@triton.jit
def gate_of(p_gates, WHICH: tl.constexpr, KIND: tl.constexpr):
    """The factor of pre (0), post (1) or res (2); hc's res shares that of pre."""
    if KIND == "static":
        gate = 1.0
    elif KIND == "hc" and WHICH == 2:
        gate = tl.load(p_gates)
    else:
        gate = tl.load(p_gates + WHICH)
    return gate


@triton.jit
def flag(b_flag, BLOCK_T: tl.constexpr, N: tl.constexpr):
    """[1, N N] to [BLOCK_T, N, N]."""
    return tl.reshape(tl.broadcast_to(b_flag, [BLOCK_T, N * N]), [BLOCK_T, N, N])


# --------------------------------------------------------------------------------------------------- forward


@triton.jit
def value_of(p_projected, p_static, gate, rstd, row, column, o_static, mask, KIND: tl.constexpr, n: tl.constexpr):
    """A coefficient before its sigmoid or Sinkhorn, and the raw product it came from."""
    static = tl.load(p_static + o_static, mask=mask, other=0.0)
    if KIND == "static":
        raw = static
        value = static
    else:
        raw = tl.load(p_projected + row * (n_columns(KIND, n) + 1) + column, mask=mask, other=0.0)
        if KIND == "hc":
            value = static + gate * tanh(raw * rstd)
        else:
            value = static + gate * raw * rstd
    return value, raw


@triton.jit
def read_kernel(
    p_x, p_projected, p_gates, p_pre0, p_post0, p_res0, p_out, p_post, p_res, P, eps, shift,
    KIND: tl.constexpr, ROUNDS: tl.constexpr, n: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The sublayer's input sum_j pre_j x_j [P, D] of lanes [P, n, D], and post [P, n], res [P, n, n] for its write."""
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    m_t = o_t < P
    pre = ()
    gate = gate_of(p_gates, 0, KIND)
    for j in tl.static_range(n):
        o_j = tl.full([BLOCK_T], j, tl.int32)
        row = row_of(o_t, o_j, KIND, n)
        rstd = rstd_at(p_projected, row, m_t, eps, KIND, n, D)
        value, _ = value_of(p_projected, p_pre0, gate, rstd, row, column_of_pre(o_j, KIND), o_j, m_t, KIND, n)
        if KIND == "mhc" or KIND == "head":
            value = logistic(value) + shift
        pre = pre + (value,)
    for d in range(0, D, BLOCK_D):
        o_d = d + tl.arange(0, BLOCK_D)
        m_td = m_t[:, None] & (o_d < D)[None, :]
        b_h = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        for j in tl.static_range(n):
            b_x = tl.load(p_x + (o_t * n + j)[:, None] * D + o_d[None, :], mask=m_td, other=0.0)
            b_h += pre[j][:, None] * b_x.to(tl.float32)
        tl.store(p_out + o_t[:, None] * D + o_d[None, :], b_h.to(p_out.dtype.element_ty), mask=m_td)
    if KIND != "head":
        o_t2, m_t2 = o_t[:, None], m_t[:, None]
        o_j = tl.arange(0, N)[None, :]
        mask = m_t2 & (o_j < n)
        rstd = rstd_of(p_projected, o_t, m_t, o_j, mask, eps, KIND, n, D)
        value, _ = value_of(
            p_projected, p_post0, gate_of(p_gates, 1, KIND), rstd, row_of(o_t2, o_j, KIND, n),
            column_of_post(o_j, KIND, n), o_j, mask, KIND, n,
        )  # fmt: skip
        if KIND == "mhc":
            value = 2.0 * logistic(value)
        tl.store(p_post + o_t2 * n + o_j, value, mask=mask)
        # flat until Sinkhorn: its sums then stay within a warp
        o_i, o_j, o_ij, exists = entries(n, N)
        mask = m_t2 & exists
        rstd = rstd_of(p_projected, o_t, m_t, o_j, mask, eps, KIND, n, D)
        value, _ = value_of(
            p_projected, p_res0, gate_of(p_gates, 2, KIND), rstd, row_of(o_t2, o_j, KIND, n),
            column_of_res(o_i, o_ij, KIND, n), o_ij, mask, KIND, n,
        )  # fmt: skip
        if KIND == "mhc":
            history = sinkhorn_history(
                tl.reshape(value, [BLOCK_T, N, N]), flag(exists, BLOCK_T, N),
                flag(tl.where(o_i < n, 0.0, 1.0), BLOCK_T, N), flag(tl.where(o_j < n, 0.0, 1.0), BLOCK_T, N),
                shift, N != n, ROUNDS,
            )  # fmt: skip
            value = tl.reshape(history[2 * ROUNDS - 1], [BLOCK_T, N * N])
        tl.store(p_res + o_t2 * n * n + o_ij, value, mask=mask)


# -------------------------------------------------------------------------------------------------- backward


@triton.jit
def slope_of(dvalue, raw, rstd, gate, KIND: tl.constexpr):
    """For value = static + gate f(raw rstd): the gate's term, d raw, and the part of d rstd."""
    if KIND == "hc":
        f = tanh(raw * rstd)
        du = gate * dvalue * (1.0 - f * f)
    else:
        f = raw * rstd
        du = gate * dvalue
    return dvalue * f, du * rstd, du * raw


@triton.jit
def coefficients_gradient_kernel(
    p_x, p_dh, p_projected, p_gates, p_pre0, p_post0, p_res0, p_dpost, p_dres,
    p_pre, p_draw, p_bend, p_partial, P, eps, shift,
    KIND: tl.constexpr, ROUNDS: tl.constexpr, n: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """From dh [P, D], dpost [P, n] and dres [P, n, n] to what the gradient of the lanes needs, one pass over the lanes.

        dpre_j = dh . x_j        bend = -(sum draw' raw) rstd^3 / width, for dx = .. + bend x

    Args:
        p_pre: [P, n], written: pre again.
        p_draw: [P, COLS] (hc [P, n, COLS]), written: the gradient of the raw products.
        p_bend: [P] (hc [P, n]), written.
        p_partial: [programs, 2, R], written: sums over a program's tokens for the static part and for the gates.
    """
    COLS: tl.constexpr = n_columns(KIND, n)
    R: tl.constexpr = n if KIND == "head" else n * n + 2 * n
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    m_t = o_t < P
    dots = ()
    for _ in tl.static_range(n):
        dots = dots + (tl.zeros([BLOCK_T, BLOCK_D], tl.float32),)
    for d in range(0, D, BLOCK_D):
        o_d = d + tl.arange(0, BLOCK_D)
        m_td = m_t[:, None] & (o_d < D)[None, :]
        b_dh = tl.load(p_dh + o_t[:, None] * D + o_d[None, :], mask=m_td, other=0.0).to(tl.float32)
        updated = ()
        for j in tl.static_range(n):
            b_x = tl.load(p_x + (o_t * n + j)[:, None] * D + o_d[None, :], mask=m_td, other=0.0)
            updated = updated + (dots[j] + b_dh * b_x.to(tl.float32),)
        dots = updated
    p_static = p_partial + tl.program_id(0).to(tl.int64) * 2 * R
    p_term = p_static + R
    o_t2, m_t2 = o_t[:, None], m_t[:, None]
    o_j = tl.arange(0, N)[None, :]
    mask = m_t2 & (o_j < n)
    mask_j = mask
    dvalue = tl.zeros([BLOCK_T, N], tl.float32)
    for j in tl.static_range(n):
        dvalue = tl.where(o_j == j, tl.sum(dots[j], 1)[:, None], dvalue)

    row = row_of(o_t2, o_j, KIND, n)
    gate = gate_of(p_gates, 0, KIND)
    rstd = rstd_of(p_projected, o_t, m_t, o_j, mask, eps, KIND, n, D)
    value, raw = value_of(p_projected, p_pre0, gate, rstd, row, column_of_pre(o_j, KIND), o_j, mask, KIND, n)
    if KIND == "mhc" or KIND == "head":
        value = logistic(value)
        dvalue = dvalue * value * (1.0 - value)
        value += shift
    tl.store(p_pre + o_t2 * n + o_j, value, mask=mask)
    tl.store(p_static + tl.arange(0, N), tl.sum(dvalue, 0), mask=tl.arange(0, N) < n)
    if KIND != "static":
        term, draw, turn = slope_of(dvalue, raw, rstd, gate, KIND)
        tl.store(p_draw + row * COLS + column_of_pre(o_j, KIND), draw, mask=mask)
        tl.store(p_term + tl.arange(0, N), tl.sum(term, 0), mask=tl.arange(0, N) < n)
        drstd = turn

    if KIND != "head":
        gate = gate_of(p_gates, 1, KIND)
        value, raw = value_of(p_projected, p_post0, gate, rstd, row, column_of_post(o_j, KIND, n), o_j, mask, KIND, n)
        dvalue = tl.load(p_dpost + o_t2 * n + o_j, mask=mask, other=0.0)
        if KIND == "mhc":
            value = logistic(value)
            dvalue = 2.0 * dvalue * value * (1.0 - value)
        tl.store(p_static + n + tl.arange(0, N), tl.sum(dvalue, 0), mask=tl.arange(0, N) < n)
        if KIND != "static":
            term, draw, turn = slope_of(dvalue, raw, rstd, gate, KIND)
            tl.store(p_draw + row * COLS + column_of_post(o_j, KIND, n), draw, mask=mask)
            tl.store(p_term + n + tl.arange(0, N), tl.sum(term, 0), mask=tl.arange(0, N) < n)
            drstd += turn

        gate = gate_of(p_gates, 2, KIND)
        o_i, o_k, o_ik, exists = entries(n, N)
        mask = m_t2 & exists
        row = row_of(o_t2, o_k, KIND, n)
        of_entry = rstd_of(p_projected, o_t, m_t, o_k, mask, eps, KIND, n, D)
        value, raw = value_of(
            p_projected, p_res0, gate, of_entry, row, column_of_res(o_i, o_ik, KIND, n), o_ik, mask, KIND, n
        )
        dvalue = tl.load(p_dres + o_t2 * n * n + o_ik, mask=mask, other=0.0)
        if KIND == "mhc":
            b_exists = flag(exists, BLOCK_T, N)
            pad_i = flag(tl.where(o_i < n, 0.0, 1.0), BLOCK_T, N)
            pad_j = flag(tl.where(o_k < n, 0.0, 1.0), BLOCK_T, N)
            history = sinkhorn_history(
                tl.reshape(value, [BLOCK_T, N, N]), b_exists, pad_i, pad_j, shift, N != n, ROUNDS
            )
            b_d = sinkhorn_gradient(
                history, tl.reshape(dvalue, [BLOCK_T, N, N]), b_exists, pad_i, pad_j, shift, N != n, ROUNDS
            )
            dvalue = tl.reshape(b_d, [BLOCK_T, N * N])
        o_sum = 2 * n + o_ik
        tl.store(p_static + o_sum, tl.sum(dvalue, 0, keep_dims=True), mask=exists)
        if KIND != "static":
            term, draw, turn = slope_of(dvalue, raw, of_entry, gate, KIND)
            tl.store(p_draw + row * COLS + column_of_res(o_i, o_ik, KIND, n), draw, mask=mask)
            tl.store(p_term + o_sum, tl.sum(term, 0, keep_dims=True), mask=exists)
            drstd += tl.sum(tl.reshape(turn, [BLOCK_T, N, N]), 1)

    if KIND != "static":
        drstd = tl.where(mask_j, drstd, 0.0)
        if KIND != "hc":
            drstd = tl.sum(drstd, 1, keep_dims=True)
        bend = -drstd * rstd * rstd * rstd / norm_width(KIND, n, D)
        if KIND == "hc":
            tl.store(p_bend + o_t2 * n + o_j, bend, mask=mask_j)
        else:
            tl.store(p_bend + o_t2, bend, mask=m_t2)


@triton.jit
def coefficient_sums_kernel(
    p_partial, p_static, p_gates, n_programs,
    KIND: tl.constexpr, n: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, ALL: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Sums the partial rows [programs, 2, R] in one fixed order: gradients of the static part [R] and of the gates.

    One program: WIDTH columns of the static part, or all columns, ALL at most, of one gate; SIZE values at a time.
    """
    N_STATIC: tl.constexpr = (R + WIDTH - 1) // WIDTH
    if tl.program_id(0) < N_STATIC:
        o_c = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
        b_sum = column_sums(p_partial, o_c, o_c < R, n_programs, R, SIZE // WIDTH, WIDTH)
        tl.store(p_static + o_c, b_sum, mask=o_c < R)
    elif KIND != "static":
        gate = tl.program_id(0) - N_STATIC
        o_all = tl.arange(0, ALL)
        of_column = tl.where(o_all < n, 0, tl.where(o_all < 2 * n, 1, 0 if KIND == "hc" else 2))
        m_all = (of_column == gate) & (o_all < R)
        tl.store(p_gates + gate, tl.sum(column_sums(p_partial + R, o_all, m_all, n_programs, R, SIZE // ALL, ALL)))


@triton.jit
def column_sums(p_first, o_c, m_c, n_rows, R: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Sums of some columns [WIDTH] over rows that are 2 R apart, ROWS at a time."""
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in range(0, n_rows, ROWS):
        o_r = first + tl.arange(0, ROWS)
        m_rc = (o_r < n_rows)[:, None] & m_c[None, :]
        total += tl.load(p_first + o_r[:, None] * 2 * R + o_c[None, :], mask=m_rc, other=0.0)
    return tl.sum(total, 0)
