"""The MSAR read on the GPU, one read at a time: score, softmax over depth, retrieve, mix; forward and backward.

Sources that later reads see through the same convs are scored for all of them when they are complete (`msar_ahead`).

Forward, every source is expanded twice in registers, once to score it and once to sum it up with its weights; the m
retrieved streams go through memory to the mix and are dropped. Kept for the backward pass: logits, rstd, weights and
gates, a few fp32 values per token, source and stream. Backward, the streams are retrieved again, turned in place into
their own gradients, and walks over the sources give everything else.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.gradients import Buffers
from kernels.msar_inputs import Sources, Spec, check_inputs
from kernels.msar_mix import mix, mix_backward
from kernels.msar_steps import (
    Scores,
    retrieve,
    score,
    scores_gradient,
    scores_of,
    softmax_over_sources,
    sources_backward,
    weights_gradient,
)
from kernels.reference import Gate
from kernels.tiles import aligned, check_sources, float32, table


class _Read(torch.autograd.Function):
    """One read; inputs are the parameters, N sources, the scores of the first of them (at `rows`), and their taps (one
    tensor if all sources share it, or none)."""

    @staticmethod
    def forward(ctx, spec, position, rows, query, mix_weight, mix_scale, mix_bias, n_sources, *tensors):
        n_ahead = len(rows)
        given, scores = tensors[:n_sources], tensors[n_sources : n_sources + n_ahead]
        taps = tensors[n_sources + n_ahead :]
        B, T, D = given[0].shape
        mixer = None if mix_weight is None else tuple(map(float32, (mix_weight, mix_scale, mix_bias)))
        held, query_32 = tuple(map(aligned, given)), float32(query)
        taps_32 = tuple(map(float32, taps))
        sources = Sources(held, taps_32, position)
        logits, rstd = all_scores(spec, sources, taps_32, query_32, scores, rows)
        weights, _, scale = softmax_over_sources(logits, rstd)
        if spec.m == 1:
            out, statistics = retrieve(spec, sources, weights, rstd, None)[0], None
        else:
            retrieved = retrieve(spec, sources, weights, rstd, scale)[0]
            out, statistics = mix(spec, retrieved, scale, mixer, sources.dtype)
        kept = (query_32, None if n_ahead == n_sources else logits, rstd, weights, scale, statistics, position)
        ctx.save_for_backward(*kept, *(mixer or (None,) * 3), *taps_32, *held)
        ctx.spec, ctx.n_sources, ctx.n_taps = spec, n_sources, len(taps)
        ctx.rows, ctx.shapes = rows, [x.shape for x in scores]
        ctx.dtypes = [None if x is None else x.dtype for x in (query, mix_weight, mix_scale, mix_bias, *taps)]
        ctx.set_materialize_grads(False)
        return out.view(B, T, D), *given, *scores

    @staticmethod
    @once_differentiable
    def backward(ctx, dh, *later):
        spec, n = ctx.spec, ctx.n_sources
        query, logits, rstd, weights, scale, statistics, position, *rest = ctx.saved_tensors
        mixer, taps, held = rest[:3], rest[3:-n], rest[-n:]
        if dh is None:
            return (None,) * 8 + tuple(later) + (None,) * ctx.n_taps
        sources = Sources(held, taps, position, Buffers(held, later[:n]))
        B, T, D, _ = sources.shape
        # the mean's gradient, dh / m for every stream, does not depend on what was retrieved
        dr, unit, dmixer = aligned(dh).view(B * T, D), 1 / spec.m, (None, None, None)
        if mixer[0] is not None:
            retrieved = retrieve(spec, sources, weights, rstd, scale)[0]
            of_mix = mix_backward(spec, retrieved, scale, dr, mixer, statistics, in_place=True)
            dr, unit, dmixer = of_mix.dr, of_mix.unit[None], of_mix.mixer
        scores = Scores(weights, rstd, len(ctx.rows), query, logits)
        dr_table = table([dr])
        dweights = weights_gradient(spec, sources, rstd, [dr], dr_table)
        dlogits, dtaps, dquery = sources_backward(spec, sources, scores, dr, dr_table, dweights, unit)
        dscores = scores_gradient(later[n:], ctx.shapes, ctx.rows, dlogits)
        dtaps = () if ctx.n_taps == 0 else (dtaps.sum(0),) if ctx.n_taps == 1 else dtaps.unbind()
        dparameters = [dquery, *dmixer, *dtaps]
        dparameters = [None if g is None else g.to(dtype) for g, dtype in zip(dparameters, ctx.dtypes, strict=True)]
        return None, None, None, *dparameters[:4], None, *sources.buffers.out, *dscores, *dparameters[4:]


def all_scores(
    spec: Spec, sources: Sources, taps: Sequence[Tensor], query: Tensor, scores: Sequence[Tensor], rows: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Logits [1, N, P, m] and rstd [N, P, m], of the first sources from their scores."""
    n, N = len(scores), len(sources.tensors)
    if n == N:
        return scores_of(scores, rows, 1)
    rest = Sources(sources.tensors[n:], taps[n:] if len(taps) > 1 else taps, sources.position) if n else sources
    logits, rstd = score(spec, rest, query)
    if n:
        ahead = scores_of(scores, rows, 1)
        logits, rstd = torch.cat((ahead[0][0], logits)), torch.cat((ahead[1], rstd))
    return logits[None], rstd


@torch.compiler.disable
def msar_read_through(
    sources: Sequence[Tensor],
    taps: Sequence[Tensor | None],
    query: Tensor,
    mix_weight: Tensor | None,
    mix_scale: Tensor | None,
    mix_bias: Tensor | None,
    *,
    kernel_sizes: Sequence[int],
    gate: Gate = "sigmoid",
    eps: float = 1e-5,
    position: Tensor | None = None,
    scores: Sequence[Tensor] = (),
    rows: Sequence[int] = (),
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`reference.msar_read`, and the sources and scores to hand to the next read.

    A read that takes the sources of the read before it adds its part of their gradients to what the later reads left,
    in the same pass over memory; autograd adds nothing.

    Args:
        sources: N tensors [B, T, D] of one dtype (bf16, fp16, fp32), D a multiple of 8, N up to 128.
        taps: N tensors [K, D], the same one N times if the reader owns the convs; None where K is 0.
        query, mix_weight, mix_scale, mix_bias, kernel_sizes, gate, eps, position: see `reference.msar_read`; up to 8
            streams of up to 32 taps.
        scores: of the first sources, what `msar_ahead.score_source` returned, and for each the row of this read.
    Returns:
        [B, T, D] in the sources' dtype, and the N sources and their scores.
    Raises:
        ValueError: inputs beyond a limit of the kernels, by name.
    """
    check_sources(sources)
    spec = Spec(tuple(kernel_sizes), gate, eps)
    mixer = mix_weight, mix_scale, mix_bias
    position = check_inputs(spec, sources[0].shape, taps, [query], mixer, position)
    if len(taps) != len(sources):
        raise ValueError(f"taps must be one group per source, got {len(taps)} for {len(sources)} sources")
    if spec.K == 0:
        taps = ()
    elif all(group is taps[0] for group in taps):
        taps = taps[:1]
    out, *through = _Read.apply(spec, position, tuple(rows), query, *mixer, len(sources), *sources, *scores, *taps)
    return out, tuple(through)


def msar_read(sources: Sequence[Tensor], taps: Sequence[Tensor | None], *parameters, **options) -> Tensor:
    """As `reference.msar_read`; autograd adds the sources' gradients of different reads."""
    return msar_read_through(sources, taps, *parameters, **options)[0]
