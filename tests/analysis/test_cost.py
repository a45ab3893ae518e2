import io
from pathlib import Path

import pytest
import torch
import yaml
from conftest import small_config, small_decoder
from rich.console import Console
from strategies import VARIANTS, every_variant
from torch.utils.flop_counter import FlopCounterMode

from lit_msar.analysis import cost
from lit_msar.model import Decoder, DecoderConfig
from lit_msar.residual import HC, MSAR, AttnRes, Vanilla

SIZES = Path(__file__).parents[2] / "configs/size"


def config_of(size: str) -> DecoderConfig:
    return DecoderConfig(**yaml.safe_load((SIZES / f"{size}.yaml").read_text())["model"]["decoder"])


@pytest.mark.parametrize(
    ("size", "total", "activated"), [("10b", 9.99e9, 1.43e9), ("18b", 17.69e9, 1.74e9), ("28b", 27.97e9, 2.72e9)]
)
def test_sizes_have_the_stated_parameters(size, total, activated):
    config = config_of(size)
    parts = cost.backbone(config)
    # xHC's 1.4B of the 10B model is met only with the embedding counted
    met = parts.activated + (parts.embedding if size == "10b" else 0)
    assert parts.total == pytest.approx(total, rel=1e-3)
    assert met == pytest.approx(activated, rel=3e-3)
    figures = cost.stated()["sizes"][cost.stated_size(config)]
    assert parts.total == pytest.approx(figures["total"], rel=0.02)
    assert met == pytest.approx(figures["activated"], rel=0.03)


@pytest.mark.parametrize("size", ["18b", "28b"])
def test_added_parameters_and_flops_are_near_the_stated(size):
    rows = {row.strategy: row for row in cost.cost_table(config_of(size))}
    compared = [row for row in rows.values() if row.stated_parameters_percent is not None]
    assert {row.strategy for row in compared} == {"MHC", "AttnRes", "MSAR"}
    for row in compared:
        assert row.added_parameters_percent == pytest.approx(row.stated_parameters_percent, abs=0.02)
        assert round(row.fitted_flops_percent, 2) == row.stated_flops_percent
        assert row.added_flops_percent == pytest.approx(row.stated_flops_percent, abs=0.03)
    assert rows["Vanilla"].added_parameters_percent == rows["Vanilla"].added_flops_percent == 0


def test_mean_sources_are_those_of_eight_blocks():
    for size, n_sources in (("18b", 4.875), ("28b", 5.375)):
        config = config_of(size)
        with torch.device("meta"):
            strategy = AttnRes()
            strategy.build(8, config.n_layers)
        assert cost.mean_sources(config, strategy) == n_sources


@pytest.mark.parametrize("changes", [{}, {"n_experts": 0}, {"n_shared_experts": 0}, {"n_dense_layers": 0}], ids=str)
def test_components_add_up_to_the_model(changes):
    config = small_config(**changes)
    parts = cost.backbone(config)
    total = sum(p.numel() for p in Decoder(config, Vanilla()).parameters())
    components = (getattr(parts, name) for name in ("embedding", "attention", "dense_mlp", "experts"))
    others = (getattr(parts, name) for name in ("shared_experts", "routers", "norms", "head"))
    assert sum(components) + sum(others) == parts.total == total


def test_activated_parameters_leave_out_the_embedding_and_the_experts_not_chosen():
    config = small_config()
    parts = cost.backbone(config)
    one_expert = 3 * config.d_model * config.d_expert
    assert parts.inactive == 2 * (6 - 2) * one_expert  # two MoE layers, top 2 of 6
    assert parts.total - parts.activated == parts.inactive + 97 * config.d_model


@every_variant
def test_residual_cost_counts_the_parameters_of_the_built_strategy(name):
    strategy = VARIANTS[name]()
    config = small_config()
    before = cost.residual_cost(config, strategy)
    assert not list(strategy.parameters())  # left as it was
    decoder = Decoder(config, strategy)
    assert before.parameters == sum(p.numel() for p in strategy.parameters())
    assert cost.residual_cost(config, decoder.residual) == before


def test_matrix_products_are_those_that_a_counter_sees():
    model, T = small_decoder(moe="loop"), 16
    config = model.config
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(97, (1, T)))
    # without attention, which some backends count and none counts as causal
    counts = counter.get_flop_counts()["Global"].items()
    seen = sum(count for operation, count in counts if "scaled_dot_product" not in str(operation))
    assert seen == 2 * T * cost.backbone(config).matrices


def test_attention_counts_the_keys_a_token_may_see_on_average():
    config, T = small_config(), 16
    pairs = T * (T + 1) // 2  # of query and key in a sequence; two products of n_heads * head_dim each
    attention = cost.multiply_adds_per_token(config, T) - cost.backbone(config).matrices
    assert T * attention == config.n_layers * 2 * config.n_heads * config.head_dim * pairs


def test_training_flops_are_six_per_multiply_add_and_include_the_residual():
    config = small_config()
    vanilla, msar = (cost.training_flops_per_token(config, s, 128) for s in (Vanilla(), MSAR()))
    added = cost.residual_cost(config, MSAR()).multiply_adds - cost.residual_cost(config, Vanilla()).multiply_adds
    assert msar - vanilla == pytest.approx(6 * added)
    longer = cost.training_flops_per_token(config, Vanilla(), 256)
    assert longer - vanilla == 6 * 128 * config.n_layers * config.n_heads * config.head_dim


def test_traffic_stands_beside_the_published_formulae():
    rows = {row.strategy: row for row in cost.cost_table(config_of("18b"))}
    D = 2112
    assert rows["Vanilla"].elements == rows["Vanilla"].formula_elements == 3 * D
    assert rows["MHC"].formula_elements == 34 * D + 48
    assert rows["AttnRes"].formula_elements == (7 / 8 + 5) * D
    assert rows["MSAR"].formula_elements == (7 / 8 + 2 * 4 + 3) * D
    assert rows["HC"].formula_elements is None
    assert cost.stated_elements(config_of("18b"), MSAR(block_size=1)) is None


def test_a_size_without_stated_figures_has_none():
    rows = cost.cost_table(small_config(), {"MSAR": MSAR()}, seq_len=64)
    assert rows[0].stated_parameters_percent is None
    assert rows[0].fitted_flops_percent is None


def printed(*renderables) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    for renderable in renderables:
        console.print(renderable)
    return console.export_text()


def test_tables_show_computed_and_stated_figures():
    config = config_of("18b")
    text = printed(cost.format_backbone(config, 8192), cost.format_table(cost.cost_table(config), config.d_model))
    for expected in ("18B", "17,692,030,528", "18.000B", "0.305 [0.31]", "0.654 [0.67]", "5,297,181"):
        assert expected in text


def test_print_cost_adds_the_configs_own_strategy_once(capsys):
    cost.print_cost(small_config(), 64, MSAR())
    assert "(config)" not in capsys.readouterr().out
    cost.print_cost(small_config(), 64, HC(n_lanes=2))
    assert "HC (config)" in capsys.readouterr().out
