"""Sums over the lanes of a warp, sixteen at a time: a lane gets one of them, for 15 exchanges instead of 80.

Halves of the values are swapped with the lane whose number differs in one bit, so that each step halves what is left;
what is added last is the same value in the other half of the warp. That takes a value to a lane, in order.
"""

import triton
import triton.language as tl

from kernels.tiles import PAIRED

COUNT = tl.constexpr(16)


@triton.constexpr_function
def exchange():
    """PTX that leaves in $0 of lane l the sum over the warp's lanes of $(1 + l % 16)."""
    lines = [".reg .pred p;", ".reg .b32 lane, bit;", ".reg .f32 keep, send, got;", "mov.u32 lane, %laneid;"]
    lines += [f".reg .f32 a{i};" for i in range(16)] + [f"mov.f32 a{i}, ${i + 1};" for i in range(16)]
    for half in (8, 4, 2, 1):
        lines += [f"and.b32 bit, lane, {half};", "setp.ne.u32 p, bit, 0;"]
        for i in range(half):
            lines += [
                f"selp.f32 keep, a{i + half}, a{i}, p;",
                f"selp.f32 send, a{i}, a{i + half}, p;",
                f"shfl.sync.bfly.b32 got, send, {half}, 31, 0xffffffff;",
                f"add.f32 a{i}, keep, got;",
            ]
    lines += ["shfl.sync.bfly.b32 got, a0, 16, 31, 0xffffffff;", "add.f32 $0, a0, got;"]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def operands():
    return "=f" + ",f" * 16


@triton.jit
def of_warps(values, LANES: tl.constexpr):
    """Of 16 vectors [LANES] a vector: lane l of a warp has the sum over its lanes of number l % 16."""
    if PAIRED:
        out = tl.inline_asm_elementwise(
            exchange(), operands(),
            [values[0], values[1], values[2], values[3], values[4], values[5], values[6], values[7], values[8],
             values[9], values[10], values[11], values[12], values[13], values[14], values[15]],
            dtype=tl.float32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        number = tl.arange(0, LANES) % 16
        out = tl.zeros([LANES], tl.float32)
        for i in tl.static_range(16):
            b_sum = tl.sum(tl.reshape(values[i], [LANES // 32, 32]), 1)
            b_sum = tl.reshape(b_sum[:, None] + tl.zeros([LANES // 32, 32], tl.float32), [LANES])
            out = tl.where(number == i, b_sum, out)
    return out
