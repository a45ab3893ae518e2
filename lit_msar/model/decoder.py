"""The decoder: embedding, layers of read - sublayer - write, final norm and head."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_msar.initialization import Initialized, initialize, normal
from lit_msar.model.attention import Attention, Sequence, sequence_of
from lit_msar.model.config import DecoderConfig
from lit_msar.model.layers import RMSNorm
from lit_msar.model.loss import Losses, cross_entropy
from lit_msar.model.moe import DenseMLP, MoE, RouterStats
from lit_msar.model.recompute import recomputed
from lit_msar.residual.base import Residual, State, sites

Checkpointing = Literal["none", "selective", "full"]


class Embedding(Initialized):
    """Token embedding [V, D]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.declare("weight", (config.vocab_size, config.d_model), normal(config.init_std))

    def forward(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(tokens, self.weight).to(dtype)


class Layer(nn.Module):
    """One attention and one MLP sublayer; the residual's parameters belong to the model, not to the layer."""

    def __init__(self, config: DecoderConfig, index: int, output_std: float, recomputes_mlp: bool) -> None:
        super().__init__()
        self.recomputes_mlp = recomputes_mlp
        self.attention_site, self.mlp_site = sites(config.n_layers)[2 * index : 2 * index + 2]
        self.attention = Attention(config, output_std)
        self.mlp = (MoE if config.is_moe(index) else DenseMLP)(config, output_std)

    def forward(self, state: State, residual: Residual, sequence: Sequence) -> tuple[State, RouterStats | None]:
        x, state = residual.read(state, self.attention_site)
        state = residual.write(state, self.attention_site, self.attention(x, sequence))
        x, state = residual.read(state, self.mlp_site)
        y, stats = recomputed(self.mlp, x) if self.recomputes_mlp and torch.is_grad_enabled() else self.mlp(x)
        return residual.write(state, self.mlp_site, y), stats


class Head(Initialized):
    """Final norm and untied LM head; one module, so that a sharded weight is whole wherever it is used."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.declare("weight", (config.vocab_size, config.d_model), normal(config.init_std))

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor | Losses:
        """Logits [B, T, V] of x [B, T, D] in its dtype, or with targets [B, T] their losses."""
        hidden = self.norm(x)
        if targets is None:
            return F.linear(hidden, self.weight.to(hidden.dtype))
        return cross_entropy(hidden, self.weight, targets)


class DecoderOutput(NamedTuple):
    """What one forward gives."""

    logits: Tensor | None
    """[B, T, V] in the compute dtype; None where targets are given."""
    losses: Losses | None
    """Sum and single losses; None without targets."""
    router: RouterStats | None
    """Statistics of all MoE layers, stacked in front ([n_moe_layers, ..]); None for a dense model."""


class Decoder(nn.Module):
    """A pre-norm decoder over any residual strategy.

    Args:
        config: shape.
        residual: a strategy that is not built yet.
        compute_dtype: of activations and depth state; parameters stay fp32.
        checkpointing: what is kept for the backward: `none` recomputes nothing; `selective` recomputes the insides of
            MLPs, by far the largest part with 8 experts per token; `full` keeps what enters each segment of layers.
            Routing is always kept.
    """

    def __init__(
        self,
        config: DecoderConfig,
        residual: Residual,
        compute_dtype: torch.dtype = torch.float32,
        checkpointing: Checkpointing = "none",
    ) -> None:
        super().__init__()
        self.config, self.compute_dtype, self.checkpointing = config, compute_dtype, checkpointing
        residual.build(config.d_model, config.n_layers)
        output_std = config.output_std * residual.output_std_factor()
        self.embedding = Embedding(config)
        self.layers = nn.ModuleList(
            Layer(config, i, output_std, checkpointing == "selective") for i in range(config.n_layers)
        )
        self.head = Head(config)
        self.residual = residual

    def initialize(self, seed: int) -> None:
        """Write the start of all parameters and buffers; each depends on the seed and its own name only."""
        initialize(self, seed)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        position: Tensor | None = None,
        residual: Residual | None = None,
        boundaries: Tensor | None = None,
    ) -> DecoderOutput:
        """Logits, or losses where targets are given.

        Args:
            tokens: [B, T] integer ids.
            targets: [B, T] ids to predict, -100 where masked.
            position: [B, T] place of each token in its document; keeps packed documents apart.
            residual: stands in for the model's own strategy, to observe it.
            boundaries: [n + 1] int32, the same documents by where they begin and end in the B T tokens laid end to end,
                padded with B T; with them attention needs no dense mask where a kernel takes them.
        """
        residual = self.residual if residual is None else residual
        sequence = sequence_of(tokens, position, self.config, boundaries, self.compute_dtype)
        state = residual.begin(self.embedding(tokens, self.compute_dtype), position)
        stats: list[RouterStats] = []
        for segment in self.segments(residual):
            state, segment_stats = self._run(segment, state, residual, sequence)
            stats.extend(segment_stats)
        output = self.head(residual.finish(state), targets)
        router = RouterStats(*map(torch.stack, zip(*stats, strict=True))) if stats else None
        return DecoderOutput(output, None, router) if targets is None else DecoderOutput(None, output, router)

    def segments(self, residual: Residual) -> Iterator[list[Layer]]:
        """Groups of layers between which the strategy's state may be cut."""
        size = residual.segment_layers
        for start in range(0, self.config.n_layers, size):
            yield list(self.layers[start : start + size])

    def _run(
        self, segment: list[Layer], state: State, residual: Residual, sequence: Sequence
    ) -> tuple[State, list[RouterStats]]:
        if self.checkpointing == "full" and torch.is_grad_enabled():
            return recomputed(_run_layers, segment, state, residual, sequence)
        return _run_layers(segment, state, residual, sequence)

    def compile_parts(self) -> None:
        """Compile attention and MLP sublayers: a handful of graphs for every strategy and depth."""
        for layer in self.layers:
            layer.attention.compile()
            layer.mlp.compile()

    def routers(self) -> list[nn.Module]:
        """Routers of the MoE layers, in order of depth."""
        return [self.layers[i].mlp.router for i in self.config.moe_layers]

    def update_balance(self, load: Tensor, rate: float | Tensor) -> None:
        """Move every router's balance bias against its load [n_moe_layers, E]."""
        for router, layer_load in zip(self.routers(), load, strict=True):
            router.update_balance(layer_load, rate)

    def no_decay_names(self) -> set[str]:
        """Full names of the parameters without weight decay: norm gains and what the strategy names."""
        norms = {f"{name}.weight" if name else "weight" for name, m in self.named_modules() if isinstance(m, RMSNorm)}
        depth = {
            f"residual.{name}" for name, _ in self.residual.named_parameters() if self.residual.is_without_decay(name)
        }
        return norms | depth


def _run_layers(
    layers: list[Layer], state: State, residual: Residual, sequence: Sequence
) -> tuple[State, list[RouterStats]]:
    stats = []
    for layer in layers:
        state, layer_stats = layer(state, residual, sequence)
        if layer_stats is not None:
            stats.append(layer_stats)
    return state, stats
