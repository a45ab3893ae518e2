# ruff: noqa: RUF005  (Triton compiles `+` of tuples, not unpacking)
"""The AttnRes read on the GPU: one softmax over depth, forward and backward, each source read once.

    e_n = rstd_n q . v_n        a = softmax(e)        h = sum_n a_n v_n                                    (Eq. 2 to 4)
    de_n = a_n (<dh, v_n> - <dh, h>)
    dv_n = a_n dh + de_n rstd_n (q - (e_n rstd_n / D) v_n)        dq = sum_tn de_n rstd_n v_n

A program owns whole tokens. D is cut into the largest power of two and a tail tile, so that D = 2112 takes 2048 + 64
lanes and not 4096. Up to UNROLLED_SOURCES sources the loops over them are unrolled and a row is met twice, first to
score it and then, from the cache, to add it up; above that a running softmax meets each row once.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.gradients import Buffers
from kernels.tiles import aligned, check_sources, float32, padded, pick

UNROLLED_SOURCES = 16
FORWARD_TOKENS = 4  # tokens per program: the query is read once for them
BACKWARD_TOKENS = 16  # and one partial row of the query's gradient is written for them


@triton.jit
def _tile_load(p_row, START: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr):
    o_d = START + tl.arange(0, SIZE)
    return tl.load(p_row + o_d, mask=o_d < D, other=0.0)


@triton.jit
def _tile_store(p_row, b_row, START: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr):
    o_d = START + tl.arange(0, SIZE)
    tl.store(p_row + o_d, b_row.to(p_row.dtype.element_ty), mask=o_d < D)


@triton.jit
def _dot(b_x, b_y, b_x_tail, b_y_tail, TAIL: tl.constexpr):
    dot = tl.sum(b_x.to(tl.float32) * b_y.to(tl.float32))
    if TAIL > 0:
        dot += tl.sum(b_x_tail.to(tl.float32) * b_y_tail.to(tl.float32))
    return dot


@triton.jit
def _forward_unrolled(
    sources, p_query, p_out, p_logits, p_rstd, p_lse, n_tokens, eps,
    N: tl.constexpr, D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """h, and per token logits [P, N], rstd [P, N] and log-sum-exp [P]."""
    first = tl.program_id(0).to(tl.int64) * TOKENS
    b_q = _tile_load(p_query, 0, MAIN, D)
    b_q_tail = _tile_load(p_query, MAIN, TAIL, D) if TAIL > 0 else 0.0
    for i in range(tl.minimum(TOKENS, n_tokens - first)):
        t = first + i
        logits = ()
        for n in tl.static_range(N):
            b_v = _tile_load(sources[n] + t * D, 0, MAIN, D)
            b_v_tail = _tile_load(sources[n] + t * D, MAIN, TAIL, D) if TAIL > 0 else 0.0
            rstd = tl.rsqrt(_dot(b_v, b_v, b_v_tail, b_v_tail, TAIL) / D + eps)
            logits = logits + (_dot(b_v, b_q, b_v_tail, b_q_tail, TAIL) * rstd,)
            tl.store(p_rstd + t * N + n, rstd)
            tl.store(p_logits + t * N + n, logits[n])
        peak = logits[0]
        for n in tl.static_range(1, N):
            peak = tl.maximum(peak, logits[n])
        total = tl.exp(logits[0] - peak)
        for n in tl.static_range(1, N):
            total += tl.exp(logits[n] - peak)
        tl.store(p_lse + t, peak + tl.log(total))
        b_h = tl.zeros([MAIN], tl.float32)
        b_h_tail = tl.zeros([TAIL], tl.float32) if TAIL > 0 else 0.0
        for n in tl.static_range(N):
            a = tl.exp(logits[n] - peak) / total
            # read again, from the cache: held in registers, nine rows in fp32 would spill
            b_h += a * _tile_load(sources[n] + t * D, 0, MAIN, D).to(tl.float32)
            if TAIL > 0:
                b_h_tail += a * _tile_load(sources[n] + t * D, MAIN, TAIL, D).to(tl.float32)
        _tile_store(p_out + t * D, b_h, 0, MAIN, D)
        if TAIL > 0:
            _tile_store(p_out + t * D, b_h_tail, MAIN, TAIL, D)


@triton.jit
def _forward_streaming(
    sources, p_query, p_out, p_logits, p_rstd, p_lse, n_tokens, N, eps,
    L: tl.constexpr, D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The same with a running softmax over any number of sources."""
    first = tl.program_id(0).to(tl.int64) * TOKENS
    b_q = _tile_load(p_query, 0, MAIN, D)
    b_q_tail = _tile_load(p_query, MAIN, TAIL, D) if TAIL > 0 else 0.0
    for i in range(tl.minimum(TOKENS, n_tokens - first)):
        t = first + i
        peak = float("-inf")
        total = 0.0
        b_h = tl.zeros([MAIN], tl.float32)
        b_h_tail = tl.zeros([TAIL], tl.float32) if TAIL > 0 else 0.0
        for n in range(N):
            p_row = pick(sources, n, L) + t * D
            b_v = _tile_load(p_row, 0, MAIN, D)
            b_v_tail = _tile_load(p_row, MAIN, TAIL, D) if TAIL > 0 else 0.0
            rstd = tl.rsqrt(_dot(b_v, b_v, b_v_tail, b_v_tail, TAIL) / D + eps)
            logit = _dot(b_v, b_q, b_v_tail, b_q_tail, TAIL) * rstd
            tl.store(p_rstd + t * N + n, rstd)
            tl.store(p_logits + t * N + n, logit)
            new_peak = tl.maximum(peak, logit)
            kept = tl.exp(peak - new_peak)
            a = tl.exp(logit - new_peak)
            total = total * kept + a
            b_h = b_h * kept + a * b_v.to(tl.float32)
            if TAIL > 0:
                b_h_tail = b_h_tail * kept + a * b_v_tail.to(tl.float32)
            peak = new_peak
        tl.store(p_lse + t, peak + tl.log(total))
        p_h = p_out + t * D
        _tile_store(p_h, b_h / total, 0, MAIN, D)
        if TAIL > 0:
            _tile_store(p_h, b_h_tail / total, MAIN, TAIL, D)


@triton.jit
def _source_gradient(
    p_gradient_in, p_gradient_out, b_v, b_v_tail, b_dh, b_dh_tail, b_q, b_q_tail, a, slope, bend,
    D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """dv = a dh + slope q - bend v, added to what later reads left."""
    b_dv = a * b_dh + slope * b_q - bend * b_v.to(tl.float32)
    if ADD:
        b_dv += _tile_load(p_gradient_in, 0, MAIN, D).to(tl.float32)
    _tile_store(p_gradient_out, b_dv, 0, MAIN, D)
    if TAIL > 0:
        b_dv_tail = a * b_dh_tail + slope * b_q_tail - bend * b_v_tail.to(tl.float32)
        if ADD:
            b_dv_tail += _tile_load(p_gradient_in, MAIN, TAIL, D).to(tl.float32)
        _tile_store(p_gradient_out, b_dv_tail, MAIN, TAIL, D)


@triton.jit
def _backward_unrolled(
    sources, gradients_in, gradients_out, p_query, p_dh, p_logits, p_rstd, p_lse, p_dquery, n_tokens,
    N: tl.constexpr, D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, TOKENS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Gradients of the sources, and one partial row of the query's gradient per program."""
    first = tl.program_id(0).to(tl.int64) * TOKENS
    b_q = _tile_load(p_query, 0, MAIN, D)
    b_q_tail = _tile_load(p_query, MAIN, TAIL, D) if TAIL > 0 else 0.0
    b_dq = tl.zeros([MAIN], tl.float32)
    b_dq_tail = tl.zeros([TAIL], tl.float32) if TAIL > 0 else 0.0
    for i in range(tl.minimum(TOKENS, n_tokens - first)):
        t = first + i
        offset = t * D
        b_dh = _tile_load(p_dh + offset, 0, MAIN, D).to(tl.float32)
        b_dh_tail = _tile_load(p_dh + offset, MAIN, TAIL, D).to(tl.float32) if TAIL > 0 else 0.0
        lse = tl.load(p_lse + t)
        logits = ()
        weights = ()
        slopes = ()
        mean = 0.0
        for n in tl.static_range(N):
            b_v = _tile_load(sources[n] + offset, 0, MAIN, D)
            b_v_tail = _tile_load(sources[n] + offset, MAIN, TAIL, D) if TAIL > 0 else 0.0
            logits = logits + (tl.load(p_logits + t * N + n),)
            weights = weights + (tl.exp(logits[n] - lse),)
            slopes = slopes + (_dot(b_v, b_dh, b_v_tail, b_dh_tail, TAIL),)
            mean += weights[n] * slopes[n]
        for n in tl.static_range(N):
            b_v = _tile_load(sources[n] + offset, 0, MAIN, D)
            b_v_tail = _tile_load(sources[n] + offset, MAIN, TAIL, D) if TAIL > 0 else 0.0
            rstd = tl.load(p_rstd + t * N + n)
            slope = weights[n] * (slopes[n] - mean) * rstd
            b_dq += slope * b_v.to(tl.float32)
            if TAIL > 0:
                b_dq_tail += slope * b_v_tail.to(tl.float32)
            _source_gradient(
                gradients_in[n] + offset, gradients_out[n] + offset, b_v, b_v_tail, b_dh, b_dh_tail, b_q, b_q_tail,
                weights[n], slope, slope * logits[n] * rstd / D, D, MAIN, TAIL, ADD,
            )  # fmt: skip
    p_partial = p_dquery + tl.program_id(0).to(tl.int64) * D
    _tile_store(p_partial, b_dq, 0, MAIN, D)
    if TAIL > 0:
        _tile_store(p_partial, b_dq_tail, MAIN, TAIL, D)


@triton.jit
def _backward_streaming(
    sources, gradients_in, gradients_out, p_query, p_dh, p_logits, p_rstd, p_lse, p_dquery, n_tokens, N,
    L: tl.constexpr, D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, TOKENS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """The same for any number of sources: a first pass for <dh, h>, a second one over the cached rows."""
    first = tl.program_id(0).to(tl.int64) * TOKENS
    b_q = _tile_load(p_query, 0, MAIN, D)
    b_q_tail = _tile_load(p_query, MAIN, TAIL, D) if TAIL > 0 else 0.0
    b_dq = tl.zeros([MAIN], tl.float32)
    b_dq_tail = tl.zeros([TAIL], tl.float32) if TAIL > 0 else 0.0
    for i in range(tl.minimum(TOKENS, n_tokens - first)):
        t = first + i
        offset = t * D
        b_dh = _tile_load(p_dh + offset, 0, MAIN, D).to(tl.float32)
        b_dh_tail = _tile_load(p_dh + offset, MAIN, TAIL, D).to(tl.float32) if TAIL > 0 else 0.0
        lse = tl.load(p_lse + t)
        mean = 0.0
        for n in range(N):
            p_row = pick(sources, n, L) + offset
            b_v = _tile_load(p_row, 0, MAIN, D)
            b_v_tail = _tile_load(p_row, MAIN, TAIL, D) if TAIL > 0 else 0.0
            a = tl.exp(tl.load(p_logits + t * N + n) - lse)
            mean += a * _dot(b_v, b_dh, b_v_tail, b_dh_tail, TAIL)
        for n in range(N):
            p_row = pick(sources, n, L) + offset
            b_v = _tile_load(p_row, 0, MAIN, D)
            b_v_tail = _tile_load(p_row, MAIN, TAIL, D) if TAIL > 0 else 0.0
            logit = tl.load(p_logits + t * N + n)
            rstd = tl.load(p_rstd + t * N + n)
            a = tl.exp(logit - lse)
            slope = a * (_dot(b_v, b_dh, b_v_tail, b_dh_tail, TAIL) - mean) * rstd
            b_dq += slope * b_v.to(tl.float32)
            if TAIL > 0:
                b_dq_tail += slope * b_v_tail.to(tl.float32)
            _source_gradient(
                pick(gradients_in, n, L) + offset, pick(gradients_out, n, L) + offset, b_v, b_v_tail,
                b_dh, b_dh_tail, b_q, b_q_tail, a, slope, slope * logit * rstd / D, D, MAIN, TAIL, ADD,
            )  # fmt: skip
    p_partial = p_dquery + tl.program_id(0).to(tl.int64) * D
    _tile_store(p_partial, b_dq, 0, MAIN, D)
    if TAIL > 0:
        _tile_store(p_partial, b_dq_tail, MAIN, TAIL, D)


# ----------------------------------------------------------------------------------------------- on the host


def _tiles(D: int) -> dict[str, int]:
    main = 1 << (D.bit_length() - 1)
    return {"D": D, "MAIN": main, "TAIL": 0 if main == D else max(32, triton.next_power_of_2(D - main))}


def _forward(sources: Sequence[Tensor], query: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, T, D = sources[0].shape
    P, N = B * T, len(sources)
    out = torch.empty_like(sources[0])
    logits, rstd = query.new_empty(2, P, N).unbind()
    lse = query.new_empty(P)
    grid = (triton.cdiv(P, FORWARD_TOKENS),)
    settings = {**_tiles(D), "TOKENS": FORWARD_TOKENS, "num_warps": 4}
    if N <= UNROLLED_SOURCES:
        _forward_unrolled[grid](tuple(sources), query, out, logits, rstd, lse, P, eps, N=N, **settings)
    else:
        many = padded(sources)
        _forward_streaming[grid](many, query, out, logits, rstd, lse, P, N, eps, L=len(many), **settings)
    return out, logits, rstd, lse


class _Read(torch.autograd.Function):
    """The read, with the sources passed through so that their gradients gather in one buffer each."""

    @staticmethod
    def forward(ctx, eps, query, *sources):
        query_32 = float32(query)
        held = tuple(aligned(source) for source in sources)
        out, *statistics = _forward(held, query_32, eps)
        ctx.save_for_backward(query_32, *statistics, *held)
        ctx.query_dtype = query.dtype
        ctx.set_materialize_grads(False)
        return out, *sources

    @staticmethod
    @once_differentiable
    def backward(ctx, dh, *later):
        query, logits, rstd, lse, *sources = ctx.saved_tensors
        if dh is None:
            return None, None, *later
        B, T, D = sources[0].shape
        P, N = B * T, len(sources)
        buffers = Buffers(sources, later)
        grid = (triton.cdiv(P, BACKWARD_TOKENS),)
        dquery = query.new_empty(grid[0], D)
        settings = {**_tiles(D), "TOKENS": BACKWARD_TOKENS, "ADD": buffers.add, "num_warps": 4}
        arguments = (query, aligned(dh), logits, rstd, lse, dquery, P)
        if N <= UNROLLED_SOURCES:
            _backward_unrolled[grid](tuple(sources), buffers.given, buffers.out, *arguments, N=N, **settings)
        else:
            many = [padded(tensors) for tensors in (sources, buffers.given, buffers.out)]
            _backward_streaming[grid](*many, *arguments, N, L=len(many[0]), **settings)
        return None, dquery.sum(0).to(ctx.query_dtype), *buffers.out


@torch.compiler.disable
def attnres_read_through(
    sources: Sequence[Tensor], query: Tensor, key_gain: Tensor | None, eps: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`reference.attnres_read`, and the sources to hand to the next read.

    A read that takes the sources of the read before it adds its part of their gradients to what the later reads left,
    in the same pass over memory; autograd adds nothing.

    Args:
        sources: N tensors [B, T, D] of one dtype (bf16, fp16, fp32), D a multiple of 8, N up to 128.
        query: [D]; zero gives the uniform mean.
        key_gain: [D], or None.
    Returns:
        [B, T, D] in the sources' dtype, and the N sources.
    Raises:
        ValueError: inputs beyond a limit of the kernels, by name.
    """
    check_sources(sources)
    if key_gain is not None:
        query = query * key_gain
    out, *through = _Read.apply(eps, query, *sources)
    return out, tuple(through)


def attnres_read(sources: Sequence[Tensor], query: Tensor, key_gain: Tensor | None, eps: float) -> Tensor:
    """As `reference.attnres_read`; autograd adds the sources' gradients of different reads."""
    return attnres_read_through(sources, query, key_gain, eps)[0]
