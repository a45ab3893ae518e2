"""The n residual lanes, as every Hyper-Connections strategy keeps them."""

from types import ModuleType
from typing import Any

from torch import Tensor

import kernels as kernel_choice
from kernels import Kernels
from lit_msar.residual.base import Residual, Site, State


class LaneResidual(Residual):
    """Keeps n running sums of width D instead of one.

    State: `(lanes,)`, [B, T, n, D] in the compute dtype, all n the embedding at first. Between a read and its write,
    `(lanes, post, res)` with post [B, T, n] and res [B, T, n, n] in fp32 (fp64 for fp64 lanes). The state does not
    grow with depth; one more lane costs B T D elements.

    Args:
        n_lanes: n, the number of residual streams.
        eps: of the norm.
        kernels: `auto`, `triton`, `reference` (plain PyTorch) or `compiled` (the reference through torch.compile).
    """

    def __init__(self, n_lanes: int, eps: float, kernels: Kernels, **options: Any) -> None:
        super().__init__(n_lanes=n_lanes, eps=eps, kernels=kernels, **options)
        kernel_choice.check(kernels)
        self.n_lanes = n_lanes
        self.eps = eps
        self.kernels = kernels

    def ops(self, lanes: Tensor) -> ModuleType:
        """The module of operations that runs tensors like `lanes`."""
        return kernel_choice.implementation(self.kernels, lanes.device)

    def begin(self, x: Tensor, position: Tensor | None = None) -> State:
        return (x.unsqueeze(2).expand(-1, -1, self.n_lanes, -1),)

    def write(self, state: State, site: Site, y: Tensor) -> State:
        lanes, post, res = state
        return (self.ops(lanes).update(lanes, y, post, res),)

    def apply_multiply_adds(self) -> int:
        """Multiply-adds of `pre x` and of `res x + post^T y`."""
        return (self.n_lanes + self.n_lanes**2 + self.n_lanes) * self.d_model

    def apply_elements(self) -> int:
        """Elements of a read that sees the lanes once and a write that sees them once, with post and res out and in."""
        n, D = self.n_lanes, self.d_model
        return (n + 1) * D + (2 * n + 1) * D + 2 * (n * n + n)
