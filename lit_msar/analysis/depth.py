"""Depth-attention weights and gates of a model on text: which source each read takes, per stream."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lit_msar.model import Decoder
from lit_msar.residual.base import Residual, Site, State, sites


class Recorder(Residual):
    """Stands in for a strategy and keeps the mean over tokens of what it decides at every site."""

    def __init__(self, residual: Residual) -> None:
        super().__init__()
        object.__setattr__(self, "observed", residual)  # not a submodule: its parameters stay where they are
        self.segment_layers = residual.segment_layers
        self.views: list[dict[str, Tensor]] = []

    def begin(self, x: Tensor, position: Tensor | None = None) -> State:
        return self.observed.begin(x, position)

    def read(self, state: State, site: Site) -> tuple[Tensor, State]:
        self._record(state, site)
        return self.observed.read(state, site)

    def write(self, state: State, site: Site, y: Tensor) -> State:
        return self.observed.write(state, site, y)

    def finish(self, state: State) -> Tensor:
        n_sublayers = self.observed.n_sublayers
        self._record(state, Site(n_sublayers, n_sublayers))
        return self.observed.finish(state)

    def _record(self, state: State, site: Site) -> None:
        seen = self.observed.inspect(state, site)
        self.views.append({name: view.float().mean((0, 1)).cpu() for name, view in seen.items()})


@dataclass
class DepthMaps:
    """Means over tokens; NaN where a read does not see a source, or the strategy decides nothing of the kind."""

    weights: np.ndarray
    """[m, 2L + 1 reads, N_max sources]; empty without depth attention."""
    gates: np.ndarray
    """[2L + 1 reads, m]; empty without adaptive mixing."""


@torch.no_grad()
def depth_maps(model: Decoder, tokens: Tensor, position: Tensor | None = None) -> DepthMaps:
    """Depth weights and gates of every read, averaged over tokens [B, T]."""
    recorder = Recorder(model.residual)
    model(tokens, position=position, residual=recorder)
    views = recorder.views
    assert len(views) == len(sites(model.config.n_layers)), "a read was not recorded"
    return DepthMaps(_stack_weights(views), _stack_gates(views))


def _stack_weights(views: list[dict[str, Tensor]]) -> np.ndarray:
    if "weights" not in views[0]:
        return np.empty((0, len(views), 0))
    n_streams = views[0]["weights"].shape[0]
    n_max = max(view["weights"].shape[1] for view in views)
    weights = np.full((n_streams, len(views), n_max), np.nan)
    for read, view in enumerate(views):
        weights[:, read, : view["weights"].shape[1]] = view["weights"].numpy()
    return weights


def _stack_gates(views: list[dict[str, Tensor]]) -> np.ndarray:
    if "gates" not in views[0]:
        return np.empty((len(views), 0))
    return np.stack([view["gates"].numpy() for view in views])
