"""What all depth-attention strategies share: sources, blocks, and the degenerate cases in which they agree."""

import numpy as np
import pytest
import torch
from strategies import ToyModel, built, embedding

from kernels import reference
from lit_msar.residual import MSAR, AttnRes, Site, WriteBack, sites


def uniform_mean(model: ToyModel, x: np.ndarray, block_size: int) -> np.ndarray:
    """Every read is the mean of [embedding, completed blocks, partial sum]."""
    blocks, partial = [x], None
    n_sublayers = model.residual.n_sublayers
    for index in range(n_sublayers + 1):
        h = np.mean(blocks + ([] if partial is None else [partial]), axis=0)
        if index < n_sublayers:
            y = np.tanh(h @ model.weights[index].numpy())
            partial = y if partial is None else partial + y
            if (index + 1) % block_size == 0:
                blocks.append(partial)
                partial = None
    return h


def set_exact_start(strategy) -> None:
    """Zero queries, taps that copy the source, gates 1/m and written copies with gate 1."""
    with torch.no_grad():
        for name, parameter in strategy.named_parameters():
            match name.split(".")[0]:
                case "query" | "mix_weight" | "write_weight" | "write_bias":
                    parameter.zero_()
                case "mix_bias":
                    parameter.fill_(-np.log(len(parameter) - 1))
                case "taps":
                    parameter.zero_()
                    start = 0
                    for size in strategy.kernel_sizes:
                        if size > 1:
                            parameter[start] = 1
                            start += size


UNIFORM = {
    "attnres": AttnRes,
    "attnres_without_key_gain": lambda block_size: AttnRes(block_size, key_gain=False),
    "attnres_channel_heads": lambda block_size: AttnRes(block_size, n_depth_heads=4),
    "msar_mean_mix": lambda block_size: MSAR(block_size, mix="mean"),
    "msar_mean_mix_reader_owned": lambda block_size: MSAR(block_size, mix="mean", conv_owner="reader"),
    "msar_even_gates": MSAR,
    "msar_without_convs": lambda block_size: MSAR(block_size, kernel_sizes=(1, 1, 1, 1)),
    "msar_frozen_queries": lambda block_size: MSAR(block_size, train_queries=False),
    "write_back": WriteBack,
}


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("name", UNIFORM)
def test_zero_queries_and_delta_taps_give_the_uniform_mean_of_the_sources(name, block_size):
    model = ToyModel(built(UNIFORM[name](block_size)))
    set_exact_start(model.residual)
    x = embedding()
    np.testing.assert_allclose(
        model(x).detach().numpy(), uniform_mean(model, x.numpy(), block_size), rtol=1e-12, atol=1e-13
    )


def test_ten_sublayers_with_four_per_block_make_blocks_of_4_4_2():
    strategy = built(AttnRes(block_size=4), n_layers=5)
    assert [strategy.n_sources(site) for site in sites(5)] == [1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4]
    assert strategy.last_writers(Site(7, 10)) == [0, 4, 7]
    assert strategy.last_writers(Site(8, 10)) == [0, 4, 8]
    assert strategy.last_writers(Site(10, 10)) == [0, 4, 8, 10]


def test_a_block_is_the_sum_of_its_sublayers_outputs():
    model = ToyModel(built(AttnRes(block_size=4), n_layers=5))
    state, outputs = model.residual.begin(embedding()), []
    for site in model.sites[:-1]:
        x, state = model.residual.read(state, site)
        outputs.append(model.sublayer(site.index, x))
        state = model.residual.write(state, site, outputs[-1])
    for block, (start, stop) in zip(state[1:], [(0, 4), (4, 8), (8, 10)], strict=True):
        torch.testing.assert_close(block, sum(outputs[start:stop]))


@pytest.mark.parametrize(("n_layers", "block_size"), [(3, 2), (12, 4), (15, 4), (28, 8), (32, 8)])
def test_the_default_keeps_about_eight_blocks(n_layers, block_size):
    with torch.device("meta"):
        strategy = MSAR()
        strategy.build(8, n_layers)
    assert strategy.block_size == block_size


@pytest.mark.parametrize("strategy", [AttnRes, MSAR, WriteBack])
def test_full_form_is_blocks_of_one_sublayer(strategy):
    x = embedding()
    full = ToyModel(built(strategy(block_size=1)))
    state = full.run(full.residual.begin(x), 0, 6)
    assert len(state) == 7
    wide = ToyModel(built(strategy(block_size=6)))
    assert len(wide.run(wide.residual.begin(x), 0, 6)) == 2


@pytest.mark.parametrize("strategy", [AttnRes, MSAR, WriteBack])
def test_a_block_size_below_one_is_refused(strategy):
    with pytest.raises(ValueError, match="block_size must be at least 1"):
        strategy(block_size=0)


@pytest.mark.parametrize("strategy", [AttnRes, MSAR])
def test_an_unknown_kernel_choice_is_refused(strategy):
    with pytest.raises(ValueError, match="kernels must be one of auto, triton, reference, compiled, got 'fast'"):
        strategy(kernels="fast")


@pytest.mark.parametrize("strategy", [AttnRes, MSAR, WriteBack])
def test_depth_weights_times_sources_is_what_the_read_gives(strategy):
    """`inspect` must not drift from `read`: its weights and gates rebuild what the read gives."""
    model = ToyModel(built(strategy(block_size=2)))
    state = model.run(model.residual.begin(embedding()), 0, 5)
    site = model.sites[5]
    weights = model.residual.inspect(state, site)["weights"]  # [B, T, m, N]
    if strategy is AttnRes:
        expected = torch.einsum("btn,nbtd->btd", weights[:, :, 0], torch.stack(state))
    elif strategy is WriteBack:
        retrieved = torch.einsum("btmn,nbtmd->btmd", weights, torch.stack(state))
        expected = torch.einsum("btm,btmd->btd", model.residual.inspect(state, site)["gates"], retrieved)
    else:
        taps = model.residual.source_taps(site)
        streams = [reference.expand(s, w, model.residual.kernel_sizes) for s, w in zip(state, taps, strict=True)]
        retrieved = torch.einsum("btmn,nbtmd->btmd", weights, torch.stack(streams))
        expected = torch.einsum("btm,btmd->btd", model.residual.inspect(state, site)["gates"], retrieved)
    torch.testing.assert_close(model.residual.read(state, site)[0], expected)
