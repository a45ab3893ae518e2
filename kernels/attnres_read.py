"""The AttnRes read on the GPU: one softmax over depth, forward and backward.

    e_n = rstd_n q . v_n        a = softmax(e)        h = sum_n a_n v_n                                    (Eq. 2 to 4)
    de_n = a_n (<dh, v_n> - <dh, h>)
    dv_n = a_n dh + de_n rstd_n (q - (e_n rstd_n / D) v_n)        dq = sum_tn de_n rstd_n v_n

A program owns whole tokens and two warps share a row, whose next one is loaded meanwhile. D is cut into the largest
power of two and a tail tile, so that D = 2112 takes 2048 + 64 lanes and not 4096.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.gradients import Buffers
from kernels.tiles import TRITON_DTYPES, aligned, check_sources, float32, table, tensor_at

FORWARD_TOKENS = 1  # tokens per program
WARPS = 2
BACKWARD_TOKENS = 8  # one partial row of the query's gradient is written for them


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
def _rows(p_table, n, offset, DTYPE: tl.constexpr, D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr):
    """A token's row of tensor n of a table: main tile, and tail tile or zero."""
    p_row = tensor_at(p_table, n, DTYPE) + offset
    b_row = _tile_load(p_row, 0, MAIN, D)
    b_tail = _tile_load(p_row, MAIN, TAIL, D) if TAIL > 0 else 0.0
    return b_row, b_tail


@triton.jit
def forward_kernel(
    p_table, p_query, p_out, p_logits, p_rstd, p_lse, n_tokens, N, eps,
    D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, TOKENS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """h, and per token logits [P, N], rstd [P, N] and log-sum-exp [P]; a running softmax, so a row is read once."""
    first = tl.program_id(0).to(tl.int64) * TOKENS
    b_q = _tile_load(p_query, 0, MAIN, D)
    b_q_tail = _tile_load(p_query, MAIN, TAIL, D) if TAIL > 0 else 0.0
    for i in range(tl.minimum(TOKENS, n_tokens - first)):
        t = first + i
        peak = float("-inf")
        total = 0.0
        b_h = tl.zeros([MAIN], tl.float32)
        b_h_tail = tl.zeros([TAIL], tl.float32) if TAIL > 0 else 0.0
        b_next, b_next_tail = _rows(p_table, 0, t * D, DTYPE, D, MAIN, TAIL)
        for n in range(N):
            b_v, b_v_tail = b_next, b_next_tail
            # the next source is under way while this one is scored
            b_next, b_next_tail = _rows(p_table, tl.minimum(n + 1, N - 1), t * D, DTYPE, D, MAIN, TAIL)
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
        _tile_store(p_out + t * D, b_h / total, 0, MAIN, D)
        if TAIL > 0:
            _tile_store(p_out + t * D, b_h_tail / total, MAIN, TAIL, D)


@triton.jit
def backward_kernel(
    p_table, p_query, p_dh, p_logits, p_rstd, p_lse, p_dquery, n_tokens, N,
    NP: tl.constexpr, D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, TOKENS: tl.constexpr,
    ADD: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Gradients of the sources, and one partial row of the query's gradient per program.

    Two passes over a token's rows, the second from the cache; between them da stays in one register vector [NP].
    """
    first = tl.program_id(0).to(tl.int64) * TOKENS
    o_n = tl.arange(0, NP)
    b_q = _tile_load(p_query, 0, MAIN, D)
    b_q_tail = _tile_load(p_query, MAIN, TAIL, D) if TAIL > 0 else 0.0
    b_dq = tl.zeros([MAIN], tl.float32)
    b_dq_tail = tl.zeros([TAIL], tl.float32) if TAIL > 0 else 0.0
    for i in range(tl.minimum(TOKENS, n_tokens - first)):
        t = first + i
        b_dh = _tile_load(p_dh + t * D, 0, MAIN, D).to(tl.float32)
        b_dh_tail = _tile_load(p_dh + t * D, MAIN, TAIL, D).to(tl.float32) if TAIL > 0 else 0.0
        b_da = tl.zeros([NP], tl.float32)
        b_next, b_next_tail = _rows(p_table, 0, t * D, DTYPE, D, MAIN, TAIL)
        for n in range(N):
            b_v, b_v_tail = b_next, b_next_tail
            b_next, b_next_tail = _rows(p_table, tl.minimum(n + 1, N - 1), t * D, DTYPE, D, MAIN, TAIL)
            b_da = tl.where(o_n == n, _dot(b_v, b_dh, b_v_tail, b_dh_tail, TAIL), b_da)
        b_e = tl.load(p_logits + t * N + o_n, mask=o_n < N, other=float("-inf"))
        b_a = tl.exp(b_e - tl.load(p_lse + t))
        b_rstd = tl.load(p_rstd + t * N + o_n, mask=o_n < N, other=0.0)
        b_slope = b_a * (b_da - tl.sum(b_a * b_da)) * b_rstd
        b_bend = b_slope * tl.where(o_n < N, b_e, 0.0) * b_rstd / D
        b_next, b_next_tail = _rows(p_table, 0, t * D, DTYPE, D, MAIN, TAIL)
        for n in range(N):
            b_v, b_v_tail = b_next.to(tl.float32), b_next_tail.to(tl.float32) if TAIL > 0 else 0.0
            b_next, b_next_tail = _rows(p_table, tl.minimum(n + 1, N - 1), t * D, DTYPE, D, MAIN, TAIL)
            a = tl.sum(tl.where(o_n == n, b_a, 0.0))
            slope = tl.sum(tl.where(o_n == n, b_slope, 0.0))
            bend = tl.sum(tl.where(o_n == n, b_bend, 0.0))
            b_dv = a * b_dh + slope * b_q - bend * b_v
            b_dq += slope * b_v
            p_out = tensor_at(p_table, 2 * N + n, DTYPE) + t * D
            if ADD:
                b_given, b_given_tail = _rows(p_table, N + n, t * D, DTYPE, D, MAIN, TAIL)
                b_dv += b_given.to(tl.float32)
            _tile_store(p_out, b_dv, 0, MAIN, D)
            if TAIL > 0:
                b_dv_tail = a * b_dh_tail + slope * b_q_tail - bend * b_v_tail
                b_dq_tail += slope * b_v_tail
                if ADD:
                    b_dv_tail += b_given_tail.to(tl.float32)
                _tile_store(p_out, b_dv_tail, MAIN, TAIL, D)
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
    forward_kernel[(triton.cdiv(P, FORWARD_TOKENS),)](
        table(sources), query, out, logits, rstd, lse, P, N, eps,
        **_tiles(D), TOKENS=FORWARD_TOKENS, DTYPE=TRITON_DTYPES[out.dtype], num_warps=WARPS,
    )  # fmt: skip
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
        n_programs = triton.cdiv(P, BACKWARD_TOKENS)
        dquery = query.new_empty(n_programs, D)
        backward_kernel[(n_programs,)](
            table(sources, buffers.given, buffers.out), query, aligned(dh), logits, rstd, lse, dquery, P, N,
            NP=triton.next_power_of_2(N), **_tiles(D), TOKENS=BACKWARD_TOKENS, ADD=buffers.add,
            DTYPE=TRITON_DTYPES[dh.dtype], num_warps=WARPS,
        )  # fmt: skip
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
