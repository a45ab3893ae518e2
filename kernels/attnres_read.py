# ruff: noqa: RUF005  (Triton compiles `+` of tuples, not unpacking)
"""The AttnRes read on the GPU: one softmax over depth, forward and backward.

    q = query gain    e_n = rstd_n q . v_n        a = softmax(e)        h = sum_n a_n v_n                  (Eq. 2 to 4)
    de_n = a_n (<dh, v_n> - <dh, h>)
    dv_n = a_n dh + de_n rstd_n (q - (e_n rstd_n / D) v_n)        dq = sum_tn de_n rstd_n v_n

A program owns whole tokens. A row is a tuple of tiles [TILE], the last masked past D, so that D = 2112 takes 9 tiles of
256 forward and not 4096 lanes. The compiler's pipeline brings the rows to come through shared memory, where they take
no registers while under way.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.gradients import Buffers
from kernels.tiles import (
    TRITON_DTYPES,
    aligned,
    cdiv,
    check_shapes,
    check_sources,
    float32,
    next_power_of_2,
    table,
    tensor_at,
    zeros,
)

# measured on an H200 at D = 2112 in bf16, see docs/kernels.md
STAGES = 4  # three rows under way and the one in use
SHARED_BYTES = 96 << 10  # of rows under way: less than a program may take on any GPU that computes in bf16
FORWARD_CHANNELS = 72  # of a row, at most, that a lane holds: one warp takes D = 2112
FORWARD_BYTES = 16  # of a tile that a lane loads at once
BACKWARD_CHANNELS = 20  # of a row, at most, that a lane holds: four warps take D = 2112
BACKWARD_TILE = 4  # channels of a tile that a lane holds
BACKWARD_WARPS = 16  # of the programs that an SM runs at once


@triton.jit
def load_tiles(p_row, D: tl.constexpr, TILE: tl.constexpr, EVICT: tl.constexpr):
    """A row [D] as a tuple of tiles in its own dtype."""
    row = ()
    for start in tl.static_range(0, D, TILE):
        o_d = start + tl.arange(0, TILE)
        row = row + (tl.load(p_row + o_d, mask=o_d < D, other=0.0, eviction_policy=EVICT),)
    return row


@triton.jit
def store_tiles(p_row, row, D: tl.constexpr, TILE: tl.constexpr):
    for i in tl.static_range(len(row)):
        o_d = i * TILE + tl.arange(0, TILE)
        tl.store(p_row + o_d, row[i].to(p_row.dtype.element_ty), mask=o_d < D)


@triton.jit
def load_query(p_query, p_gain, D: tl.constexpr, TILE: tl.constexpr):
    """The query times the keys' gain, if there is one."""
    row = load_tiles(p_query, D, TILE, "evict_last")
    if p_gain is not None:
        gain = load_tiles(p_gain, D, TILE, "evict_last")
        product = ()
        for i in tl.static_range(len(row)):
            product = product + (row[i] * gain[i],)
        row = product
    return row


@triton.jit
def dot(x, y):
    """Sum over channels of the product of two rows; lanes keep theirs until the last tile."""
    b_sum = x[0].to(tl.float32) * y[0].to(tl.float32)
    for i in tl.static_range(1, len(x)):
        b_sum += x[i].to(tl.float32) * y[i].to(tl.float32)
    return tl.sum(b_sum, 0)


@triton.jit(do_not_specialize=["N"])
def forward_kernel(
    p_table, p_query, p_gain, p_out, p_logits, p_rstd, p_lse, N, eps,
    D: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """h of one token, its logits [P, N], rstd [P, N] and log-sum-exp [P]; a running softmax, so a row is read once."""
    t = tl.program_id(0).to(tl.int64)
    q = load_query(p_query, p_gain, D, TILE)
    peak = float("-inf")
    total = 0.0
    h = zeros(len(q), TILE, tl.float32)
    for n in tl.range(0, N, num_stages=STAGES):
        v = load_tiles(tensor_at(p_table, n, DTYPE) + t * D, D, TILE, "")
        rstd = tl.rsqrt(dot(v, v) / D + eps)
        logit = dot(v, q) * rstd
        tl.store(p_rstd + t * N + n, rstd)
        tl.store(p_logits + t * N + n, logit)
        new_peak = tl.maximum(peak, logit)
        kept = tl.exp(peak - new_peak)
        a = tl.exp(logit - new_peak)
        total = total * kept + a
        peak = new_peak
        updated = ()
        for i in tl.static_range(len(h)):
            updated = updated + (h[i] * kept + a * v[i].to(tl.float32),)
        h = updated
    out = ()
    for i in tl.static_range(len(h)):
        out = out + (h[i] / total,)
    store_tiles(p_out + t * D, out, D, TILE)
    tl.store(p_lse + t, peak + tl.log(total))


@triton.jit(do_not_specialize=["N"])
def backward_kernel(
    p_table, p_query, p_gain, p_dh, p_logits, p_rstd, p_lse, p_dq, n_tokens, N,
    NP: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, ADD: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Gradients of the sources, and one partial row of dq per program, whose tokens are strided.

    Two passes over a token's rows, the second from the cache; between them da stays in one register vector [NP]. Only
    the first is pipelined: stages for the second, which stores as much as it loads, gained nothing.
    """
    q = load_query(p_query, p_gain, D, TILE)
    dq = zeros(len(q), TILE, tl.float32)
    o_n = tl.arange(0, NP)
    t = tl.program_id(0).to(tl.int64)
    while t < n_tokens:
        dh = load_tiles(p_dh + t * D, D, TILE, "")
        b_da = tl.zeros([NP], tl.float32)
        for n in tl.range(0, N, num_stages=STAGES):
            v = load_tiles(tensor_at(p_table, n, DTYPE) + t * D, D, TILE, "")
            b_da = tl.where(o_n == n, dot(v, dh), b_da)
        b_e = tl.load(p_logits + t * N + o_n, mask=o_n < N, other=float("-inf"))
        b_a = tl.exp(b_e - tl.load(p_lse + t))
        b_rstd = tl.load(p_rstd + t * N + o_n, mask=o_n < N, other=0.0)
        b_slope = b_a * (b_da - tl.sum(b_a * b_da)) * b_rstd
        b_bend = b_slope * tl.where(o_n < N, b_e, 0.0) * b_rstd / D
        for n in tl.range(0, N, num_stages=1):
            v = load_tiles(tensor_at(p_table, n, DTYPE) + t * D, D, TILE, "")
            if ADD:
                given = load_tiles(tensor_at(p_table, N + n, DTYPE) + t * D, D, TILE, "")
            p_dv = tensor_at(p_table, 2 * N + n, DTYPE) + t * D
            a = tl.sum(tl.where(o_n == n, b_a, 0.0))
            slope = tl.sum(tl.where(o_n == n, b_slope, 0.0))
            bend = tl.sum(tl.where(o_n == n, b_bend, 0.0))
            updated = ()
            dv = ()
            for i in tl.static_range(len(q)):
                b_v = v[i].to(tl.float32)
                updated = updated + (dq[i] + slope * b_v,)
                b_dv = a * dh[i].to(tl.float32) + slope * q[i] - bend * b_v
                if ADD:
                    b_dv += given[i].to(tl.float32)
                dv = dv + (b_dv,)
            dq = updated
            store_tiles(p_dv, dv, D, TILE)
        t += tl.num_programs(0)
    store_tiles(p_dq + tl.program_id(0).to(tl.int64) * D, dq, D, TILE)


@triton.jit
def query_gradient_kernel(
    p_dq, p_query, p_gain, p_dquery, p_dgain, count, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Sums `count` partial rows of dq, always in one order, to the gradients of the query and of the gain if any."""
    o_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    b_sum = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for first in range(0, count, BLOCK_R):
        o_r = first + tl.arange(0, BLOCK_R)
        b_sum += tl.load(p_dq + o_r[:, None] * D + o_d[None, :], mask=(o_r < count)[:, None] & m_d[None, :], other=0.0)
    b_dquery = tl.sum(b_sum, 0)
    if p_gain is not None:
        b_query = tl.load(p_query + o_d, mask=m_d, other=0.0)
        tl.store(p_dgain + o_d, b_dquery * b_query, mask=m_d)
        b_dquery *= tl.load(p_gain + o_d, mask=m_d, other=0.0)
    tl.store(p_dquery + o_d, b_dquery, mask=m_d)


# ----------------------------------------------------------------------------------------------- on the host


def row_layout(D: int, dtype: torch.dtype, lane_channels: int, tile_channels: int) -> dict[str, int]:
    """How a program lays rows [D] of this dtype over threads: a launch's options.

    Args:
        lane_channels: of a row that a lane holds at most; a longer row takes more warps.
        tile_channels: of a tile that a lane holds.
    """
    num_warps = min(32, next_power_of_2(cdiv(D, 32 * lane_channels)))
    tile = min(32 * num_warps * tile_channels, next_power_of_2(D))
    row_bytes = cdiv(D, tile) * tile * dtype.itemsize
    stages = min(STAGES, 1 + SHARED_BYTES // row_bytes)  # all but one have a row in shared memory
    return {"D": D, "TILE": tile, "STAGES": stages, "num_warps": num_warps}


def forward_layout(D: int, dtype: torch.dtype) -> dict[str, int]:
    return row_layout(D, dtype, FORWARD_CHANNELS, FORWARD_BYTES // dtype.itemsize)


def backward_layout(D: int, dtype: torch.dtype) -> dict[str, int]:
    return row_layout(D, dtype, BACKWARD_CHANNELS, BACKWARD_TILE)


def resident_programs(P: int, num_warps: int, device: torch.device) -> int:
    """Programs of the backward pass over P tokens, all resident at once: each leaves a partial row of dq."""
    n_processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return min(P, n_processors * max(1, BACKWARD_WARPS // num_warps))


def _forward(
    sources: Sequence[Tensor], query: Tensor, gain: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, T, D = sources[0].shape
    P, N = B * T, len(sources)
    out = torch.empty_like(sources[0])
    logits, rstd = query.new_empty(2, P, N).unbind()
    lse = query.new_empty(P)
    forward_kernel[(P,)](
        table(sources), query, gain, out, logits, rstd, lse, N, eps,
        **forward_layout(D, out.dtype), DTYPE=TRITON_DTYPES[out.dtype],
    )  # fmt: skip
    return out, logits, rstd, lse


def _query_gradients(partial: Tensor, query: Tensor, gain: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gradients [D] of query and gain, of partial rows [programs, D] of the gradient of their product."""
    n_rows, D = partial.shape
    dquery, dgain = torch.empty_like(query), None if gain is None else torch.empty_like(gain)
    query_gradient_kernel[(cdiv(D, 16),)](
        partial, query, gain, dquery, dgain, n_rows, D=D, BLOCK_R=256, BLOCK_D=16, num_warps=8
    )
    return dquery, dgain


class _Read(torch.autograd.Function):
    """The read, with the sources passed through so that their gradients gather in one buffer each."""

    @staticmethod
    def forward(ctx, eps, query, gain, *sources):
        held = tuple(aligned(source) for source in sources)
        parameters = float32(query), float32(gain)
        out, *statistics = _forward(held, *parameters, eps)
        ctx.save_for_backward(*parameters, *statistics, *held)
        ctx.dtypes = query.dtype, None if gain is None else gain.dtype
        ctx.set_materialize_grads(False)
        return out, *sources

    @staticmethod
    @once_differentiable
    def backward(ctx, dh, *later):
        query, gain, logits, rstd, lse, *sources = ctx.saved_tensors
        if dh is None:
            return None, None, None, *later
        B, T, D = sources[0].shape
        P, N = B * T, len(sources)
        buffers = Buffers(sources, later)
        layout = backward_layout(D, dh.dtype)
        n_programs = resident_programs(P, layout["num_warps"], dh.device)
        partial = query.new_empty(n_programs, D)
        backward_kernel[(n_programs,)](
            table(sources, buffers.given, buffers.out), query, gain, aligned(dh), logits, rstd, lse, partial, P, N,
            NP=next_power_of_2(N), **layout, ADD=buffers.add, DTYPE=TRITON_DTYPES[dh.dtype],
        )  # fmt: skip
        dquery, dgain = _query_gradients(partial, query, gain)
        of_query, of_gain = ctx.dtypes
        return None, dquery.to(of_query), None if dgain is None else dgain.to(of_gain), *buffers.out


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
    D = sources[0].shape[-1]
    check_shapes(query=(query, (D,)), key_gain=(key_gain, (D,)))
    out, *through = _Read.apply(eps, query, key_gain, *sources)
    return out, tuple(through)


def attnres_read(sources: Sequence[Tensor], query: Tensor, key_gain: Tensor | None, eps: float) -> Tensor:
    """As `reference.attnres_read`; autograd adds the sources' gradients of different reads."""
    return attnres_read_through(sources, query, key_gain, eps)[0]
