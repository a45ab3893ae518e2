"""The mixture-of-experts sublayer: sigmoid router with loss-free balance bias, dropless experts, shared expert.

Router (DeepSeek-V3, arXiv 2412.19437, Eq. 12 to 16): scores s = sigmoid(x W^T); the top k of s + bias are chosen; their
weights are s over its sum over the chosen. The bias moves by the sign of the load error, outside of the gradient.
Letters: N tokens, E experts, k = top_k, F = d_expert.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_msar.initialization import Initialized, constant, local_part, normal
from lit_msar.model.config import DecoderConfig
from lit_msar.model.layers import RMSNorm, SwiGLU, swiglu


class RouterStats(NamedTuple):
    """What a MoE layer's router did in one forward; outputs, so that recomputation under checkpointing counts once."""

    load: Tensor
    """[E] tokens sent to each expert, fp32."""
    entropy: Tensor
    """[] mean entropy of the normalised scores, nats."""
    aux_loss: Tensor
    """[] sequence-wise balance loss, unscaled; 0 if not asked for."""


class Route(NamedTuple):
    """Where each token goes."""

    experts: Tensor
    """[N, k] expert ids."""
    weights: Tensor
    """[N, k] fp32, summing to route_scale."""


class Router(Initialized):
    """Chooses top_k of n_experts per token, in fp32 throughout."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.top_k, self.route_scale, self.computes_aux_loss = config.top_k, config.route_scale, config.aux_loss
        self.declare("weight", (config.n_experts, config.d_model), normal(config.init_std))
        self.declare_buffer("balance_bias", (config.n_experts,), constant(0.0))

    def forward(self, x: Tensor) -> tuple[Route, Tensor, Tensor]:
        """Route, mean entropy and balance loss of x [B, T, D]."""
        scores = torch.sigmoid(F.linear(x.to(self.weight.dtype), self.weight))  # [B, T, E]
        experts = (scores + self.balance_bias).topk(self.top_k, dim=-1).indices
        chosen = scores.gather(-1, experts)
        weights = self.route_scale * chosen / chosen.sum(-1, keepdim=True)
        share = scores / scores.sum(-1, keepdim=True)
        entropy = -(share.detach() * share.detach().log()).sum(-1).mean()
        aux_loss = self._sequence_aux_loss(share, experts) if self.computes_aux_loss else entropy.new_zeros(())
        return Route(experts.flatten(0, 1), weights.flatten(0, 1)), entropy, aux_loss

    def _sequence_aux_loss(self, share: Tensor, experts: Tensor) -> Tensor:
        """Mean over sequences of sum_e f_e P_e: share of the choices times mean score (Eq. 17 to 20); 1 when even."""
        chosen = torch.zeros_like(share).scatter(-1, experts, 1.0)  # [B, T, E]
        frequency = chosen.mean(1) * share.shape[-1] / self.top_k  # [B, E]
        return (frequency * share.mean(1)).sum(-1).mean()

    @torch.no_grad()
    def update_balance(self, load: Tensor, rate: float | Tensor) -> None:
        """Move the bias of each expert by `rate` towards even load [E]; its mean stays 0 (arXiv 2408.15664, Alg. 1).

        A rate of 0 leaves it bit for bit.
        """
        step = rate * torch.sign(load.mean() - load)
        self.balance_bias += step - step.mean()


class _SortRows(torch.autograd.Function):
    """Rows `x[order // copies]`: each of [N, D] as often as it was chosen, by expert. `_SumRows` is its backward."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x[order // copies]

    @staticmethod
    def backward(ctx, grad: Tensor):
        (inverse,) = ctx.saved_tensors
        return _sum_copies(grad, inverse, ctx.copies), None, None, None


class _SumRows(torch.autograd.Function):
    """Sums [N, D] of the rows [N k, D] of each token. Both directions gather: no scatter, the same bits each time."""

    @staticmethod
    def forward(ctx, rows: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.copies = copies
        return _sum_copies(rows, inverse, copies)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (order,) = ctx.saved_tensors
        return grad[order // ctx.copies], None, None, None


def _sum_copies(rows: Tensor, inverse: Tensor, copies: int) -> Tensor:
    return rows[inverse].unflatten(0, (-1, copies)).sum(1)


_grouped_mm_outside_graph = torch.compiler.disable(F.grouped_mm)


def _grouped_mm(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """One product per group of rows; torch.compile traces it in bf16 only, so other dtypes leave the graph for it."""
    if torch.compiler.is_compiling() and rows.dtype != torch.bfloat16:
        return _grouped_mm_outside_graph(rows, weight, offs=offsets)
    return F.grouped_mm(rows, weight, offs=offsets)


ApplyExperts = Callable[[Tensor, Tensor], Tensor]
"""Rows [M, D] sorted by expert, and where each expert's rows end, to the experts' outputs [M, D]."""


class Experts(Initialized):
    """E SwiGLU experts; every token reaches all of its k, none is dropped."""

    exchange: Callable[[Tensor, Tensor, ApplyExperts], Tensor] | None = None
    """Where experts are spread over ranks: carries the sorted rows to their experts, applies them there, and back."""

    def __init__(self, config: DecoderConfig, output_std: float) -> None:
        super().__init__()
        E, D, width = config.n_experts, config.d_model, config.d_expert
        self.n_experts, self.implementation = E, config.moe
        self.declare("gate_up", (E, 2 * width, D), normal(config.init_std))
        self.declare("down", (E, D, width), normal(output_std))

    def forward(self, x: Tensor, route: Route) -> tuple[Tensor, Tensor]:
        """Weighted sum of the chosen experts' outputs.

        Args:
            x: [N, D].
            route: of these N tokens.
        Returns:
            [N, D] and the load [E] in fp32.
        """
        k = route.experts.shape[1]
        sorted_experts, order = route.experts.flatten().sort(stable=True)
        inverse = torch.empty_like(order).scatter(0, order, torch.arange(order.numel(), device=order.device))
        ids = torch.arange(self.n_experts, device=x.device)
        ends = torch.searchsorted(sorted_experts, ids, right=True)  # [E], rows of experts 0..e end here
        rows = _SortRows.apply(x, order, inverse, k)  # [N k, D]
        weights = _SortRows.apply(route.weights.to(x.dtype).flatten().unsqueeze(1), order, inverse, 1)  # [N k, 1]
        if self.exchange is None:
            rows = self._apply_experts(rows, ends, weights)
        else:
            rows = self.exchange(rows, ends, self._apply_experts) * weights
        y = _SumRows.apply(rows, order, inverse, k)  # [N, D]
        return y, torch.diff(ends, prepend=ends.new_zeros(1)).float()

    def _apply_experts(self, rows: Tensor, ends: Tensor, weights: Tensor | None = None) -> Tensor:
        """Each row's expert's output, times the row's weight [M, 1].

        The weight goes on the hidden channels, of which there are fewer, in the pass that makes them; and what `down`
        gives need not be kept for the weight's gradient.
        """
        # with an exchange, a parameter is this rank's experts alone
        gate_up, down = local_part(self.gate_up).to(rows.dtype), local_part(self.down).to(rows.dtype)
        if self._uses_grouped_mm(rows):
            offsets = ends.to(torch.int32)
            hidden = _weighted(swiglu(_grouped_mm(rows, gate_up.transpose(1, 2), offsets)), weights)
            return _grouped_mm(hidden, down.transpose(1, 2), offsets)
        sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
        hidden = torch.cat([swiglu(part @ gate_up[e].T) for e, part in enumerate(rows.split(sizes))])
        hidden = _weighted(hidden, weights)
        return torch.cat([part @ down[e].T for e, part in enumerate(hidden.split(sizes))])

    def _uses_grouped_mm(self, x: Tensor) -> bool:
        if self.implementation == "auto":
            has_kernel = (torch.float32, torch.float16, torch.bfloat16) if x.device.type == "cpu" else (torch.bfloat16,)
            return x.dtype in has_kernel
        return self.implementation == "grouped_mm"


def _weighted(hidden: Tensor, weights: Tensor | None) -> Tensor:
    return hidden if weights is None else hidden * weights


class DenseMLP(nn.Module):
    """PreNorm and SwiGLU over [B, T, D]."""

    def __init__(self, config: DecoderConfig, output_std: float) -> None:
        super().__init__()
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = SwiGLU(config.d_model, config.d_ff, config.init_std, output_std)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.mlp(self.norm(x)), None


class MoE(nn.Module):
    """PreNorm, routed experts and a shared expert over [B, T, D]."""

    def __init__(self, config: DecoderConfig, output_std: float) -> None:
        super().__init__()
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.router = Router(config)
        self.experts = Experts(config, output_std)
        shared_width = config.n_shared_experts * config.d_expert
        self.shared = SwiGLU(config.d_model, shared_width, config.init_std, output_std) if shared_width else None

    def forward(self, x: Tensor) -> tuple[Tensor, RouterStats]:
        x = self.norm(x)
        route, entropy, aux_loss = self.router(x)
        routed, load = self.experts(x.flatten(0, 1), route)
        y = routed.unflatten(0, x.shape[:2])
        if self.shared is not None:
            y = y + self.shared(x)
        return y, RouterStats(load, entropy, aux_loss)
