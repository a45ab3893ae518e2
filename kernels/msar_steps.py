"""The steps of an MSAR read as launches of Triton kernels: what `msar_read` and `msar_block` are made of.

P = B T tokens, R reads at once, N sources, m streams. Small tensors, a value per read, source, token and stream, are
fp32. Retrieved streams are stored in the scratch dtype times a scale, their gradients in units, both [P, m].
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from kernels import combining, depth_softmax, narrow, streams, streams_backward, walk
from kernels.gradients import Buffers
from kernels.reference import Gate, n_taps
from kernels.tiles import TRITON_DTYPES, processors, table

SEGMENT = 256  # tokens per program of a backward walk, about: one partial row set of the taps' gradient each
WALKS = {torch.float16: 12, torch.float32: 8}  # programs of a walk that an SM holds at once, by the computing dtype
PRODUCT_SEGMENT = 1024  # rows per program where their sums gather in tensor cores
COMBINE_TOKENS = 8
READS_AT_ONCE = 4  # reads that share one expansion of a source in a launch
WARPS = 4  # tiles of tokens side by side that share the taps they fetch


@dataclasses.dataclass(frozen=True)
class Spec:
    """What the kernels of one read are compiled for."""

    kernel_sizes: tuple[int, ...]
    gate: Gate
    eps: float

    @property
    def m(self) -> int:
        return len(self.kernel_sizes)

    @property
    def K(self) -> int:
        return n_taps(self.kernel_sizes)

    @property
    def block_d(self) -> int:
        """Channels per program of one warp: two per lane while taps, their gradients and windows fit in registers."""
        return 64 if self.K + max(self.kernel_sizes) <= 36 and self.m <= 4 else 32


class Sources:
    """N sources [B, T, D] with their taps, as the kernels take them."""

    def __init__(
        self, tensors: Sequence[Tensor], taps: Sequence[Tensor], position: Tensor | None, buffers: Buffers | None = None
    ) -> None:
        """`taps` has one group per source, a single one for all, or none where no stream has any; `buffers` takes
        gradients in the backward pass."""
        self.tensors, self.position, self.buffers = tuple(tensors), position, buffers
        x, N = self.tensors[0], len(self.tensors)
        half = x.dtype == torch.bfloat16 and N <= narrow.MAX_SOURCES
        self.compute = torch.float16 if half else torch.float32
        self._fits: tuple[Tensor, Tensor] | None = None
        groups = tuple(taps) or self.tensors[:1]  # without taps the kernels never follow the address
        self.narrow_taps = x.new_empty(len(taps), *taps[0].shape, dtype=torch.float16) if half and taps else None
        narrowed = groups if self.narrow_taps is None else self.narrow_taps.unbind()
        gradients = () if buffers is None else (buffers.given, buffers.out)
        # rows: sources, taps, taps in the dtype that computes; gradients to add to, gradients to write
        self.table = table(self.tensors, per_source(groups, N), per_source(narrowed, N), *gradients)

    @functools.cached_property
    def norms(self) -> Tensor | None:
        """Sums of |taps| for `narrow`, which fill the fp16 taps on the way; None without taps."""
        if self.narrow_taps is None:
            return None
        return narrow.narrow_taps(self.table, self.narrow_taps, len(self.tensors))

    def fits(self, rstd: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """What `narrow.fit` says of the sources with rstd [N, P, m]; None where fp32 computes."""
        if self.compute == torch.float32:
            return None, None
        if self._fits is None:
            self._fits = narrow.fit(rstd, self.norms, self.tensors[0].shape[-1])
        return self._fits

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, T, D, N."""
        return *self.tensors[0].shape, len(self.tensors)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    def constants(self, spec: Spec, compute: torch.dtype | None = None, warps_per_sm: int | None = None) -> dict:
        """What every kernel over sources is compiled for.

        Args:
            compute: for kernels that have a choice.
            warps_per_sm: 12 or 16 to be resident; the compiler would often rather take the registers of more.
        """
        choice = {} if compute is None else {"COMPUTE": TRITON_DTYPES[compute]}
        if warps_per_sm is not None:
            choice["maxnreg"] = {12: 168, 16: 128}[warps_per_sm]
        return choice | {
            "SIZES": spec.kernel_sizes,
            "D": self.tensors[0].shape[-1],
            "PACKED": self.position is not None,
            "DTYPE": TRITON_DTYPES[self.dtype],
        }


def per_source(groups: Sequence[Tensor], n_sources: int) -> tuple[Tensor, ...]:
    return tuple(groups) if len(groups) == n_sources else tuple(groups) * n_sources


def tiles(T: int, steps: int) -> dict:
    """The options of kernels that give every warp of a program `steps` tokens of its own."""
    return {"STEPS": steps, "WARPS": WARPS, "EVEN": T % (WARPS * steps) == 0, "num_warps": WARPS}


def tokens_of_a_warp(sums: int, registers: int, most: int = 8) -> int:
    """A power of two of tokens whose `sums` each fit into so many registers, at least one and `most` at most."""
    return 1 << (max(1, min(most, registers // sums)).bit_length() - 1)


def segment_length(sequences: tuple[int, int], n_programs: int, past: int, at_once: int) -> int:
    """Tokens per program of a walk, such that no last wave of programs leaves the device idle.

    Args:
        sequences: how many and how long.
        n_programs: of one segment.
        past: tokens that a program walks beyond its own.
        at_once: programs that the device holds.
    """
    B, T = sequences
    lengths = {min(SEGMENT * 2, 16 * triton.cdiv(T, 16 * n)) for n in range(1, triton.cdiv(2 * T, SEGMENT) + 1)}
    waves = {length: triton.cdiv(B * triton.cdiv(T, length) * n_programs, at_once) for length in lengths}
    return min(sorted(lengths, reverse=True), key=lambda length: waves[length] * (length + past))


def scratch_dtype(dtype: torch.dtype) -> torch.dtype:
    """What streams wait in between two kernels: for bf16 sources fp16, in known units 8 times as precise."""
    return torch.float16 if dtype == torch.bfloat16 else torch.float32


def by_token(x: Tensor) -> Tensor:
    """[R, N, P, m] as [N, P, m, R]: what a program needs for a token in one place."""
    return x.permute(1, 2, 3, 0).contiguous()


def reads_at_once(n_reads: int) -> list[slice]:
    """R reads in groups of at most READS_AT_ONCE that differ by one at most: each is a launch."""
    n_groups = triton.cdiv(n_reads, READS_AT_ONCE)
    bounds = [n_reads * group // n_groups for group in range(n_groups + 1)]
    return [slice(first, end) for first, end in itertools.pairwise(bounds)]


def score(spec: Spec, sources: Sources, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [R, N, P, m] and rstd [N, P, m] of every source for queries [R, m, D]."""
    B, T, _, N = sources.shape
    R = len(queries)
    logits, rstd = queries.new_empty(R, N, B * T, spec.m), queries.new_empty(N, B * T, spec.m)
    steps = tokens_of_a_warp(spec.m, 16, most=16)
    n_tiles = triton.cdiv(T, WARPS * steps)
    for group in reads_at_once(R):
        n_reads = group.stop - group.start
        streams.score_kernel[(B * n_tiles, N)](
            sources.table, queries[group], sources.position, logits[group], rstd, T, N, B * T, n_tiles, spec.eps,
            READS=n_reads, BLOCK_D=spec.block_d, **tiles(T, steps),
            **sources.constants(spec, warps_per_sm=16 if n_reads < READS_AT_ONCE else 12),
        )  # fmt: skip
    return logits, rstd


def softmax_over_sources(logits: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [R, N, P, m], log-sum-exp [R, P, m], and the scale of what is retrieved [P, m]."""
    R, N, *shape = logits.shape
    weights, lse, scale = torch.empty_like(logits), logits.new_empty(R, *shape), logits.new_empty(shape)
    depth_softmax.weights_kernel[(triton.cdiv(scale.numel(), depth_softmax.BLOCK), R)](
        logits, rstd, weights, lse, scale, N, scale.numel(), BLOCK=depth_softmax.BLOCK
    )
    return weights, lse, scale


def retrieve(
    spec: Spec, sources: Sources, weights: Tensor, rstd: Tensor, scale: Tensor | None,
    base: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The retrieved streams of R reads of the same sources: R tensors [P, m, D].

    Args:
        weights: [R, N, P, m]; rstd: [N, P, m].
        scale: [P, m] for the scratch dtype; None for the plain values in the sources' dtype.
        base: [P, m, D] and its weight [P, m], added: what the read, a single one, has of other sources.
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
        n_tiles = triton.cdiv(T, WARPS * steps)
        streams.retrieve_kernel[(B * n_tiles * triton.cdiv(D, spec.block_d),)](
            sources.table, by_read, fit, scale, *(base or (None, None)), sources.position, out_table[0, group], T, N,
            B * T, n_tiles, READS=n_reads, BLOCK_D=spec.block_d, SCALED=scale is not None, BASE=base is not None,
            OUT_DTYPE=TRITON_DTYPES[dtype], **tiles(T, steps),
            **sources.constants(spec, compute, None if fit is None else 16),
        )  # fmt: skip
    return out


@dataclasses.dataclass(frozen=True)
class Scores:
    """How R reads of N sources weighted them.

    Attributes:
        queries: [R, m, D].
        logits, weights: [R, N, P, m].
        rstd: [N, P, m].
    """

    queries: Tensor
    logits: Tensor
    weights: Tensor
    rstd: Tensor


def computing_dtype(sources: Sources, dr_dtype: torch.dtype) -> torch.dtype:
    """fp16 where both the sources and gradients in units of `narrow.GRADIENT_PEAK` allow it."""
    return sources.compute if dr_dtype == torch.float16 else torch.float32


def weights_gradient(
    spec: Spec, sources: Sources, rstd: Tensor, drs: Sequence[Tensor], dr_table: Tensor, r: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """dr_rj . u_nj [R, N, P, m] in the units of dr: R tensors [P, m, D], or one [P, D] that all streams share.

    With r [P, m, D] of one read also dr_j . r_j [P, m], in the units of both.
    """
    B, T, _, N = sources.shape
    out = sources.table.new_empty(len(drs), N, B * T, spec.m, dtype=torch.float32)
    means = None if r is None else torch.empty_like(out[0, 0])
    compute = computing_dtype(sources, drs[0].dtype)
    fit, _ = sources.fits(rstd) if compute == torch.float16 else (None, None)
    at_once = 2 if N > 1 and fit is not None else 1
    n_groups = triton.cdiv(N, at_once)
    for group in reads_at_once(len(drs)):
        n_reads = group.stop - group.start
        # the fewer sums a token has, the more tokens share the rows before them; two channels share a register
        sums = spec.m * n_reads * at_once
        steps = tokens_of_a_warp(sums, 32 if fit is None else 96, most=8 if r is None else 4)
        n_tiles = triton.cdiv(T, WARPS * steps)
        streams_backward.dweights_kernel[(B * n_tiles * n_groups,)](
            sources.table, dr_table[0, group], r, fit, out[group], means, sources.position, T, N, B * T, n_tiles,
            READS=n_reads, AT_ONCE=at_once, SHARED=drs[0].ndim == 2, MEANS=r is not None, BLOCK_D=spec.block_d,
            DR_DTYPE=TRITON_DTYPES[drs[0].dtype], **tiles(T, steps),
            **sources.constants(spec, compute, None if fit is None else 12),
        )  # fmt: skip
    return out, means


def sources_backward(
    spec: Spec, sources: Sources, scores: Scores, drs: Sequence[Tensor], units: Tensor | float,
    means: Tensor | None = None, dweights: Tensor | None = None, n_ahead: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of all that R reads did with N sources; those of the sources go to their buffers.

    Args:
        drs: R tensors [P, m, D], or [P, D] that all streams share.
        units: what their values count, [R, P, m] or one number.
        means: [R, P, m], sum over all sources of a read of weight times its gradient; NaN, or None for all, where these
            are all its sources and it is summed here.
        dweights: what `weights_gradient` gives, where it is known already.
        n_ahead: of one read, how many of the first sources were scored elsewhere; `scores_backward` does the rest.
    Returns:
        Gradients of the queries [R, m, D], of the taps [N, K, D], and of the logits scored elsewhere [n_ahead, P, m].
    """
    B, T, D, N = sources.shape
    R, P, m = len(drs), B * T, spec.m
    dr_table = table(drs)
    if dweights is None:
        dweights, _ = weights_gradient(spec, sources, scores.rstd, drs, dr_table)
    scaled, slope = torch.empty_like(dweights), torch.empty_like(dweights)
    bend = slope.new_empty(N, P, m)
    has_units = isinstance(units, Tensor)
    depth_softmax.slopes_kernel[(triton.cdiv(P * m, depth_softmax.BLOCK),)](
        dweights, units if has_units else None, means, scores.weights, scores.logits, scores.rstd, scaled, slope, bend,
        N, P * m, 0.0 if has_units else units, D,
        READS=R, UNITS=has_units, MEANS=means is not None, BLOCK=depth_softmax.BLOCK,
    )  # fmt: skip
    if R > READS_AT_ONCE:
        dqueries, dtaps = walk_combined(spec, sources, drs, scores.queries, scaled, slope, bend, scores.rstd)
        return dqueries, dtaps, slope[0, :0]
    options = {"rstd": scores.rstd, "shared": drs[0].ndim == 2, "dr_dtype": drs[0].dtype}
    dqueries, dtaps = slope.new_zeros(R, m, D), []
    if n_ahead:
        dtaps += [walk_sources(spec, sources, slice(0, n_ahead), dr_table, scaled, **options)[1]]
    if n_ahead < N:
        of_scores = (slope, bend, scores.queries)
        dqueries, rest = walk_sources(spec, sources, slice(n_ahead, N), dr_table, scaled, of_scores, **options)
        dtaps += [rest]
    return dqueries, torch.cat(dtaps), slope[0, :n_ahead] / scores.rstd[:n_ahead]


def scores_backward(
    spec: Spec, sources: Sources, queries: Tensor, logits: Tensor, rstd: Tensor, dlogits: Tensor
) -> tuple[Tensor, Tensor]:
    """The backward pass of `score`, for dlogits [R, N, P, m]: gradients of queries and taps; sources' in buffers."""
    slope = dlogits * rstd
    bend = (slope * logits).sum(0) * rstd / sources.shape[2]
    return walk_combined(spec, sources, (), queries, None, slope, bend, rstd)


def walk_combined(
    spec: Spec, sources: Sources, drs: Sequence[Tensor], queries: Tensor, scaled_weights: Tensor | None, slope: Tensor,
    bend: Tensor, rstd: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of queries [R, m, D] and taps [N, K, D] from those of R reads' streams; sources' in their buffers."""
    B, T, D, N = sources.shape
    R, P, m = len(queries), B * T, spec.m
    n_segments = triton.cdiv(T, PRODUCT_SEGMENT)
    dqueries = slope.new_empty(N, B * n_segments, R, m, D)
    combining.dqueries_kernel[(triton.cdiv(D, 64) * N, B * n_segments, m)](
        sources.table, by_token(slope), sources.position, dqueries, T, N, P, n_segments, PRODUCT_SEGMENT,
        READS=R, BLOCK_T=32, BLOCK_D=64, PRECISION="ieee" if sources.dtype == torch.float32 else "tf32",
        **sources.constants(spec) | {"num_warps": 4, "num_stages": 2},
    )  # fmt: skip
    dus, unit = combine(scratch_dtype(sources.dtype), drs, queries, scaled_weights, slope)
    _, dtaps = walk_sources(
        spec, sources, slice(0, N), table(dus), unit[None], (None, bend, None), rstd=rstd, per_source=True,
        dr_dtype=dus[0].dtype,
    )  # fmt: skip
    return dqueries.sum((0, 1)), dtaps


def walk_sources(
    spec: Spec, sources: Sources, part: slice, dr_table: Tensor, weights: Tensor,
    of_scores: tuple[Tensor | None, Tensor, Tensor | None] | None = None,
    *, rstd: Tensor, dr_dtype: torch.dtype, shared: bool = False, per_source: bool = False,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """Gradients of some of the sources, in their buffers, and of their taps; see `walk.gradient_kernel`.

    Args:
        dr_table: of R tensors, or (R = 1, `per_source`) of one per source of the part.
        weights: [R, N, P, m], and rstd [N, P, m], of all sources.
        of_scores: slope [R, N, P, m], bend [N, P, m] and queries [R, m, D], where scores are part of it; the first and
            the last may be None.
    Returns:
        Gradients of the queries [R, m, D], None if not given, and of the taps [part, K, D].
    """
    B, T, D, _ = sources.shape
    R, N, n_tiles = len(weights), part.stop - part.start, triton.cdiv(D, spec.block_d)
    slope, bend, queries = of_scores or (None,) * 3
    compute, fit, dfit = computing_dtype(sources, dr_dtype), None, None
    at_once = WALKS[compute] * processors(weights.device)
    segment = segment_length((B, T), n_tiles * N, max(spec.kernel_sizes) - 1, at_once)
    n_segments = triton.cdiv(T, segment)
    dtaps = weights.new_empty(N, B * n_segments, spec.K, D)
    dqueries = None if queries is None else weights.new_empty(N, B * n_segments, R, spec.m, D)
    weights, slope = (None if x is None else x[:, part].contiguous() for x in (weights, slope))
    bend = None if bend is None else bend[part]
    if compute == torch.float16:
        fit, room = (x[part] for x in sources.fits(rstd))
        weights, narrow_slope, narrow_bend, dfit = narrow.narrow_gradients(
            weights, slope, bend, queries, rstd[part], (fit, room), D
        )
        slope, bend = None if slope is None else narrow_slope, None if bend is None else narrow_bend
    else:
        weights, slope = by_token(weights), None if slope is None else by_token(slope)
    walk.gradient_kernel[(n_tiles * N, B * n_segments)](
        sources.table[:, part].contiguous(), dr_table, weights, slope, bend, queries, fit, dfit, sources.position,
        dtaps, dqueries, T, N, B * T, n_segments, segment,
        READS=R, PER_SOURCE=per_source, SHARED=shared, BEND=bend is not None, QUERY=queries is not None,
        BLOCK_D=spec.block_d, UNROLL=4, ADD=sources.buffers.add, DR_DTYPE=TRITON_DTYPES[dr_dtype], num_warps=1,
        **sources.constants(spec, compute, None if fit is None else 12),
    )  # fmt: skip
    return None if dqueries is None else dqueries.sum((0, 1)), dtaps.sum(1)


def combine(
    dtype: torch.dtype, drs: Sequence[Tensor], queries: Tensor, scaled_weights: Tensor | None, slope: Tensor
) -> tuple[tuple[Tensor, ...], Tensor]:
    """What R reads leave for the streams of N sources by their weights (with `drs`) and slopes [R, N, P, m].

    Returns:
        N tensors du [P, m, D] of `dtype`, and what their values count [N, P, m]. Together they are as large as the dr
        of N reads, and live until the walk over the sources.
    """
    R, N, P, m = slope.shape
    D = queries.shape[-1]
    peak = queries.abs().amax(-1).clamp_min(1e-30)
    rows = (queries / peak[..., None]).to(dtype)
    du, unit = slope.new_empty(N, P, m, D, dtype=dtype), slope.new_empty(N, P, m)
    n_rows = len(drs) + R
    combining.combine_kernel[(triton.cdiv(P, COMBINE_TOKENS), m, triton.cdiv(N, 16))](
        table([*drs, *rows]), scaled_weights, slope, peak, unit, du, N, P, P * m,
        READS=R, WEIGHTED=len(drs) > 0, M=m, D=D, BLOCK_T=COMBINE_TOKENS, BLOCK_N=16,
        BLOCK_K=max(16, triton.next_power_of_2(n_rows)), BLOCK_D=64, DTYPE=TRITON_DTYPES[dtype], num_warps=4,
    )  # fmt: skip
    return du.unbind(), unit
