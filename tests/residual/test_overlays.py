"""Configs of strategies and ablations: each makes the strategy its name says, and can be overlaid and overridden."""

from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentParser

from lit_msar.residual import HC, MHC, MSAR, AttnRes, AttnResMHC, Residual, Vanilla, VanillaConv, WriteBack

CONFIGS = Path(__file__).parents[2] / "configs"

EXPECTED: dict[str, Residual] = {
    "residual/vanilla": Vanilla(),
    "residual/hc": HC(),
    "residual/mhc": MHC(),
    "residual/attnres": AttnRes(),
    "residual/msar": MSAR(),
    "ablation/attnres_mhc": AttnResMHC(),
    "ablation/no_convs": MSAR(kernel_sizes=(1, 1, 1, 1)),
    "ablation/mean_mix": MSAR(mix="mean"),
    "ablation/two_streams": MSAR(kernel_sizes=(1, 4)),
    "ablation/eight_streams": MSAR(kernel_sizes=(1, 2, 4, 6, 8, 12, 16, 24)),
    "ablation/channel_heads": AttnRes(n_depth_heads=16),
    "ablation/write_back": WriteBack(),
    "ablation/block_size_1": MSAR(block_size=1),
    "ablation/block_size_2": MSAR(block_size=2),
    "ablation/block_size_4": MSAR(block_size=4),
    "ablation/block_size_8": MSAR(block_size=8),
    "ablation/block_size_16": MSAR(block_size=16),
    "ablation/frozen_queries": MSAR(train_queries=False),
    "ablation/vanilla_conv": VanillaConv(),
    "ablation/delta_init": MSAR(conv_init="delta"),
    "ablation/reader_owned": MSAR(conv_owner="reader"),
    "ablation/softmax_gate": MSAR(gate="softmax"),
    "ablation/no_key_gain": AttnRes(key_gain=False),
}


def parse(*arguments: str) -> Residual:
    """The strategy that the arguments make, on a command line with the options of a residual alone."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_argument("--model.residual", type=Residual)
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # the former from 4.49 on
    return instantiate(parser.parse_args(list(arguments))).model.residual


def overlay(name: str) -> str:
    return f"--config={CONFIGS / name}.yaml"


def test_every_overlay_is_listed():
    names = {f"{folder}/{path.stem}" for folder in ("residual", "ablation") for path in (CONFIGS / folder).glob("*")}
    assert names == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_an_overlay_makes_its_strategy(name):
    strategy = parse(overlay(name))
    assert type(strategy) is type(EXPECTED[name])
    assert strategy.options == EXPECTED[name].options


@pytest.mark.parametrize("name", EXPECTED)
def test_an_overlay_says_what_is_stated_and_how_to_run_it(name):
    text = (CONFIGS / f"{name}.yaml").read_text()
    header = [line for line in text.splitlines() if line.startswith("#")]
    assert any(line.startswith("# Stated") for line in header)
    assert f"configs/{name}.yaml" in "".join(header)
    assert yaml.safe_load(text).keys() == {"model"}
    assert len(text.splitlines()) <= 30


def test_options_of_an_overlay_can_be_overridden():
    assert parse(overlay("residual/msar"), "--model.residual.block_size=8").options == MSAR(block_size=8).options
    assert parse(overlay("residual/hc"), "--model.residual.dynamic=false").options == HC(dynamic=False).options
    both = parse(overlay("ablation/block_size_16"), "--model.residual.mix=mean", "--model.residual.kernel_sizes=[1,4]")
    assert both.options == MSAR(block_size=16, mix="mean", kernel_sizes=(1, 4)).options


@pytest.mark.parametrize("name", ["Vanilla", "HC", "MHC", "AttnRes", "MSAR", "WriteBack", "VanillaConv", "AttnResMHC"])
def test_a_class_name_is_enough_on_the_command_line(name):
    assert type(parse(f"--model.residual={name}")).__name__ == name


def test_a_later_overlay_replaces_the_strategy():
    strategy = parse(overlay("residual/msar"), overlay("ablation/channel_heads"))
    assert strategy.options == AttnRes(n_depth_heads=16).options
