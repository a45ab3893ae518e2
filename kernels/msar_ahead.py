"""Scores of the sources that all reads of a block see, computed once when the block opens; for producers' convs.

A completed source is expanded once to score it for all reads of the block, and once more backward, instead of once per
read. What travels to the reads is small: logits and rstd, 8 m values per source, token and read.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import MAX_READS
from kernels.gradients import Buffers
from kernels.msar_steps import Sources, Spec, score, scores_backward
from kernels.tiles import aligned, check_sources, check_streams, float32


class _ScoreBlock(torch.autograd.Function):
    """Inputs are R queries, N sources and their N taps (or none)."""

    @staticmethod
    def forward(ctx, spec, position, n_reads, n_sources, *tensors):
        queries, given = tensors[:n_reads], tensors[n_reads : n_reads + n_sources]
        taps = tensors[n_reads + n_sources :]
        stacked = torch.stack([float32(query) for query in queries])
        held = tuple(map(aligned, given))
        taps_32 = tuple(map(float32, taps))
        sources = Sources(held, taps_32, position)
        B, T, _, N = sources.shape
        logits, rstd = score(spec, sources, stacked)
        ctx.save_for_backward(stacked, logits, rstd, position, *taps_32, *held)
        ctx.spec, ctx.n_taps = spec, len(taps)
        ctx.dtypes = [x.dtype for x in (*queries, *taps)]
        ctx.set_materialize_grads(False)
        return *(torch.stack((of_read, rstd)).view(2, N, B, T, spec.m) for of_read in logits), *given

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        queries, logits, rstd, position, *rest = ctx.saved_tensors
        R, N = logits.shape[:2]
        taps, held, later = rest[:-N], rest[-N:], gradients[R:]
        if all(gradient is None for gradient in gradients[:R]):
            return None, None, None, None, *(None,) * R, *later, *(None,) * ctx.n_taps
        sources = Sources(held, taps, position, Buffers(held, later))
        dlogits = [torch.zeros_like(logits[0]) if g is None else g[0].reshape_as(logits[0]) for g in gradients[:R]]
        dqueries, dtaps = scores_backward(ctx.spec, sources, queries, logits, rstd, torch.stack(dlogits))
        dparameters = [*dqueries.unbind(), *(dtaps.unbind() if ctx.n_taps else ())]
        dparameters = [g.to(dtype) for g, dtype in zip(dparameters, ctx.dtypes, strict=True)]
        return None, None, None, None, *dparameters[:R], *sources.buffers.out, *dparameters[R:]


@torch.compiler.disable
def score_block(
    sources: Sequence[Tensor],
    taps: Sequence[Tensor | None],
    queries: Sequence[Tensor],
    *,
    kernel_sizes: Sequence[int],
    eps: float = 1e-5,
    position: Tensor | None = None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Score N sources for R reads that see them.

    Args:
        sources, taps, kernel_sizes, eps, position: see `msar_read.msar_read_through`; one group of taps per source.
        queries: R tensors [m, D], one per read.
    Returns:
        R tensors [2, N, B, T, m], logits and rstd, for `msar_read_through(scored=)`; and the N sources.
    Raises:
        ValueError: inputs beyond a limit of the kernels, by name.
    """
    check_sources(sources)
    check_streams(kernel_sizes)
    if not 1 <= len(queries) <= MAX_READS:
        raise ValueError(f"scores ahead are for 1 to {MAX_READS} reads, got {len(queries)}; score in each read")
    spec = Spec(tuple(kernel_sizes), "sigmoid", eps)
    taps = taps if spec.K else ()
    if position is not None:
        position = position.to(torch.int32).contiguous()
    out = _ScoreBlock.apply(spec, position, len(queries), len(sources), *queries, *sources, *taps)
    return out[: len(queries)], out[len(queries) :]
