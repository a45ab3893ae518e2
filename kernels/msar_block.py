"""The MSAR reads of a block on the GPU, in two phases; for convs that belong to the sources' producers.

When a block opens, all its reads see the same completed sources through the same convs, so one expansion serves them
all (`open_block`). Each read then adds the one source that is new to it, the running partial sum, and mixes
(`read_block`):

    a_p = sigmoid(e_p - lse)            r = (1 - a_p) r_completed + a_p u_p

Backward likewise: the reads leave the gradients of their retrieved streams, and when the last one (the block's first)
is done, one walk per completed source turns them into the gradients of sources, taps and queries. Between the phases
r_completed [B, T, m, D] of every read and its statistics [2, B, T, m] wait; for the backward pass a read keeps its r.

The two functions agree on what travels between them as gradients: in the place of r_completed's gradient its values in
units, in the place of the statistics' (log-sum-exp, scale) the mean of the weights' gradient and those units.
"""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import MAX_READS, depth_softmax
from kernels.gradients import Buffers
from kernels.msar_mix import Mixer, mix, mix_backward
from kernels.msar_steps import (
    Scores,
    Sources,
    Spec,
    retrieve,
    score,
    scratch_dtype,
    softmax_over_sources,
    sources_backward,
    weights_gradient,
)
from kernels.reference import Gate
from kernels.tiles import aligned, check_sources, check_streams, float32, table


class _OpenBlock(torch.autograd.Function):
    """Phase 1; inputs are R queries, N sources and their N taps (or none)."""

    @staticmethod
    def forward(ctx, spec, position, n_reads, n_sources, *tensors):
        queries, given = tensors[:n_reads], tensors[n_reads : n_reads + n_sources]
        taps = tensors[n_reads + n_sources :]
        stacked = torch.stack([float32(query) for query in queries])
        held = tuple(map(aligned, given))
        taps_32 = tuple(map(float32, taps))
        sources = Sources(held, taps_32, position)
        B, T, D, _ = sources.shape
        logits, rstd = score(spec, sources, stacked)
        weights, lse, scale = softmax_over_sources(logits, rstd)
        retrieved = retrieve(spec, sources, weights, rstd, scale)
        ctx.save_for_backward(stacked, logits, weights, rstd, position, *taps_32, *held)
        ctx.spec, ctx.n_taps = spec, len(taps)
        ctx.dtypes = [x.dtype for x in (*queries, *taps)]
        ctx.set_materialize_grads(False)
        out = []
        for r in range(n_reads):
            out += [retrieved[r].view(B, T, spec.m, D), torch.stack((lse[r], scale)).view(2, B, T, spec.m)]
        return *out, *given

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        spec = ctx.spec
        queries, logits, weights, rstd, position, *rest = ctx.saved_tensors
        R, N, P, m = logits.shape
        taps, held = rest[:-N], rest[-N:]
        later = gradients[2 * R :]
        sources = Sources(held, taps, position, Buffers(held, later))
        drs, means, units = [], [], []
        for dr, statistics in zip(gradients[: 2 * R : 2], gradients[1 : 2 * R : 2], strict=True):
            if dr is None:  # a read that nothing used
                dtype = scratch_dtype(held[0].dtype)
                dr, statistics = weights.new_zeros(P, m, held[0].shape[-1], dtype=dtype), weights.new_zeros(2, P, m)
            drs.append(dr.reshape(P, m, -1))
            means.append(statistics[0].reshape(P, m))
            units.append(statistics[1].reshape(P, m))
        scores = Scores(queries, logits, weights, rstd)
        dqueries, dtaps, _ = sources_backward(spec, sources, scores, drs, torch.stack(units), torch.stack(means))
        dparameters = [*dqueries.unbind(), *(dtaps.unbind() if ctx.n_taps else ())]
        dparameters = [g.to(dtype) for g, dtype in zip(dparameters, ctx.dtypes, strict=True)]
        return None, None, None, None, *dparameters[:R], *sources.buffers.out, *dparameters[R:]


class _ReadBlock(torch.autograd.Function):
    """Phase 2; `partial` is None for the read that opens the block, `taps` is None without convs."""

    @staticmethod
    def forward(ctx, spec, position, retrieved, statistics, partial, taps, query, weight, scale, bias):
        B, T, m, D = retrieved.shape
        mixer: Mixer = (float32(weight), float32(scale), float32(bias))
        lse, scale_of_r = statistics.view(2, B * T, m).unbind()
        r = retrieved.view(B * T, m, D)
        ctx.spec = spec
        ctx.dtypes = [None if x is None else x.dtype for x in (taps, query, weight, scale, bias)]
        ctx.set_materialize_grads(False)
        of_partial: tuple = (None,) * 6
        kept_weight = None
        if partial is not None:
            queries, held = float32(query)[None], aligned(partial)
            taps_32 = float32(taps)
            sources = Sources([held], () if taps is None else (taps_32,), position)
            logits, rstd = score(spec, sources, queries)
            a, base_weight, merged = torch.empty_like(rstd), torch.empty_like(lse), torch.empty_like(lse)
            depth_softmax.merge_kernel[(triton.cdiv(lse.numel(), depth_softmax.BLOCK),)](
                logits, rstd, lse, scale_of_r, a, base_weight, merged, lse.numel(), BLOCK=depth_softmax.BLOCK
            )
            (r,) = retrieve(spec, sources, a[None], rstd, merged, (r, base_weight))
            of_partial = (queries, held, taps_32, logits, rstd, a)
            kept_weight, scale_of_r = base_weight * scale_of_r, merged
        h, of_gates = mix(spec, r, scale_of_r, mixer, source_dtype(retrieved.dtype))
        ctx.save_for_backward(r, scale_of_r, kept_weight, of_gates, position, *mixer, *of_partial)
        return h.view(B, T, D), partial

    @staticmethod
    @once_differentiable
    def backward(ctx, dh, later):
        spec = ctx.spec
        r, scale_of_r, kept_weight, of_gates, position, weight, scale, bias, *of_partial = ctx.saved_tensors
        if dh is None:
            return None, None, None, None, later, *(None,) * 5
        P, m, D = r.shape
        shape = (*dh.shape[:2], m)
        dh = aligned(dh).view(P, D)
        of_mix = mix_backward(spec, r, scale_of_r, dh, (weight, scale, bias), of_gates, in_place=False)
        dr, unit, dpartial, dquery, dtaps = of_mix.dr, of_mix.unit, None, None, None
        if kept_weight is None:  # phase 1 has all the sources of this read and sums the mean itself
            mean = torch.full_like(unit, float("nan"))
        else:
            queries, held, taps, logits, rstd, a = of_partial
            sources = Sources([held], () if taps is None else (taps,), position, Buffers([held], [later]))
            # the mean over all sources, most of which are phase 1's: sum_n a_nj dr_j . u_nj = dr_j . r_j
            dweights, products = weights_gradient(spec, sources, rstd, [dr], table([dr]), r)
            mean = products * unit / scale_of_r
            scores = Scores(queries, logits, a[None], rstd)
            dqueries, dtaps, _ = sources_backward(spec, sources, scores, [dr], unit[None], mean[None], dweights)
            dpartial, dquery, dtaps = sources.buffers.out[0], dqueries[0], dtaps[0]
            mean, unit = mean * kept_weight, unit * kept_weight
        dparameters = [dtaps if ctx.dtypes[0] is not None else None, dquery, *of_mix.mixer]
        dparameters = [None if g is None else g.to(dtype) for g, dtype in zip(dparameters, ctx.dtypes, strict=True)]
        dstatistics = torch.stack((mean, unit)).view(2, *shape)
        return None, None, dr.view(*shape, D), dstatistics, dpartial, *dparameters


def source_dtype(scratch: torch.dtype) -> torch.dtype:
    """The sources' dtype of a retrieval in the scratch dtype."""
    return torch.bfloat16 if scratch == torch.float16 else scratch


@torch.compiler.disable
def open_block(
    sources: Sequence[Tensor],
    taps: Sequence[Tensor | None],
    queries: Sequence[Tensor],
    *,
    kernel_sizes: Sequence[int],
    eps: float = 1e-5,
    position: Tensor | None = None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Phase 1: what R reads retrieve from the sources they have in common.

    Args:
        sources: N tensors [B, T, D], bf16 or fp32, D a multiple of 8.
        taps: N tensors [K, D], the group of each source's producer; None where K is 0.
        queries: R tensors [m, D], one per read.
        kernel_sizes, eps, position: see `reference.msar_read`.
    Returns:
        2 R tensors for `read_block`, streams and statistics of each read in turn; and the N sources.
    """
    check_sources(sources)
    check_streams(kernel_sizes)
    if sources[0].dtype == torch.float16:
        raise ValueError("kernels=triton with schedule=per_block takes bf16 or fp32 sources, got fp16; use per_read")
    if not 1 <= len(queries) <= MAX_READS:
        raise ValueError(f"schedule=per_block takes 1 to {MAX_READS} reads a block, got {len(queries)}; use per_read")
    spec = Spec(tuple(kernel_sizes), "sigmoid", eps)
    taps = taps if spec.K else ()
    if position is not None:
        position = position.to(torch.int32).contiguous()
    out = _OpenBlock.apply(spec, position, len(queries), len(sources), *queries, *sources, *taps)
    return out[: 2 * len(queries)], out[2 * len(queries) :]


@torch.compiler.disable
def read_block(
    retrieved: Tensor,
    statistics: Tensor,
    partial: Tensor | None,
    taps: Tensor | None,
    query: Tensor,
    mix_weight: Tensor,
    mix_scale: Tensor,
    mix_bias: Tensor,
    *,
    kernel_sizes: Sequence[int],
    gate: Gate = "sigmoid",
    eps: float = 1e-5,
    position: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Phase 2: one read, from what `open_block` retrieved for it and the partial sum.

    Args:
        retrieved, statistics: of this read, as `open_block` returned them.
        partial: [B, T, D], the source that is new to this read; None for the read that opens the block.
        taps: [K, D] of the partial sum's last writer; None where K is 0.
        query, mix_weight, mix_scale, mix_bias, kernel_sizes, gate, eps, position: see `reference.msar_read`.
    Returns:
        [B, T, D] in the sources' dtype, and the partial sum to hand on.
    """
    if partial is not None:
        check_sources([partial])
    spec = Spec(tuple(kernel_sizes), gate, eps)
    if position is not None:
        position = position.to(torch.int32).contiguous()
    return _ReadBlock.apply(
        spec, position, retrieved, statistics, partial, taps if spec.K else None, query, mix_weight, mix_scale, mix_bias
    )
