"""The MSAR read on the GPU, one read at a time: score, softmax over depth, retrieve, mix; forward and backward.

Forward: every source is expanded twice in registers, once to score it and once to sum it up with its weights; the m
retrieved streams go through memory to the mix and are dropped. Kept for the backward pass: logits, rstd, weights and
gates, a few fp32 values per token, source and stream. Backward: the streams are retrieved again, turned in place into
their own gradients, and two walks over the sources give everything else (`streams.gradient_kernel`).
"""

import dataclasses
from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import depth_softmax, mixing, streams
from kernels.gradients import Buffers
from kernels.reference import Gate, n_taps
from kernels.tiles import aligned, check_sources, check_streams, float32, padded

SEGMENT = 256  # tokens per program of the backward walk: one partial row set of the taps' gradient each
MIX_TOKENS = 16
MIX_GRADIENT_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class Spec:
    """What the kernels of one read are compiled for, and the launches that need nothing else."""

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

    @property
    def steps(self) -> int:
        """Tokens per tile of the forward kernels, by the accumulators they need."""
        return max(1, 32 // self.m)


@dataclasses.dataclass(frozen=True)
class Sources:
    """N sources [B, T, D] with their taps, as the kernels take them."""

    tensors: tuple[Tensor, ...]
    taps: tuple[Tensor, ...]
    position: Tensor | None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, T, D, N."""
        return *self.tensors[0].shape, len(self.tensors)

    def padded(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return padded(self.tensors), padded(self.taps)


def score(spec: Spec, sources: Sources, query: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and rstd of every source, both [N, P, m] in fp32; query [m, D]."""
    B, T, D, N = sources.shape
    logits, rstd = query.new_empty(2, N, B * T, spec.m).unbind()
    n_tiles = triton.cdiv(T, spec.steps)
    tensors, taps = sources.padded()
    streams.score_kernel[(B * n_tiles, N)](
        tensors, taps, query, sources.position, logits, rstd, T, N, B * T, n_tiles, spec.eps,
        SIZES=spec.kernel_sizes, L=len(tensors), D=D, STEPS=spec.steps, BLOCK_D=128,
        PACKED=sources.position is not None, num_warps=4,
    )  # fmt: skip
    return logits, rstd


def softmax_over_sources(logits: Sequence[Tensor], rstds: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Weights [N, P, m] of N logit tensors [P, m], and the largest rms among the sources [P, m]."""
    weights, rms = logits[0].new_empty(len(logits), *logits[0].shape), torch.empty_like(logits[0])
    count = rms.numel()
    given = padded(logits)
    depth_softmax.weights_kernel[(triton.cdiv(count, depth_softmax.BLOCK),)](
        given, padded(rstds), weights, rms, len(logits), count, L=len(given), BLOCK=depth_softmax.BLOCK
    )
    return weights, rms


def retrieve(spec: Spec, sources: Sources, weights: Tensor, rms: Tensor | None) -> Tensor:
    """The retrieved streams [P, m, D]: scratch dtype in units of `rms` [P, m], or plain in the sources' dtype."""
    B, T, D, N = sources.shape
    dtype = sources.tensors[0].dtype
    out = sources.tensors[0].new_empty(B * T, spec.m, D, dtype=dtype if rms is None else scratch_dtype(dtype))
    n_tiles = triton.cdiv(T, spec.steps)
    tensors, taps = sources.padded()
    streams.retrieve_kernel[(B * n_tiles, triton.cdiv(D, spec.block_d))](
        tensors, taps, weights, rms, sources.position, out, T, N, B * T, n_tiles,
        SIZES=spec.kernel_sizes, L=len(tensors), D=D, STEPS=spec.steps, BLOCK_D=spec.block_d,
        PACKED=sources.position is not None, EVEN=T % spec.steps == 0, SCALED=rms is not None, num_warps=1,
    )  # fmt: skip
    return out


def scratch_dtype(dtype: torch.dtype) -> torch.dtype:
    """What streams wait in between two kernels: for bf16 sources fp16, in known units 8 times as precise."""
    return torch.float16 if dtype == torch.bfloat16 else torch.float32


def mix(
    spec: Spec, retrieved: Tensor, rms: Tensor, mixer: Sequence[Tensor] | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """h [P, D] and the statistics of its gates [P, 1 + m]; `mixer` is weight, scale and bias, or None for the mean."""
    P, m, D = retrieved.shape
    out = retrieved.new_empty(P, D, dtype=dtype)
    weight, scale, bias = mixer or (rms,) * 3
    statistics = None if mixer is None else rms.new_empty(P, m + 1)
    mixing.mix_kernel[(triton.cdiv(P, MIX_TOKENS),)](
        retrieved, rms, weight, scale, bias, out, statistics, P, spec.eps,
        M=m, D=D, BLOCK_T=MIX_TOKENS, BLOCK_D=64, SOFTMAX=spec.gate == "softmax", MEAN=mixer is None, num_warps=4,
    )  # fmt: skip
    return out, statistics


def mix_backward(
    spec: Spec, retrieved: Tensor, rms: Tensor, dh: Tensor, mixer: Sequence[Tensor], statistics: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Turns `retrieved` [P, m, D] into its gradient in place: the units it is in [P, m]; gradients of the mixer."""
    P, m, D = retrieved.shape
    weight, scale, bias = mixer
    n_groups, n_programs = triton.cdiv(P, MIX_GRADIENT_TOKENS), triton.cdiv(P, MIX_TOKENS)
    slopes, unit = rms.new_empty(P, 2 * m + 1), torch.empty_like(rms)
    partial, dweight = rms.new_empty(n_programs, m + 1), rms.new_empty(n_groups, m, m, D)
    mixing.mix_slopes_kernel[(n_programs,)](
        retrieved, rms, dh, statistics, weight.abs().amax(-1), scale, bias, slopes, unit, partial, P,
        M=m, D=D, BLOCK_T=MIX_TOKENS, BLOCK_D=64, SOFTMAX=spec.gate == "softmax", num_warps=4,
    )  # fmt: skip
    mixing.mix_gradient_kernel[(triton.cdiv(D, 64), n_groups)](
        retrieved, rms, dh, weight, slopes, unit, dweight, P, MIX_GRADIENT_TOKENS,
        M=m, D=D, BLOCK_T=4, BLOCK_D=64, num_warps=4,
    )  # fmt: skip
    totals = partial.sum(0)
    return unit, (dweight.sum(0), totals[:1], totals[1:])


def walk(
    spec: Spec, sources: Sources, buffers: Buffers | None, *, weights: Tensor, dr: Tensor, unit: Tensor | None,
    query: Tensor | None = None, slope: Tensor | None = None, bend: Tensor | None = None, dweights: str = "none",
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """One walk over the sources, `streams.gradient_kernel`.

    Args:
        buffers: where gradients of the sources go; None if only the weights' gradient is wanted.
        weights: [N, P, m].
        dr: [P, m, D], in units of `unit` [P, m] if given; or [P, D], m times the gradient of every stream.
        query, slope, bend: [m, D], [N, P, m], [N, P, m]: with the terms of the scores.
        dweights: `none`, `too` or `only`.
    Returns:
        Partial sums of the weights' gradient [chunks, N, P, m], the taps' gradient [N, K, D], the query's [m, D].
    """
    B, T, D, N = sources.shape
    block_d = spec.block_d
    n_segments, n_chunks = triton.cdiv(T, SEGMENT), triton.cdiv(D, block_d)
    tensors, taps = sources.padded()
    empty = weights.new_empty
    dtaps = empty(N, B * n_segments, spec.K, D) if buffers is not None else None
    dquery = empty(N, B * n_segments, spec.m, D) if query is not None else None
    partial = empty(n_chunks, N, B * T, spec.m) if dweights != "none" else None
    given, out = (padded(buffers.given), padded(buffers.out)) if buffers is not None else (tensors, tensors)
    streams.gradient_kernel[(n_chunks, B * n_segments, N)](
        tensors, taps, given, out, weights, dr, unit, partial, slope, bend, query, sources.position, dtaps, dquery,
        T, N, B * T, n_segments, 0, SEGMENT,
        SIZES=spec.kernel_sizes, L=len(tensors), D=D, BLOCK_D=block_d, UNROLL=4,
        VALUES=True, DR="scaled" if unit is not None else "mean" if dr.ndim == 2 else "plain",
        SCORES=query is not None, DWEIGHTS=dweights, ADD=buffers is not None and buffers.add,
        PACKED=sources.position is not None, num_warps=1,
    )  # fmt: skip
    return (
        partial,
        None if dtaps is None else dtaps.sum(1),
        None if dquery is None else dquery.sum((0, 1)),
    )


def softmax_backward(partial: Tensor, weights: Tensor, logits: Tensor, rstd: Tensor, D: int) -> tuple[Tensor, Tensor]:
    """Slope and bend [N, P, m] of `streams.gradient_kernel` from partial sums of the weights' gradient."""
    N, count = weights.shape[0], weights[0].numel()
    slope, bend = weights.new_empty(2, *weights.shape).unbind()
    depth_softmax.slopes_kernel[(triton.cdiv(count, depth_softmax.BLOCK),)](
        partial, weights, logits, rstd, slope, bend, N, partial.shape[0], count, D, BLOCK=depth_softmax.BLOCK
    )
    return slope, bend


class _Read(torch.autograd.Function):
    """One read; inputs are the parameters, N sources and their taps (one tensor if all sources share it, or none)."""

    @staticmethod
    def forward(ctx, spec, position, query, mix_weight, mix_scale, mix_bias, n_sources, *tensors):
        given, taps = tensors[:n_sources], tensors[n_sources:]
        B, T, D = given[0].shape
        query_32 = float32(query)
        mixer = None if mix_weight is None else tuple(map(float32, (mix_weight, mix_scale, mix_bias)))
        held = tuple(map(aligned, given))
        # without taps the kernels never read them, but still want a pointer
        taps_32 = tuple(map(float32, taps)) or (query_32,)
        sources = Sources(held, taps_32 * (1 if len(taps_32) == n_sources else n_sources), position)
        logits, rstd = score(spec, sources, query_32)
        weights, rms = softmax_over_sources(logits.unbind(), rstd.unbind())
        if spec.m == 1:
            out, statistics = retrieve(spec, sources, weights, None), None
        else:
            out, statistics = mix(spec, retrieve(spec, sources, weights, rms), rms, mixer, held[0].dtype)
        kept = (query_32, logits, rstd, weights, rms, statistics, position)
        ctx.save_for_backward(*kept, *(mixer or (None,) * 3), *taps_32, *held)
        ctx.spec, ctx.n_sources, ctx.n_taps = spec, n_sources, len(taps)
        ctx.dtypes = [None if x is None else x.dtype for x in (query, mix_weight, mix_scale, mix_bias, *taps)]
        ctx.set_materialize_grads(False)
        return out.view(B, T, D), *given

    @staticmethod
    @once_differentiable
    def backward(ctx, dh, *later):
        spec, n = ctx.spec, ctx.n_sources
        query, logits, rstd, weights, rms, statistics, position, *rest = ctx.saved_tensors
        mixer, taps, held = rest[:3], rest[3:-n], rest[-n:]
        if dh is None:
            return (None,) * 7 + tuple(later) + (None,) * ctx.n_taps
        mixer = None if mixer[0] is None else mixer
        sources = Sources(tuple(held), tuple(taps) * (1 if len(taps) == n else n), position)
        B, T, D, _ = sources.shape
        dh = aligned(dh).view(B * T, D)
        dr, unit, dmixer = dh, None, (None, None, None)
        if spec.m == 1:
            dr = dh.view(B * T, 1, D)
        elif mixer is not None:
            dr = retrieve(spec, sources, weights, rms)
            unit, dmixer = mix_backward(spec, dr, rms, dh, mixer, statistics)
        partial, *_ = walk(spec, sources, None, weights=weights, dr=dr, unit=unit, dweights="only")
        slope, bend = softmax_backward(partial, weights, logits, rstd, D)
        buffers = Buffers(held, later)
        _, dtaps, dquery = walk(
            spec, sources, buffers, weights=weights, dr=dr, unit=unit, query=query, slope=slope, bend=bend
        )
        dparameters = [dquery, *dmixer]
        if ctx.n_taps == 1:
            dparameters.append(dtaps.sum(0))
        elif ctx.n_taps:
            dparameters.extend(dtaps.unbind())
        dparameters = [None if g is None else g.to(dtype) for g, dtype in zip(dparameters, ctx.dtypes, strict=True)]
        return None, None, *dparameters[:4], None, *buffers.out, *dparameters[4:]


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
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`reference.msar_read`, and the sources to hand to the next read.

    A read that takes the sources of the read before it adds its part of their gradients to what the later reads left,
    in the same pass over memory; autograd adds nothing.

    Args:
        sources: N tensors [B, T, D] of one dtype (bf16, fp16, fp32), D a multiple of 8, N up to 128.
        taps: N tensors [K, D], the same one N times if the reader owns the convs; None where K is 0.
        query, mix_weight, mix_scale, mix_bias, kernel_sizes, gate, eps, position: see `reference.msar_read`; up to 8
            streams of up to 32 taps.
    Returns:
        [B, T, D] in the sources' dtype, and the N sources.
    Raises:
        ValueError: inputs beyond a limit of the kernels, by name.
    """
    check_sources(sources)
    check_streams(kernel_sizes)
    spec = Spec(tuple(kernel_sizes), gate, eps)
    if spec.K == 0:
        taps = ()
    elif all(group is taps[0] for group in taps):
        taps = taps[:1]
    if position is not None:
        position = position.to(torch.int32).contiguous()
    out, *through = _Read.apply(spec, position, query, mix_weight, mix_scale, mix_bias, len(sources), *sources, *taps)
    return out, tuple(through)


def msar_read(sources: Sequence[Tensor], taps: Sequence[Tensor | None], *parameters, **options) -> Tensor:
    """As `reference.msar_read`; autograd adds the sources' gradients of different reads."""
    return msar_read_through(sources, taps, *parameters, **options)[0]
