# ruff: noqa: RUF005  (Triton compiles `+` of tuples, not unpacking)
"""Sums of products over channels, by the tensor cores where fp16 computes.

A product of two fp16 values that is to be added in fp32 takes a multiplication, and then two conversions and two
additions for a lane's pair of channels. One `mma` of 16 x 8 x 16 adds four such products, as they lie in registers,
over the channels of groups of four lanes: in fp32, and 16 of them to the four registers of a lane that four took.

    In a register of the operand lane 4 g + q holds columns 2 q and 2 q + 1 of row g, of sums likewise.
    Times a selection, ones in one column and zeros elsewhere, the values of a row are added to that column.
    Times a number on the diagonal they stay where they are, in fp32: `converted`.

That takes two neighbouring channels to a lane, in order, which is how Triton lays 64 channels over a warp
(test_compilation.py holds it to that). The interpreter, which knows no assembly, adds what a group of lanes holds with
ordinary operations, to the same place. Kernels that compute in fp32, or have one channel to a lane, keep a sum per
lane.

Beside `mma` the compiler leaves fp16 multiply-adds one of the two pipes that they share otherwise, so this pays where
much is added for each multiplication; a walk and a retrieval are slower with it (docs/kernels.md).
"""

import triton
import triton.language as tl

from kernels.tiles import PAIRED, computed, pair_sums, zeros_per_warp

GROUP = tl.constexpr(8)  # channels that four lanes hold: a row of the operand
TILES = tl.constexpr(16)  # of products, whose sums share two tiles


@triton.constexpr_function
def on_tensor_cores(compute, block_d):
    """Whether products of tiles [WARPS, block_d] in this dtype are added by tensor cores."""
    return compute == tl.float16 and int(block_d) == 64


@triton.constexpr_function
def tile_count(m, count, fast):
    """Tiles that hold the sums of `count` tiles of products for each of m streams."""
    return 2 * ((int(m) * int(count) + 15) // 16) if fast else int(m) * int(count)


@triton.constexpr_function
def groups(block_d):
    """Rows of the operand that a row of a tile fills."""
    return int(block_d) // 8


@triton.jit
def converted(rows, fit, COUNT: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_D: tl.constexpr, FAST: tl.constexpr):
    """`tiles.computed`, where FAST of bf16 rows by the tensor cores: two rows times `fit` on the diagonal."""
    if FAST and PAIRED:
        o = tl.arange(0, BLOCK_D)[None, :]
        b_fit = tl.where(o // GROUP == o % GROUP, fit, 0.0).to(tl.bfloat16)
        out = ()
        for i in tl.static_range(0, COUNT, 2):
            b_1, b_2 = tl.inline_asm_elementwise(
                """{
                .reg .f32 zero, x1, x2, y1, y2;
                mov.f32 zero, 0f00000000;
                mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32
                    {x1, x2, y1, y2}, {$2, $3}, {$4}, {zero, zero, zero, zero};
                cvt.rn.f16x2.f32 $0, x2, x1;
                cvt.rn.f16x2.f32 $1, y2, y1;
                }""",
                "=r,=r,r,r,r", [rows[i], rows[min(i + 1, COUNT - 1)], b_fit],
                dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
            out = out + (b_1,)
            if i + 1 < COUNT:
                out = out + (b_2,)
    else:
        out = computed(rows, fit, COUNT, COMPUTE)
    return out


@triton.jit
def no_sums(M: tl.constexpr, COUNT: tl.constexpr, WARPS: tl.constexpr, BLOCK_D: tl.constexpr, FAST: tl.constexpr):
    """Sums of COUNT tiles of products [WARPS, BLOCK_D] for each of M streams, before the first are added."""
    return zeros_per_warp(tile_count(M, COUNT, FAST), WARPS, BLOCK_D if FAST else BLOCK_D // 2)


@triton.jit
def selections(BLOCK_D: tl.constexpr, FAST: tl.constexpr):
    """Eight operands, of which number n adds to column n."""
    out = ()
    if FAST:
        for n in tl.static_range(8):
            out = out + (tl.where(tl.arange(0, BLOCK_D)[None, :] // GROUP == n, 1.0, 0.0).to(tl.float16),)
    return out


@triton.jit
def with_products(
    sums, products, selected, j: tl.constexpr, M: tl.constexpr, COUNT: tl.constexpr, FAST: tl.constexpr
):  # fmt: skip
    """`sums` with COUNT tiles of products of stream j added, for a tile of channels.

    On tensor cores, which take them four at a time, tile 16 i + 4 q + 2 h + e of all streams' goes to column 2 q + e of
    tile 2 i + h.
    """
    out = ()
    if FAST:
        tl.static_assert(COUNT % 4 == 0)
        for i in tl.static_range(0, tile_count(M, COUNT, FAST), 2):
            b_even, b_odd = sums[i], sums[i + 1]
            for q in tl.static_range(4):
                b_even, b_odd = with_four(
                    b_even, b_odd, products, selected, 8 * i + 4 * q - j * COUNT, COUNT, q
                )  # fmt: skip
            out = out + (b_even, b_odd)
    else:
        for i in tl.static_range(M * COUNT):
            if i >= j * COUNT and i < (j + 1) * COUNT:
                out = out + (sums[i] + pair_sums(products[i - j * COUNT]),)
            else:
                out = out + (sums[i],)
    return out


@triton.jit
def with_four(
    b_even, b_odd, products, selected, FIRST: tl.constexpr, COUNT: tl.constexpr, Q: tl.constexpr
):  # fmt: skip
    """Products FIRST to FIRST + 3, if among the COUNT there are, added to the columns 2 Q and 2 Q + 1 of two tiles."""
    if FIRST >= 0 and FIRST < COUNT:
        b_1, b_2, b_3, b_4 = products[FIRST], products[FIRST + 1], products[FIRST + 2], products[FIRST + 3]
        if PAIRED:
            b_even, b_odd = tl.inline_asm_elementwise(
                "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                "{$0, $1, $2, $3}, {$8, $10, $9, $11}, {$12, $13}, {$4, $5, $6, $7};",
                "=f,=f,=f,=f,f,f,f,f,r,r,r,r,r,r",
                [b_even, b_odd, b_1, b_2, b_3, b_4, selected[2 * Q], selected[2 * Q + 1]],
                dtype=(tl.float32, tl.float32), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            b_even += in_column(b_1, 2 * Q) + in_column(b_2, 2 * Q + 1)
            b_odd += in_column(b_3, 2 * Q) + in_column(b_4, 2 * Q + 1)
    return b_even, b_odd


@triton.jit
def in_column(b_x, column):
    """What groups of four lanes hold of a tile, added, in that column of theirs, and zeros in the others."""
    WARPS: tl.constexpr = b_x.shape[0]
    GROUPS: tl.constexpr = groups(b_x.shape[1])
    b_sum = tl.sum(tl.reshape(b_x.to(tl.float32), (WARPS, GROUPS, GROUP)), 2)[:, :, None]
    return tl.reshape(tl.where(tl.arange(0, GROUP)[None, None, :] == column, b_sum, 0.0), b_x.shape)


@triton.jit
def totals(b_sums):
    """Sums of the columns [WARPS, 8] of a tile."""
    return tl.sum(tl.reshape(b_sums, (b_sums.shape[0], groups(b_sums.shape[1]), GROUP)), 1)


@triton.jit
def numbers(i: tl.constexpr, COUNT: tl.constexpr):
    """Of the totals of tile i [1, 8] the stream, M or more for none, and the number of its tile of products."""
    o = tl.arange(0, GROUP)[None, :]
    at = i // 2 * TILES + o // 2 * 4 + i % 2 * 2 + o % 2
    return at // COUNT, at % COUNT
