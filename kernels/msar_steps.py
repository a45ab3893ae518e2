"""The steps of an MSAR read as launches of Triton kernels: what `msar_read` and `msar_block` are made of.

P = B T tokens, R reads at once, N sources, m streams. Small tensors, a value per read, source, token and stream, are
fp32. Retrieved streams are stored in the scratch dtype times a scale, their gradients in units, both [P, m].
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import depth_softmax, narrow, streams, streams_backward, walk
from kernels.gradients import own_buffer
from kernels.msar_inputs import Sources, Spec
from kernels.tensor_sums import on_tensor_cores
from kernels.tiles import TRITON_DTYPES, cdiv, processors, table

SEGMENT = 256  # tokens per program of a backward walk, about: one partial row set of the taps' gradient each
WALK_STEPS = 4  # tokens that a walk takes at a time
READS_AT_ONCE = 4  # reads that share one expansion of a source in a launch
WARPS = 4  # tiles of tokens side by side that share the taps they fetch


def tiles(T: int, steps: int) -> dict:
    """The options of kernels that give every warp of a program `steps` tokens of its own."""
    return {"STEPS": steps, "WARPS": WARPS, "EVEN": T % (WARPS * steps) == 0, "num_warps": WARPS}


def tokens_of_a_warp(sums: int, registers: int, most: int = 8) -> int:
    """A power of two of tokens whose `sums` each fit into so many registers, at least one and `most` at most."""
    return 1 << (max(1, min(most, registers // sums)).bit_length() - 1)


@functools.lru_cache
def segment_length(sequences: tuple[int, int], n_programs: int, past: int, at_once: int) -> int:
    """Tokens per program of a walk, such that no last wave of programs leaves the device idle.

    Args:
        sequences: how many and how long.
        n_programs: of one segment.
        past: tokens that a program walks beyond its own.
        at_once: programs that the device holds.
    """
    B, T = sequences
    lengths = {min(SEGMENT * 2, 16 * cdiv(T, 16 * n)) for n in range(1, cdiv(2 * T, SEGMENT) + 1)}
    waves = {length: cdiv(B * cdiv(T, length) * n_programs, at_once) for length in lengths}
    return min(sorted(lengths, reverse=True), key=lambda length: waves[length] * (length + past))


def scratch_dtype(dtype: torch.dtype) -> torch.dtype:
    """What streams wait in between two kernels: for bf16 sources fp16, in known units 8 times as precise."""
    return torch.float16 if dtype == torch.bfloat16 else torch.float32


def by_token(x: Tensor) -> Tensor:
    """[R, N, P, m] as [N, P, m, R]: what a program needs for a token in one place."""
    return x.permute(1, 2, 3, 0).contiguous()


def reads_at_once(n_reads: int, most: int = READS_AT_ONCE) -> list[slice]:
    """R reads in groups of at most so many that differ by one at most: each is a launch."""
    n_groups = cdiv(n_reads, most)
    bounds = [n_reads * group // n_groups for group in range(n_groups + 1)]
    return [slice(first, end) for first, end in itertools.pairwise(bounds)]


def score(spec: Spec, sources: Sources, query: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """Logits [N, P, m] of every source for a query [m, D], None without one, and rstd [N, P, m]."""
    B, T, _, N = sources.shape
    rstd = sources.table.new_empty(N, B * T, spec.m, dtype=torch.float32)
    logits = None if query is None else torch.empty_like(rstd)
    steps = tokens_of_a_warp(spec.m, 16, most=16)
    n_tiles = cdiv(T, WARPS * steps)
    streams.score_kernel[(B * n_tiles, N)](
        sources.table, query, sources.position, logits, rstd, T, N, B * T, n_tiles, spec.eps,
        QUERY=query is not None, BLOCK_D=spec.block_d, **tiles(T, steps), **sources.constants(spec, warps_per_sm=12),
    )  # fmt: skip
    return logits, rstd


def scores_of(scores: Sequence[Tensor], rows: Sequence[int], n_reads: int) -> tuple[Tensor, Tensor]:
    """Logits [R, N, P, m] of R reads that begin at `rows`, and rstd [N, P, m], of scores [R_n + 1, B, T, m]."""
    logits = [x[row : row + n_reads] for x, row in zip(scores, rows, strict=True)]
    return torch.stack(logits, 1).flatten(2, 3), torch.stack([x[-1] for x in scores]).flatten(1, 2)


def scores_gradient(
    later: Sequence[Tensor | None], shapes: Sequence[Sequence[int]], rows: Sequence[int], dlogits: Tensor
) -> list[Tensor]:
    """Gradients of N scores: what later reads left, and dlogits [R, N, P, m] at `rows`."""
    out = [own_buffer(of_later, dlogits, shape) for of_later, shape in zip(later, shapes, strict=True)]
    for n, (buffer, row) in enumerate(zip(out, rows, strict=True)):
        of_reads = buffer[row : row + len(dlogits)]
        of_reads.copy_(dlogits[:, n].view_as(of_reads))
    return out


def softmax_over_sources(logits: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [R, N, P, m], log-sum-exp [R, P, m], and the scale of what is retrieved [P, m]."""
    R, N, *shape = logits.shape
    weights, lse, scale = torch.empty_like(logits), logits.new_empty(R, *shape), logits.new_empty(shape)
    depth_softmax.weights_kernel[(cdiv(scale.numel(), depth_softmax.BLOCK), R)](
        logits, rstd, weights, lse, scale, N, scale.numel(), BLOCK=depth_softmax.BLOCK
    )
    return weights, lse, scale


def retrieve(spec: Spec, sources: Sources, weights: Tensor, rstd: Tensor, scale: Tensor | None) -> tuple[Tensor, ...]:
    """The retrieved streams of R reads of the same sources: R tensors [P, m, D].

    Args:
        weights: [R, N, P, m]; rstd: [N, P, m].
        scale: [P, m] for the scratch dtype; None for the plain values in the sources' dtype.
    """
    B, T, D, N = sources.shape
    dtype = sources.dtype if scale is None else scratch_dtype(sources.dtype)
    out = tuple(weights.new_empty(B * T, spec.m, D, dtype=dtype) for _ in weights)  # apart: reads drop theirs
    out_table = table(out)
    compute, fit = torch.float32 if scale is None else sources.compute, None
    if compute == torch.float16:
        fit, _ = sources.fits(rstd)
    for group in reads_at_once(len(weights)):
        of_group = weights[group]
        n_reads = len(of_group)
        by_read = by_token(of_group) if fit is None else narrow.narrow_weights(of_group, scale, fit)
        # as many accumulators as fit beside the window: two channels take one register in fp16 and two in fp32
        steps = tokens_of_a_warp(spec.m * n_reads, 32 if fit is None else 64)
        n_tiles = cdiv(T, WARPS * steps)
        streams.retrieve_kernel[(B * n_tiles * cdiv(D, spec.block_d),)](
            sources.table, by_read, fit, scale, sources.position, out_table[0, group], T, N,
            B * T, n_tiles, READS=n_reads, BLOCK_D=spec.block_d, SCALED=scale is not None,
            OUT_DTYPE=TRITON_DTYPES[dtype], **tiles(T, steps),
            # two reads of eight tokens just exceed the registers of 16 warps
            **sources.constants(spec, compute, None if fit is None else 12 if n_reads == 2 else 16),
        )  # fmt: skip
    return out


def onto_factors(
    source: Sources, weight: Tensor, rstd: Tensor, scale: Tensor
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """What rows of one source are multiplied by, and its weights [1, 1, P, m] with `scale` [P, m] in them."""
    if source.compute == torch.float32:
        return None, weight * scale
    fit, _ = source.fits(rstd)
    return fit, narrow.narrow_weights(weight, scale, fit)


def retrieve_onto(
    spec: Spec, source: Sources, factors: tuple[Tensor | None, Tensor], base: Tensor, base_weight: Tensor,
    first: int = 0,
) -> Tensor:  # fmt: skip
    """The retrieved streams [P, m, D] of a read, times a scale: of one source, and of others what is known.

    Args:
        source: one; factors: `onto_factors` of it.
        base: [P, m, D] of the other sources, of which base_weight [P, m] are taken.
        first: channel from which on; those before stay unwritten.
    """
    B, T, D, _ = source.shape
    fit, weight = factors
    n_tiles = cdiv(D - first, spec.block_d)
    segment = segment_length((B, T), n_tiles, 0, 16 * processors(base.device))
    n_segments = cdiv(T, segment)
    out = torch.empty_like(base)
    streams.add_source_kernel[(n_tiles, B * n_segments)](
        source.table, weight, fit, base, base_weight, source.position, out, T, n_segments, segment,
        FIRST=first, BLOCK_D=spec.block_d, UNROLL=WALK_STEPS, EVEN=T % WALK_STEPS == 0, STAGES=3, num_warps=1,
        OUT_DTYPE=TRITON_DTYPES[base.dtype], **source.constants(spec, source.compute, None if fit is None else 16),
    )  # fmt: skip
    return out


@dataclasses.dataclass(frozen=True)
class Scores:
    """How a read of N sources weighted them.

    Attributes:
        weights: [1, N, P, m].
        rstd: [N, P, m].
        n_ahead: how many of the first sources were scored elsewhere.
        query: [m, D], and logits [1, N, P, m] of a read that scored the others itself.
    """

    weights: Tensor
    rstd: Tensor
    n_ahead: int
    query: Tensor | None = None
    logits: Tensor | None = None


def computing_dtype(sources: Sources, dr_dtype: torch.dtype) -> torch.dtype:
    """fp16 where both the sources and gradients in units of `narrow.GRADIENT_PEAK` allow it."""
    return sources.compute if dr_dtype == torch.float16 else torch.float32


def weights_gradient(spec: Spec, sources: Sources, rstd: Tensor, drs: Sequence[Tensor], dr_table: Tensor) -> Tensor:
    """dr_rj . u_nj [R, N, P, m] in the units of dr: R tensors [P, m, D], or one [P, D] that all streams share."""
    B, T, _, N = sources.shape
    out = sources.table.new_empty(len(drs), N, B * T, spec.m, dtype=torch.float32)
    compute = computing_dtype(sources, drs[0].dtype)
    fit, _ = sources.fits(rstd) if compute == torch.float16 else (None, None)
    fast = on_tensor_cores(TRITON_DTYPES[compute], spec.block_d)
    for group in reads_at_once(len(drs)):
        n_reads = group.stop - group.start
        # the fewer sums a token has, the more tokens share the rows before them; eight of four reads spill
        steps = (4 if n_reads == 4 else 8) if fast else tokens_of_a_warp(spec.m * n_reads, 32 if fit is None else 96)
        n_tiles = cdiv(T, WARPS * steps)
        streams_backward.dweights_kernel[(B * n_tiles * N,)](
            sources.table, dr_table[0, group], fit, out[group], sources.position, T, N, B * T, n_tiles,
            READS=n_reads, SHARED=drs[0].ndim == 2, BLOCK_D=spec.block_d,
            DR_DTYPE=TRITON_DTYPES[drs[0].dtype], **tiles(T, steps),
            **sources.constants(spec, compute, None if fit is None else 16 if n_reads <= 2 else 12),
        )  # fmt: skip
    return out


def softmax_backward(
    weights: Tensor, rstd: Tensor, logits: Tensor | None, dweights: Tensor, units: Tensor | float,
    means: Tensor | None, width: int,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Weights in units of dr, slopes [R, N, P, m] and, with logits, bend [N, P, m]: `depth_softmax.slopes_kernel`."""
    R, N, P, m = weights.shape
    scaled, slope = torch.empty_like(dweights), torch.empty_like(dweights)
    bend = None if logits is None else torch.empty_like(rstd)
    has_units = isinstance(units, Tensor)
    depth_softmax.slopes_kernel[(cdiv(P * m, depth_softmax.BLOCK),)](
        dweights, units if has_units else None, means, weights, logits, rstd, scaled, slope, bend, N, P * m,
        0.0 if has_units else units, width,
        READS=R, UNITS=has_units, MEANS=means is not None, BEND=logits is not None, BLOCK=depth_softmax.BLOCK,
    )  # fmt: skip
    return scaled, slope, bend


def sources_backward(
    spec: Spec, sources: Sources, scores: Scores, dr: Tensor, dr_table: Tensor, dweights: Tensor,
    units: Tensor | float, means: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of all that one read did with N sources; those of the sources go to their buffers.

    Args:
        dr: [P, m, D], or [P, D] that all streams share, and a table of it.
        dweights: [1, N, P, m], see `weights_gradient`.
        units: what its values count, [1, P, m] or one number.
        means: [1, P, m], sum over all sources of the read of weight times its gradient; None where these are all its
            sources and it is summed here.
    Returns:
        Gradients of the logits scored elsewhere [1, n_ahead, P, m], of the taps [N, K, D] and of the query [m, D], None
        where every source was scored elsewhere.
    """
    N, n, rstd = sources.shape[3], scores.n_ahead, scores.rstd
    logits = scores.logits if n < N else None
    scaled, slope, bend = softmax_backward(scores.weights, rstd, logits, dweights, units, means, sources.shape[2])
    of_scores = None if bend is None else (slope[0, n:], bend[n:], scores.query)
    dquery, dtaps = walk_sources(
        spec, sources, dr_table, scaled, of_scores, n, rstd=rstd, shared=dr.ndim == 2, dr_dtype=dr.dtype
    )
    return slope[:, :n] / rstd[:n], dtaps, dquery


def walk_resources(compute: torch.dtype, n_reads: int, scored: bool) -> tuple[int, int]:
    """Programs of a walk that an SM is to hold, and its stages.

    Its loads are under way ahead of it, so registers pay more than warps where a walk has much to hold, be it what a
    source that was scored takes or a fourth read; and more stages pay while spills do not need their room in the L1.
    """
    half = compute == torch.float16
    return 12 if half and not scored and n_reads <= 3 else 8, 3 if half and n_reads <= 2 else 2


def walk_sources(
    spec: Spec, sources: Sources, dr_table: Tensor | None, weights: Tensor | None,
    of_scores: tuple[Tensor | None, Tensor, Tensor | None] | None = None, n_plain: int = 0,
    *, rstd: Tensor, dr_dtype: torch.dtype = torch.float16, shared: bool = False,
    more: tuple[Tensor, Tensor] | None = None, again: bool = False,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """Gradients of N sources, in their buffers, and of their taps; see `walk.gradient_kernel`.

    Args:
        dr_table: of R tensors, and their weights [R, N, P, m]; both None for no reads.
        of_scores: slope and bend [N - n_plain, P, m] and query [m, D] of a read that scored all but the first n_plain
            sources itself; slope and query are None where only the norm is left to differentiate.
        rstd: [N, P, m].
        more: [P, D] and what its values count, one number: another gradient of the only source that was scored.
        again: whether to add to what a walk before this one left in the buffers.
    Returns:
        Gradients of the query [m, D], None if not given, and of the taps [N, K, D].
    """
    B, T, D, N = sources.shape
    R, n_tiles = 0 if weights is None else len(weights), cdiv(D, spec.block_d)
    slope, bend, query = of_scores or (None,) * 3
    compute, fit, dfit = computing_dtype(sources, dr_dtype), None, None
    warps_per_sm, stages = walk_resources(compute, R, bend is not None)
    past = cdiv(max(spec.kernel_sizes) - 1, WALK_STEPS) * WALK_STEPS
    segment = segment_length((B, T), n_tiles * N, past, warps_per_sm * processors(rstd.device))
    n_segments = cdiv(T, segment)
    n_rows = spec.K + (0 if query is None else spec.m)
    sums = rstd.new_empty(N, B * n_segments, n_rows, D)
    if compute == torch.float16:
        fit, room = sources.fits(rstd)
        weights, slope, bend, dfit = narrow.narrow_gradients(weights, slope, bend, query, rstd, (fit, room), D, n_plain)
    else:
        weights = None if weights is None else by_token(weights)
    rows = sources.table
    if again:
        rows = torch.cat((rows[:3], rows[4:], rows[4:]))
    walk.gradient_kernel[(n_tiles * N, B * n_segments)](
        rows, dr_table, weights, slope, bend, query, fit, dfit, *(more or (None, None)), sources.position, sums,
        T, N, n_plain, rows.stride(0), B * T, n_segments, segment,
        READS=R, SHARED=shared, BEND=bend is not None, QUERY=query is not None, MORE=more is not None,
        MIXED=bend is not None and n_plain > 0, BLOCK_D=spec.block_d, UNROLL=WALK_STEPS, EVEN=T % WALK_STEPS == 0,
        STAGES=stages, ADD=again or sources.buffers.add,
        DR_DTYPE=TRITON_DTYPES[dr_dtype], num_warps=1, **sources.constants(spec, compute, warps_per_sm),
    )  # fmt: skip
    of_sources = sums.sum(1)
    dquery = None if query is None else of_sources[n_plain:, spec.K :].sum(0)
    return dquery, of_sources[:, : spec.K]
