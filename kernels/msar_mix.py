"""The mix of an MSAR read and its backward pass, as launches of the kernels of `mixing`.

P = B T tokens, m streams. Small tensors, a value per token and stream, are fp32.
"""

import dataclasses

import torch
import triton
from torch import Tensor

from kernels import mixing
from kernels.msar_steps import Spec

MIX_TOKENS = 8
MIX_GRADIENT_TOKENS = 64
MIX_CHANNELS = 128

Mixer = tuple[Tensor, Tensor, Tensor]
"""Weight [m, m, D], scale [1] and bias [m], fp32."""


def mix(
    spec: Spec, retrieved: Tensor, scale_of_r: Tensor, mixer: Mixer | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """h [P, D], and of its gates rstd and sums [P, 1 + m]; without a mixer the mean of the streams."""
    P, m, D = retrieved.shape
    out = retrieved.new_empty(P, D, dtype=dtype)
    weight, scale, bias = mixer or (scale_of_r,) * 3
    statistics = None if mixer is None else scale_of_r.new_empty(P, m + 1)
    mixing.mix_kernel[(triton.cdiv(P, MIX_TOKENS),)](
        retrieved, scale_of_r, weight, scale, bias, out, statistics, P, spec.eps,
        M=m, D=D, BLOCK_T=MIX_TOKENS, BLOCK_D=64, SOFTMAX=spec.gate == "softmax", MEAN=mixer is None, num_warps=4,
    )  # fmt: skip
    return out, statistics


@dataclasses.dataclass(frozen=True)
class MixGradients:
    """What the backward pass of a mix gives.

    Attributes:
        dr: [P, m, D] in units of `unit` [P, m].
        mean: [P, m], dr_j . r_j: the mean of the weights' gradient over sources; None if not asked for.
        mixer: gradients of weight, scale and bias.
    """

    dr: Tensor
    unit: Tensor
    mean: Tensor | None
    mixer: tuple[Tensor, Tensor, Tensor]


def mix_backward(
    spec: Spec, retrieved: Tensor, scale_of_r: Tensor, dh: Tensor, mixer: Mixer, statistics: Tensor,
    *, in_place: bool, with_mean: bool,
) -> MixGradients:  # fmt: skip
    """The backward pass of `mix` for dh [P, D]; `in_place` overwrites `retrieved`."""
    P, m, D = retrieved.shape
    weight, scale, bias = mixer
    empty = scale_of_r.new_empty
    n_programs, n_groups, n_chunks = (
        triton.cdiv(*pair) for pair in ((P, MIX_TOKENS), (P, MIX_GRADIENT_TOKENS), (D, MIX_CHANNELS))
    )
    factors, unit, partial = empty(P, 5 * m), empty(P, m), empty(n_programs, m + 1)
    mixing.mix_factors_kernel[(n_programs,)](
        retrieved, scale_of_r, dh, statistics, weight.abs().amax(-1), scale, bias, factors, unit, partial, P,
        M=m, D=D, BLOCK_T=MIX_TOKENS, BLOCK_D=64, SOFTMAX=spec.gate == "softmax", num_warps=4,
    )  # fmt: skip
    dr = retrieved if in_place else torch.empty_like(retrieved)
    dweight, dots = empty(n_groups, m, m, D), empty(n_chunks, P, m) if with_mean else None
    mixing.mix_gradient_kernel[(n_chunks, n_groups)](
        retrieved, dr, dh, weight, factors, dweight, dots, P, MIX_GRADIENT_TOKENS,
        M=m, D=D, BLOCK_T=4, BLOCK_D=MIX_CHANNELS, DOTS=with_mean, num_warps=4,
    )  # fmt: skip
    totals = partial.sum(0)
    mean = dots.sum(0) * unit / scale_of_r if with_mean else None
    return MixGradients(dr, unit, mean, (dweight.sum(0), totals[:1], totals[1:]))
