import numpy as np
import pytest
import torch
from conftest import small_decoder

from lit_msar.analysis.depth import depth_maps
from lit_msar.analysis.plots import depth_figure
from lit_msar.residual import MHC, MSAR, AttnRes, Vanilla


def test_maps_of_zero_queries_are_the_uniform_mean_over_what_a_read_sees():
    maps = depth_maps(small_decoder(MSAR(block_size=2)), torch.randint(97, (2, 9)))
    assert maps.weights.shape == (4, 7, 4)
    for read, n_sources in enumerate((1, 2, 2, 3, 3, 4, 4)):
        np.testing.assert_allclose(maps.weights[:, read, :n_sources], 1 / n_sources, rtol=1e-6)
        assert np.isnan(maps.weights[:, read, n_sources:]).all()
    assert maps.gates.shape == (7, 4)
    np.testing.assert_allclose(maps.gates, 0.25, atol=0.02)


def test_observing_changes_no_output():
    model = small_decoder(MSAR(block_size=2))
    tokens = torch.randint(97, (2, 9))
    before = model(tokens).logits
    depth_maps(model, tokens)
    assert torch.equal(before, model(tokens).logits)


@pytest.mark.parametrize(
    ("residual", "shape"),
    [(Vanilla, (0, 7, 0)), (MHC, (0, 7, 0)), (AttnRes, (1, 7, 4))],
    ids=["vanilla", "mhc", "attnres"],
)
def test_maps_of_other_strategies(residual, shape):
    assert depth_maps(small_decoder(residual()), torch.randint(97, (1, 5))).weights.shape == shape


def test_figure_has_a_panel_per_stream():
    maps = depth_maps(small_decoder(MSAR(block_size=2)), torch.randint(97, (1, 5)))
    titles = [axis.get_title() for axis in depth_figure(maps).axes]
    assert titles[:4] == [f"stream {j}" for j in range(1, 5)]
