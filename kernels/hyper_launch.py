"""How the Hyper-Connections kernels are launched: tiles, limits of the inputs, one function per pass over the lanes."""

import dataclasses
from typing import Literal

import torch
import triton
from torch import Tensor

from kernels import MAX_LANES, hyper_coefficients, hyper_lanes
from kernels.tiles import DTYPES, cdiv, float32, next_power_of_2, processors, shared_bytes

MAX_ROUNDS = 64
STAGED_BYTES = 160 << 10  # of shared memory that the lanes' gradient takes to have rows under way (Hopper: 219 KiB)

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
            if few:
                return Launch(32, 64) if half else Launch(16, 64)
            return Launch(16, 32, num_stages=1)
        case "read":
            return Launch(8, 256) if few else Launch(4, 256)
        case "coefficients_gradient":
            return Launch(16, 128) if few else Launch(4, 256)
        case "update_gradient":
            return Launch(1, 256, num_warps=1)
        case "lanes_gradient":
            if few:  # products in fp32 take more registers
                return Launch(64, 64, num_warps=8, num_stages=3) if half else Launch(32, 32, num_warps=8, num_stages=1)
            return Launch(16, 16, num_warps=8, num_stages=1)
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
            "KIND": self.kind, "ROUNDS": self.rounds, "n": self.n, "N": max(2, next_power_of_2(self.n)),
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


# --------------------------------------------------------------------------------------------------- forward


def _precision(dtype: torch.dtype) -> tuple[int, str]:
    """Parts of W, and how its products are taken."""
    if dtype == torch.bfloat16:
        # the interpreter cannot multiply bf16; raised operands give the same products
        return 2, "ieee" if triton.knobs.runtime.interpret else "half"
    return 1, "ieee" if dtype == torch.float32 else "tf32x3"


def _dot_width(columns: int) -> int:
    return max(16, next_power_of_2(columns))


def _parts(weight: Tensor, n_parts: int) -> Tensor:
    """W as the kernels multiply it: fp32, or bf16 [2, columns, K]."""
    weight = float32(weight)
    if n_parts == 1:
        return weight
    parts = torch.empty(2, *weight.shape, dtype=torch.bfloat16, device=weight.device)
    hyper_lanes.split_kernel[(cdiv(weight.numel(), 1024),)](weight, parts, weight.numel(), BLOCK=1024)
    return parts


def update_lanes(
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
    tile = launch("update", n, lanes.dtype)
    hyper_lanes.update_kernel[(cdiv(P, tile.tokens),)](
        lanes, *(write or (None,) * 3), out, parts, projected, P,
        UPDATE=write is not None, PROJECT=project, COLS=columns, n=n, D=D,
        # 64 rows of W, parts included, are the least that Hopper's tensor cores take as they are
        WIDTH=max(64 // n_parts, _dot_width(columns)) if dot == "half" else _dot_width(columns),
        PARTS=n_parts, DOT=dot, **tile.options(),
    )  # fmt: skip
    return out, projected


def _static_parts(spec: Spec, static: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Pre, post and res of the static part; one bias [R] holds them one after the other."""
    if len(static) == 3:
        return static
    (bias,) = static
    return bias, bias[spec.n :], bias[2 * spec.n :]


def read_lanes(
    spec: Spec, lanes: Tensor, projected: Tensor | None, gates: Tensor | None, static: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """h [B, T, D] in the lanes' dtype; post [B, T, n] and res [B, T, n, n] in fp32, None for the head."""
    B, T, n, D = lanes.shape
    out = lanes.new_empty(B, T, D)
    post = res = None
    if spec.kind != "head":
        post, res = (torch.empty(B, T, *shape, device=lanes.device) for shape in ((n,), (n, n)))
    tile = launch("read", n)
    hyper_coefficients.read_kernel[(cdiv(B * T, tile.tokens),)](
        lanes, projected, gates, *_static_parts(spec, static), out, post, res, B * T, spec.eps, spec.shift,
        **spec.options("read"),
    )  # fmt: skip
    return out, post, res


# -------------------------------------------------------------------------------------------------- backward


def update_gradient(
    dout: Tensor, lanes: Tensor, write: tuple[Tensor, Tensor, Tensor], wants_lanes: bool
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """Gradients of the lanes (res^T dout, if wanted) and of y, post and res."""
    B, T, n, D = lanes.shape
    y, post, res = write
    dy, dpost, dres = torch.empty_like(y), torch.empty_like(post), torch.empty_like(res)
    dlanes = torch.empty_like(lanes) if wants_lanes else None
    tile = launch("update_gradient", n)
    hyper_lanes.update_gradient_kernel[(cdiv(B * T, tile.tokens),)](
        dout, lanes, y, post, res, dy, dpost, dres, dlanes, B * T,
        n=n, D=D, LANES=wants_lanes, FOLD=8, **tile.options(),
    )  # fmt: skip
    return dlanes, dy, dpost, dres


def coefficients_gradient(
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
    n_programs = cdiv(P, launch("coefficients_gradient", n).tokens)
    partial, of_static = torch.empty(n_programs, 2, R, **new), torch.empty(R, **new)
    hyper_coefficients.coefficients_gradient_kernel[(n_programs,)](
        lanes, dh, projected, gates, *_static_parts(spec, tuple(static)), dpost, dres, pre, draw, bend, partial, P,
        spec.eps, spec.shift, **spec.options("coefficients_gradient"),
    )  # fmt: skip
    n_gates = 0 if of_gates is None else of_gates.numel()
    hyper_coefficients.coefficient_sums_kernel[(cdiv(R, 8) + n_gates,)](
        partial, of_static, of_gates, n_programs,
        KIND=spec.kind, n=n, R=R, WIDTH=8, ALL=next_power_of_2(R), SIZE=16384, num_warps=8,
    )  # fmt: skip
    return (pre, draw, bend), of_gates, of_static


def lanes_gradient(
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
    P = B * T
    dlanes = torch.empty_like(lanes)
    tile = launch("lanes_gradient", n, lanes.dtype)
    if shared_bytes(lanes.device) < STAGED_BYTES:  # GPUs without an A100's or H100's
        tile = dataclasses.replace(tile, num_stages=1)
    n_slices = cdiv(D, tile.channels)
    n_chunks = _n_chunks(P, tile.tokens, n_slices, lanes.device)
    n_parts, dot = _precision(lanes.dtype)
    partial = None
    if weight is not None:
        partial = torch.empty(n_chunks, *weight.shape, dtype=torch.float32, device=lanes.device)
    hyper_lanes.lanes_gradient_kernel[(n_slices, n_chunks)](
        lanes, dh, dout, through[0], res, *through[1:], float32(weight), dlanes, partial, P,
        LATER=dout is not None, PROJECT=spec.project, COLS=spec.columns, WIDTH=_dot_width(spec.columns), n=n, D=D,
        PARTS=n_parts, DOT=dot, STAGES=tile.num_stages, **tile.options(),
    )  # fmt: skip
    if partial is None:
        return dlanes, None
    return dlanes, partial[0] if n_chunks == 1 else partial.sum(0)


def _n_chunks(P: int, tile_tokens: int, n_slices: int, device: torch.device) -> int:
    """Token chunks of the lanes' gradient: full waves of programs, and few, since each chunk writes a partial dW."""
    n_processors, most = processors(device), max(1, min(32, cdiv(P, tile_tokens)))

    def cost(n_chunks: int) -> float:
        programs = n_slices * n_chunks
        waves = cdiv(programs, n_processors)
        return waves * n_processors / programs * (1 + 0.004 * n_chunks)

    return min(range(1, most + 1), key=cost)
