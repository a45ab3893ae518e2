"""Gated copies of each output as candidates of depth attention: MSAR's streams without its convolutions (ablation)."""

import torch
from torch import Tensor

from kernels import reference
from lit_msar.initialization import constant, normal
from lit_msar.residual.base import Cost, Site, State
from lit_msar.residual.depth import DepthAttention, split_position
from lit_msar.residual.msar import GATE_SCALE, WEIGHT_STD, gate_bias_start

Mixer = tuple[Tensor, Tensor, Tensor]


class WriteBack(DepthAttention):
    """Depth attention over m candidates per source, each the source times a gate that was written with it.

        y_j = p_j F(h)        p = 2 sigmoid(alpha' RMSNorm([r_1; ..; r_m]) W' + b')      (as mHC's post)
        e_ij = q_j . RMSNorm(y_ij)        r_j = sum_i softmax_i(e_ij) y_ij        h = sum_j g_j r_j   (g as in MSAR)

    A candidate differs from its siblings by a scalar alone, which the key norm takes out: within a source the keys are
    nearly equal. State: see `DepthAttention`, sources [B, T, m, D], the embedding's m copies alike; between a read and
    its write also the gates p [B, T, m], last. One more source costs m B T D elements.

    Args:
        block_size: S, sublayers per depth block; 1 is the full form, null means 2 ceil(2 n_layers / 16).
        n_candidates: m, at least 2.
        eps: of the norms.
    """

    no_decay = frozenset({"query", "mix_scale", "mix_bias", "write_scale", "write_bias"})

    def __init__(self, block_size: int | None = None, n_candidates: int = 4, eps: float = 1e-5) -> None:
        super().__init__(block_size, eps, kernels="reference")
        self.options = {"block_size": block_size, "n_candidates": n_candidates, "eps": eps}
        if n_candidates < 2:
            raise ValueError(f"n_candidates must be at least 2 (one is residual=AttnRes), got {n_candidates}")
        self.m = n_candidates

    def build(self, d_model: int, n_layers: int) -> None:
        super().build(d_model, n_layers)
        self.declare_list("query", (self.m, d_model), [constant(0.0)] * (self.n_sublayers + 1))
        # p starts at 1, g at 1/m
        for use, n, bias in (
            ("mix", self.n_sublayers + 1, gate_bias_start("sigmoid", self.m)),
            ("write", self.n_sublayers, 0.0),
        ):
            self.declare_list(f"{use}_weight", (self.m, self.m, d_model), [normal(WEIGHT_STD)] * n)
            self.declare_list(f"{use}_scale", (1,), [constant(GATE_SCALE)] * n)
            self.declare_list(f"{use}_bias", (self.m,), [constant(bias)] * n)

    def mixer(self, site: Site) -> Mixer:
        """Weight [m, m, D], scale [1] and bias [m] of the gates g of the read at `site`."""
        return self.mix_weight[site.index], self.mix_scale[site.index], self.mix_bias[site.index]

    def writer(self, site: Site) -> Mixer:
        """Weight [m, m, D], scale [1] and bias [m] of the gates p of the write at `site`."""
        return self.write_weight[site.index], self.write_scale[site.index], self.write_bias[site.index]

    def begin(self, x: Tensor, position: Tensor | None = None) -> State:
        return super().begin(x.unsqueeze(2).expand(-1, -1, self.m, -1), position)

    def _retrieve(self, state: State, site: Site) -> tuple[Tensor, list[Tensor]]:
        """r [B, T, m, D] and the N logits [B, T, m]."""
        _, sources = split_position(state)
        sources = [reference.raised(source) for source in sources]
        logits = [reference.score(source, self.query[site.index], self.eps) for source in sources]
        return reference.retrieve(sources, logits), logits

    def read(self, state: State, site: Site) -> tuple[Tensor, State]:
        retrieved, _ = self._retrieve(state, site)
        x = reference.mix_streams(retrieved, *self.mixer(site), "sigmoid", self.eps).to(state[-1].dtype)
        if site.is_head:
            return x, state
        return x, (*state, 2 * reference.mix_gates(retrieved, *self.writer(site), "sigmoid", self.eps))

    def write(self, state: State, site: Site, y: Tensor) -> State:
        *sources, gates = state
        candidates = (gates.unsqueeze(-1) * reference.raised(y).unsqueeze(2)).to(y.dtype)  # [B, T, m, D]
        return super().write(tuple(sources), site, candidates)

    def inspect(self, state: State, site: Site) -> dict[str, Tensor]:
        retrieved, logits = self._retrieve(state, site)
        gates = reference.mix_gates(retrieved, *self.mixer(site), "sigmoid", self.eps)
        return {"weights": torch.softmax(torch.stack(logits, dim=-1), dim=-1), "gates": gates}

    def cost(self, site: Site) -> Cost:
        n, m, D = self.n_sources(site), self.m, self.d_model
        n_mixers = 1 if site.is_head else 2
        parameters = m * D + n_mixers * (m * m * D + m + 1)
        multiply_adds = 3 * m * n * D + 2 * m * D + n_mixers * m * m * D  # scores, sums; norm, mix; gate logits
        multiply_adds += 0 if site.is_head else 2 * m * D  # gated copies and their addition
        # a write makes m values per channel out of one, and reads and adds the partial sum where the block has begun
        written = 0 if site.is_head else (1 + m + (0 if self.opens_block(site) else m)) * D
        return Cost(parameters, multiply_adds, (m * n + 1) * D + written)
