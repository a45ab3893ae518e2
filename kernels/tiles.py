# ruff: noqa: RUF005  (Triton compiles `+` of tuples, not unpacking)
"""Pieces that the Triton kernels share: tables of tensors, causal windows in registers, limits of inputs.

A depth-attention kernel gets its N sources as a table of addresses and walks along time with the last rows of a source
in registers: a window is a tuple of row tiles [BLOCK_D], newest first, unrolled while compiling.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from kernels.reference import check_kernel_sizes

MAX_SOURCES = 128
MAX_STREAMS = 8
MAX_WIDTH = 32
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PAIRED = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter knows no assembly


# ------------------------------------------------------------------------------------------- while compiling


@triton.constexpr_function
def n_streams(kernel_sizes):
    return len(kernel_sizes)


@triton.constexpr_function
def width(kernel_sizes, j):
    """Taps of stream j; 1 for an identity stream."""
    return int(kernel_sizes[j])


@triton.constexpr_function
def learned(kernel_sizes, j):
    """Learned taps of stream j: none for an identity stream."""
    return int(kernel_sizes[j]) if int(kernel_sizes[j]) > 1 else 0


@triton.constexpr_function
def first_tap(kernel_sizes, j):
    """Row of stream j's first tap in the stacked taps; for j = m the number of taps K."""
    return sum(int(size) for size in list(kernel_sizes)[:j] if int(size) > 1)


@triton.constexpr_function
def widest(kernel_sizes):
    return max(int(size) for size in kernel_sizes)


# --------------------------------------------------------------------------------------------- in a kernel


@triton.jit
def table_kernel(addresses, p_table, COUNT: tl.constexpr):
    """Writes COUNT addresses, kernel arguments, to memory."""
    for i in tl.static_range(COUNT):
        tl.store(p_table + i, addresses[i])


@triton.jit
def tensor_at(p_table, i, DTYPE: tl.constexpr):
    """Pointer to tensor number i of a table."""
    # every tensor is checked to be 16-byte aligned; without the hint loads are not vectorised
    return tl.multiple_of(tl.load(p_table + i).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def load_rows(p_first, o_d, D: tl.constexpr, COUNT: tl.constexpr):
    """COUNT consecutive rows as a tuple of row tiles, in their own dtype."""
    rows = ()
    for i in tl.static_range(COUNT):
        rows = rows + (tl.load(p_first + i * D + o_d, mask=o_d < D, other=0.0),)
    return rows


@triton.jit
def load_values(p_first, inside, COUNT: tl.constexpr, DTYPE: tl.constexpr):
    """COUNT consecutive values of DTYPE as a tuple of scalars; zeros where `inside` is false."""
    values = ()
    if DTYPE == tl.float16 and COUNT % 4 == 0:  # four to a load
        p_words = p_first.to(tl.pointer_type(tl.int64))
        for i in tl.static_range(COUNT // 4):
            word = tl.load(p_words + i, mask=inside, other=0)
            for k in tl.static_range(2):
                pair = (word >> (32 * k)).to(tl.int32)
                low, high = pair.to(tl.int16), (pair >> 16).to(tl.int16)
                values = values + (low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True))
    else:
        for i in tl.static_range(COUNT):
            values = values + (tl.load(p_first + i, mask=inside, other=0.0),)
    return values


@triton.jit
def zeros(COUNT: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr):
    """COUNT row tiles of zeros."""
    rows = ()
    for _ in tl.static_range(COUNT):
        rows = rows + (tl.zeros([BLOCK_D], DTYPE),)
    return rows


@triton.jit
def zeros_per_warp(COUNT: tl.constexpr, WARPS: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr = tl.float32):
    """COUNT tiles of zeros, a row of each for every warp."""
    tiles = ()
    for _ in tl.static_range(COUNT):
        tiles = tiles + (tl.zeros([WARPS, BLOCK_D], DTYPE),)
    return tiles


@triton.jit
def raw_rows(p_first, t_first, o_d, T, D: tl.constexpr, PAST: tl.constexpr, COUNT: tl.constexpr, EVEN: tl.constexpr):
    """PAST rows that may lie before a sequence and COUNT rows that may lie beyond it (not if EVEN), oldest first.

    Rows [BLOCK_D] from row t_first at p_first on, in their own dtype; zeros outside [0, T).
    """
    rows = ()
    for i in tl.static_range(PAST):
        t = t_first + i
        # a tile of several warps may have one that begins beyond the sequence
        mask = o_d < tl.where(t >= 0 if EVEN else (t >= 0) & (t < T), D, 0)
        rows = rows + (tl.load(p_first + i * D + o_d, mask=mask, other=0.0),)
    for i in tl.static_range(PAST, PAST + COUNT):
        mask = o_d < (D if EVEN else tl.where(t_first + i < T, D, 0))
        rows = rows + (tl.load(p_first + i * D + o_d, mask=mask, other=0.0),)
    return rows


@triton.jit
def prefetch(p_values, inside):
    """Asks the L1 for the 32 bytes at each address that is `inside`; nothing waits for them until they are loaded."""
    if PAIRED:
        tl.inline_asm_elementwise(
            "{ .reg .pred inside; setp.ne.s32 inside, $2, 0; @inside prefetch.global.L1 [$1]; mov.u32 $0, 0; }",
            "=r,l,r", [p_values, inside.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def prefetch_rows(
    p_first, o_first, first, end, D: tl.constexpr, COUNT: tl.constexpr, BLOCK_D: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """`prefetch` of COUNT rows of BLOCK_D channels from o_first on, of which numbers [first, end) exist."""
    VALUES: tl.constexpr = 32 // (p_first.dtype.element_ty.primitive_bitwidth // 8)
    PIECES: tl.constexpr = BLOCK_D // VALUES
    for chunk in tl.static_range((COUNT * PIECES + 32 * WARPS - 1) // (32 * WARPS)):
        i = chunk * 32 * WARPS + tl.arange(0, 32 * WARPS)
        row, channel = i // PIECES, o_first + i % PIECES * VALUES
        inside = (row >= first) & (row < end) & (row < COUNT) & (channel < D)
        prefetch(p_first + row * D + channel, inside)


@triton.jit
def prefetch_values(p_first, count, o_lane):
    """`prefetch` of `count` consecutive values by the first of the lanes o_lane, which are enough; none beyond them."""
    VALUES: tl.constexpr = 32 // (p_first.dtype.element_ty.primitive_bitwidth // 8)
    o_value = o_lane * VALUES
    # the last value too: the first need not be at a whole sector
    prefetch(p_first + tl.minimum(o_value, count - 1), (o_value < count + VALUES) & (count > 0))


@triton.jit
def prefetch_block(p_first, n_bytes):
    """Asks the L2 for n_bytes, a multiple of 16, from a 16-byte address on, in one instruction. None before Hopper."""
    if PAIRED:
        if cuda_capability_geq(9, 0):
            tl.inline_asm_elementwise(
                """{
                .reg .pred one, ask;
                .reg .b32 thread;
                mov.u32 thread, %tid.x;
                setp.eq.u32 one, thread, 0;
                setp.gt.and.s32 ask, $2, 0, one;
                @ask cp.async.bulk.prefetch.L2.global [$1], $2;
                mov.u32 $0, 0;
                }""",
                "=r,l,r", [p_first, n_bytes.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def visible(window, position, LENGTH: tl.constexpr):
    """The window with the rows of earlier documents zeroed: tap i is dropped where position < i."""
    rows = (window[0],)
    for i in tl.static_range(1, LENGTH):
        rows = rows + (tl.where(position >= i, window[i], 0.0),)
    return rows


@triton.jit
def multiply_add(a, b, c):
    """a b + c of row tiles and scalars of one dtype; two channels an instruction in fp16.

    Left to the compiler's vectoriser, half of the products of a long chain are taken one channel at a time.
    """
    if a.dtype == tl.float16 and PAIRED:
        out = tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        out = tl.fma(a, b, c)
    return out


@triton.jit
def multiply(a, b):
    """a b, as `multiply_add`."""
    if a.dtype == tl.float16 and PAIRED:
        out = tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        out = a * b
    return out


@triton.jit
def pair_sums(b_x):
    """Sums of neighbouring channels of [WARPS, BLOCK_D] in fp32: the two of a lane take one register."""
    return tl.sum(tl.reshape(b_x.to(tl.float32), (b_x.shape[0], b_x.shape[1] // 2, 2)), 2)


@triton.jit
def fitted(b_row, fit):
    """A bf16 row times a power of two, which bf16 holds exactly, in fp16.

    Minus zero is added, which changes nothing: before Hopper bf16 has no multiplication alone.
    """
    if PAIRED:
        out = tl.inline_asm_elementwise(
            """{
            .reg .b32 zeros, pair, low, high;
            mov.b32 zeros, 0x80008000;
            fma.rn.bf16x2 pair, $1, $2, zeros;
            shl.b32 low, pair, 16;
            and.b32 high, pair, 0xffff0000;
            cvt.rn.f16x2.f32 $0, high, low;
            }""",
            "=r,r,r", [b_row, fit], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        out = (b_row.to(tl.float32) * fit.to(tl.float32)).to(tl.float16)
    return out


@triton.jit
def computed(rows, fit, COUNT: tl.constexpr, COMPUTE: tl.constexpr):
    """Rows of a source in the dtype that computes: fp32, or fp16 times `fit`, a power of two."""
    converted = ()
    for i in tl.static_range(COUNT):
        if COMPUTE == tl.float16:
            converted = converted + (fitted(rows[i], fit.to(tl.bfloat16)),)
        else:
            converted = converted + (rows[i].to(COMPUTE),)
    return converted


@triton.jit
def load_fit(p_fit, n, COMPUTE: tl.constexpr):
    """What `computed` multiplies rows of source n by; 1 without meaning where fp32 computes."""
    fit = 1.0
    if COMPUTE == tl.float16:
        fit = tl.load(p_fit + n)
    return fit


@triton.jit
def seen_at(rows, p_position, row, inside, s: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr):
    """The WIDTH rows that end at step s of a tile, newest first; `rows` begin WIDTH - 1 before the tile."""
    window = ()
    for i in tl.static_range(WIDTH):
        window = window + (rows[WIDTH - 1 + s - i],)
    if PACKED:
        window = visible(window, tl.load(p_position + row, mask=inside, other=0), WIDTH)
    return window


@triton.jit
def convolved(taps, window, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """One stream at the newest row of the window: sum_i taps[FIRST + i] window[i]; WIDTH 1 is the row itself."""
    if WIDTH == 1:
        u = window[0]
    else:
        u = multiply(taps[FIRST], window[0])
        for i in tl.static_range(1, WIDTH):
            u = multiply_add(taps[FIRST + i], window[i], u)
    return u


@triton.jit
def product(b_a, b_b, accumulator, DOT: tl.constexpr):
    """accumulator + a b: `half` on the tensor cores as they are, otherwise in fp32 with that precision."""
    if DOT == "half":
        out = tl.dot(b_a, b_b, accumulator)
    else:
        out = tl.dot(b_a.to(tl.float32), b_b.to(tl.float32), accumulator, input_precision=DOT)
    return out


# ----------------------------------------------------------------------------------------------- on the host


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. Triton's, which kernels can call too, takes two microseconds on the host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two not below n, at least 1; see `cdiv`."""
    return 1 << (n - 1).bit_length()


def check_sources(sources: Sequence[Tensor]) -> None:
    """Raise ValueError unless the kernels can read these sources."""
    x = sources[0]
    if not 1 <= len(sources) <= MAX_SOURCES:
        raise ValueError(f"kernels=triton reads 1 to {MAX_SOURCES} sources, got {len(sources)}; use kernels=reference")
    if x.dtype not in DTYPES:
        raise ValueError(f"kernels=triton takes bf16, fp16 or fp32 sources, got {x.dtype}; use kernels=reference")
    if x.ndim != 3 or x.shape[-1] % 8:
        raise ValueError(
            f"kernels=triton needs sources [B, T, D] with D a multiple of 8, got {tuple(x.shape)}; use reference"
        )
    for source in sources:
        if source.shape != x.shape or source.dtype != x.dtype or source.device != x.device:
            raise ValueError(
                f"sources differ: {tuple(x.shape)} {x.dtype} on {x.device}, {tuple(source.shape)} {source.dtype} on "
                f"{source.device}; all sources of a read must be alike"
            )
    if not (x.is_cuda or triton.knobs.runtime.interpret):
        raise ValueError(
            f"kernels=triton runs on CUDA, got tensors on {x.device}; use kernels=reference (TRITON_INTERPRET=1 "
            "interprets the kernels on the CPU, for tests)"
        )


def check_streams(kernel_sizes: Sequence[int]) -> None:
    """Raise ValueError unless the kernels can expand a source into these streams."""
    check_kernel_sizes(kernel_sizes)
    if len(kernel_sizes) > MAX_STREAMS or max(kernel_sizes) > MAX_WIDTH:
        raise ValueError(
            f"kernels=triton takes up to {MAX_STREAMS} streams of up to {MAX_WIDTH} taps, got kernel_sizes "
            f"{list(kernel_sizes)}; use kernels=reference"
        )


def check_shapes(**given: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Raise ValueError unless each tensor, by name, has the shape beside it."""
    for name, (tensor, shape) in given.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")


def aligned(x: Tensor) -> Tensor:
    """`x` contiguous at a 16-byte address, copied only if it is not."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def table(*rows: Sequence[Tensor]) -> Tensor:
    """The addresses of equally many tensors per row, as a tensor [rows, N] on their device.

    A kernel writes it from its arguments: nothing is copied from the host, and a CUDA graph replays it.
    """
    addresses = [x.data_ptr() for row in rows for x in row]
    count = next_power_of_2(len(addresses))  # few kernels are compiled as N grows
    out = rows[0][0].new_empty(count, dtype=torch.int64)
    addresses += addresses[-1:] * (count - len(addresses))
    table_kernel[(1,)](tuple(addresses), out, COUNT=count, num_warps=1)
    return out[: len(rows) * len(rows[0])].view(len(rows), -1)


def processors(device: torch.device) -> int:
    """Streaming multiprocessors; for the interpreter a few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def shared_bytes(device: torch.device) -> int:
    """Of shared memory that a program may have; the interpreter's is Hopper's."""
    if device.type != "cuda":
        return 227 << 10
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def float32(x: Tensor | None) -> Tensor | None:
    """A parameter as the kernels read it."""
    return None if x is None else aligned(x.detach().float())
