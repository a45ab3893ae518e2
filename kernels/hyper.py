"""Hyper-Connections on the GPU (HC, mHC), under the names of `reference_hyper`: reads, writes and their gradients.

Forward, a write stores the lanes and projects them for the next read in the same pass (`update_and_project`), so that
read and write together move 3 n + 2 widths per token. What the read got that way it treats as a value: the gradients of
the projection are all its own.

Backward, a write gives only the gradients of y, post and res. What its lanes pass on, res^T dx', waits as the raw dx'
until the sublayer has been differentiated; then the read before it computes the whole gradient of the lanes at once
(`_Handover`). Nothing is added by autograd, and no gradient of the lanes is written twice.
"""

import weakref

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.hyper_launch import (
    MAX_ROUNDS,
    Spec,
    check_lanes,
    check_weight,
    check_write,
    coefficients_gradient,
    lanes_gradient,
    read_lanes,
    update_gradient,
    update_lanes,
)
from kernels.tiles import aligned, check_shapes, float32

_HANDOVER = "_handover_of_lanes"


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
        out, projected = update_lanes(held, write, weight)
        ctx.save_for_backward(held, *write)
        ctx.handover = handover
        if projected is not None:
            ctx.mark_non_differentiable(projected)
        return out, projected

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _):
        lanes, *write = ctx.saved_tensors
        dout = aligned(dout)
        wants_lanes = ctx.handover is None and ctx.needs_input_grad[2]
        gradients = update_gradient(dout, lanes, write, wants_lanes)
        if ctx.handover is not None:
            ctx.handover.put(dout)
        return None, None, *gradients


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


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spec, handover, projected, lanes, weight, gates, *static):
        held = aligned(lanes)
        if projected is not None:
            projected = projected.contiguous()
        elif weight is not None:
            projected = update_lanes(held, None, weight)[1]
        gates_32, static_32 = float32(gates), tuple(float32(part) for part in static)
        out, post, res = read_lanes(spec, held, projected, gates_32, static_32)
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
        through, of_gates, of_static = coefficients_gradient(ctx.spec, lanes, dh, projected, gates, static, dpost, dres)
        dlanes, dweight = lanes_gradient(ctx.spec, lanes, dh, dout, res, weight, through)
        parameters = (dweight, of_gates, *_split_static(ctx.spec, of_static, len(static)))
        shaped = (
            None if given is None else gradient.view(given[0]).to(given[1])
            for gradient, given in zip(parameters, ctx.shapes, strict=True)
        )
        return None, None, None, dlanes, *shaped


def _split_static(spec: Spec, gradient: Tensor, n_parts: int) -> tuple[Tensor, ...]:
    return (gradient,) if n_parts == 1 else gradient.split([spec.n, spec.n, spec.n**2])


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
    check_shapes(phi=(phi, (spec.columns, n * D)), alpha=(alpha, (3,)), bias=(bias, (spec.columns,)))
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
    check_shapes(weight=(weight, (n, n * D)), scale=(scale, (1,)), bias=(bias, (n,)))
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
    check_shapes(
        weight=(weight, (n + 2, D)), scale=(scale, (2,)), pre=(pre, (n,)), post=(post, (n,)), res=(res, (n, n))
    )
    return _read(Spec(kind, n, D, eps), lanes, weight, scale, (pre, post, res), projected)
