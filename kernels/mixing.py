# ruff: noqa: RUF005  (Triton compiles `+` of tuples, not unpacking)
"""Triton kernel of the mix: the gated sum of the streams that a read retrieved.

    z_k = scale rstd S_k + bias_k      S_k = sum_j W_kj . r_j      rstd over all m D values      h = sum_j gate_j(z) r_j

A program owns whole tokens and holds their streams in registers from the one time it reads them. W, of which every
program reads all, is what L1 should keep. Channels are tiles of TILE, a power of two, and a rest of TAIL. r is stored
times a scale per token and stream that keeps it in range of fp16.
"""

import triton
import triton.language as tl

from kernels.narrow import power_of_two
from kernels.tiles import multiply, multiply_add, zeros

HEADROOM = tl.constexpr(0.25)  # of stored streams, so that squares and their sums stay in range of fp16


@triton.jit
def gates_of(z, M: tl.constexpr, SOFTMAX: tl.constexpr):
    """The gates of M logit values."""
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
def streams_of(p_r, first, o_d, n_tokens, M: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr):
    """Streams of TOKENS tokens, of which n_tokens exist, at the channels o_d: TOKENS M row tiles as stored."""
    stored = ()
    for i in tl.static_range(TOKENS):
        mask = o_d < tl.where(i < n_tokens, D, 0)
        for j in tl.static_range(M):
            # this is their last use: W is what L1 should keep
            p_row = p_r + (first + i) * (M * D) + j * D
            stored = stored + (tl.load(p_row + o_d, mask=mask, other=0.0, eviction_policy="evict_first"),)
    return stored


@triton.jit
def in_fp32(rows, units, COUNT: tl.constexpr):
    """COUNT row tiles times their units."""
    raised = ()
    for i in tl.static_range(COUNT):
        raised = raised + (rows[i].to(tl.float32) * units[i],)
    return raised


@triton.jit
def added_gate_sums(parts, rows, p_weight, o_d, M: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr):
    """`parts` plus what these channels add to the squares and the M sums S_k: M + 1 row tiles per token."""
    out = ()
    for i in tl.static_range(TOKENS):
        b_square = parts[i] + rows[i * M] * rows[i * M]
        for j in tl.static_range(1, M):
            b_square += rows[i * M + j] * rows[i * M + j]
        out = out + (b_square,)
    for k in tl.static_range(M):
        sums = ()
        for i in tl.static_range(TOKENS):
            sums = sums + (parts[(k + 1) * TOKENS + i],)
        for j in tl.static_range(M):
            b_w = tl.load(p_weight + (k * M + j) * D + o_d, mask=o_d < D, other=0.0, eviction_policy="evict_last")
            updated = ()
            for i in tl.static_range(TOKENS):
                updated = updated + (sums[i] + rows[i * M + j] * b_w,)
            sums = updated
        out = out + sums
    return out


@triton.jit
def folded(tiles, COUNT: tl.constexpr, BLOCK_D: tl.constexpr, LANES: tl.constexpr):
    """COUNT row tiles summed over runs of neighbouring channels, which one thread holds anyway: vectors [LANES]."""
    out = ()
    for i in tl.static_range(COUNT):
        out = out + (tl.sum(tl.reshape(tiles[i].to(tl.float32), [LANES, BLOCK_D // LANES]), 1),)
    return out


@triton.jit
def totals(parts, COUNT: tl.constexpr):
    """Sums over lanes of COUNT vectors, four at a time: one exchange between warps instead of four."""
    out = ()
    for i in tl.static_range(0, COUNT - COUNT % 4, 4):
        b_four = tl.join(tl.join(parts[i], parts[i + 1]), tl.join(parts[i + 2], parts[i + 3]))
        b_left, b_right = tl.split(tl.sum(b_four, 0))
        first, second = tl.split(b_left)
        third, fourth = tl.split(b_right)
        out = out + (first, second, third, fourth)
    for i in tl.static_range(COUNT - COUNT % 4, COUNT):
        out = out + (tl.sum(parts[i], 0),)
    return out


@triton.jit
def store_mixed(
    rows, gates, p_out, first, o_d, n_tokens, M: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """Writes the channels o_d of h for TOKENS tokens and their gates."""
    for i in tl.static_range(TOKENS):
        b_h = gates[i * M] * rows[i * M]
        for j in tl.static_range(1, M):
            b_h += gates[i * M + j] * rows[i * M + j]
        mask = o_d < tl.where(i < n_tokens, D, 0)
        tl.store(p_out + (first + i) * D + o_d, b_h.to(p_out.dtype.element_ty), mask=mask)


@triton.jit
def mix_kernel(
    p_r, p_r_scale, p_weight, p_scale, p_bias, p_out, p_statistics, P, eps,
    M: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, TAIL: tl.constexpr, LANES: tl.constexpr,
    TOKENS: tl.constexpr, SOFTMAX: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """h [P, D] of r [P, m, D], and rstd and S [P, 1 + m] for the backward pass; MEAN: only the mean of the streams."""
    first = tl.program_id(0).to(tl.int64) * TOKENS
    n_tokens = tl.minimum(P - first, TOKENS)
    N_TILES: tl.constexpr = D // TILE
    stored = ()
    for c in tl.static_range(N_TILES):
        stored = stored + (streams_of(p_r, first, c * TILE + tl.arange(0, TILE), n_tokens, M, D, TOKENS),)
    if TAIL > 0:
        o_tail = N_TILES * TILE + tl.arange(0, TAIL)
        stored_tail = streams_of(p_r, first, o_tail, n_tokens, M, D, TOKENS)
    units = ()
    for i in tl.static_range(TOKENS):
        for j in tl.static_range(M):
            units = units + (1.0 / tl.load(p_r_scale + (first + i) * M + j, mask=i < n_tokens, other=1.0),)
    rows = ()
    for c in tl.static_range(N_TILES):
        rows = rows + (in_fp32(stored[c], units, TOKENS * M),)
    if TAIL > 0:
        tail = in_fp32(stored_tail, units, TOKENS * M)
    gates = ()
    if MEAN:
        for _ in tl.static_range(TOKENS * M):
            gates = gates + (1.0 / M,)
    else:
        COUNT: tl.constexpr = (M + 1) * TOKENS
        parts = zeros(COUNT, TILE, tl.float32)
        for c in tl.static_range(N_TILES):
            parts = added_gate_sums(parts, rows[c], p_weight, c * TILE + tl.arange(0, TILE), M, D, TOKENS)
        parts = folded(parts, COUNT, TILE, LANES)
        if TAIL > 0:
            of_tail = added_gate_sums(zeros(COUNT, TAIL, tl.float32), tail, p_weight, o_tail, M, D, TOKENS)
            of_tail = folded(of_tail, COUNT, TAIL, LANES)
            together = ()
            for i in tl.static_range(COUNT):
                together = together + (parts[i] + of_tail[i],)
            parts = together
        sums = totals(parts, COUNT)
        scale = tl.load(p_scale)
        for i in tl.static_range(TOKENS):
            rstd = tl.rsqrt(sums[i] / (M * D) + eps)
            p_token = p_statistics + (first + i) * (M + 1)
            tl.store(p_token, rstd, mask=i < n_tokens)
            z = ()
            for k in tl.static_range(M):
                b_sum = sums[(k + 1) * TOKENS + i]
                tl.store(p_token + k + 1, b_sum, mask=i < n_tokens)
                z = z + (scale * rstd * b_sum + tl.load(p_bias + k),)
            gates = gates + gates_of(z, M, SOFTMAX)
    for c in tl.static_range(N_TILES):
        store_mixed(rows[c], gates, p_out, first, c * TILE + tl.arange(0, TILE), n_tokens, M, D, TOKENS)
    if TAIL > 0:
        store_mixed(tail, gates, p_out, first, o_tail, n_tokens, M, D, TOKENS)


@triton.jit
def narrow_weight_kernel(p_weight, p_narrow, p_unit, ROWS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """W [ROWS, D] in fp16, a row per program, and the power of two that all of it was divided by."""
    b_peak = tl.full([BLOCK], 1e-30, tl.float32)
    for first in range(0, ROWS * D, BLOCK):
        o = first + tl.arange(0, BLOCK)
        b_peak = tl.maximum(b_peak, tl.abs(tl.load(p_weight + o, mask=o < ROWS * D, other=0.0)))
    unit = power_of_two(tl.max(b_peak, 0))
    if tl.program_id(0) == 0:
        tl.store(p_unit, unit)
    for first in range(0, D, BLOCK):
        o = first + tl.arange(0, BLOCK)
        at = tl.program_id(0) * D + o
        b_w = tl.load(p_weight + at, mask=o < D, other=0.0) / unit
        tl.store(p_narrow + at, b_w.to(tl.float16), mask=o < D)


@triton.jit
def narrow_streams(p_token, ratios, o_d, M: tl.constexpr, D: tl.constexpr):
    """M row tiles of a token at the channels o_d, in units that all streams share."""
    rows = ()
    for j in tl.static_range(M):
        # this is their last use: W is what L1 should keep
        b_r = tl.load(p_token + j * D + o_d, mask=o_d < D, other=0.0, eviction_policy="evict_first")
        rows = rows + (multiply(ratios[j], b_r),)
    return rows


@triton.jit
def added_narrow_sums(parts, rows, p_weight, o_d, M: tl.constexpr, D: tl.constexpr):
    """`parts` plus the squares of M row tiles and their products with W: M (1 + M) row tiles of fp16.

    A thread adds a few of its channels to each, none of which can leave the range: all squares of a token together are
    at most D HEADROOM^2.
    """
    out = ()
    for j in tl.static_range(M):
        out = out + (multiply_add(rows[j], rows[j], parts[j]),)
    for k in tl.static_range(M):
        for j in tl.static_range(M):
            p_row = p_weight + (k * M + j) * D
            b_w = tl.load(p_row + o_d, mask=o_d < D, other=0.0, eviction_policy="evict_last")
            out = out + (multiply_add(b_w, rows[j], parts[M + k * M + j]),)
    return out


@triton.jit
def store_narrow_mix(rows, gates, unit, p_row, o_d, M: tl.constexpr, D: tl.constexpr):
    """Writes the channels o_d of a token's h."""
    b_h = multiply(gates[0].to(tl.float16), rows[0])
    for j in tl.static_range(1, M):
        b_h = multiply_add(gates[j].to(tl.float16), rows[j], b_h)
    tl.store(p_row + o_d, (b_h.to(tl.float32) * unit).to(p_row.dtype.element_ty), mask=o_d < D)


@triton.jit
def narrow_mix_kernel(
    p_r, p_r_scale, p_weight, p_weight_unit, p_scale, p_bias, p_out, p_statistics, eps,
    M: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, TAIL: tl.constexpr, LANES: tl.constexpr,
    SOFTMAX: tl.constexpr,
):  # fmt: skip
    """`mix_kernel` for streams and W in fp16, a token per program.

    The streams are brought to one unit, which leaves each its 11 bits unless it is 2^-14 of the largest; S_k is good
    to 4e-4, as r is.

    Args:
        p_statistics: [P, (1 + m)^2], written: rstd, the m sums S_k, and what the mean of a read's weights' gradients
            takes: |r_j|^2 of the streams, and the products W_kj . r_j, j by j.
    """
    N_TILES: tl.constexpr = D // TILE
    token = tl.program_id(0).to(tl.int64)
    units = ()
    unit = 0.0
    for j in tl.static_range(M):
        units = units + (1.0 / tl.load(p_r_scale + token * M + j),)
        unit = tl.maximum(unit, units[j])
    ratios = ()
    for j in tl.static_range(M):
        ratios = ratios + ((units[j] / unit * HEADROOM).to(tl.float16),)
    unit /= HEADROOM
    tiles = ()
    for c in tl.static_range(N_TILES):
        tiles = tiles + (narrow_streams(p_r + token * M * D, ratios, c * TILE + tl.arange(0, TILE), M, D),)
    if TAIL > 0:
        o_tail = N_TILES * TILE + tl.arange(0, TAIL)
        tail = narrow_streams(p_r + token * M * D, ratios, o_tail, M, D)
    COUNT: tl.constexpr = M + M * M
    parts = zeros(COUNT, TILE, tl.float16)
    for c in tl.static_range(N_TILES):
        parts = added_narrow_sums(parts, tiles[c], p_weight, c * TILE + tl.arange(0, TILE), M, D)
    parts = folded(parts, COUNT, TILE, LANES)
    if TAIL > 0:
        of_tail = added_narrow_sums(zeros(COUNT, TAIL, tl.float16), tail, p_weight, o_tail, M, D)
        of_tail = folded(of_tail, COUNT, TAIL, LANES)
        together = ()
        for i in tl.static_range(COUNT):
            together = together + (parts[i] + of_tail[i],)
        parts = together
    sums = totals(parts, COUNT)
    p_token = p_statistics + token * ((1 + M) * (1 + M))
    square = 0.0
    for j in tl.static_range(M):
        b_square = sums[j] * (unit * unit)
        square += b_square
        tl.store(p_token + 1 + M + j, b_square)
    rstd = tl.rsqrt(square / (M * D) + eps)
    tl.store(p_token, rstd)
    scale = tl.load(p_scale)
    sum_unit = unit * tl.load(p_weight_unit)
    z = ()
    for k in tl.static_range(M):
        b_sum = 0.0
        for j in tl.static_range(M):
            b_product = sums[M + k * M + j] * sum_unit
            b_sum += b_product
            tl.store(p_token + 1 + 2 * M + j * M + k, b_product)
        tl.store(p_token + k + 1, b_sum)
        z = z + (scale * rstd * b_sum + tl.load(p_bias + k),)
    gates = gates_of(z, M, SOFTMAX)
    for c in tl.static_range(N_TILES):
        store_narrow_mix(tiles[c], gates, unit, p_out + token * D, c * TILE + tl.arange(0, TILE), M, D)
    if TAIL > 0:
        store_narrow_mix(tail, gates, unit, p_out + token * D, o_tail, M, D)
