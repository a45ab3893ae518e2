"""Manifold-constrained Hyper-Connections (arXiv 2512.24880): the lanes are mixed by doubly stochastic matrices."""

import math
from typing import Literal

import torch
from torch import Tensor

from kernels import Kernels, reference
from lit_msar.initialization import Init, constant, normal, uniform, values
from lit_msar.residual.base import Cost, Site, State
from lit_msar.residual.lanes import LaneResidual

WEIGHT_STD = 0.02
IDENTITY_LOGIT = 4.0  # diagonal of res starts at 0.95 (n = 4); from 8 on its gradient all but vanishes

Start = Literal["near_identity", "megatron"]


def weight_start(start: Start, n_rows: int, n_columns: int) -> Init:
    """Start of a projection [n_rows, n_columns]; never zero, for equal lanes with equal gradients never part."""
    return normal(WEIGHT_STD) if start == "near_identity" else uniform(math.sqrt(6 / (n_rows + n_columns)))


def bias_start(start: Start, n: int) -> Init:
    """Start of the bias [n n + 2 n] of pre, post and res."""
    if start == "megatron":
        return constant(0.0)
    pre = torch.full((n,), math.log(1 / (n - 1)), device="cpu")  # sigmoid gives 1/n
    post = torch.zeros(n, device="cpu")  # 2 sigmoid gives 1
    return values(torch.cat([pre, post, IDENTITY_LOGIT * torch.eye(n, device="cpu").flatten()]))


class MHC(LaneResidual):
    """Manifold-constrained Hyper-Connections.

        h = pre x        x <- res x + post^T F(h)        H = alpha (phi RMSNorm(vec(x))) + b
        pre = sigmoid(H_pre)        post = 2 sigmoid(H_post)        res = Sinkhorn(exp(H_res)), rows last (Eq. 7 to 9)

    State: see `LaneResidual`. `res` is by (lane written, lane read), as in the paper; DeepSeek-V4, TileKernels and
    Megatron store its transpose. n D (n n + 2 n) + n n + 2 n + 3 parameters per sublayer: 96 D + 27 for n = 4. The
    paper names neither the start of phi and b nor what becomes of the lanes at the end.

    Args:
        n_lanes: n, at least 2.
        sinkhorn_rounds: rounds of column and row normalisation.
        sinkhorn_eps: added where DeepSeek-V4 adds it (its value: 1e-6): in Sinkhorn, to pre and to the learned
            contraction; 0 is the paper.
        start: `near_identity`: phi N(0, 0.02^2), pre 1/n, post 1, res near the identity; `megatron`: phi
            Xavier-uniform, b = 0, so pre 1/2, post 1 and res 1/n.
        alpha_start: the three gating factors at first.
        contract: the head's read: `mean` or `sum` of the lanes, or `learned` (DeepSeek-V4's head, n n D + n + 1 more).
        eps: of the norm over all n D values.
        kernels: auto, triton, reference (plain PyTorch) or compiled (torch.compile of it).
    """

    no_decay = frozenset({"alpha", "bias", "head_scale", "head_bias"})

    def __init__(
        self,
        n_lanes: int = 4,
        sinkhorn_rounds: int = 20,
        sinkhorn_eps: float = 0.0,
        start: Start = "near_identity",
        alpha_start: float = 0.01,
        contract: Literal["mean", "sum", "learned"] = "mean",
        eps: float = 1e-5,
        kernels: Kernels = "auto",
    ) -> None:
        super().__init__(
            n_lanes,
            eps,
            kernels,
            sinkhorn_rounds=sinkhorn_rounds,
            sinkhorn_eps=sinkhorn_eps,
            start=start,
            alpha_start=alpha_start,
            contract=contract,
        )
        if n_lanes < 2:
            raise ValueError(f"n_lanes must be at least 2 (one lane is residual=Vanilla), got {n_lanes}")
        if sinkhorn_rounds < 1:
            raise ValueError(f"sinkhorn_rounds must be at least 1, got {sinkhorn_rounds}")
        self.sinkhorn_rounds = sinkhorn_rounds
        self.sinkhorn_eps = sinkhorn_eps
        self.start = start
        self.alpha_start = alpha_start
        self.contract = contract

    def build(self, d_model: int, n_layers: int) -> None:
        super().build(d_model, n_layers)
        n, n_sublayers = self.n_lanes, self.n_sublayers
        n_rows, n_columns = n * n + 2 * n, n * d_model
        self.declare_list("phi", (n_rows, n_columns), [weight_start(self.start, n_rows, n_columns)] * n_sublayers)
        self.declare_list("alpha", (3,), [constant(self.alpha_start)] * n_sublayers)
        self.declare_list("bias", (n_rows,), [bias_start(self.start, n)] * n_sublayers)
        if self.contract == "learned":
            self.declare("head_weight", (n, n_columns), weight_start(self.start, n, n_columns))
            self.declare("head_scale", (1,), constant(self.alpha_start))
            self.declare("head_bias", (n,), constant(0.0 if self.start == "megatron" else math.log(1 / (n - 1))))

    def projection(self, site: Site) -> Tensor | None:
        if site.is_head:
            return self.head_weight if self.contract == "learned" else None
        return self.phi[site.index]

    def read(self, state: State, site: Site) -> tuple[Tensor, State]:
        lanes, *projected = state
        if site.is_head:
            return self.head_read(lanes, *projected), state
        x, post, res = self.ops(lanes).mhc_read(lanes, *self.coefficients(site), *projected)
        return x, (lanes, post, res)

    def coefficients(self, site: Site) -> tuple[Tensor, Tensor, Tensor, int, float, float]:
        """Phi, alpha and bias of `site`, and the options: what `mhc_read` takes after the lanes."""
        at = site.index
        return self.phi[at], self.alpha[at], self.bias[at], self.sinkhorn_rounds, self.eps, self.sinkhorn_eps

    def head_read(self, lanes: Tensor, *projected: Tensor) -> Tensor:
        """The contraction of lanes [B, T, n, D] to [B, T, D]."""
        if self.contract == "learned":
            learned = self.head_weight, self.head_scale, self.head_bias
            return self.ops(lanes).mhc_contract(lanes, *learned, self.eps, self.sinkhorn_eps, *projected)
        x = reference.raised(lanes)
        return (x.mean(2) if self.contract == "mean" else x.sum(2)).to(lanes.dtype)

    def inspect(self, state: State, site: Site) -> dict[str, Tensor]:
        if site.is_head:
            return {}
        seen = reference.mhc_coefficients(state[0], *self.coefficients(site))
        return dict(zip(("pre", "post", "res"), seen, strict=True))

    def cost(self, site: Site) -> Cost:
        n, D = self.n_lanes, self.d_model
        if site.is_head:
            learned = self.contract == "learned"
            parameters = n * n * D + n + 1 if learned else 0
            multiply_adds = n * D + ((n * n + n) * D if learned else 0)  # weighted sum; dots and squares
            return Cost(parameters, multiply_adds, (n + 1) * D)
        n_rows = n * n + 2 * n
        multiply_adds = (n_rows + 1) * n * D + self.apply_multiply_adds()  # dots and squares
        multiply_adds += 2 * self.sinkhorn_rounds * n * n
        return Cost(n_rows * n * D + n_rows + 3, multiply_adds, self.apply_elements())
