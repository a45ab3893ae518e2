"""Scores of a source for all reads to come, computed once when it is complete; for producers' convs.

A completed source is expanded once forward, for the norms of its streams, and once more backward; the logits of all
later reads are matrix products. What travels to the reads is small: 4 m bytes per source, token and later read.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import dots
from kernels.gradients import Buffers
from kernels.msar_inputs import Sources, Spec, check_inputs
from kernels.msar_steps import score, walk_sources
from kernels.tiles import aligned, check_sources, float32


def scores_ahead(
    spec: Spec, source: Tensor, taps: Tensor | None, queries: Tensor, position: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Logits [R, P, m] of one source for queries [R, m, D], and its rstd [P, m]."""
    _, rstd = score(spec, Sources([source], () if taps is None else (taps,), position), None)
    return dots.logits(source, taps, queries, rstd[0], spec.kernel_sizes, position), rstd[0]


@dataclasses.dataclass(frozen=True)
class Ahead:
    """A source's scores for all reads to come, to differentiate.

    Attributes:
        taps: [K, D] or None; queries: [R, m, D].
        logits: [R, P, m]; rstd: [P, m].
    """

    taps: Tensor | None
    queries: Tensor
    logits: Tensor
    rstd: Tensor

    def backward(self, spec: Spec, source: Tensor, position: Tensor | None, dlogits: Tensor) -> dots.Gradients:
        """For dlogits [R, P, m]; what it gives for streams and source is left to a walk."""
        scores = (self.logits.contiguous(), self.rstd)
        return dots.backward(source, self.taps, self.queries, scores, dlogits.contiguous(), spec.kernel_sizes, position)


def scores_ahead_backward(spec: Spec, sources: Sources, ahead: Ahead, dlogits: Tensor) -> tuple[Tensor, Tensor]:
    """For dlogits [R, P, m] the gradients of queries and taps [K, D]; the one source's goes to its buffer."""
    of_dots = ahead.backward(spec, sources.tensors[0], sources.position, dlogits)
    of_scores, rstd = (None, of_dots.bend[None], None), ahead.rstd[None]
    _, of_norm = walk_sources(spec, sources, None, None, of_scores, rstd=rstd, more=of_dots.source)
    return of_dots.queries, of_dots.taps + of_norm[0]


class _ScoreSource(torch.autograd.Function):
    """Inputs are a source, its taps (or None) and R queries."""

    @staticmethod
    def forward(ctx, spec, position, source, taps, *queries):
        stacked = torch.stack([float32(query) for query in queries])
        held, taps_32 = aligned(source), float32(taps)
        B, T, _ = source.shape
        logits, rstd = scores_ahead(spec, held, taps_32, stacked, position)
        ctx.save_for_backward(stacked, logits, rstd, position, taps_32, held)
        ctx.spec = spec
        ctx.dtypes = [None if x is None else x.dtype for x in (taps, *queries)]
        ctx.set_materialize_grads(False)
        return torch.cat((logits, rstd[None])).view(-1, B, T, spec.m), source

    @staticmethod
    @once_differentiable
    def backward(ctx, dscores, later):
        queries, logits, rstd, position, taps, held = ctx.saved_tensors
        if dscores is None:
            return None, None, later, *(None,) * len(ctx.dtypes)
        given = () if taps is None else (taps,)
        sources = Sources([held], given, position, Buffers([held], [later], no_partial=True))
        dlogits = dscores[:-1].view_as(logits)
        dqueries, dtaps = scores_ahead_backward(ctx.spec, sources, Ahead(taps, queries, logits, rstd), dlogits)
        dparameters = [None if taps is None else dtaps, *dqueries.unbind()]
        dparameters = [None if g is None else g.to(dtype) for g, dtype in zip(dparameters, ctx.dtypes, strict=True)]
        return None, None, sources.buffers.out[0], *dparameters


@torch.compiler.disable
def score_source(
    source: Tensor,
    taps: Tensor | None,
    queries: Sequence[Tensor],
    *,
    kernel_sizes: Sequence[int],
    eps: float = 1e-5,
    position: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Score a source for R reads that see it.

    Args:
        source: [B, T, D], bf16, fp16 or fp32, D a multiple of 8.
        taps: [K, D], the group of its producer; None where K is 0.
        queries: R tensors [m, D], one per read.
        kernel_sizes, eps, position: see `reference.msar_read`.
    Returns:
        [R + 1, B, T, m] in fp32, the reads' logits and rstd, for `msar_read_through(scores=)`; and the source, which
        the reads take from here.
    Raises:
        ValueError: inputs beyond a limit of the kernels, by name.
    """
    check_sources([source])
    spec = Spec(tuple(kernel_sizes), "sigmoid", eps)
    position = check_inputs(spec, source.shape, [taps], queries, position=position)
    return _ScoreSource.apply(spec, position, source, taps if spec.K else None, *queries)
