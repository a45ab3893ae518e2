# ruff: noqa: RUF005  (Triton compiles `+` of tuples, not unpacking)
"""Rows and factors that reach registers through shared memory, fetched some steps before a loop needs them.

A loop `tl.range(..., num_stages=STAGES)` copies what `load_tile` and `load_factors` name STAGES - 1 turns ahead, 16
bytes a lane and no register, then reads it from shared memory straight into the layout of rows, if three things hold
(test_compilation.py looks at what comes out):

- a tile is taken apart by halves, whose layouts follow from each other: `rows_of`;
- nothing that a turn hands to the next is just what the one before handed to it, as in a window that only moves on:
  Triton takes that for a dependency over two turns and does not pipeline the loop. `carried` makes new values of it;
- what gathers over the turns starts from values laid out like the rows: `zeros_of_rows`.
"""

import triton
import triton.language as tl

from kernels.tiles import PAIRED, multiply, multiply_add


@triton.constexpr_function
def log2(n):
    return int(n).bit_length() - 1


@triton.constexpr_function
def in_words(dtype, count, even):
    """Whether `count` factors of this dtype come two to a word; else their first need not be at a whole word."""
    return dtype == tl.float16 and bool(even) and int(count) % 2 == 0 and bool(PAIRED)


@triton.constexpr_function
def in_pairs(dtype, block_d):
    """Whether a lane holds pairs of fp16 channels of a row, and assembly can take them."""
    return dtype == tl.float16 and int(block_d) >= 64 and bool(PAIRED)


@triton.jit
def load_tile(p_first, o_d, first, end, D: tl.constexpr, BLOCK_D: tl.constexpr, COUNT: tl.constexpr, ALL: tl.constexpr):
    """COUNT consecutive rows from p_first on, for `rows_of`; zeros out of [first, end), unless ALL are inside."""
    ROWS: tl.constexpr = triton.next_power_of_2(COUNT)
    i = tl.arange(0, ROWS)[:, None]
    p_rows = p_first + i * D + o_d[None, :]
    if ALL and ROWS == COUNT and D % BLOCK_D == 0:
        b_tile = tl.load(p_rows)
    else:
        inside = (i < COUNT) & (o_d < D)[None, :]
        if not ALL:
            inside = inside & (i >= first) & (i < end)
        b_tile = tl.load(p_rows, mask=inside, other=0.0)
    return b_tile


@triton.jit
def rows_of(b_tile, COUNT: tl.constexpr):
    """The first COUNT rows of a tile of a power of two of them, as row tiles."""
    tiles = (b_tile,)
    for _ in tl.static_range(log2(b_tile.shape[0])):
        finer = ()
        for i in tl.static_range(len(tiles)):
            finer = finer + halves(tiles[i])
        tiles = finer
    rows = ()
    for i in tl.static_range(COUNT):
        rows = rows + (tl.reshape(tiles[i], (tiles[i].shape[1],)),)
    return rows


@triton.jit
def halves(b_tile):
    """The first and the second half of a tile's rows."""
    HALF: tl.constexpr = b_tile.shape[0] // 2
    b_first, b_second = tl.split(tl.permute(tl.reshape(b_tile, (2, HALF, b_tile.shape[1])), (1, 2, 0)))
    return b_first, b_second


@triton.jit
def load_taps(p_first, o_d, D: tl.constexpr, BLOCK_D: tl.constexpr, COUNT: tl.constexpr):
    """COUNT consecutive rows, once: in one load, since the time to compile grows with their number squared."""
    rows = ()
    if COUNT > 0:
        rows = rows_of(load_tile(p_first, o_d, 0, COUNT, D, BLOCK_D, COUNT, True), COUNT)
    return rows


@triton.jit
def store_rows(p_first, rows, o_d, D: tl.constexpr, BLOCK_D: tl.constexpr, COUNT: tl.constexpr):
    """Writes COUNT consecutive rows, in one store likewise."""
    if COUNT > 0:
        SIZE: tl.constexpr = triton.next_power_of_2(COUNT)
        tiles = ()
        for i in tl.static_range(SIZE):
            tiles = tiles + (tl.reshape(rows[min(i, COUNT - 1)], (1, BLOCK_D)),)
        for _ in tl.static_range(log2(SIZE)):
            coarser = ()
            for i in tl.static_range(0, len(tiles), 2):
                coarser = coarser + (whole(tiles[i], tiles[i + 1]),)
            tiles = coarser
        o_row = tl.arange(0, SIZE)[:, None]
        tl.store(p_first + o_row * D + o_d[None, :], tiles[0], mask=(o_row < COUNT) & (o_d < D)[None, :])


@triton.jit
def whole(b_first, b_second):
    """Two halves of a tile's rows, one below the other."""
    ROWS: tl.constexpr = 2 * b_first.shape[0]
    return tl.reshape(tl.permute(tl.join(b_first, b_second), (2, 0, 1)), (ROWS, b_first.shape[1]))


@triton.jit
def load_factors(p_first, end, COUNT: tl.constexpr, DTYPE: tl.constexpr, EVEN: tl.constexpr):
    """COUNT consecutive factors of row tiles for `times` and `plus_times`; zeros from number `end` on.

    With EVEN all are inside or none, and p_first is where a word begins: then fp16 factors stay two to a word.
    """
    WORDS: tl.constexpr = in_words(DTYPE, COUNT, EVEN)
    N_VALUES: tl.constexpr = COUNT // 2 if WORDS else COUNT
    SIZE: tl.constexpr = max(triton.next_power_of_2(N_VALUES), 32)  # one for each lane, or one lane would fetch several
    i = tl.arange(0, SIZE)
    if WORDS:
        p_words = p_first.to(tl.pointer_type(tl.int32))
        b_values = tl.load(p_words + i, mask=(i < N_VALUES) & (end > 0), other=0)
    else:
        b_values = tl.load(p_first + i, mask=i < tl.minimum(end, N_VALUES), other=0.0)
    return rows_of(tl.reshape(b_values, (SIZE, 1)), N_VALUES)


@triton.constexpr_function
def by_half(operation, i, others):
    """Assembly of an operation on pairs, the first of which is twice a half of the word $1: number i of halves."""
    half = "high" if int(i) % 2 else "low"
    taken = f"mov.b32 {{low, high}}, $1; mov.b32 both, {{{half}, {half}}};"
    return f"{{ .reg .b16 low, high; .reg .b32 both; {taken} {operation}.rn.f16x2 $0, both, {others}; }}"


@triton.jit
def times(factors, i: tl.constexpr, b_x):
    """Factor number i times a row tile."""
    if factors[0].dtype == tl.int32:
        out = tl.inline_asm_elementwise(
            by_half("mul", i, "$3"), "=r,r,r,r", [factors[i // 2], b_x], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        out = multiply(factors[i], b_x)
    return out


@triton.jit
def plus_times(b_sum, factors, i: tl.constexpr, b_x):
    """A row tile plus factor number i times another."""
    if factors[0].dtype == tl.int32:
        out = tl.inline_asm_elementwise(
            by_half("fma", i, "$3, $4"), "=r,r,r,r,r", [factors[i // 2], b_x, b_sum],
            dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        out = multiply_add(factors[i], b_x, b_sum)
    return out


@triton.jit
def carried(rows, COUNT: tl.constexpr, DTYPE: tl.constexpr, BLOCK_D: tl.constexpr):
    """COUNT row tiles as a loop hands them to its next turn; `rows_carried` gives them back.

    Two fp16 rows share a tile of words, so that what the compiler carries are pairs of channels.
    """
    out = ()
    if in_pairs(DTYPE, BLOCK_D):
        for i in tl.static_range(0, COUNT, 2):
            b_words = tl.inline_asm_elementwise(
                "mov.b32 $0, $2; mov.b32 $1, $3;", "=&r,=&r,r,r", [rows[i], rows[min(i + 1, COUNT - 1)]],
                dtype=tl.int32, is_pure=True, pack=2,
            )  # fmt: skip
            out = out + (b_words,)
    else:
        for i in tl.static_range(COUNT):
            out = out + (moved(rows[i]),)
    return out


@triton.jit
def moved(b_x):
    """The same values, new to the compiler."""
    if not PAIRED:
        out = b_x
    elif b_x.dtype == tl.float16:
        out = tl.inline_asm_elementwise("mov.b16 $0, $1;", "=h,h", [b_x], dtype=tl.float16, is_pure=True, pack=1)
    else:
        out = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [b_x], dtype=tl.float32, is_pure=True, pack=1)
    return out


@triton.jit
def rows_carried(kept, COUNT: tl.constexpr, DTYPE: tl.constexpr, BLOCK_D: tl.constexpr):
    """The COUNT row tiles that `carried` was given."""
    rows = ()
    if in_pairs(DTYPE, BLOCK_D):
        for i in tl.static_range(0, COUNT, 2):
            b_1, b_2 = tl.inline_asm_elementwise(
                "mov.b32 $0, $2; mov.b32 $1, $3;", "=&r,=&r,r,r", [kept[i // 2]],
                dtype=(tl.int16, tl.int16), is_pure=True, pack=2,
            )  # fmt: skip
            rows = rows + (b_1.to(DTYPE, bitcast=True),)
            if i + 1 < COUNT:
                rows = rows + (b_2.to(DTYPE, bitcast=True),)
    else:
        rows = kept
    return rows


@triton.jit
def zeros_of_rows(p_first, o_d, COUNT: tl.constexpr):
    """COUNT row tiles of fp32 zeros in the layout of rows loaded from p_first on."""
    b_row = tl.load(p_first + o_d, mask=o_d < 0, other=0.0)
    zeros = ()
    for _ in tl.static_range(COUNT):
        zeros = zeros + (b_row.to(tl.float32),)
    return zeros


@triton.jit
def newest(rows, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """COUNT rows from number FIRST on."""
    kept = ()
    for i in tl.static_range(COUNT):
        kept = kept + (rows[FIRST + i],)
    return kept


@triton.jit
def row_mask(o_d, inside, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Where a row tile may be read: one condition for all of it where tiles divide D."""
    if D % BLOCK_D == 0:
        mask = tl.where(inside, tl.full([BLOCK_D], True, tl.int1), False)
    else:
        mask = o_d < tl.where(inside, D, 0)
    return mask
