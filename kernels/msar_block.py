"""The MSAR reads of a block on the GPU, in two phases; for convs that belong to the sources' producers.

When a block opens, all its reads see the same completed sources through the same convs, so one expansion serves them
all (`open_block`); it also scores the newest of them for these and all later reads. Each read then adds the one source
that is new to it, the running partial sum, and mixes (`read_block`):

    a_p = sigmoid(e_p - lse)            r = (1 - a_p) r_completed + a_p u_p

Backward likewise: the reads leave the gradients of their retrieved streams, and when the last one (the block's first)
is done, one walk per completed source turns them into the gradients of sources and taps; the newest one's takes what
all reads made of its norms along. Between the phases r_completed [B, T, m, D] of every read and its statistics
[2, B, T, m] wait; for the backward pass a read keeps its r.

The two functions agree on what travels between them as gradients: in the place of r_completed's gradient its values in
units, in the place of the statistics' (log-sum-exp, scale) the mean of the weights' gradient and those units.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import MAX_READS, depth_softmax
from kernels.gradients import Buffers
from kernels.msar_ahead import Ahead, scores_ahead
from kernels.msar_inputs import Sources, Spec, check_inputs
from kernels.msar_mix import Mixer, means_of, mix, mix_backward, mix_onto, mixes_onto
from kernels.msar_steps import (
    Scores,
    onto_factors,
    reads_at_once,
    retrieve,
    retrieve_onto,
    score,
    scores_gradient,
    scores_of,
    scratch_dtype,
    softmax_backward,
    softmax_over_sources,
    sources_backward,
    walk_sources,
    weights_gradient,
)
from kernels.reference import Gate
from kernels.tiles import aligned, cdiv, check_shapes, check_sources, float32, table


class _OpenBlock(torch.autograd.Function):
    """Phase 1 of R reads; inputs are N sources, the scores of all but the last, N taps (or none), and the queries of
    these reads and all that follow."""

    @staticmethod
    def forward(ctx, spec, position, rows, n_reads, n_taps, *tensors):
        N = len(rows) + 1
        given, scores = tensors[:N], tensors[N : 2 * N - 1]
        taps, queries = tensors[2 * N - 1 : 2 * N - 1 + n_taps], tensors[2 * N - 1 + n_taps :]
        held = tuple(map(aligned, given))
        taps_32 = tuple(map(float32, taps))
        stacked = torch.stack([float32(query) for query in queries])
        sources = Sources(held, taps_32, position)
        B, T, D, _ = sources.shape
        logits, rstd = scores_ahead(spec, held[-1], taps_32[-1] if taps else None, stacked, position)
        of_last = torch.cat((logits, rstd[None])).view(-1, B, T, spec.m)
        logits, rstd = scores_of((*scores, of_last), (*rows, 0), n_reads)
        weights, lse, scale = softmax_over_sources(logits, rstd)
        retrieved = retrieve(spec, sources, weights, rstd, scale)
        ctx.save_for_backward(weights, rstd, of_last, position, stacked, *sources.prepared, *taps_32, *held)
        ctx.spec, ctx.rows, ctx.shapes = spec, rows, [x.shape for x in scores]
        ctx.dtypes = [x.dtype for x in (*taps, *queries)]
        ctx.set_materialize_grads(False)
        out = []
        for r in range(n_reads):
            out += [retrieved[r].view(B, T, spec.m, D), torch.stack((lse[r], scale)).view(2, B, T, spec.m)]
        return *out, *given, *scores, of_last

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        spec = ctx.spec
        weights, rstd, of_last, position, queries, *rest = ctx.saved_tensors
        prepared, rest = rest[:3], rest[3:]
        R, N, P, m = weights.shape
        taps, held = rest[:-N], rest[-N:]
        buffers = Buffers(held, gradients[2 * R : 2 * R + N], no_partial=True)
        sources = Sources(held, taps, position, buffers, prepared)
        drs, means, units = [], [], []
        for dr, statistics in zip(gradients[: 2 * R : 2], gradients[1 : 2 * R : 2], strict=True):
            if dr is None:  # a read that nothing used
                dtype = scratch_dtype(held[0].dtype)
                dr, statistics = weights.new_zeros(P, m, held[0].shape[-1], dtype=dtype), weights.new_zeros(2, P, m)
            drs.append(dr.reshape(P, m, -1))
            means.append(statistics[0].reshape(P, m))
            units.append(statistics[1].reshape(P, m))
        *older, of_later = gradients[2 * R + N :]
        if of_later is None:
            of_later = torch.zeros_like(of_last)
        ahead = Ahead(taps[-1] if taps else None, queries, of_last[:-1].flatten(1, 2), rstd[-1])
        dlogits, dtaps, dqueries = block_backward(
            spec, sources, weights, rstd, drs, torch.stack(units), torch.stack(means), ahead,
            of_later[R:-1].flatten(1, 2),
        )  # fmt: skip
        dscores = scores_gradient(older, ctx.shapes, ctx.rows, dlogits)
        dparameters = [*(dtaps.unbind() if taps else ()), *dqueries.unbind()]
        dparameters = [g.to(dtype) for g, dtype in zip(dparameters, ctx.dtypes, strict=True)]
        return None, None, None, None, None, *sources.buffers.out, *dscores, *dparameters


def block_backward(
    spec: Spec, sources: Sources, weights: Tensor, rstd: Tensor, drs: Sequence[Tensor], units: Tensor, means: Tensor,
    ahead: Ahead, of_later: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of all that the R reads of a block did with N sources, of which the last was scored here.

    Args:
        weights: [R, N, P, m]; rstd: [N, P, m].
        drs: R tensors [P, m, D], whose values count units [R, P, m].
        means: [R, P, m], sum over all sources of a read of weight times its gradient; NaN for a read that has no other
            sources, for which it is summed here.
        ahead: of the last source, for these reads and those that follow.
        of_later: gradients of its logits for those that follow [R', P, m].
    Returns:
        Gradients of the older sources' logits [R, N - 1, P, m], of the taps [N, K, D], of the queries [R + R', m, D].
    """
    R, N = weights.shape[:2]
    dr_table = table(drs)
    dweights = weights_gradient(spec, sources, rstd, drs, dr_table)
    scaled, slope, _ = softmax_backward(weights, rstd, None, dweights, units, means, sources.shape[2])
    dlogits = slope / rstd
    of_dots = ahead.backward(spec, sources.tensors[-1], sources.position, torch.cat((dlogits[:, -1], of_later)))
    dtaps = 0
    for group in reads_at_once(R):
        # the first walk takes along what all reads made of the newest source's norms
        of_norms = (None,) if group.start else ((None, of_dots.bend[None], None), N - 1)
        dtaps = dtaps + walk_sources(
            spec, sources, dr_table[:, group], scaled[group], *of_norms, rstd=rstd, dr_dtype=drs[0].dtype,
            more=None if group.start else of_dots.source, again=group.start > 0,
        )[1]  # fmt: skip
    dtaps[-1] += of_dots.taps
    return dlogits[:, :-1], dtaps, of_dots.queries


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
        of_partial: tuple = (None,) * 9
        if partial is not None:
            query_32, held = float32(query), aligned(partial)
            taps_32 = float32(taps)
            sources = Sources([held], () if taps is None else (taps_32,), position)
            logits, rstd = score(spec, sources, query_32)
            a, base_weight, merged = torch.empty_like(rstd), torch.empty_like(lse), torch.empty_like(lse)
            depth_softmax.merge_kernel[(cdiv(lse.numel(), depth_softmax.BLOCK),)](
                logits, rstd, lse, scale_of_r, a, base_weight, merged, lse.numel(), BLOCK=depth_softmax.BLOCK
            )
            factors = onto_factors(sources, a[None], rstd, merged)
            of_partial = (query_32, held, taps_32, logits, rstd, a, *sources.prepared)
            scale_of_r = merged
        if partial is not None and mixes_onto(spec, r.dtype, D):
            r, h, of_gates = mix_onto(spec, sources, factors, r, base_weight, scale_of_r, mixer, partial.dtype)
        else:
            r = r if partial is None else retrieve_onto(spec, sources, factors, r, base_weight)
            h, of_gates = mix(spec, r, scale_of_r, mixer, source_dtype(retrieved.dtype))
        ctx.save_for_backward(r, scale_of_r, of_gates, position, *mixer, *of_partial)
        return h.view(B, T, D), partial

    @staticmethod
    @once_differentiable
    def backward(ctx, dh, later):
        spec = ctx.spec
        r, scale_of_r, of_gates, position, weight, scale, bias, *of_partial = ctx.saved_tensors
        if dh is None:
            return None, None, None, None, later, *(None,) * 5
        P, m, D = r.shape
        shape = (*dh.shape[:2], m)
        dh = aligned(dh).view(P, D)
        of_mix = mix_backward(spec, r, scale_of_r, dh, (weight, scale, bias), of_gates, in_place=False)
        dr, unit, dpartial, dquery, dtaps = of_mix.dr, of_mix.unit, None, None, None
        query, held, taps, logits, rstd, a, *prepared = of_partial
        if held is None:  # phase 1 has all the sources of this read and sums the mean itself
            dstatistics = torch.stack((torch.full_like(unit, float("nan")), unit))
        else:
            given = () if taps is None else (taps,)
            sources = Sources([held], given, position, Buffers([held], [later]), prepared)
            dr_table = table([dr])
            dweights = weights_gradient(spec, sources, rstd, [dr], dr_table)
            mean, dstatistics = means_of(of_mix, r, scale_of_r), unit.new_empty(2, P, m)
            depth_softmax.handed_kernel[(cdiv(P * m, depth_softmax.BLOCK),)](
                mean, unit, a, dstatistics, P * m, BLOCK=depth_softmax.BLOCK
            )
            scores = Scores(a[None], rstd, 0, query, logits[None])
            units, means = unit[None], mean[None]
            _, dtaps, dquery = sources_backward(spec, sources, scores, dr, dr_table, dweights, units, means)
            dpartial, dtaps = sources.buffers.out[0], dtaps[0]
        dparameters = [dtaps if ctx.dtypes[0] is not None else None, dquery, *of_mix.mixer]
        dparameters = [None if g is None else g.to(dtype) for g, dtype in zip(dparameters, ctx.dtypes, strict=True)]
        return None, None, dr.view(*shape, D), dstatistics.view(2, *shape), dpartial, *dparameters


def source_dtype(scratch: torch.dtype) -> torch.dtype:
    """The sources' dtype of a retrieval in the scratch dtype."""
    return torch.bfloat16 if scratch == torch.float16 else scratch


@torch.compiler.disable
def open_block(
    sources: Sequence[Tensor],
    taps: Sequence[Tensor | None],
    scores: Sequence[Tensor],
    rows: Sequence[int],
    queries: Sequence[Tensor],
    n_reads: int,
    *,
    kernel_sizes: Sequence[int],
    eps: float = 1e-5,
    position: Tensor | None = None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Phase 1: what R reads retrieve from the sources they have in common, of which the last is new to all reads.

    Args:
        sources: N tensors [B, T, D], bf16 or fp32, D a multiple of 8.
        taps: N tensors [K, D], the group of each source's producer; None where K is 0.
        scores: N - 1 tensors [R_n + 1, B, T, m], of the older sources.
        rows: N - 1 numbers, where the scores of the first of these reads are among them.
        queries: [m, D] of these reads and all that follow.
        n_reads: R, one read after the other.
        kernel_sizes, eps, position: see `reference.msar_read`.
    Returns:
        2 R tensors for `read_block`, streams and statistics of each read in turn; the N sources; and the scores of all.
    """
    check_sources(sources)
    if sources[0].dtype == torch.float16:
        raise ValueError("kernels=triton with schedule=per_block takes bf16 or fp32 sources, got fp16; use per_read")
    if not 1 <= n_reads <= MAX_READS:
        raise ValueError(f"schedule=per_block takes 1 to {MAX_READS} reads a block, got {n_reads}; use per_read")
    spec = Spec(tuple(kernel_sizes), "sigmoid", eps)
    position = check_inputs(spec, sources[0].shape, taps, queries, position=position)
    taps = taps if spec.K else ()
    tensors = (*sources, *scores, *taps, *queries)
    out = _OpenBlock.apply(spec, position, tuple(rows), n_reads, len(taps), *tensors)
    return out[: 2 * n_reads], out[2 * n_reads : -len(sources)], out[-len(sources) :]


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
    B, T, _, D = retrieved.shape
    check_shapes(partial=(partial, (B, T, D)))
    mixer = mix_weight, mix_scale, mix_bias
    position = check_inputs(spec, (B, T, D), [taps], [query], mixer, position)
    return _ReadBlock.apply(spec, position, retrieved, statistics, partial, taps if spec.K else None, query, *mixer)
