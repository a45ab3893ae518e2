"""Parameters, FLOPs and memory traffic of a decoder and of the residual strategies on it, from its config alone.

Activated parameters are those a token meets: top_k of n_experts experts, the LM head, not the embedding look-up.
Training FLOPs are 6 per multiply-add of the forward pass (2 there, 4 in the backward).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import chain

import torch
from rich.console import Console
from rich.table import Table

from lit_msar.model import Decoder, DecoderConfig
from lit_msar.model.attention import Attention
from lit_msar.model.layers import RMSNorm
from lit_msar.model.moe import DenseMLP, Experts, Router
from lit_msar.residual import HC, MHC, MSAR, AttnRes, Cost, Residual, Vanilla, sites
from lit_msar.residual.depth import DepthAttention

STATE_BYTES = 2  # the depth state is bf16 on a GPU
FLOPS_PER_MULTIPLY_ADD = 6


@dataclass(frozen=True)
class Backbone:
    """Parameters of a decoder by component, its residual strategy left out."""

    embedding: int
    attention: int
    dense_mlp: int
    experts: int
    shared_experts: int
    routers: int
    norms: int
    head: int
    inactive: int
    """Of the experts: what a token does not meet."""

    @property
    def total(self) -> int:
        return self.activated + self.embedding + self.inactive

    @property
    def activated(self) -> int:
        return self.matrices + self.norms

    @property
    def matrices(self) -> int:
        """Activated weights of matrix products: a multiply-add each."""
        experts = self.experts - self.inactive
        return self.attention + self.dense_mlp + experts + self.shared_experts + self.routers + self.head


def backbone(config: DecoderConfig) -> Backbone:
    """Counts the parameters of a decoder made on the meta device."""
    with torch.device("meta"):
        decoder = Decoder(config, Vanilla())

    def count(*modules: torch.nn.Module | None) -> int:
        """Values of the modules, norm gains left out."""
        inner = chain.from_iterable(m.modules() for m in modules if m is not None)
        return sum(p.numel() for m in inner if not isinstance(m, RMSNorm) for p in m.parameters(recurse=False))

    def of_kind(kind: type) -> list[torch.nn.Module]:
        return [m for m in decoder.modules() if isinstance(m, kind)]

    experts = count(*of_kind(Experts))
    return Backbone(
        embedding=count(decoder.embedding),
        attention=count(*of_kind(Attention)),
        dense_mlp=count(*of_kind(DenseMLP)),
        experts=experts,
        shared_experts=count(*(decoder.layers[i].mlp.shared for i in config.moe_layers)),
        routers=count(*of_kind(Router)),
        norms=sum(m.weight.numel() for m in of_kind(RMSNorm)),
        head=count(decoder.head),
        inactive=experts - experts * config.top_k // config.n_experts if experts else 0,
    )


def residual_cost(config: DecoderConfig, residual: Residual) -> Cost:
    """Sum over all reads and writes of a strategy, built or not, at the config's size; per token, forward."""
    with torch.device("meta"):
        strategy = type(residual)(**residual.options)
        strategy.build(config.d_model, config.n_layers)
    return sum((strategy.cost(site) for site in sites(config.n_layers)), Cost())


def multiply_adds_per_token(config: DecoderConfig, seq_len: int) -> float:
    """Of the backbone's forward: its activated matrices, and attention's two products over (seq_len + 1) / 2 keys."""
    attention = config.n_layers * config.n_heads * config.head_dim * (seq_len + 1)
    return backbone(config).matrices + attention


def training_flops_per_token(config: DecoderConfig, residual: Residual, seq_len: int) -> float:
    """FLOPs of forward and backward per token, the residual strategy's own included, recomputation not."""
    forward = multiply_adds_per_token(config, seq_len) + residual_cost(config, residual).multiply_adds
    return FLOPS_PER_MULTIPLY_ADD * forward


# ------------------------------------------------------------------------------------------ beside stated figures


@cache
def stated() -> dict:
    """Public figures with their sources."""
    return json.loads(files("lit_msar.analysis").joinpath("stated.json").read_text())


def stated_size(config: DecoderConfig) -> str | None:
    """The paper's name of a model of this width and depth, if it has one."""
    for name, size in stated()["sizes"].items():
        if (size["d_model"], size["n_layers"]) == (config.d_model, config.n_layers):
            return name
    return None


def mean_sources(config: DecoderConfig, strategy: DepthAttention) -> float:
    """Mean number of sources over the sublayers' reads, the head's left out."""
    return sum(strategy.n_sources(site) for site in sites(config.n_layers)[:-1]) / (2 * config.n_layers)


def fitted_multiply_adds(config: DecoderConfig) -> dict[str, float]:
    """Added multiply-adds per token in the accounting that rounds to the paper's six figures.

    Per sublayer and channel: mHC 108, AttnRes 3.5 N, MSAR 44 + 8 N, with N the mean number of sources. Found by fitting
    the stated percentages; a strategy's `cost` is the kit's own count.
    """
    with torch.device("meta"):
        blocks = AttnRes()
        blocks.build(config.d_model, config.n_layers)
    n_sources = mean_sources(config, blocks)
    per_channel = {"MHC": 108.0, "AttnRes": 3.5 * n_sources, "MSAR": 44 + 8 * n_sources}
    return {name: value * config.d_model * 2 * config.n_layers for name, value in per_channel.items()}


def fitted_vanilla(config: DecoderConfig) -> tuple[float, float] | None:
    """Bounds on Vanilla's multiply-adds per token between which all of `fitted_multiply_adds` round to the stated
    percentages; None where no figures are stated for the size."""
    figures = stated()["added_training_flops_percent"].get(stated_size(config) or "")
    if figures is None:
        return None
    added = fitted_multiply_adds(config)
    low = max(100 * added[name] / (percent + 0.005) for name, percent in figures.items())
    high = min(100 * added[name] / (percent - 0.005) for name, percent in figures.items())
    return low, high


def stated_elements(config: DecoderConfig, residual: Residual) -> float | None:
    """Elements per token and sublayer by AttnRes' Table 1 (the MSAR row is ours): unfused mHC, two-phase attention."""
    D, n = config.d_model, getattr(residual, "n_lanes", 0)
    if isinstance(residual, Vanilla):
        return 3.0 * D
    if isinstance(residual, MHC):
        return (8 * n + 2) * D + 2 * n * n + 4 * n
    if not isinstance(residual, AttnRes | MSAR):
        return None
    with torch.device("meta"):
        strategy = type(residual)(**residual.options)
        strategy.build(D, config.n_layers)
    S = strategy.block_size
    if S == 1:
        return None  # the full form has no blocks; its published figure depends on how reads are batched
    n_blocks = -(-2 * config.n_layers // S)
    return (n_blocks / S + (5 if isinstance(residual, AttnRes) else 2 * strategy.m + 3)) * D


# ------------------------------------------------------------------------------------------ the table


@dataclass(frozen=True)
class CostRow:
    """One strategy at one size; percentages are over Vanilla at the same size."""

    strategy: str
    total: int
    activated: int
    residual: Cost
    training_flops: float
    added_parameters_percent: float
    """Of Vanilla's activated parameters."""
    added_flops_percent: float
    """The kit's own accounting."""
    fitted_flops_percent: float | None
    """The accounting fitted to the stated figures, over the middle of the bounds it puts on Vanilla."""
    elements: float
    """Moved by the residual per token and sublayer in a fused forward pass."""
    formula_elements: float | None
    """The same by the published formula."""
    stated_parameters_percent: float | None
    stated_flops_percent: float | None


def cost_table(
    config: DecoderConfig, strategies: Mapping[str, Residual] | None = None, seq_len: int = 8192
) -> list[CostRow]:
    """One row per strategy.

    Args:
        config: the decoder's shape.
        strategies: by label, built or not; None for the five of the literature with their defaults.
        seq_len: tokens per sequence, for attention's part of the FLOPs.
    """
    if strategies is None:
        strategies = default_strategies()
    base, base_flops = backbone(config), training_flops_per_token(config, Vanilla(), seq_len)
    size, bounds = stated_size(config) or "", fitted_vanilla(config)
    fitted = {name: 200 * x / sum(bounds) for name, x in fitted_multiply_adds(config).items()} if bounds else {}
    rows = []
    for name, residual in strategies.items():
        cost = residual_cost(config, residual)
        flops = training_flops_per_token(config, residual, seq_len)
        rows.append(
            CostRow(
                strategy=name,
                total=base.total + cost.parameters,
                activated=base.activated + cost.parameters,
                residual=cost,
                training_flops=flops,
                added_parameters_percent=100 * cost.parameters / base.activated,
                added_flops_percent=100 * (flops / base_flops - 1),
                fitted_flops_percent=fitted.get(name),
                elements=cost.elements / (2 * config.n_layers),
                formula_elements=stated_elements(config, residual),
                stated_parameters_percent=stated()["added_parameters_percent"].get(size, {}).get(name),
                stated_flops_percent=stated()["added_training_flops_percent"].get(size, {}).get(name),
            )
        )
    return rows


def default_strategies() -> dict[str, Residual]:
    """The strategies of the literature with their defaults, by class name."""
    return {cls.__name__: cls() for cls in (Vanilla, HC, MHC, AttnRes, MSAR)}


def format_backbone(config: DecoderConfig, seq_len: int) -> Table:
    """Parameters and forward multiply-adds per token of the decoder without its residual strategy."""
    parts = backbone(config)
    size = stated_size(config)
    figures = stated()["sizes"][size] if size else {}
    table = Table(title=f"Decoder: {config.n_layers} layers of width {config.d_model}{f', {size}' if size else ''}")
    for heading in ("component", "parameters", "activated", "stated"):
        table.add_column(heading, justify="left" if heading == "component" else "right")
    for name in ("embedding", "attention", "dense_mlp", "experts", "shared_experts", "routers", "norms", "head"):
        count = getattr(parts, name)
        active = {"embedding": 0, "experts": parts.experts - parts.inactive}.get(name, count)
        table.add_row(name.replace("_", " "), f"{count:,}", f"{active:,}")
    table.add_section()
    table.add_row("total", f"{parts.total:,}", "", _billions(figures.get("total")))
    table.add_row("activated", "", f"{parts.activated:,}", _billions(figures.get("activated")))
    table.add_row("activated, with the embedding", "", f"{parts.activated + parts.embedding:,}")
    forward = multiply_adds_per_token(config, seq_len)
    table.add_row(f"multiply-adds per token at {seq_len} tokens", "", f"{forward:.4g}")
    return table


def format_table(rows: list[CostRow], d_model: int) -> Table:
    """A rich table of `cost_table`: what each strategy adds, the stated figure in brackets."""
    table = Table(title="Residual strategies: what they add to Vanilla, the stated figure in brackets")
    table.add_column("strategy", no_wrap=True)
    for heading in (
        "residual parameters",
        "total",
        "activated",
        "added %",
        "training FLOPs/token",
        "added %",
        "fitted %",
        "elements/D per sublayer",
        "formula",
        "MB/token forward",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.strategy,
            f"{row.residual.parameters:,}",
            _billions(row.total),
            _billions(row.activated),
            _beside(row.added_parameters_percent, row.stated_parameters_percent),
            f"{row.training_flops:.4g}",
            _beside(row.added_flops_percent, row.stated_flops_percent),
            _number(row.fitted_flops_percent, ".2f"),
            f"{row.elements / d_model:.1f}",
            _number(row.formula_elements and row.formula_elements / d_model, ".1f"),
            f"{row.residual.elements * STATE_BYTES / 1e6:.2f}",
        )
    return table


def print_cost(config: DecoderConfig, seq_len: int, residual: Residual) -> None:
    """Print both tables for a config: the strategies of the literature, and the config's own if it is another."""
    strategies = default_strategies()
    if not any(type(s) is type(residual) and s.options == residual.options for s in strategies.values()):
        strategies[f"{type(residual).__name__} (config)"] = residual
    console = Console(width=160)
    console.print(format_backbone(config, seq_len))
    console.print(format_table(cost_table(config, strategies, seq_len), config.d_model))
    bounds = fitted_vanilla(config)
    if bounds:
        console.print(
            "fitted: mHC 108, AttnRes 3.5 N and MSAR 44 + 8 N multiply-adds per channel and sublayer (N sources on "
            f"average) round to all stated figures if Vanilla has {bounds[0]:.4g} to {bounds[1]:.4g} per token"
        )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _billions(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:.3f}B"


def _beside(value: float, stated_value: float | None) -> str:
    return f"{value:.3f}" if stated_value is None else f"{value:.3f} \\[{stated_value:.2f}]"
