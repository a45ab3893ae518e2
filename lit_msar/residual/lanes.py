"""The n residual lanes, as every Hyper-Connections strategy keeps them."""

from types import ModuleType
from typing import Any

from torch import Tensor

import kernels as kernel_choice
from kernels import MAX_LANES, Kernels
from lit_msar.residual.base import Residual, Site, State


class LaneResidual(Residual):
    """Keeps n running sums of width D instead of one.

    State: `(lanes,)`, [B, T, n, D] in the compute dtype, all n the embedding at first. Between a read and its write,
    `(lanes, post, res)` with post [B, T, n] and res [B, T, n, n] in fp32 (fp64 for fp64 lanes). The Triton write also
    projects the lanes for the next read, while it has them at hand: `(lanes, projected)`, a few fp32 values per token
    more. The state does not grow with depth; one more lane costs B T D elements.

    Args:
        n_lanes: n, the number of residual streams.
        eps: of the norm.
        kernels: `auto`, `triton`, `reference` (plain PyTorch) or `compiled` (the reference through torch.compile).
    """

    projects_ahead = True
    """Whether a write may leave `projected` in the state for the next read."""

    def __init__(self, n_lanes: int, eps: float, kernels: Kernels, **options: Any) -> None:
        super().__init__(n_lanes=n_lanes, eps=eps, kernels=kernels, **options)
        kernel_choice.check(kernels)
        if kernels == "triton" and n_lanes > MAX_LANES:
            raise ValueError(f"kernels=triton takes 1 to {MAX_LANES} lanes, got n_lanes={n_lanes}; use kernels=auto")
        self.n_lanes = n_lanes
        self.eps = eps
        self.kernels = kernels

    def ops(self, lanes: Tensor) -> ModuleType:
        """The module of operations that runs tensors like `lanes`."""
        return kernel_choice.implementation(self.kernels, lanes.device, has_triton=self.n_lanes <= MAX_LANES)

    def runs_ahead(self, x: Tensor) -> bool:
        """Whether the operations of tensors like `x` can project for the next read."""
        return hasattr(self.ops(x), "update_and_project")

    def projection(self, site: Site) -> Tensor | None:
        """The weight that the read at `site` projects the lanes with, if it does."""
        raise NotImplementedError

    def begin(self, x: Tensor, position: Tensor | None = None) -> State:
        lanes = x.unsqueeze(2).expand(-1, -1, self.n_lanes, -1)
        # the kernels would otherwise copy the lanes at the first read, and again at its write
        return (lanes.contiguous() if self.runs_ahead(x) else lanes,)

    def write(self, state: State, site: Site, y: Tensor) -> State:
        lanes, post, res = state
        ops, weight = self.ops(lanes), None
        if self.projects_ahead and self.runs_ahead(lanes):
            weight = self.projection(Site(site.index + 1, site.n_sublayers))
        if weight is None:
            return (ops.update(lanes, y, post, res),)
        return ops.update_and_project(lanes, y, post, res, weight)

    def kept_by_write(self, site: Site) -> int:
        return self.d_model

    def apply_multiply_adds(self) -> int:
        """Multiply-adds of `pre x` and of `res x + post^T y`."""
        return (self.n_lanes + self.n_lanes**2 + self.n_lanes) * self.d_model

    def apply_elements(self) -> int:
        """Elements of a read that sees the lanes once and a write that sees them once, with post and res out and in."""
        n, D = self.n_lanes, self.d_model
        return (n + 1) * D + (2 * n + 1) * D + 2 * (n * n + n)
