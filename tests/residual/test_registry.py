import pytest

from lit_msar.residual import Vanilla
from lit_msar.residual.registry import parse_strategies, strategy_names


def test_strategies_are_read_from_text():
    found = parse_strategies('Vanilla, MSAR(block_size=2, kernel_sizes=[1, 4], mix="mean"),')
    assert list(found) == ["Vanilla", "MSAR(block_size=2, kernel_sizes=[1, 4], mix='mean')"]
    vanilla, msar = found.values()
    assert isinstance(vanilla, Vanilla)
    assert (msar.block_size, msar.kernel_sizes, msar.options["mix"]) == (2, (1, 4), "mean")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("Highway", "no residual strategy 'Highway'; the strategies are AttnRes"),
        ("MSAR(2)", "strategies are given as"),
        ("MSAR(2)(3)", "strategies are given as"),
        ("MSAR(block_size=open('x'))", "strategies are given as"),
        ("MSAR(depth=2)", "unexpected keyword argument 'depth'"),
        ("Vanilla MSAR", "strategies are given as"),
    ],
)
def test_wrong_text_is_refused(text, named):
    with pytest.raises(ValueError, match=named.replace("(", r"\(")):
        parse_strategies(text)


def test_names_are_those_of_whole_strategies():
    assert {"Vanilla", "HC", "MHC", "AttnRes", "MSAR", "WriteBack", "AttnResMHC", "VanillaConv"} <= set(
        strategy_names()
    )
    assert not {"Residual", "DepthAttention", "LaneResidual"} & set(strategy_names())
