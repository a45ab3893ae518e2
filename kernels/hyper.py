"""Hyper-Connections on the GPU (HC, mHC), under the names of `reference_hyper`: reads, writes and their gradients.

Forward, a write stores the lanes and projects them for the next read in the same pass (`update_and_project`), so that
read and write together move 3 n + 2 widths per token. What the read got that way it treats as a value: the gradients of
the projection are all its own.

Backward, a write gives only the gradients of y, post and res. What its lanes pass on, res^T dx', waits as the raw dx'
until the sublayer has been differentiated; then the read before it computes the whole gradient of the lanes at once
(`_Handover`). Nothing is added by autograd, and no gradient of the lanes is written twice.
"""

import dataclasses
import weakref
from typing import Literal

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import hyper_coefficients, hyper_lanes
from kernels.tiles import DTYPES, aligned, float32

MAX_LANES = 8
MAX_ROUNDS = 64
_HANDOVER = "_handover_of_lanes"

Kind = Literal["hc", "static", "mhc", "head"]


@dataclasses.dataclass(frozen=True)
class Launch:
    """Tile and resources of one kernel."""

    tokens: int
    channels: int
    num_warps: int = 4
    num_stages: int = 2

    def options(self) -> dict[str, int]:
        return {
            "BLOCK_T": self.tokens,
            "BLOCK_D": self.channels,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


def launch(kernel: str, n: int, dtype: torch.dtype = torch.bfloat16) -> Launch:
    """The tile of a kernel for n lanes: what a program holds grows with n (or its square), so the tile shrinks."""
    few, half = n <= 4, dtype == torch.bfloat16
    match kernel:
        case "update":
            return Launch(32, 64) if few else Launch(16, 32, num_stages=1)
        case "read":
            return Launch(8, 256) if few else Launch(4, 256)
        case "coefficients_gradient":
            return Launch(16, 128) if few else Launch(4, 256)
        case "update_gradient":
            return Launch(8, 128) if few else Launch(2, 256)
        case "lanes_gradient":
            return Launch(32, 64) if few and half else Launch(16, 32, num_stages=1)
        case "weight_gradient":
            return Launch(64, 128, num_stages=4) if few and half else Launch(32, 32, num_stages=2)
    raise AssertionError(kernel)


@dataclasses.dataclass(frozen=True)
class Spec:
    """What the kernels of one read are compiled for."""

    kind: Kind
    n: int
    D: int
    eps: float
    shift: float = 0.0
    rounds: int = 1

    @property
    def columns(self) -> int:
        """Products per row of `projected`."""
        return {"hc": self.n + 2, "static": 0, "mhc": self.n**2 + 2 * self.n, "head": self.n}[self.kind]

    @property
    def project(self) -> str:
        return {"hc": "lane", "static": "none"}.get(self.kind, "flat")

    def n_static(self) -> int:
        """R: values of the static part."""
        return self.n if self.kind == "head" else self.n**2 + 2 * self.n

    def options(self, kernel: str) -> dict:
        """Compile-time arguments of the coefficient kernels."""
        return {
            "KIND": self.kind, "ROUNDS": self.rounds, "n": self.n, "N": max(2, triton.next_power_of_2(self.n)),
            "D": self.D, **launch(kernel, self.n).options(),
        }  # fmt: skip


# ---------------------------------------------------------------------------------------------------- limits


def check_lanes(lanes: Tensor) -> None:
    """Raise ValueError unless the kernels can work on these lanes."""
    if lanes.dtype not in DTYPES:
        raise ValueError(f"kernels=triton takes bf16, fp16 or fp32 lanes, got {lanes.dtype}; use kernels=reference")
    if lanes.ndim != 4 or lanes.shape[-1] % 8:
        raise ValueError(
            f"kernels=triton needs lanes [B, T, n, D] with D a multiple of 8, got {tuple(lanes.shape)}; "
            "use kernels=reference"
        )
    if not 1 <= lanes.shape[2] <= MAX_LANES:
        raise ValueError(f"kernels=triton takes 1 to {MAX_LANES} lanes, got {lanes.shape[2]}; use kernels=reference")
    if not (lanes.is_cuda or triton.knobs.runtime.interpret):
        raise ValueError(
            f"kernels=triton runs on CUDA, got lanes on {lanes.device}; use kernels=reference (TRITON_INTERPRET=1 "
            "interprets the kernels on the CPU, for tests)"
        )


def check_write(lanes: Tensor, y: Tensor, post: Tensor, res: Tensor) -> None:
    """Raise ValueError unless y, post and res belong to these lanes."""
    B, T, n, D = lanes.shape
    if y.shape != (B, T, D) or y.dtype != lanes.dtype:
        raise ValueError(f"y must be {[B, T, D]} in {lanes.dtype} as the lanes, got {list(y.shape)} in {y.dtype}")
    for name, given, shape in (("post", post, (B, T, n)), ("res", res, (B, T, n, n))):
        if given.shape != shape or given.dtype != torch.float32:
            raise ValueError(f"{name} must be {list(shape)} in fp32, got {list(given.shape)} in {given.dtype}")


def check_weight(lanes: Tensor, weight: Tensor) -> None:
    """Raise ValueError unless `weight` projects these lanes, one by one or together."""
    n, D = lanes.shape[2:]
    if weight.ndim != 2 or weight.shape[1] not in (D, n * D):
        raise ValueError(f"weight must be [columns, {D}] (each lane) or [columns, {n * D}], got {list(weight.shape)}")


# --------------------------------------------------------------------------------------------------- writing


def _precision(dtype: torch.dtype) -> tuple[int, str]:
    """Parts of W, and how its products are taken."""
    if dtype == torch.bfloat16:
        # the interpreter cannot multiply bf16; raised operands give the same products
        return 2, "ieee" if triton.knobs.runtime.interpret else "bf16"
    return 1, "ieee" if dtype == torch.float32 else "tf32x3"


def _dot_width(columns: int) -> int:
    return max(16, triton.next_power_of_2(columns))


def _parts(weight: Tensor, n_parts: int) -> Tensor:
    """W as the kernels multiply it: fp32, or bf16 [2, columns, K]."""
    weight = float32(weight)
    if n_parts == 1:
        return weight
    parts = torch.empty(2, *weight.shape, dtype=torch.bfloat16, device=weight.device)
    hyper_lanes.split_kernel[(triton.cdiv(weight.numel(), 1024),)](weight, parts, weight.numel(), BLOCK=1024)
    return parts


def _update(
    lanes: Tensor, write: tuple[Tensor, Tensor, Tensor] | None, weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The lanes after a write (y, post, res), and the projection of them, or of `lanes` without a write."""
    B, T, n, D = lanes.shape
    P = B * T
    out = torch.empty_like(lanes) if write else None
    project, columns, projected, parts = "none", 0, None, None
    n_parts, dot = _precision(lanes.dtype)
    if weight is not None:
        project = "flat" if weight.shape[1] == n * D else "lane"
        columns = weight.shape[0]
        rows = (B, T) if project == "flat" else (B, T, n)
        projected = torch.empty(*rows, columns + 1, dtype=torch.float32, device=lanes.device)
        parts = _parts(weight, n_parts)
    tile = launch("update", n)
    hyper_lanes.update_kernel[(triton.cdiv(P, tile.tokens),)](
        lanes, *(write or (None,) * 3), out, parts, projected, P,
        UPDATE=write is not None, PROJECT=project, COLS=columns, n=n, D=D,
        # 64 rows of W, parts included, are the least that Hopper's tensor cores take as they are
        WIDTH=max(64 // n_parts, _dot_width(columns)) if dot == "bf16" else _dot_width(columns),
        PARTS=n_parts, DOT=dot, **tile.options(),
    )  # fmt: skip
    return out, projected


class _Handover:
    """The gradient of the lanes after a write, on its way to the read that made the write's coefficients.

    A read hangs one on the `res` it returns. The write that takes these very lanes with this `res` claims it, and its
    backward pass leaves the raw gradient here instead of a gradient of the lanes; the read's, which autograd runs later
    since `res` came from it, takes it into account. Any other use of the lanes is autograd's business as ever.
    """

    def __init__(self, lanes: Tensor) -> None:
        self._lanes = weakref.ref(lanes)
        self._is_claimed = False
        self._kept: tuple[int, Tensor] | None = None

    def claim(self, lanes: Tensor) -> bool:
        """Whether the caller is the one write that may leave its gradient here."""
        if self._is_claimed or self._lanes() is not lanes:
            return False
        self._is_claimed = True
        return True

    def put(self, gradient: Tensor) -> None:
        self._kept = (torch._C._current_graph_task_id(), gradient)

    def take(self) -> Tensor | None:
        """What was left in this backward pass, once."""
        kept, self._kept = self._kept, None
        # a pass that ended before the read (gradients of y alone, say) leaves a gradient nobody wants
        return kept[1] if kept is not None and kept[0] == torch._C._current_graph_task_id() else None


class _Update(torch.autograd.Function):
    @staticmethod
    def forward(ctx, handover, weight, lanes, y, post, res):
        write = aligned(y), aligned(post), aligned(res)
        held = aligned(lanes)
        out, projected = _update(held, write, weight)
        ctx.save_for_backward(held, *write)
        ctx.handover = handover
        if projected is not None:
            ctx.mark_non_differentiable(projected)
        return out, projected

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _):
        lanes, y, post, res = ctx.saved_tensors
        B, T, n, D = lanes.shape
        dout = aligned(dout)
        dy, dpost, dres = torch.empty_like(y), torch.empty_like(post), torch.empty_like(res)
        dlanes = None
        if ctx.handover is None and ctx.needs_input_grad[2]:
            dlanes = torch.empty_like(lanes)
        tile = launch("update_gradient", n)
        hyper_lanes.update_gradient_kernel[(triton.cdiv(B * T, tile.tokens),)](
            dout, lanes, y, post, res, dy, dpost, dres, dlanes, B * T,
            n=n, D=D, LANES=dlanes is not None, FOLD=8, **tile.options(),
        )  # fmt: skip
        if ctx.handover is not None:
            ctx.handover.put(dout)
        return None, None, dlanes, dy, dpost, dres


def _write(lanes: Tensor, y: Tensor, post: Tensor, res: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    check_lanes(lanes)
    check_write(lanes, y, post, res)
    handover = getattr(res, _HANDOVER, None)
    if handover is not None and not handover.claim(lanes):
        handover = None
    return _Update.apply(handover, None if weight is None else weight.detach(), lanes, y, post, res)


@torch.compiler.disable
def update(lanes: Tensor, y: Tensor, post: Tensor, res: Tensor) -> Tensor:
    """As `reference.update`: post and res in fp32, y in the lanes' dtype; ValueError names what does not fit."""
    return _write(lanes, y, post, res, None)[0]


@torch.compiler.disable
def update_and_project(lanes: Tensor, y: Tensor, post: Tensor, res: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """`update`, and the products that the next read begins with, in one pass over the lanes.

    Args:
        weight: what the next read projects with: `phi` of `mhc_read` [n n + 2 n, n D], `weight` of `hc_read`
            [n + 2, D] or of `mhc_contract` [n, n D]. It gets no gradient here, but from that read.
    Returns:
        [B, T, n, D] in the lanes' dtype; `projected` for that read, fp32 [B, T, columns + 1] ([B, T, n, columns + 1]
        for `hc_read`): the products before the norm, and the sum of squares. It holds no gradient.
    """
    check_weight(lanes, weight)
    return _write(lanes, y, post, res, weight)


# --------------------------------------------------------------------------------------------------- reading


def _static_parts(spec: Spec, static: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Pre, post and res of the static part; one bias [R] holds them one after the other."""
    if len(static) == 3:
        return static
    (bias,) = static
    return bias, bias[spec.n :], bias[2 * spec.n :]


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spec, handover, projected, lanes, weight, gates, *static):
        B, T, n, D = lanes.shape
        held = aligned(lanes)
        if projected is not None:
            projected = projected.contiguous()
        elif weight is not None:
            projected = _update(held, None, weight)[1]
        gates_32, static_32 = float32(gates), tuple(float32(part) for part in static)
        out = held.new_empty(B, T, D)
        post = res = None
        if spec.kind != "head":
            post, res = (torch.empty(B, T, *shape, device=held.device) for shape in ((n,), (n, n)))
        tile = launch("read", n)
        hyper_coefficients.read_kernel[(triton.cdiv(B * T, tile.tokens),)](
            held, projected, gates_32, *_static_parts(spec, static_32), out, post, res, B * T, spec.eps, spec.shift,
            **spec.options("read"),
        )  # fmt: skip
        ctx.save_for_backward(held, projected, weight, gates_32, res, *static_32)
        ctx.spec, ctx.handover = spec, handover
        ctx.shapes = [None if x is None else (x.shape, x.dtype) for x in (weight, gates, *static)]
        return out if spec.kind == "head" else (out, post, res)

    @staticmethod
    @once_differentiable
    def backward(ctx, dh, dpost=None, dres=None):
        lanes, projected, weight, gates, res, *static = ctx.saved_tensors
        dh, dpost, dres = aligned(dh), *(None if x is None else aligned(x) for x in (dpost, dres))
        dout = ctx.handover.take() if ctx.handover is not None else None
        through, of_gates, of_static = _coefficients_gradient(
            ctx.spec, lanes, dh, projected, gates, static, dpost, dres
        )
        dlanes, dweight = _lanes_gradient(ctx.spec, lanes, dh, dout, res, weight, through)
        parameters = (dweight, of_gates, *_split_static(ctx.spec, of_static, len(static)))
        shaped = (
            None if given is None else gradient.view(given[0]).to(given[1])
            for gradient, given in zip(parameters, ctx.shapes, strict=True)
        )
        return None, None, None, dlanes, *shaped


def _split_static(spec: Spec, gradient: Tensor, n_parts: int) -> tuple[Tensor, ...]:
    return (gradient,) if n_parts == 1 else gradient.split([spec.n, spec.n, spec.n**2])


def _coefficients_gradient(
    spec: Spec,
    lanes: Tensor,
    dh: Tensor,
    projected: Tensor | None,
    gates: Tensor | None,
    static: list[Tensor],
    dpost: Tensor | None,
    dres: Tensor | None,
) -> tuple[tuple[Tensor, Tensor | None, Tensor | None], Tensor | None, Tensor]:
    """(pre [P, n], draw, bend) for the lanes' gradient; gradients of the gates and of the static part [R]."""
    B, T, n = lanes.shape[:3]
    P, R = B * T, spec.n_static()
    new = {"dtype": torch.float32, "device": lanes.device}
    pre = torch.empty(P, n, **new)
    draw = bend = of_gates = None
    if spec.kind != "static":
        rows = P * n if spec.project == "lane" else P
        draw, bend = torch.empty(rows, spec.columns, **new), torch.empty(rows, **new)
        of_gates = torch.empty_like(gates)
    n_programs = triton.cdiv(P, launch("coefficients_gradient", n).tokens)
    partial, of_static = torch.empty(n_programs, 2, R, **new), torch.empty(R, **new)
    hyper_coefficients.coefficients_gradient_kernel[(n_programs,)](
        lanes, dh, projected, gates, *_static_parts(spec, tuple(static)), dpost, dres, pre, draw, bend, partial, P,
        spec.eps, spec.shift, **spec.options("coefficients_gradient"),
    )  # fmt: skip
    width = triton.next_power_of_2(2 * R)
    hyper_coefficients.coefficient_sums_kernel[(1,)](
        partial, of_static, of_gates, n_programs,
        KIND=spec.kind, n=n, R=R, ROWS=max(1, 8192 // width), WIDTH=width, num_warps=8,
    )  # fmt: skip
    return (pre, draw, bend), of_gates, of_static


def _lanes_gradient(
    spec: Spec,
    lanes: Tensor,
    dh: Tensor,
    dout: Tensor | None,
    res: Tensor | None,
    weight: Tensor | None,
    through: tuple[Tensor, Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the lanes and of W [columns, n D or D]; `dout` is what the write after this read left, if any."""
    B, T, n, D = lanes.shape
    dlanes = torch.empty_like(lanes)
    tile = launch("lanes_gradient", n, lanes.dtype)
    n_parts, dot = _precision(lanes.dtype)
    leading = None
    if weight is not None:
        leading = aligned(weight.to(torch.bfloat16)) if n_parts == 2 else float32(weight)
    n_tiles, n_chunks = triton.cdiv(B * T, tile.tokens), triton.cdiv(D, tile.channels)
    # channels are cut too, into segments of at least two steps, until there are a few programs per processor
    n_segments = max(1, min(n_chunks // 2, triton.cdiv(4 * _n_processors(lanes.device), n_tiles)))
    segment = triton.cdiv(n_chunks, n_segments) * tile.channels
    hyper_lanes.lanes_gradient_kernel[(n_tiles, triton.cdiv(D, segment))](
        lanes, dh, dout, through[0], res, *through[1:], leading, dlanes, B * T, segment,
        LATER=dout is not None, PROJECT=spec.project, COLS=spec.columns, WIDTH=_dot_width(spec.columns), n=n, D=D,
        PARTS=n_parts, DOT=dot, **tile.options(),
    )  # fmt: skip
    return dlanes, None if weight is None else _weight_gradient(lanes, through[1], weight.shape)


def _weight_gradient(lanes: Tensor, draw: Tensor, shape: tuple[int, int]) -> Tensor:
    """dW [columns, K] of draw [M, columns] and the lanes as [M, K]."""
    (columns, K), M = shape, draw.shape[0]
    tile = launch("weight_gradient", lanes.shape[2], lanes.dtype)
    n_slices = triton.cdiv(K, tile.channels)
    n_chunks = _n_chunks(M, tile.tokens, n_slices, lanes.device)
    rows = triton.cdiv(triton.cdiv(M, n_chunks), tile.tokens) * tile.tokens
    n_chunks = triton.cdiv(M, rows)
    n_parts, dot = _precision(lanes.dtype)
    partial = torch.empty(n_chunks, columns, K, dtype=torch.float32, device=lanes.device)
    hyper_lanes.weight_gradient_kernel[(n_slices, n_chunks)](
        lanes, draw, partial, M, rows,
        COLS=columns, WIDTH=_dot_width(columns), K=K, PARTS=n_parts, DOT=dot, **tile.options(),
    )  # fmt: skip
    return partial[0] if n_chunks == 1 else partial.sum(0)


def _n_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _n_chunks(M: int, tile_rows: int, n_slices: int, device: torch.device) -> int:
    """Chunks of rows for dW: full waves of programs, and few, since each chunk writes a partial dW."""
    n_processors = _n_processors(device)
    most = max(1, min(32, triton.cdiv(M, tile_rows)))

    def cost(n_chunks: int) -> float:
        programs = n_slices * n_chunks
        waves = triton.cdiv(programs, n_processors)
        return waves * n_processors / programs * (1 + 0.004 * n_chunks)

    return min(range(1, most + 1), key=cost)


def _read(
    spec: Spec, lanes: Tensor, weight: Tensor | None, gates: Tensor | None, static: tuple[Tensor, ...],
    projected: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor] | Tensor:  # fmt: skip
    if spec.rounds > MAX_ROUNDS:
        raise ValueError(f"kernels=triton unrolls up to {MAX_ROUNDS} Sinkhorn rounds, got n_rounds={spec.rounds}")
    if spec.kind == "head":
        return _Read.apply(spec, None, projected, lanes, weight, gates, *static)
    handover = _Handover(lanes)
    h, post, res = _Read.apply(spec, handover, projected, lanes, weight, gates, *static)
    if res.requires_grad and lanes.requires_grad:
        setattr(res, _HANDOVER, handover)
    return h, post, res


@torch.compiler.disable
def mhc_read(
    lanes: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    n_rounds: int,
    eps: float,
    sinkhorn_eps: float = 0.0,
    projected: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.mhc_read`.

    Args:
        projected: what `update_and_project` gave with these lanes and this `phi`; None computes it.
    Raises:
        ValueError: inputs beyond a limit of the kernels, by name.
    """
    check_lanes(lanes)
    n, D = lanes.shape[2:]
    spec = Spec("mhc", n, D, eps, sinkhorn_eps, n_rounds)
    return _read(spec, lanes, phi, alpha, (bias,), projected)


@torch.compiler.disable
def mhc_contract(
    lanes: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor,
    eps: float,
    sinkhorn_eps: float = 0.0,
    projected: Tensor | None = None,
) -> Tensor:
    """As `reference.mhc_contract`; `projected` as in `mhc_read`."""
    check_lanes(lanes)
    n, D = lanes.shape[2:]
    return _read(Spec("head", n, D, eps, sinkhorn_eps), lanes, weight, scale, (bias,), projected)


@torch.compiler.disable
def hc_read(
    lanes: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    pre: Tensor,
    post: Tensor,
    res: Tensor,
    eps: float,
    projected: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.hc_read`; `projected` as in `mhc_read`."""
    check_lanes(lanes)
    n, D = lanes.shape[2:]
    kind = "static" if weight is None else "hc"
    return _read(Spec(kind, n, D, eps), lanes, weight, scale, (pre, post, res), projected)
