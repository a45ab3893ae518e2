# ruff: noqa: RUF005  (Triton compiles `+` of tuples, not unpacking)
"""Triton kernels over the lanes of Hyper-Connections: the update with the next read's projection, and the gradients.

    x'_i = sum_j res_ij x_j + post_i y            projected = W x' and the squares of x', for the read that comes next
    dy   = sum_i post_i dx'_i                     dpost_i = dx'_i . y            dres_ij = dx'_i . x_j
    dx_j = pre_j dh + sum_i res_ij dx'_i + (W^T draw)_j + bend x_j               dW = sum_t draw x

Lanes are [P, n, D] in memory, P = B T tokens. W is [COLS, n D] over all lanes (`flat`), or [COLS, D], the same for
every lane (`lane`). Products with W run on the tensor cores. For bf16 lanes W comes in two bf16 parts whose sum is W to
2^-17, and so do the small factors draw: as good as fp32 for what becomes a coefficient or a parameter's gradient.
"""

import triton
import triton.language as tl

from kernels.tiles import product


@triton.jit
def split_kernel(p_weight, p_parts, count, BLOCK: tl.constexpr):
    """fp32 [count] to bf16 [2, count]: the rounded value, and what rounding lost."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o < count
    b_w = tl.load(p_weight + o, mask=inside, other=0.0)
    b_high = b_w.to(tl.bfloat16)
    tl.store(p_parts + o, b_high, mask=inside)
    tl.store(p_parts + count + o, (b_w - b_high.to(tl.float32)).to(tl.bfloat16), mask=inside)


@triton.jit
def projected_tile(
    accumulator, b_x, p_weight, o_d, K,
    COLS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Adds x [BLOCK_T, BLOCK_D] times these columns of W, by (part and column, token): [PARTS WIDTH, BLOCK_T].

    W comes first, so that x is the operand that goes through shared memory: as the one in registers, the update would
    be computed a second time in the layout of the tensor cores.
    """
    o_r = tl.arange(0, PARTS * WIDTH)
    column = o_r % WIDTH
    row = (o_r // WIDTH) * COLS + column
    mask = (column < COLS)[:, None] & (o_d < D)[None, :]
    b_w = tl.load(p_weight + row[:, None] * K + o_d[None, :], mask=mask, other=0.0)
    return product(b_w, tl.trans(b_x), accumulator, DOT)


@triton.jit
def update_kernel(
    p_x, p_y, p_post, p_res, p_out, p_weight, p_projected, P,
    UPDATE: tl.constexpr, PROJECT: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr, n: tl.constexpr,
    D: tl.constexpr, PARTS: tl.constexpr, DOT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The lanes after a write, and the projection of the lanes as stored; UPDATE false projects p_x as it is.

    Args:
        p_projected: [P, COLS + 1] (`lane`: [P, n, COLS + 1]), written: products, then the sum of squares.
        PROJECT: `none`, `flat` or `lane`.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK_T
    o_t = tl.arange(0, BLOCK_T)
    m_t = o_t < P - first
    p_x += first * n * D
    post = ()
    res = ()
    if UPDATE:
        p_y += first * D
        p_out += first * n * D
        for i in tl.static_range(n):
            post = post + (tl.load(p_post + first * n + o_t * n + i, mask=m_t, other=0.0),)
            for j in tl.static_range(n):
                o_ij = o_t * n * n + i * n + j
                res = res + (tl.load(p_res + first * n * n + o_ij, mask=m_t, other=0.0),)
    N_ROWS: tl.constexpr = n if PROJECT == "lane" else 1
    products = ()
    squares = ()
    for _ in tl.static_range(N_ROWS):
        products = products + (tl.zeros([PARTS * WIDTH, BLOCK_T], tl.float32),)
        squares = squares + (tl.zeros([BLOCK_T], tl.float32),)
    for d in range(0, D, BLOCK_D):
        o_d = d + tl.arange(0, BLOCK_D)
        m_td = m_t[:, None] & (o_d < D)[None, :]
        lanes = ()
        for j in tl.static_range(n):
            lanes = lanes + (tl.load(p_x + (o_t * n + j)[:, None] * D + o_d[None, :], mask=m_td, other=0.0),)
        if UPDATE:
            b_y = tl.load(p_y + o_t[:, None] * D + o_d[None, :], mask=m_td, other=0.0).to(tl.float32)
        new_products = ()
        new_squares = ()
        b_square = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        for i in tl.static_range(n):
            b_out = lanes[i]
            if UPDATE:
                b_sum = post[i][:, None] * b_y
                for j in tl.static_range(n):
                    b_sum += res[i * n + j][:, None] * lanes[j].to(tl.float32)
                b_out = b_sum.to(p_out.dtype.element_ty)
                tl.store(p_out + (o_t * n + i)[:, None] * D + o_d[None, :], b_out, mask=m_td)
            if PROJECT == "lane":
                new_products = new_products + (
                    projected_tile(products[i], b_out, p_weight, o_d, D, COLS, WIDTH, D, PARTS, DOT),
                )
                b_own = b_out.to(tl.float32)
                new_squares = new_squares + (squares[i] + tl.sum(b_own * b_own, 1),)
            elif PROJECT == "flat":
                products = (
                    projected_tile(products[0], b_out, p_weight + i * D, o_d, n * D, COLS, WIDTH, D, PARTS, DOT),
                )
                b_square += b_out.to(tl.float32) * b_out.to(tl.float32)
        if PROJECT == "lane":
            products = new_products
            squares = new_squares
        elif PROJECT == "flat":
            squares = (squares[0] + tl.sum(b_square, 1),)
    if PROJECT != "none":
        o_r = tl.arange(0, WIDTH)
        p_projected += first * N_ROWS * (COLS + 1)
        for row in tl.static_range(N_ROWS):
            b_product = tl.sum(tl.reshape(products[row], [PARTS, WIDTH, BLOCK_T]), 0)
            o_row = (o_t * N_ROWS + row) * (COLS + 1)
            mask = (o_r < COLS)[:, None] & m_t[None, :]
            tl.store(p_projected + o_r[:, None] + o_row[None, :], b_product, mask=mask)
            tl.store(p_projected + o_row + COLS, squares[row], mask=m_t)


@triton.jit
def folded(b_x, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, FOLD: tl.constexpr):
    """Sums runs of FOLD channels, which one thread holds anyway: [BLOCK_T, BLOCK_D / FOLD]."""
    if FOLD > 1:
        b_x = tl.sum(tl.reshape(b_x, [BLOCK_T, BLOCK_D // FOLD, FOLD]), 2)
    return b_x


@triton.jit
def update_gradient_kernel(
    p_dout, p_x, p_y, p_post, p_res, p_dy, p_dpost, p_dres, p_dx, P,
    n: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, FOLD: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradients of y [P, D], post [P, n] and res [P, n, n]; with LANES of the lanes too, res^T dx' alone."""
    first = tl.program_id(0).to(tl.int64) * BLOCK_T
    o_t = tl.arange(0, BLOCK_T)
    m_t = o_t < P - first
    p_dout += first * n * D
    p_x += first * n * D
    p_y += first * D
    p_dy += first * D
    p_post += first * n
    p_res += first * n * n
    p_dpost += first * n
    p_dres += first * n * n
    if LANES:
        p_dx += first * n * D
    dots = ()
    for _ in tl.static_range(n * n + n):
        dots = dots + (tl.zeros([BLOCK_T, BLOCK_D // FOLD], tl.float32),)
    for d in range(0, D, BLOCK_D):
        o_d = d + tl.arange(0, BLOCK_D)
        m_td = m_t[:, None] & (o_d < D)[None, :]
        o_td = o_t[:, None] * D + o_d[None, :]
        b_dy = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        gradients = ()
        for i in tl.static_range(n):
            b_dout = tl.load(p_dout + (o_t * n + i)[:, None] * D + o_d[None, :], mask=m_td, other=0.0).to(tl.float32)
            # read again at every step, from the cache: held, n vectors more would spill
            b_dy += tl.load(p_post + o_t * n + i, mask=m_t, other=0.0)[:, None] * b_dout
            gradients = gradients + (b_dout,)
        tl.store(p_dy + o_td, b_dy.to(p_dy.dtype.element_ty), mask=m_td)
        updated = ()
        for j in tl.static_range(n + 1):
            if j < n:
                b_v = tl.load(p_x + (o_t * n + j)[:, None] * D + o_d[None, :], mask=m_td, other=0.0).to(tl.float32)
            else:
                b_v = tl.load(p_y + o_td, mask=m_td, other=0.0).to(tl.float32)
            for i in tl.static_range(n):
                updated = updated + (dots[j * n + i] + folded(gradients[i] * b_v, BLOCK_T, BLOCK_D, FOLD),)
        dots = updated
        if LANES:
            for j in tl.static_range(n):
                b_dx = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
                for i in tl.static_range(n):
                    b_dx += tl.load(p_res + o_t * n * n + i * n + j, mask=m_t, other=0.0)[:, None] * gradients[i]
                p_row = p_dx + (o_t * n + j)[:, None] * D
                tl.store(p_row + o_d[None, :], b_dx.to(p_dx.dtype.element_ty), mask=m_td)
    for i in tl.static_range(n):
        for j in tl.static_range(n):
            tl.store(p_dres + o_t * n * n + i * n + j, tl.sum(dots[j * n + i], 1), mask=m_t)
        tl.store(p_dpost + o_t * n + i, tl.sum(dots[n * n + i], 1), mask=m_t)


@triton.jit
def factors(p_draw, o_row, m_t, COLS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """draw [BLOCK_T, WIDTH PARTS], column r at PARTS r: in fp32, or what is left in bf16 beside what that loses."""
    o_r = tl.arange(0, WIDTH)
    mask = m_t[:, None] & (o_r < COLS)[None, :]
    b_draw = tl.load(p_draw + o_row[:, None] * COLS + o_r[None, :], mask=mask, other=0.0)
    if PARTS == 2:
        b_high = b_draw.to(tl.bfloat16)
        b_low = (b_draw - b_high.to(tl.float32)).to(tl.bfloat16)
        b_draw = tl.reshape(tl.join(b_high, b_low), [b_draw.shape[0], 2 * WIDTH])
    return b_draw


@triton.jit
def lanes_gradient_kernel(
    p_x, p_dh, p_dout, p_pre, p_res, p_draw, p_bend, p_weight, p_dx, p_dweight, P,
    LATER: tl.constexpr, PROJECT: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr, n: tl.constexpr,
    D: tl.constexpr, PARTS: tl.constexpr, DOT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The whole gradient of the lanes, and a partial dW per program: BLOCK_D channels of every num_programs(1)-th tile.

    Tiles are taken from the last on, since the pass over the lanes before this one has left their ends in the cache.

    Args:
        p_dout: [P, n, D], the gradient of the lanes after the write, with LATER.
        p_weight: W in fp32; rounded to bf16 if there are two parts: what the second adds is under the rounding of dx.
        p_dweight: [programs, COLS, n D or D] partial sums.
    """
    o_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    column = tl.arange(0, PARTS * WIDTH) // PARTS  # W under both parts of draw
    m_rd = (column < COLS)[:, None] & m_d[None, :]
    # int64, so that the many addresses of a tile are one and constants; as int32 they take registers each
    o_t = tl.arange(0, BLOCK_T).to(tl.int64)
    N_WEIGHTS: tl.constexpr = n if PROJECT == "flat" else 1
    K: tl.constexpr = N_WEIGHTS * D
    weights = ()
    dweight = ()
    if PROJECT != "none":
        for j in tl.static_range(N_WEIGHTS):
            b_w = tl.load(p_weight + j * D + column[:, None] * K + o_d[None, :], mask=m_rd, other=0.0)
            if PARTS == 2:
                b_w = b_w.to(tl.bfloat16)
            weights = weights + (b_w,)
            dweight = dweight + (tl.zeros([BLOCK_D, PARTS * WIDTH], tl.float32),)
    n_tiles = tl.cdiv(P, BLOCK_T)
    # the stages here, not as an option of the launch, which would fetch ahead only what the products need
    for place in tl.range(tl.program_id(1), n_tiles, tl.num_programs(1), num_stages=STAGES):
        first = (n_tiles - 1 - place).to(tl.int64) * BLOCK_T
        m_t = o_t < P - first
        m_td = m_t[:, None] & m_d[None, :]
        b_dh = tl.load(p_dh + first * D + (o_t[:, None] * D + o_d[None, :]), mask=m_td, other=0.0)
        gradients = ()
        if LATER:
            for i in tl.static_range(n):
                o_i = (o_t * n + i)[:, None] * D + o_d[None, :]
                gradients = gradients + (tl.load(p_dout + first * n * D + o_i, mask=m_td, other=0.0),)
        if PROJECT == "flat":
            b_draw = factors(p_draw + first * COLS, o_t, m_t, COLS, WIDTH, PARTS)
            bend = tl.load(p_bend + first + o_t, mask=m_t, other=0.0)
        new_dweight = ()
        for j in tl.static_range(n):
            o_j = (o_t * n + j)[:, None] * D + o_d[None, :]
            pre = tl.load(p_pre + first * n + (o_t * n + j), mask=m_t, other=0.0)
            b_dx = pre[:, None] * b_dh.to(tl.float32)
            if LATER:
                for i in tl.static_range(n):
                    factor = tl.load(p_res + first * n * n + (o_t * n * n + i * n + j), mask=m_t, other=0.0)
                    b_dx += factor[:, None] * gradients[i].to(tl.float32)
            if PROJECT != "none":
                b_x = tl.load(p_x + first * n * D + o_j, mask=m_td, other=0.0)
                if PROJECT == "lane":
                    b_draw = factors(p_draw + first * n * COLS, o_t * n + j, m_t, COLS, WIDTH, PARTS)
                    bend = tl.load(p_bend + first * n + (o_t * n + j), mask=m_t, other=0.0)
                b_dx += bend[:, None] * b_x.to(tl.float32)
                b_dx = product(b_draw, weights[j % N_WEIGHTS], b_dx, DOT)
                b_dweight = product(tl.trans(b_x), b_draw, dweight[j % N_WEIGHTS], DOT)
                if PROJECT == "flat":
                    new_dweight = new_dweight + (b_dweight,)
                else:
                    dweight = (b_dweight,)
            tl.store(p_dx + first * n * D + o_j, b_dx.to(p_dx.dtype.element_ty), mask=m_td)
        if PROJECT == "flat":
            dweight = new_dweight
    if PROJECT != "none":
        o_r = tl.arange(0, WIDTH)
        mask = m_d[:, None] & (o_r < COLS)[None, :]
        p_partial = p_dweight + tl.program_id(1).to(tl.int64) * COLS * K
        for j in tl.static_range(N_WEIGHTS):
            b_sum = tl.sum(tl.reshape(dweight[j], [BLOCK_D, WIDTH, PARTS]), 2)
            tl.store(p_partial + o_r[None, :] * K + j * D + o_d[:, None], b_sum, mask=mask)
