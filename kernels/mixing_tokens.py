# ruff: noqa: RUF005  (Triton compiles `+` of tuples, not unpacking)
"""Triton kernel of the backward pass of the mix (`mixing_backward` has the lines) that reads r from memory once.

A program owns consecutive tokens and all channels, eight to a thread, and in registers the sums over its tokens for
dW [m m, D] in fp32: at m = 4 and D = 2112 they fill an SM's, and one program of eight warps runs on each. It takes four
tokens at a time: their dot products with dh, sixteen sums at once (`lane_sums`); their factors, an element to a lane,
which go through memory to where every thread needs them as numbers; then dr and dW, with r from the L1 by now.

Values are fp16, two channels an instruction, dots and dW fp32. Channels beyond a power of two, the tail, are one to a
thread for all four tokens. With so few warps nothing hides a load that is waited for:

- the next group's rows are asked for by one instruction while this one is worked on;
- of loads and stores to memory that might overlap the compiler keeps the order, so stores come last;
- tiles of small values stay in one layout: a change of it takes a barrier.
"""

import triton
import triton.language as tl

from kernels import lane_sums
from kernels.narrow import GRADIENT_PEAK, power_of_two
from kernels.staged import plus_times, times
from kernels.tiles import PAIRED, prefetch_block, prefetch_values, zeros

GROUP = tl.constexpr(4)
BLOCK = tl.constexpr(32)  # words of a token's factors: halves for dr, values for dW and one for dh
N_HALVES = tl.constexpr(24)


@triton.jit
def narrow_rows_kernel(p_weight, p_narrow, p_peak, D: tl.constexpr, BLOCK: tl.constexpr):
    """W [m, D] row by row in fp16 over a power of two of its own, and the largest of each row [m]; D counts a row's."""
    p_row = p_weight + tl.program_id(0) * D
    b_peak = tl.full([BLOCK], 1e-30, tl.float32)
    for first in range(0, D, BLOCK):
        o = first + tl.arange(0, BLOCK)
        b_peak = tl.maximum(b_peak, tl.abs(tl.load(p_row + o, mask=o < D, other=0.0)))
    peak = tl.max(b_peak, 0)
    unit = power_of_two(peak)
    tl.store(p_peak + tl.program_id(0), peak)
    for first in range(0, D, BLOCK):
        o = first + tl.arange(0, BLOCK)
        b_w = tl.load(p_row + o, mask=o < D, other=0.0) / unit
        tl.store(p_narrow + tl.program_id(0) * D + o, b_w.to(tl.float16), mask=o < D)


@triton.jit
def token_rows(p_r, p_dh, token, o_d, M: tl.constexpr, D: tl.constexpr, POLICY: tl.constexpr):
    """The streams of a token and dh, M + 1 row tiles as stored."""
    rows = ()
    for j in tl.static_range(M):
        rows = rows + (tl.load(p_r + token * (M * D) + j * D + o_d, eviction_policy=POLICY),)
    return rows + (tl.load(p_dh + token * D + o_d, eviction_policy=POLICY),)


@triton.jit
def tail_rows(p_r, p_dh, token, o_d, mask, M: tl.constexpr, D: tl.constexpr):
    """As `token_rows`, a channel of a token to a thread, in fp32."""
    rows = ()
    for j in tl.static_range(M):
        rows = rows + (tl.load(p_r + (token * M + j) * D + o_d, mask=mask, other=0.0).to(tl.float32),)
    return rows + (tl.load(p_dh + token * D + o_d, mask=mask, other=0.0).to(tl.float32),)


@triton.jit
def dots_with_dh(rows, M: tl.constexpr, LANES: tl.constexpr):
    """Of row tiles of streams and dh, a thread's part of four products and its largest |dh|: vectors [LANES]."""
    b_dh = tl.reshape(rows[M].to(tl.float32), [LANES, rows[M].shape[0] // LANES])
    products = ()
    for j in tl.static_range(4):
        if j < M:
            b_r = tl.reshape(rows[j].to(tl.float32), [LANES, rows[M].shape[0] // LANES])
            products = products + (tl.sum(b_r * b_dh, 1),)
        else:
            products = products + (tl.zeros([LANES], tl.float32),)
    return products, tl.max(tl.abs(b_dh), 1)


@triton.jit
def with_tail(dots, peaks, tail, s_lane, M: tl.constexpr):
    """`dots` and `peaks` of a group with those of its tail, of token s_lane for each lane."""
    out, largest = (), ()
    for i in tl.static_range(4 * GROUP):
        if i % 4 < M:
            out = out + (dots[i] + tl.where(s_lane == i // 4, tail[i % 4] * tail[M], 0.0),)
        else:
            out = out + (dots[i],)
    for i in tl.static_range(GROUP):
        largest = largest + (tl.maximum(peaks[i], tl.where(s_lane == i, tl.abs(tail[M]), 0.0)),)
    return out, largest


@triton.jit
def largest_of_warps(b_x, LANES: tl.constexpr):
    """The largest of a warp's lanes in each of them, of a vector [LANES] of values that are not negative."""
    if PAIRED:
        bits = b_x.to(tl.int32, bitcast=True)
        bits = tl.inline_asm_elementwise(
            "redux.sync.max.s32 $0, $1, 0xffffffff;", "=r,r", [bits], dtype=tl.int32, is_pure=False, pack=1
        )
        out = bits.to(tl.float32, bitcast=True)
    else:
        b_max = tl.max(tl.reshape(b_x, [LANES // 32, 32]), 1)
        out = tl.reshape(b_max[:, None] + tl.zeros([LANES // 32, 32], tl.float32), [LANES])
    return out


@triton.jit
def load_block(p_first, HALVES: tl.constexpr, COUNT: tl.constexpr):
    """What every thread needs as numbers: HALVES of fp16, as `staged.times` takes them, and COUNT of fp32.

    All are consecutive from an int32 pointer on; HALVES / 2 + COUNT words are whole pieces of 16 bytes, one load each.
    """
    halves, values = (), ()
    if PAIRED:
        words = ()
        for i in tl.static_range((HALVES // 2 + COUNT) // 4):
            w0, w1, w2, w3 = tl.inline_asm_elementwise(
                "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", [p_first + 4 * i],
                dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
            )  # fmt: skip
            words = words + (w0, w1, w2, w3)
        for i in tl.static_range(HALVES // 2):
            halves = halves + (words[i],)
        for i in tl.static_range(COUNT):
            values = values + (words[HALVES // 2 + i].to(tl.float32, bitcast=True),)
    else:
        for i in tl.static_range(HALVES):
            halves = halves + (tl.load(p_first.to(tl.pointer_type(tl.float16)) + i),)
        for i in tl.static_range(COUNT):
            values = values + (tl.load(p_first.to(tl.pointer_type(tl.float32)) + HALVES // 2 + i),)
    return halves, values


@triton.jit
def prepared(
    p_sums, p_statistics, p_r_scale, bias_k, bias_j, weight_peak, p_words, p_unit, p_mean, first, end, scale,
    M: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """Writes what `applied` takes of a group of tokens; gives dz_k and dz_k S_k rstd [GROUP, 16], zero unless j = 0.

    Element e of a row is stream k = e / 4 of the gates, stream j = e % 4 of r.
    """
    o_t = tl.arange(0, GROUP)[:, None]
    e = tl.arange(0, 16)[None, :]
    k, j = e // 4, e % 4
    token = first + o_t
    is_token = token < end
    has_k, has_j = is_token & (k < M), is_token & (j < M)
    once = (j == 0) & (k < M)
    p_token = p_statistics + token * ((1 + M) * (1 + M))
    rstd = tl.load(p_token, mask=is_token, other=0.0)
    s_k = tl.load(p_token + 1 + k, mask=has_k, other=0.0)
    s_j = tl.load(p_token + 1 + j, mask=has_j, other=0.0)
    u_k = 1.0 / tl.load(p_r_scale + token * M + k, mask=has_k, other=1.0)
    u_j = 1.0 / tl.load(p_r_scale + token * M + j, mask=has_j, other=1.0)
    dgate_k = tl.load(p_sums + 4 * o_t + k)
    dgate_j = tl.load(p_sums + 4 * o_t + j)
    peak = tl.load(p_sums + LANES + o_t)
    for warp in tl.static_range(1, LANES // 32):
        dgate_k += tl.load(p_sums + warp * 32 + 4 * o_t + k)
        dgate_j += tl.load(p_sums + warp * 32 + 4 * o_t + j)
        peak = tl.maximum(peak, tl.load(p_sums + LANES + warp * 32 + o_t))
    dgate_k, dgate_j = dgate_k * u_k, dgate_j * u_j
    z_k, z_j = scale * rstd * s_k + bias_k, scale * rstd * s_j + bias_j
    if SOFTMAX:
        top = tl.max(tl.where(once, z_k, -float("inf")), 1)[:, None]
        total = tl.sum(tl.where(once, tl.exp(z_k - top), 0.0), 1)[:, None]
        gate_k, gate_j = tl.exp(z_k - top) / total, tl.exp(z_j - top) / total
        dz_k = gate_k * (dgate_k - tl.sum(tl.where(once, gate_k * dgate_k, 0.0), 1)[:, None])
    else:
        gate_k, gate_j = 1.0 / (1.0 + tl.exp(-z_k)), 1.0 / (1.0 + tl.exp(-z_j))
        dz_k = gate_k * (1.0 - gate_k) * dgate_k
    dz_k = tl.where(has_k, dz_k, 0.0)
    slope_k = scale * rstd * dz_k
    of_sums = tl.sum(tl.where(once, dz_k * s_k, 0.0), 1)[:, None]
    bound_of_weight = tl.sum(tl.where(once, tl.abs(slope_k) * weight_peak, 0.0), 1)[:, None]
    f = scale * of_sums * rstd * rstd * rstd / (M * D)
    bound = gate_j * peak + tl.abs(f) * u_j * tl.sqrt(D + 0.0) + bound_of_weight
    unit = tl.maximum(bound, 1e-34) / GRADIENT_PEAK  # the floor keeps a token without gradient from dividing by zero
    inverse = 1.0 / unit
    dh_unit = power_of_two(tl.maximum(peak, 1e-30))
    of_j = has_j & (k == 0)
    tl.store(p_unit + token * M + j, unit, mask=of_j)
    p_block = p_words + o_t * BLOCK
    p_half = p_block.to(tl.pointer_type(tl.float16))
    tl.store(p_half + e, (slope_k * power_of_two(weight_peak) * inverse).to(tl.float16))
    tl.store(p_half + 16 + j, (-f * u_j * inverse).to(tl.float16), mask=k == 0)
    tl.store(p_half + 20 + j, tl.minimum(gate_j * inverse * dh_unit, 6e4).to(tl.float16), mask=k == 0)
    p_value = p_block.to(tl.pointer_type(tl.float32)) + N_HALVES // 2
    tl.store(p_value + e, slope_k * u_j)
    tl.store(p_value + 16 + e, 1.0 / dh_unit, mask=e == 0)
    products = tl.load(p_token + 1 + 2 * M + j * M + k, mask=has_k & has_j, other=0.0)
    squares = tl.load(p_token + 1 + M + j, mask=has_j, other=0.0)
    b_mean = slope_k * products + tl.where(k == 0, gate_j * dgate_j - f * squares, 0.0)
    b_mean = tl.sum(tl.reshape(b_mean, [GROUP, 4, 4]), 1)  # taken back to the tile that it came from, in its layout
    b_mean = tl.reshape(tl.broadcast_to(b_mean[:, None, :], [GROUP, 4, 4]), [GROUP, 16])
    tl.store(p_mean + token * M + j, b_mean, mask=of_j)
    return tl.where(once, dz_k, 0.0), tl.where(once, dz_k * s_k * rstd, 0.0)


@triton.jit
def applied(rows, dweight, halves, values, p_weight, p_dr, o_d, M: tl.constexpr, D: tl.constexpr):
    """Writes dr of row tiles of a token; `dweight` with their part added."""
    b_dh = (rows[M].to(tl.float32) * values[16]).to(tl.float16)
    drs = ()
    for j in tl.static_range(M):
        b_dr = times(halves, j, tl.load(p_weight + j * D + o_d, eviction_policy="evict_last"))
        for k in tl.static_range(1, M):
            b_w = tl.load(p_weight + (k * M + j) * D + o_d, eviction_policy="evict_last")
            b_dr = plus_times(b_dr, halves, 4 * k + j, b_w)
        b_dr = plus_times(b_dr, halves, 16 + j, rows[j])
        drs = drs + (plus_times(b_dr, halves, 20 + j, b_dh),)
    for j in tl.static_range(M):
        tl.store(p_dr + j * D + o_d, drs[j])
    out = ()
    for k in tl.static_range(M):
        for j in tl.static_range(M):
            out = out + (tl.fma(rows[j].to(tl.float32), values[4 * k + j], dweight[k * M + j]),)
    return out


@triton.jit
def applied_tail(
    tail, dweight, p_words, p_weight, p_dr, token, o_d, s_lane, mask, M: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """As `applied`, of a group's tail: dr of channel o_d of a token to a thread."""
    p_block = p_words + s_lane * BLOCK
    p_half = p_block.to(tl.pointer_type(tl.float16))
    p_value = p_block.to(tl.pointer_type(tl.float32)) + N_HALVES // 2
    b_dh = tail[M] * tl.load(p_value + 16)
    drs = ()
    for j in tl.static_range(M):
        b_dr = tl.load(p_half + 20 + j).to(tl.float32) * b_dh + tl.load(p_half + 16 + j).to(tl.float32) * tail[j]
        for k in tl.static_range(M):
            b_w = tl.load(p_weight + (k * M + j) * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)
            b_dr += tl.load(p_half + 4 * k + j).to(tl.float32) * b_w
        drs = drs + (b_dr.to(tl.float16),)
    out = ()
    for k in tl.static_range(M):
        for j in tl.static_range(M):
            out = out + (tl.fma(tail[j], tl.load(p_value + 4 * k + j), dweight[k * M + j]),)
    for j in tl.static_range(M):
        tl.store(p_dr + (token * M + j) * D + o_d, drs[j], mask=mask)
    return out


@triton.jit
def backward_kernel(
    p_r, p_dr, p_r_scale, p_dh, p_statistics, p_weight, p_weight_peak, p_scale, p_bias, p_sums, p_unit, p_mean, p_words,
    p_dweight, p_partial, P, tokens,
    M: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, HAS_TAIL: tl.constexpr,
    SOFTMAX: tl.constexpr,
):  # fmt: skip
    """dr [P, m, D] in units [P, m] of a bound of its size, which may overwrite r; dr . r [P, m]; and per program of
    `tokens` tokens the gradients of the mixer: dW [m m, D] and [1 + m] of scale and bias. m <= 4.

    Args:
        p_statistics: [P, (1 + m)^2] of `mixing.narrow_mix_kernel`.
        p_weight, p_weight_peak: of `narrow_rows_kernel`.
        p_sums [programs, 2 LANES], p_words [programs, GROUP BLOCK]: scratch.
        HAS_TAIL: there are up to LANES / GROUP channels beyond TILE = 8 LANES.
    """
    W: tl.constexpr = LANES // GROUP
    begin = tl.program_id(0).to(tl.int64) * tokens
    end = tl.minimum(P, begin + tokens)
    p_sums += tl.program_id(0) * (2 * LANES)
    p_words += tl.program_id(0) * (GROUP * BLOCK)
    o_d = tl.arange(0, TILE)
    o_lane = tl.arange(0, LANES)
    s_lane, o_tail = o_lane // W, TILE + o_lane % W
    scale = tl.load(p_scale)
    e = tl.arange(0, 16)[None, :]
    bias_k = tl.load(p_bias + e // 4, mask=e // 4 < M, other=0.0)
    bias_j = tl.load(p_bias + e % 4, mask=e % 4 < M, other=0.0)
    weight_peak = tl.load(p_weight_peak + e // 4, mask=e // 4 < M, other=1.0)
    dweight = zeros(M * M, TILE, tl.float32)
    dweight_tail = zeros(M * M if HAS_TAIL else 0, LANES, tl.float32)
    dbias = tl.zeros([GROUP, 16], tl.float32)
    dscale = tl.zeros([GROUP, 16], tl.float32)
    for first in range(begin, end, GROUP):
        of_lane = first + s_lane
        in_tail = (of_lane < end) & (o_tail < D)
        # asked for now, needed in the next round
        of_next = tl.minimum(first + GROUP, end)
        n_next = (tl.minimum(of_next + GROUP, end) - of_next).to(tl.int32)
        prefetch_block(p_r + of_next * (M * D), n_next * (2 * M * D))
        prefetch_block(p_dh + of_next * D, n_next * (2 * D))
        if HAS_TAIL:
            tail = tail_rows(p_r, p_dh, of_lane, o_tail, in_tail, M, D)
        dots, peaks = (), ()
        following = token_rows(p_r, p_dh, first, o_d, M, D, "")
        for i in tl.static_range(GROUP):
            rows = following
            if i + 1 < GROUP:
                following = token_rows(p_r, p_dh, tl.minimum(first + i + 1, end - 1), o_d, M, D, "")
            products, b_peak = dots_with_dh(rows, M, LANES)
            dots, peaks = dots + products, peaks + (b_peak,)
        if HAS_TAIL:
            dots, peaks = with_tail(dots, peaks, tail, s_lane, M)
        tl.store(p_sums + o_lane, lane_sums.of_warps(dots, LANES))
        largest = largest_of_warps(peaks[0], LANES)
        for i in tl.static_range(1, GROUP):
            largest = tl.where(o_lane % GROUP == i, largest_of_warps(peaks[i], LANES), largest)
        tl.store(p_sums + LANES + o_lane, largest)
        N_STATISTICS: tl.constexpr = (1 + M) * (1 + M)
        prefetch_values(p_statistics + of_next * N_STATISTICS, n_next * N_STATISTICS, o_lane)
        prefetch_values(p_r_scale + of_next * M, n_next * M, o_lane)
        tl.debug_barrier()
        of_bias, of_scale = prepared(
            p_sums, p_statistics, p_r_scale, bias_k, bias_j, weight_peak, p_words, p_unit, p_mean, first, end,
            scale, M, D, LANES, SOFTMAX,
        )  # fmt: skip
        dbias += of_bias
        dscale += of_scale
        tl.debug_barrier()
        prefetch_values(p_words, GROUP * BLOCK, o_lane)
        for token in range(first, tl.minimum(first + GROUP, end)):
            halves, values = load_block(p_words + (token - first) * BLOCK, N_HALVES, BLOCK - N_HALVES // 2)
            rows = token_rows(p_r, p_dh, token, o_d, M, D, "evict_first")
            dweight = applied(rows, dweight, halves, values, p_weight, p_dr + token * (M * D), o_d, M, D)
        if HAS_TAIL:
            dweight_tail = applied_tail(
                tail, dweight_tail, p_words, p_weight, p_dr, of_lane, o_tail, s_lane, in_tail, M, D
            )
    p_program = p_dweight + tl.program_id(0).to(tl.int64) * (M * M * D)
    o_w = TILE + tl.arange(0, W)
    for n in tl.static_range(M * M):
        tl.store(p_program + n * D + o_d, dweight[n])
        if HAS_TAIL:
            b_sum = tl.sum(tl.reshape(dweight_tail[n], [GROUP, W]), 0)
            tl.store(p_program + n * D + o_w, b_sum, mask=o_w < D)
    o_e = tl.arange(0, 16)
    p_program = p_partial + tl.program_id(0) * (1 + M)
    tl.store(p_program, tl.sum(dscale))
    tl.store(p_program + 1 + o_e // 4, tl.sum(dbias, 0), mask=(o_e % 4 == 0) & (o_e // 4 < M))
