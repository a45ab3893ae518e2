"""Hyper-Connections (arXiv 2409.19606): n residual lanes with learned reads, writes and mixing between lanes."""

import math

import torch
from torch import Tensor

from kernels import Kernels, reference
from lit_msar.initialization import constant, values
from lit_msar.residual.base import Cost, Site, State
from lit_msar.residual.lanes import LaneResidual

SCALE_START = 0.01


class HC(LaneResidual):
    """Hyper-Connections, dynamic or static.

        h = pre x        x <- res x + post^T F(h)        (pre, post, res) = s tanh(W RMSNorm(x_j)) + static, per lane j

    Starts as Vanilla: W = 0, sublayer l reads lane l mod n, writes to all lanes alike, and leaves every lane its own
    (HC Eq. 14). Lanes begin as copies of the embedding and are summed at the end. State: see `LaneResidual`.
    (n + 2) D + n (n + 2) + 2 parameters per sublayer, none at the head. `res` is by (lane written, lane read), the
    transpose of the paper's A_r.

    Args:
        n_lanes: n, the paper's expansion rate.
        dynamic: coefficients depend on the token; false keeps the static part alone.
        eps: of the norm over each lane's channels.
        kernels: auto, triton, reference (plain PyTorch) or compiled (torch.compile of it).
    """

    no_decay = frozenset({"pre", "post", "res", "scale"})

    def __init__(self, n_lanes: int = 4, dynamic: bool = True, eps: float = 1e-5, kernels: Kernels = "auto") -> None:
        super().__init__(n_lanes, eps, kernels, dynamic=dynamic)
        if n_lanes < 1:
            raise ValueError(f"n_lanes must be at least 1, got {n_lanes}")
        self.dynamic = dynamic

    def build(self, d_model: int, n_layers: int) -> None:
        super().build(d_model, n_layers)
        n, lane_of = self.n_lanes, torch.eye(self.n_lanes, device="cpu")
        self.declare_list("pre", (n,), [values(lane_of[index % n]) for index in range(self.n_sublayers)])
        self.declare_list("post", (n,), [constant(1.0)] * self.n_sublayers)
        self.declare_list("res", (n, n), [values(lane_of)] * self.n_sublayers)
        if self.dynamic:
            self.declare_list("weight", (n + 2, d_model), [constant(0.0)] * self.n_sublayers)
            self.declare_list("scale", (2,), [constant(SCALE_START)] * self.n_sublayers)

    def coefficients(self, site: Site) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor, Tensor]:
        """Weight [n + 2, D] and scale [2] (None if static), and the static pre [n], post [n] and res [n, n]."""
        at = site.index
        weight, scale = (self.weight[at], self.scale[at]) if self.dynamic else (None, None)
        return weight, scale, self.pre[at], self.post[at], self.res[at]

    def projection(self, site: Site) -> Tensor | None:
        return self.weight[site.index] if self.dynamic and not site.is_head else None

    def read(self, state: State, site: Site) -> tuple[Tensor, State]:
        lanes, *projected = state
        if site.is_head:
            return reference.raised(lanes).sum(2).to(lanes.dtype), state
        x, post, res = self.ops(lanes).hc_read(lanes, *self.coefficients(site), self.eps, *projected)
        return x, (lanes, post, res)

    def inspect(self, state: State, site: Site) -> dict[str, Tensor]:
        if site.is_head:
            return {}
        seen = reference.hc_coefficients(state[0], *self.coefficients(site), self.eps)
        return dict(zip(("pre", "post", "res"), seen, strict=True))

    def cost(self, site: Site) -> Cost:
        n, D = self.n_lanes, self.d_model
        if site.is_head:
            return Cost(multiply_adds=n * D, elements=(n + 1) * D)
        parameters = n * (n + 2) + ((n + 2) * D + 2 if self.dynamic else 0)
        multiply_adds = self.apply_multiply_adds() + (n * (n + 3) * D if self.dynamic else 0)  # squares; n + 2 dots
        return Cost(parameters, multiply_adds, self.apply_elements())

    def output_std_factor(self) -> float:
        """1/sqrt(n). The paper scales the output projections' start "by sqrt(n)" to keep the std of the summed output.

        Our reading: down, since the sum over lanes grows with n (as sqrt(n) were the lanes independent; as n while
        they are equal, which the final norm takes out).
        """
        return 1 / math.sqrt(self.n_lanes)
