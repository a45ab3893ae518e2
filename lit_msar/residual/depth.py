"""Sources and blocks, as every depth-attention strategy keeps them (AttnRes, arXiv 2603.15031, Eq. 5 and 6)."""

import math
from types import ModuleType
from typing import Any

from torch import Tensor

import kernels as kernel_choice
from kernels import Kernels
from lit_msar.residual.base import Residual, Site, State


def joined(position: Tensor | None, sources: State) -> State:
    """The state of a position, if there is one, and sources."""
    return tuple(sources) if position is None else (position, *sources)


def split_position(state: State) -> tuple[Tensor | None, State]:
    """The document position, if the state carries one, and the sources."""
    if state[0].is_floating_point():
        return None, state
    return state[0], state[1:]


class DepthAttention(Residual):
    """Keeps the embedding, the sums of completed blocks and the partial sum of the current block as sources.

    State at a site: `(position?, embedding, block_1, .., block_k, partial?)`, sources [B, T, D] in the compute dtype.
    One more source costs B T D elements of memory and one more tensor per read.

    Args:
        block_size: S, sublayers per depth block; 1 is the full form, None means 2 ceil(2 n_layers / 16).
        eps: of the key norm.
        kernels: `auto`, `triton`, `reference` (plain PyTorch) or `compiled` (the reference through torch.compile).
    """

    def __init__(self, block_size: int | None, eps: float, kernels: Kernels, **options: Any) -> None:
        super().__init__(block_size=block_size, eps=eps, kernels=kernels, **options)
        if block_size is not None and block_size < 1:
            raise ValueError(f"block_size must be at least 1 sublayer (1 is the full form) or null, got {block_size}")
        kernel_choice.check(kernels)
        self.block_size = block_size
        self.eps = eps
        self.kernels = kernels

    def build(self, d_model: int, n_layers: int) -> None:
        super().build(d_model, n_layers)
        if self.block_size is None:
            self.block_size = 2 * math.ceil(2 * n_layers / 16)

    def ops(self, x: Tensor) -> ModuleType:
        """The module of operations that runs tensors like `x`."""
        return kernel_choice.implementation(self.kernels, x.device, has_triton=True)

    def run_read(self, name: str, sources: State, *parameters: Any, **options: Any) -> tuple[Tensor, State]:
        """Operation `name` on the sources: its output, and the sources for the next read.

        The Triton reads pass the sources on, so that the gradients of a source gather in one buffer.
        """
        ops = self.ops(sources[0])
        through = getattr(ops, f"{name}_through", None)
        if through is not None:
            return through(sources, *parameters, **options)
        return getattr(ops, name)(sources, *parameters, **options), sources

    def n_sources(self, site: Site) -> int:
        """N: sources that the read at `site` sees."""
        return 1 + math.ceil(site.index / self.block_size)

    def opens_block(self, site: Site) -> bool:
        """Whether the output of sublayer `site` starts a block."""
        return site.index % self.block_size == 0

    def last_writers(self, site: Site) -> list[int]:
        """Per source at `site`, the 1-based sublayer that wrote it last; 0 for the embedding."""
        return [min(n * self.block_size, site.index) for n in range(self.n_sources(site))]

    def begin(self, x: Tensor, position: Tensor | None = None) -> State:
        return (x,) if position is None else (position, x)

    def write(self, state: State, site: Site, y: Tensor) -> State:
        if self.opens_block(site):
            return (*state, y)
        return (*state[:-1], state[-1] + y)

    def write_elements(self, site: Site) -> int:
        """Elements a write moves: two in, one out; none for an output that becomes the partial sum as it is."""
        return 0 if site.is_head or self.opens_block(site) else 3 * self.d_model
