"""The mix of an MSAR read and its backward pass, as launches of the kernels of `mixing` and `mixing_backward`.

P = B T tokens, m streams. Small tensors, a value per token and stream, are fp32.
"""

import dataclasses

import torch
import triton
from torch import Tensor

from kernels import mixing, mixing_backward, mixing_onto, mixing_tokens
from kernels.msar_inputs import Sources, Spec
from kernels.msar_steps import retrieve_onto
from kernels.tiles import TRITON_DTYPES, cdiv, next_power_of_2, processors

MIX_TOKENS = 1  # that a program of the mix holds
MIX_VALUES = 44  # at most, of those tokens, that a thread of it holds
NARROW_MIX_VALUES = 88  # likewise where they are fp16
MIX_CHANNELS = 4  # of a row tile that a thread of it holds
PARTS_TOKENS = 128  # of a program that prepares the operands of products
WHOLE_TILES, WHOLE_STREAMS = (1024, 2048), 4  # of programs that hold all channels of a token
ONTO_TAPS = 16  # at most, of a stream, for a partial sum to be added and mixed in one kernel

Mixer = tuple[Tensor, Tensor, Tensor]
"""Weight [m, m, D], scale [1] and bias [m], fp32."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """Tile and resources of a kernel of the backward pass."""

    tokens: int
    channels: int
    num_warps: int
    stages: int
    resident: int = 1
    """Programs that an SM has room for, where as many are launched."""

    def options(self) -> dict[str, int]:
        registers = 65536 // (32 * self.num_warps * self.resident) // 8 * 8
        limit = {"maxnreg": registers} if self.resident > 1 else {}
        return limit | {
            "BLOCK_T": self.tokens,
            "BLOCK_D": self.channels,
            "STAGES": self.stages,
            "num_warps": self.num_warps,
        }


def factors_tile(m: int) -> Tile:
    return Tile(1, 256, num_warps=1, stages=3) if m <= 4 else Tile(2, 256, num_warps=4, stages=2)


def gradient_tile(m: int, scratch: torch.dtype) -> Tile:
    if scratch == torch.float32:  # products in fp32 take more registers; of 8 streams larger tiles spill
        return Tile(16, 64, num_warps=8, stages=1)
    return Tile(32, 64, num_warps=4, stages=3, resident=3) if m <= 4 else Tile(32, 64, num_warps=8, stages=2)


def row_tiles(m: int, D: int, tokens: int = 1, values: int = MIX_VALUES) -> dict[str, int]:
    """How the programs of the mix lay their tokens' channels over threads, of which each holds up to so many values."""
    num_warps = min(16, max(1, next_power_of_2(cdiv(tokens * m * D, 32 * values))))
    tile = min(32 * MIX_CHANNELS * num_warps, 1 << (D.bit_length() - 1))
    lanes = min(32 * num_warps, tile)
    tail = max(lanes, next_power_of_2(D % tile)) if D % tile else 0
    return {"TILE": tile, "TAIL": tail, "LANES": lanes, "num_warps": num_warps}


def mix(
    spec: Spec, retrieved: Tensor, scale_of_r: Tensor, mixer: Mixer | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """h [P, D], and of its gates statistics for `mix_backward`; without a mixer the mean of the streams."""
    P, m, D = retrieved.shape
    out = retrieved.new_empty(P, D, dtype=dtype)
    weight, scale, bias = mixer or (scale_of_r,) * 3
    with_products = gives_means(retrieved.dtype)
    statistics = None if mixer is None else scale_of_r.new_empty(P, (1 + m) ** 2 if with_products else 1 + m)
    if with_products and mixer is not None:
        narrow_weight, unit = narrow_mixer(weight)
        mixing.narrow_mix_kernel[(P,)](
            retrieved, scale_of_r, narrow_weight, unit, scale, bias, out, statistics, spec.eps,
            M=m, D=D, SOFTMAX=spec.gate == "softmax", **row_tiles(m, D, values=NARROW_MIX_VALUES),
        )  # fmt: skip
        return out, statistics
    mixing.mix_kernel[(cdiv(P, MIX_TOKENS),)](
        retrieved, scale_of_r, weight, scale, bias, out, statistics, P, spec.eps,
        M=m, D=D, TOKENS=MIX_TOKENS, SOFTMAX=spec.gate == "softmax", MEAN=mixer is None,
        **row_tiles(m, D, MIX_TOKENS),
    )  # fmt: skip
    return out, statistics


def narrow_mixer(weight: Tensor) -> tuple[Tensor, Tensor]:
    """W [m, m, D] as fp16 [m m, D], and the power of two [1] that it was divided by."""
    m, _, D = weight.shape
    narrow_weight, unit = weight.new_empty(m * m, D, dtype=torch.float16), weight.new_empty(1)
    mixing.narrow_weight_kernel[(m * m,)](weight, narrow_weight, unit, ROWS=m * m, D=D, BLOCK=8192, num_warps=16)
    return narrow_weight, unit


def whole_tiles(scratch: torch.dtype, m: int, D: int) -> dict[str, int] | None:
    """How programs that hold whole tokens lay them over threads, eight channels to each and a few left over to some.

    None where two kernels that hold less take their place: what a thread of more channels or streams holds does not fit
    its registers, and a longer tail costs more than it saves.
    """
    tile = 1 << (D.bit_length() - 1)
    lanes = tile // 8
    if scratch != torch.float16 or m > WHOLE_STREAMS or tile not in WHOLE_TILES or D - tile > lanes // 4:
        return None
    return {"TILE": tile, "LANES": lanes, "HAS_TAIL": D > tile, "num_warps": lanes // 32, "maxnreg": 255}


def whole_programs(tiles: dict[str, int], device: torch.device) -> int:
    """Programs of such tiles that are resident at once: eight warps of them fill an SM's registers."""
    return processors(device) * (8 // tiles["num_warps"])


def mixes_onto(spec: Spec, scratch: torch.dtype, D: int) -> bool:
    """Whether `mix_onto` takes reads of such streams."""
    return whole_tiles(scratch, spec.m, D) is not None and max(spec.kernel_sizes) <= ONTO_TAPS


def mix_onto(
    spec: Spec, source: Sources, factors: tuple[Tensor, Tensor], base: Tensor, base_weight: Tensor,
    scale_of_r: Tensor, mixer: Mixer, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`retrieve_onto` and `mix` in one: the retrieved streams r [P, m, D], h [P, D] and the gates' statistics."""
    B, T, D, _ = source.shape
    P, m = B * T, spec.m
    tiles = whole_tiles(base.dtype, m, D)
    weight, scale, bias = mixer
    narrow_weight, unit = narrow_mixer(weight)
    r = (
        retrieve_onto(spec, source, factors, base, base_weight, tiles["TILE"])
        if tiles["HAS_TAIL"]
        else torch.empty_like(base)
    )
    h, statistics = r.new_empty(P, D, dtype=dtype), scale_of_r.new_empty(P, (1 + m) ** 2)
    group = mixing_tokens.GROUP.value
    segment = cdiv(cdiv(T, max(1, whole_programs(tiles, base.device) // B)), group) * group
    n_segments = cdiv(T, segment)
    n_programs = B * n_segments
    sums = scale_of_r.new_empty(n_programs, mixing_onto.SUMS.value * tiles["LANES"])
    words = torch.empty(n_programs, 4 * group, dtype=torch.int32, device=base.device)
    fit, weights = factors
    mixing_onto.mix_onto_kernel[(n_programs,)](
        source.table, weights, fit, base, base_weight, source.position, r, scale_of_r, narrow_weight, unit, scale, bias,
        h, statistics, sums, words, spec.eps, T, n_segments, segment,
        SIZES=spec.kernel_sizes, D=D, PACKED=source.position is not None, SOFTMAX=spec.gate == "softmax",
        DTYPE=TRITON_DTYPES[source.dtype], **tiles,
    )  # fmt: skip
    return r, h, statistics


@dataclasses.dataclass(frozen=True)
class MixGradients:
    """What the backward pass of a mix gives.

    Attributes:
        dr: [P, m, D] in units of `unit` [P, m].
        mixer: gradients of weight, scale and bias.
        means: what `means_of` gives, where the mix left it.
    """

    dr: Tensor
    unit: Tensor
    mixer: tuple[Tensor, Tensor, Tensor]
    means: Tensor | None


def gives_means(scratch: torch.dtype) -> bool:
    """Whether the mix of streams of this dtype leaves what the means take: the one for fp16 has it on its way."""
    return scratch == torch.float16


def mix_backward(
    spec: Spec, retrieved: Tensor, scale_of_r: Tensor, dh: Tensor, mixer: Mixer, statistics: Tensor,
    *, in_place: bool,
) -> MixGradients:  # fmt: skip
    """The backward pass of `mix` for dh [P, D]; `in_place` overwrites `retrieved`."""
    P, m, D = retrieved.shape
    weight, scale, bias = mixer
    if tiles := whole_tiles(retrieved.dtype, m, D):
        return _by_token(spec, retrieved, scale_of_r, dh, mixer, statistics, tiles, in_place=in_place)
    empty = scale_of_r.new_empty
    n_parts, dot = precision(retrieved.dtype)
    of_factors, tile = factors_tile(m), gradient_tile(m, retrieved.dtype)

    weight_peak = empty(m * m)
    parts = empty(2, m, m, D, dtype=torch.bfloat16) if n_parts == 2 else weight
    mixing_backward.weight_kernel[(m * m,)](weight, parts, weight_peak, D=D, BLOCK=1024, PARTS=n_parts)

    n_programs = cdiv(P, of_factors.tokens)
    factors, unit, partial = empty(P, 5 * m), empty(P, m), empty(m + 2, n_programs)
    means = empty(P, m) if gives_means(retrieved.dtype) else None
    mixing_backward.factors_kernel[(n_programs,)](
        retrieved, scale_of_r, dh, statistics, weight_peak, scale, bias, factors, unit, means, partial, P,
        M=m, D=D, SOFTMAX=spec.gate == "softmax", MEANS=means is not None, **of_factors.options(),
    )  # fmt: skip

    n_slices = cdiv(D, tile.channels)
    width = product_width(m, n_parts)
    parts_of_c = empty(P, width * n_parts**2, dtype=torch.bfloat16 if n_parts == 2 else torch.float32)
    parts_of_r, peak = empty(P, m, 16, dtype=retrieved.dtype), partial[0].amax()
    mixing_backward.parts_kernel[(cdiv(P, PARTS_TOKENS),)](
        factors, peak, parts_of_c, parts_of_r, P, M=m, WIDTH=width, PARTS=n_parts, BLOCK_T=PARTS_TOKENS, num_warps=8
    )  # fmt: skip

    tokens = tokens_of_a_program(P, n_slices, tile, retrieved.device)
    n_chunks = cdiv(P, tokens)
    dr = retrieved if in_place else torch.empty_like(retrieved)
    dweight = empty(n_chunks, m, m, D)
    mixing_backward.gradient_kernel[(n_slices, n_chunks)](
        retrieved, dr, dh, parts, factors, peak, parts_of_c, parts_of_r, dweight, P, tokens,
        M=m, D=D, WIDTH=width, PARTS=n_parts, DOT=dot, EVEN=P % tile.tokens == 0, **tile.options(),
    )  # fmt: skip
    totals = partial[1:].sum(1)
    return MixGradients(dr, unit, (dweight.sum(0), totals[:1], totals[1:]), means)


def means_of(gradients: MixGradients, retrieved: Tensor, scale_of_r: Tensor) -> Tensor:
    """dr . r [P, m], sums over all sources of a read of weight times its gradient; `retrieved` is as it was."""
    if gradients.means is not None:
        return gradients.means
    return torch.linalg.vecdot(gradients.dr, retrieved) * gradients.unit / scale_of_r


def _by_token(
    spec: Spec, retrieved: Tensor, scale_of_r: Tensor, dh: Tensor, mixer: Mixer, statistics: Tensor,
    tiles: dict[str, int], *, in_place: bool,
) -> MixGradients:  # fmt: skip
    """`mix_backward` of fp16 streams that reads them once."""
    P, m, D = retrieved.shape
    weight, scale, bias = mixer
    empty = scale_of_r.new_empty
    narrow_weight, peak = weight.new_empty(m * m, D, dtype=torch.float16), empty(m)
    mixing_tokens.narrow_rows_kernel[(m,)](weight, narrow_weight, peak, D=m * D, BLOCK=8192, num_warps=16)
    group, words_of_token = mixing_tokens.GROUP.value, mixing_tokens.BLOCK.value
    tokens = cdiv(cdiv(P, whole_programs(tiles, retrieved.device)), group) * group
    n_programs = cdiv(P, tokens)
    dr = retrieved if in_place else torch.empty_like(retrieved)
    unit, means = empty(P, m), empty(P, m)
    sums, dweight, partial = empty(n_programs, 2 * tiles["LANES"]), empty(n_programs, m, m, D), empty(n_programs, 1 + m)
    words = torch.empty(n_programs, group * words_of_token, dtype=torch.int32, device=retrieved.device)
    mixing_tokens.backward_kernel[(n_programs,)](
        retrieved, dr, scale_of_r, dh, statistics, narrow_weight, peak, scale, bias, sums, unit, means, words,
        dweight, partial, P, tokens,
        M=m, D=D, SOFTMAX=spec.gate == "softmax", **tiles,
    )  # fmt: skip
    totals = partial.sum(0)
    return MixGradients(dr, unit, (dweight.sum(0), totals[:1], totals[1:]), means)


def precision(scratch: torch.dtype) -> tuple[int, str]:
    """Parts of the small operands of products with streams of this dtype, and how the products are taken."""
    if scratch == torch.float32:
        return 1, "tf32x3"
    # the interpreter cannot multiply bf16; raised operands give the same products
    return 2, "ieee" if triton.knobs.runtime.interpret else "half"


def product_width(m: int, n_parts: int) -> int:
    """Columns for m values in a product that takes 16 or more: of every pair of parts."""
    return max(16 // n_parts**2, next_power_of_2(m))


def tokens_of_a_program(P: int, n_slices: int, tile: Tile, device: torch.device) -> int:
    """Tokens per program of the gradients such that all programs are resident at once: each leaves a partial dW."""
    n_chunks = max(1, tile.resident * processors(device) // n_slices)
    return cdiv(cdiv(P, n_chunks), tile.tokens) * tile.tokens
