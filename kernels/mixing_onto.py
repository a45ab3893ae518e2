# ruff: noqa: RUF005  (Triton compiles `+` of tuples, not unpacking)
"""Triton kernel that adds the partial sum to what a read retrieved and mixes the streams, which it then holds.

    r_j = weight_j u_j + base_weight_j base_j                 h = sum_j gate_j r_j, see `mixing`

A program owns consecutive tokens of a sequence and TILE channels, eight to a thread, four tokens at a time: the last
rows of the source and the four tokens' streams are in registers, so that r is written and not read. Channels beyond
TILE, the tail, have been added before (`streams.add_source_kernel`) and are read, one to a thread for all four tokens.
Sums over channels are taken sixteen at a time (`lane_sums`), the rest over warps and the gates by a tile of the four
tokens, through memory. `mixing_tokens` says what so few warps ask for. Here stores also go between loads of W, which
would stand behind all of them, and base, which is read once, leaves the L1 to W and the taps.
"""

import triton
import triton.language as tl

from kernels import lane_sums
from kernels.mixing_tokens import GROUP, load_block
from kernels.staged import newest, plus_times, times
from kernels.tiles import (
    computed,
    convolved,
    first_tap,
    learned,
    load_fit,
    load_rows,
    load_values,
    multiply,
    multiply_add,
    n_streams,
    prefetch_block,
    prefetch_rows,
    prefetch_values,
    raw_rows,
    seen_at,
    tensor_at,
    widest,
    width,
    zeros,
)

SUMS = tl.constexpr(7)  # vectors [LANES] that a program keeps in memory: four and one of its channels, two of the tail


@triton.jit
def quarters(b_x, LANES: tl.constexpr):
    """A row tile [8 LANES] as four tiles [LANES, 2], the pairs that a thread holds."""
    b_x = tl.trans(tl.reshape(b_x, [LANES, 2, 2, 2]), 0, 2, 3, 1)
    b_low, b_high = tl.split(b_x)
    b_0, b_1 = tl.split(tl.trans(b_low, 0, 2, 1))
    b_2, b_3 = tl.split(tl.trans(b_high, 0, 2, 1))
    return b_0, b_1, b_2, b_3


@triton.jit
def sum_of_products(a, b):
    """Sums of a thread's products of two rows in `quarters`, added in fp16, [LANES]."""
    b_sum = multiply(a[0], b[0])
    for i in tl.static_range(1, 4):
        b_sum = multiply_add(a[i], b[i], b_sum)
    return tl.sum(b_sum.to(tl.float32), 1)


@triton.jit
def mix_onto_kernel(
    p_table, p_weights, p_fit, p_base, p_base_weight, p_position, p_r, p_r_scale, p_weight, p_weight_unit, p_scale,
    p_bias, p_h, p_statistics, p_sums, p_words, eps, T, n_segments, SEGMENT,
    SIZES: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, HAS_TAIL: tl.constexpr, LANES: tl.constexpr,
    PACKED: tl.constexpr, SOFTMAX: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """r [P, m, D], h [P, D] and the statistics of `mixing.narrow_mix_kernel`, for m <= 4 streams in fp16.

    Args:
        p_table, p_weights, p_fit, p_base, p_base_weight: as `streams.add_source_kernel` takes them.
        p_weight, p_weight_unit: W in fp16 of `mixing.narrow_weight_kernel`.
        p_sums [programs, 7 LANES], p_words [programs, 16]: scratch.
        HAS_TAIL: there are up to LANES / 4 channels beyond TILE = 8 LANES.
    """
    M: tl.constexpr = n_streams(SIZES)
    PAST: tl.constexpr = widest(SIZES) - 1
    W: tl.constexpr = LANES // GROUP  # channels of a token's tail at a time
    b = tl.program_id(0) // n_segments
    t_begin = tl.program_id(0).to(tl.int64) % n_segments * SEGMENT
    t_end = tl.minimum(T, t_begin + SEGMENT)
    sequence = b.to(tl.int64) * T
    o_d = tl.arange(0, TILE)
    o_lane = tl.arange(0, LANES)
    p_source = tensor_at(p_table, 0, DTYPE) + sequence * D
    p_taps = tensor_at(p_table, 2, tl.float16)
    fit = load_fit(p_fit, 0, tl.float16)
    p_sums += tl.program_id(0) * (SUMS * LANES)
    p_words += tl.program_id(0) * 16
    scale = tl.load(p_scale)
    weight_unit = tl.load(p_weight_unit)
    history = raw_rows(p_source + (t_begin - PAST) * D, t_begin - PAST, o_d, T, D, PAST, 0, False)
    window = computed(history, fit, PAST, tl.float16)
    for start in range(t_begin, t_end, GROUP):
        token = sequence + start
        raw = raw_rows(p_source + start * D, start, o_d, T, D, 0, GROUP, False)
        weights, kept = factors_of_group(p_weights, p_base_weight, token, start, t_end, M)
        bases = rows_to_add_to(p_base + token * (M * D), start, t_end, o_d, M, D)
        s_lane = o_lane // W
        of_lane = token + s_lane
        lane_inside = start + s_lane < t_end
        channel = TILE + o_lane % W
        in_tail = lane_inside & (channel < D)
        tail = ()
        for j in tl.static_range(M if HAS_TAIL else 0):
            tail = tail + (tl.load(p_r + (of_lane * M + j) * D + channel, mask=in_tail, other=0.0),)
        rows = window + computed(raw, fit, GROUP, tl.float16)
        streams = ()
        for j in tl.static_range(M):
            b_taps = load_rows(p_taps + first_tap(SIZES, j) * D, o_d, D, learned(SIZES, j))
            for s in tl.static_range(GROUP):
                seen = seen_at(rows, p_position, token + s, start + s < t_end, s, PAST + 1, PACKED)
                b_u = convolved(b_taps, seen, 0, width(SIZES, j))
                b_base = multiply(kept[s * M + j].to(tl.float16), bases[j * GROUP + s])
                streams = streams + (multiply_add(weights[s * M + j], b_u, b_base),)
        # asked for now, needed in the next round
        of_next = tl.minimum(start + GROUP, t_end)
        n_next = tl.minimum(of_next + GROUP, t_end) - of_next
        prefetch_block(p_base + (sequence + of_next) * (M * D), n_next * (2 * M * D))
        prefetch_block(p_source + of_next * D, n_next * (2 * D))
        next_values = (sequence + of_next) * M
        prefetch_values(p_weights + next_values, n_next * M, o_lane)
        prefetch_values(p_base_weight + next_values, n_next * M, o_lane)
        prefetch_values(p_r_scale + next_values, n_next * M, o_lane)
        if HAS_TAIL:
            prefetch_rows(p_r + (token + GROUP) * (M * D), TILE, 0, n_next * M, D, GROUP * M, W, LANES // 32)
        parts = ()
        for i in tl.static_range(M * GROUP):
            parts = parts + (quarters(streams[i], LANES),)
        products = ()
        b_w = tl.load(p_weight + o_d, eviction_policy="evict_last")
        for k in tl.static_range(4):
            for j in tl.static_range(4):
                if k < M and j < M:
                    now = quarters(b_w, LANES)
                    if k * M + j + 1 < M * M:
                        b_w = tl.load(p_weight + (k * M + j + 1) * D + o_d, eviction_policy="evict_last")
                    for s in tl.static_range(GROUP):
                        products = products + (sum_of_products(now, parts[j * GROUP + s]),)
                else:
                    products = products + zeros(GROUP, LANES, tl.float32)
                if k < GROUP and j < M:  # between the loads, which would wait for all of them
                    at = ((token + k) * M + j) * D + o_d
                    tl.store(p_r + at, streams[j * GROUP + k], mask=o_d < tl.where(start + k < t_end, D, 0))
        squares = ()
        for s in tl.static_range(GROUP):
            of_token = ()
            for i in tl.static_range(16):
                of_token = of_token + (products[i * GROUP + s],)
            tl.store(p_sums + s * LANES + o_lane, lane_sums.of_warps(of_token, LANES))
            for j in tl.static_range(4):
                if j < M:
                    squares = squares + (sum_of_products(parts[j * GROUP + s], parts[j * GROUP + s]),)
                else:
                    squares = squares + (tl.zeros([LANES], tl.float32),)
        tl.store(p_sums + GROUP * LANES + o_lane, lane_sums.of_warps(squares, LANES))
        if HAS_TAIL:
            products = ()
            squares = ()
            for k in tl.static_range(4):
                for j in tl.static_range(4):
                    b_part, b_square = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
                    if k < M and j < M:
                        b_w = tl.load(p_weight + (k * M + j) * D + channel, mask=channel < D, other=0.0)
                        b_part = tail[j].to(tl.float32) * b_w.to(tl.float32)
                    if k == 0 and j < M:
                        b_square = tail[j].to(tl.float32) * tail[j].to(tl.float32)
                    products = products + (b_part,)
                    squares = squares + (b_square,)
            tl.store(p_sums + (GROUP + 1) * LANES + o_lane, lane_sums.of_warps(products, LANES))
            tl.store(p_sums + (GROUP + 2) * LANES + o_lane, lane_sums.of_warps(squares, LANES))
        tl.debug_barrier()
        gates_of_group(
            p_sums, p_r_scale, p_bias, p_statistics, p_words, token, start, t_end, scale, weight_unit, eps,
            M, D, LANES, HAS_TAIL, SOFTMAX,
        )  # fmt: skip
        tl.debug_barrier()
        for s in tl.static_range(GROUP):
            gates, unit = load_block(p_words + s * 4, 4, 2)
            b_h = times(gates, 0, streams[s])
            for j in tl.static_range(1, M):
                b_h = plus_times(b_h, gates, j, streams[j * GROUP + s])
            b_h = b_h.to(tl.float32) * unit[0]
            mask = o_d < tl.where(start + s < t_end, D, 0)
            tl.store(p_h + (token + s) * D + o_d, b_h.to(p_h.dtype.element_ty), mask=mask)
        if HAS_TAIL:
            b_mixed = tl.zeros([LANES], tl.float32)
            for j in tl.static_range(M):
                gate = tl.load((p_words + s_lane * 4).to(tl.pointer_type(tl.float16)) + j)
                b_mixed += gate.to(tl.float32) * tail[j].to(tl.float32)
            b_mixed *= tl.load((p_words + s_lane * 4 + 2).to(tl.pointer_type(tl.float32)))
            tl.store(p_h + of_lane * D + channel, b_mixed.to(p_h.dtype.element_ty), mask=in_tail)
        window = newest(rows, GROUP, PAST)


@triton.jit
def rows_to_add_to(p_base, start, t_end, o_d, M: tl.constexpr, D: tl.constexpr):
    """Rows of a group of base, stream by stream."""
    rows = ()
    for j in tl.static_range(M):
        for s in tl.static_range(GROUP):
            mask = o_d < tl.where(start + s < t_end, D, 0)
            rows = rows + (tl.load(p_base + (s * M + j) * D + o_d, mask=mask, other=0.0, cache_modifier=".cg"),)
    return rows


@triton.jit
def factors_of_group(p_weights, p_base_weight, token, start, t_end, M: tl.constexpr):
    """What a group's streams and base are multiplied by, token by token."""
    weights, kept = (), ()
    for s in tl.static_range(GROUP):
        inside = start + s < t_end
        weights = weights + load_values(p_weights + (token + s) * M, inside, M, tl.float16)
        kept = kept + load_values(p_base_weight + (token + s) * M, inside, M, tl.float32)
    return weights, kept


@triton.jit
def over_warps(p_sums, at, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Sums of what COUNT warps left at `at`."""
    b_sum = tl.load(p_sums + FIRST + at)
    for warp in tl.static_range(1, COUNT):
        b_sum += tl.load(p_sums + FIRST + warp * 32 + at)
    return b_sum


@triton.jit
def gates_of_group(
    p_sums, p_r_scale, p_bias, p_statistics, p_words, token, start, t_end, scale, weight_unit, eps,
    M: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, HAS_TAIL: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """Statistics of four tokens, and their gates as `mix_onto_kernel` multiplies by them.

    A row of a tile is a token, its element e stream k = e % 4 of the gates and stream j = e / 4 of r.
    """
    WARPS: tl.constexpr = LANES // 32
    s = tl.arange(0, GROUP)[:, None]
    e = tl.arange(0, 16)[None, :]
    k, j = e % 4, e // 4
    is_token = start + s < t_end
    of_k = is_token & (k < M) & (j == 0)
    b_product = over_warps(p_sums, s * LANES + 4 * k + j, 0, WARPS)
    b_square = over_warps(p_sums, s * 4 + k, GROUP * LANES, WARPS)
    if HAS_TAIL:
        PER_TOKEN: tl.constexpr = max(1, WARPS // GROUP)
        b_product += over_warps(p_sums, s * (PER_TOKEN * 32) + 4 * k + j, (GROUP + 1) * LANES, PER_TOKEN)
        b_square += over_warps(p_sums, s * (PER_TOKEN * 32) + k, (GROUP + 2) * LANES, PER_TOKEN)
    p_scales = p_r_scale + (token + s) * M
    unit_j = 1.0 / tl.load(p_scales + j, mask=is_token & (j < M), other=1.0)
    unit_k = 1.0 / tl.load(p_scales + k, mask=is_token & (k < M), other=1.0)
    b_product *= unit_j * weight_unit
    b_square *= unit_k * unit_k
    p_token = p_statistics + (token + s) * ((1 + M) * (1 + M))
    tl.store(p_token + 1 + 2 * M + j * M + k, b_product, mask=is_token & (k < M) & (j < M))
    tl.store(p_token + 1 + M + k, b_square, mask=of_k)
    rstd = tl.rsqrt(tl.sum(tl.where(j == 0, b_square, 0.0), 1)[:, None] / (M * D) + eps)
    tl.store(p_token + e, rstd + tl.zeros([GROUP, 16], tl.float32), mask=is_token & (e == 0))
    b_sum = tl.sum(tl.reshape(b_product, [GROUP, 4, 4]), 1)  # taken back to the tile that it came from, in its layout
    b_sum = tl.reshape(tl.broadcast_to(b_sum[:, None, :], [GROUP, 4, 4]), [GROUP, 16])
    tl.store(p_token + 1 + k, b_sum, mask=of_k)
    z = scale * rstd * b_sum + tl.load(p_bias + k, mask=k < M, other=0.0)
    if SOFTMAX:
        z = tl.where((k < M) & (j == 0), z, -float("inf"))
        z = tl.exp(z - tl.max(z, 1)[:, None])
        gate = z / tl.sum(z, 1)[:, None]
    else:
        gate = 1.0 / (1.0 + tl.exp(-z))
    largest = tl.max(tl.where(k < M, unit_k, 0.0), 1)[:, None] + tl.zeros([GROUP, 16], tl.float32)
    p_block = p_words + s * 4
    p_half = p_block.to(tl.pointer_type(tl.float16))
    tl.store(p_half + k, tl.where(k < M, gate * unit_k / largest, 0.0).to(tl.float16), mask=j == 0)
    tl.store(p_block.to(tl.pointer_type(tl.float32)) + 2 + e, largest, mask=e == 0)
