"""Every residual strategy, variant and ablation under a name, and a toy model to run them in."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lit_msar.initialization import initialize
from lit_msar.residual import (
    HC,
    MHC,
    MSAR,
    AttnRes,
    AttnResMHC,
    Residual,
    State,
    Vanilla,
    VanillaConv,
    WriteBack,
    sites,
)

VARIANTS: dict[str, Callable[[], Residual]] = {
    "vanilla": Vanilla,
    "hc": HC,
    "hc_static": lambda: HC(dynamic=False),
    "hc_one_lane": lambda: HC(n_lanes=1),
    "mhc": MHC,
    "mhc_two_lanes": lambda: MHC(n_lanes=2),
    "mhc_megatron_start": lambda: MHC(start="megatron", alpha_start=1.0),
    "mhc_sum": lambda: MHC(contract="sum"),
    "mhc_learned_contraction": lambda: MHC(contract="learned", sinkhorn_eps=1e-6),
    "attnres": lambda: AttnRes(block_size=4),
    "attnres_full": lambda: AttnRes(block_size=1),
    "attnres_default_blocks": AttnRes,
    "attnres_without_key_gain": lambda: AttnRes(block_size=4, key_gain=False),
    "attnres_channel_heads": lambda: AttnRes(block_size=4, n_depth_heads=4),
    "msar": lambda: MSAR(block_size=4),
    "msar_full": lambda: MSAR(block_size=1),
    "msar_default_blocks": MSAR,
    "msar_reader_owned": lambda: MSAR(block_size=4, conv_owner="reader"),
    "msar_delta_start": lambda: MSAR(block_size=4, conv_init="delta"),
    "msar_mean_mix": lambda: MSAR(block_size=4, mix="mean"),
    "msar_softmax_gate": lambda: MSAR(block_size=4, gate="softmax"),
    "msar_one_stream": lambda: MSAR(block_size=4, kernel_sizes=(1,)),
    "msar_two_streams": lambda: MSAR(block_size=4, kernel_sizes=(1, 4)),
    "msar_eight_streams": lambda: MSAR(block_size=4, kernel_sizes=(1, 2, 4, 6, 8, 12, 16, 24)),
    "msar_without_convs": lambda: MSAR(block_size=4, kernel_sizes=(1, 1, 1, 1)),
    "msar_frozen_queries": lambda: MSAR(block_size=4, train_queries=False),
    "vanilla_conv": VanillaConv,
    "vanilla_conv_mean_mix": lambda: VanillaConv(mix="mean", conv_init="delta"),
    "write_back": lambda: WriteBack(block_size=4),
    "attnres_mhc": lambda: AttnResMHC(block_size=4),
}

every_variant = pytest.mark.parametrize("name", VARIANTS)


def built(strategy: Residual, d_model: int = 8, n_layers: int = 3, seed: int = 0, spread: float = 0.3) -> Residual:
    """The strategy in float64, its trained parameters moved off their start by N(0, spread^2)."""
    strategy.build(d_model, n_layers)
    initialize(strategy, seed)
    strategy.double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in strategy.parameters():
            if parameter.requires_grad:
                parameter += spread * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return strategy


class ToyModel(nn.Module):
    """Sublayers tanh(x W) under a strategy, without embedding and head: only the strategy can reach across tokens."""

    def __init__(self, residual: Residual, seed: int = 0) -> None:
        super().__init__()
        D = residual.d_model
        generator = torch.Generator().manual_seed(seed)
        self.weights = [
            torch.randn(D, D, generator=generator, dtype=torch.float64) / D**0.5 for _ in range(residual.n_sublayers)
        ]
        self.residual = residual
        self.sites = sites(residual.n_layers)

    def sublayer(self, index: int, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weights[index].to(x.dtype))

    def run(self, state: State, start: int, stop: int) -> State:
        """The state after sublayers start to stop - 1."""
        for site in self.sites[start:stop]:
            x, state = self.residual.read(state, site)
            state = self.residual.write(state, site, self.sublayer(site.index, x))
        return state

    def forward(self, x: Tensor, position: Tensor | None = None) -> Tensor:
        state = self.run(self.residual.begin(x, position), 0, self.residual.n_sublayers)
        return self.residual.finish(state)


def toy(name: str, **options) -> ToyModel:
    """The toy model of a named variant; options as for `built`."""
    return ToyModel(built(VARIANTS[name](), **options))


def embedding(B: int = 2, T: int = 9, D: int = 8) -> Tensor:
    """Random token embeddings [B, T, D] in float64."""
    return torch.randn(B, T, D, dtype=torch.float64)
