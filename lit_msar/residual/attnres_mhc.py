"""The naive combination of Attention Residuals and mHC: both states, and the sum of both reads (ablation)."""

from torch import Tensor

from kernels import Kernels
from lit_msar.residual.attnres import AttnRes
from lit_msar.residual.base import Cost, Residual, Site, State
from lit_msar.residual.mhc import MHC


class AttnResMHC(Residual):
    """`h = AttnRes read + pre x`; every output is written to both states as each strategy does it.

    State: the lanes of `MHC` (between a read and its write also post and res), then the sources of `AttnRes`. One more
    source costs B T D elements and one more tensor per read.

    Args:
        block_size: of AttnRes: S, sublayers per depth block; 1 is the full form, null means 2 ceil(2 n_layers / 16).
        n_lanes: of mHC.
        kernels: auto, triton, reference (plain PyTorch) or compiled (torch.compile of it).
    """

    def __init__(self, block_size: int | None = None, n_lanes: int = 4, kernels: Kernels = "auto") -> None:
        super().__init__(block_size=block_size, n_lanes=n_lanes, kernels=kernels)
        self.attnres = AttnRes(block_size=block_size, kernels=kernels)
        self.mhc = MHC(n_lanes=n_lanes, kernels=kernels)
        self.mhc.projects_ahead = False  # the lanes' part of the state keeps its length

    def build(self, d_model: int, n_layers: int) -> None:
        super().build(d_model, n_layers)
        self.attnres.build(d_model, n_layers)
        self.mhc.build(d_model, n_layers)

    def begin(self, x: Tensor, position: Tensor | None = None) -> State:
        return (*self.mhc.begin(x), *self.attnres.begin(x, position))

    def read(self, state: State, site: Site) -> tuple[Tensor, State]:
        from_lanes, lanes = self.mhc.read(state[:1], site)
        from_sources, sources = self.attnres.read(state[1:], site)
        return from_lanes + from_sources, (*lanes, *sources)

    def write(self, state: State, site: Site, y: Tensor) -> State:
        lanes, sources = state[:3], state[3:]
        return (*self.mhc.write(lanes, site, y), *self.attnres.write(sources, site, y))

    def inspect(self, state: State, site: Site) -> dict[str, Tensor]:
        return self.mhc.inspect(state[:1], site) | self.attnres.inspect(state[1:], site)

    def kept_by_write(self, site: Site) -> int:
        return self.mhc.kept_by_write(site)

    def is_without_decay(self, name: str) -> bool:
        owner, _, own_name = name.partition(".")
        return self.get_submodule(owner).is_without_decay(own_name)

    def cost(self, site: Site) -> Cost:
        return self.mhc.cost(site) + self.attnres.cost(site) + Cost(multiply_adds=self.d_model)
