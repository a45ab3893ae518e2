import numpy as np
import pytest
import torch
from strategies import ToyModel, built, embedding

from kernels import reference
from lit_msar.residual import AttnRes


def rms_norm(v: np.ndarray) -> np.ndarray:
    return v / np.sqrt((v * v).mean(-1, keepdims=True) + 1e-5)


def softmax(e: np.ndarray) -> np.ndarray:
    return np.exp(e) / np.exp(e).sum(0)


def attnres_in_numpy(model: ToyModel, x: np.ndarray, block_size: int) -> np.ndarray:
    """h_l = sum_i softmax_i(q_l . RMSNorm(v_i) gain) v_i over [embedding, blocks, partial sum] (Eq. 2 to 6)."""
    query, gain = ([p.detach().numpy() for p in values] for values in (model.residual.query, model.residual.key_gain))
    blocks, partial, n_sublayers = [x], [], model.residual.n_sublayers
    for index in range(n_sublayers + 1):
        v = np.stack(blocks + partial)
        h = (softmax(rms_norm(v) * gain[index] @ query[index])[..., None] * v).sum(0)
        if index < n_sublayers:
            partial = [sum(partial) + np.tanh(h @ model.weights[index].numpy())]
        if (index + 1) % block_size == 0:
            blocks, partial = blocks + partial, []
    return h


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_attnres_equals_a_transcription_of_its_formula(block_size):
    model, x = ToyModel(built(AttnRes(block_size), n_layers=5)), embedding()
    np.testing.assert_allclose(
        model(x).detach().numpy(), attnres_in_numpy(model, x.numpy(), block_size), rtol=1e-11, atol=1e-12
    )


def test_channel_heads_weigh_their_slices_by_a_norm_over_all_channels():
    model, x = ToyModel(built(AttnRes(block_size=2, n_depth_heads=4))), embedding()
    state = model.run(model.residual.begin(x), 0, 5)
    read = model.residual.read(state, model.sites[5])[0].detach().numpy()
    v = np.stack([source.detach().numpy() for source in state])  # [N, B, T, D]
    scored = rms_norm(v) * (model.residual.query[5] * model.residual.key_gain[5]).detach().numpy()
    for head in range(4):
        channels = slice(2 * head, 2 * head + 2)
        weights = softmax(scored[..., channels].sum(-1))
        np.testing.assert_allclose(read[..., channels], (weights[..., None] * v[..., channels]).sum(0), rtol=1e-11)


def test_one_channel_head_is_the_plain_form():
    sources = [embedding() for _ in range(3)]
    query, gain = torch.randn(2, 8, dtype=torch.float64)
    torch.testing.assert_close(
        reference.split_head_read(sources, query, gain, 1, 1e-5), reference.attnres_read(sources, query, gain, 1e-5)
    )


def test_key_gain_folds_into_the_query():
    x = embedding()
    with_gain, without = (ToyModel(built(AttnRes(block_size=2, key_gain=gain))) for gain in (True, False))
    with torch.no_grad():
        for query, gain, folded in zip(
            with_gain.residual.query, with_gain.residual.key_gain, without.residual.query, strict=True
        ):
            folded.copy_(query * gain)
    torch.testing.assert_close(without(x), with_gain(x))


def test_attnres_adds_a_query_and_a_key_gain_per_read():
    strategy = built(AttnRes(), d_model=24, n_layers=5)
    assert sum(p.numel() for p in strategy.parameters()) == 11 * 2 * 24


def test_the_start_is_zero_queries_and_unit_gains():
    strategy = built(AttnRes(), spread=0.0)
    assert not any(query.any() for query in strategy.query)
    assert all((gain == 1).all() for gain in strategy.key_gain)


def test_channel_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="n_depth_heads=3 must divide d_model=8"):
        AttnRes(n_depth_heads=3).build(8, 2)
    with pytest.raises(ValueError, match="n_depth_heads must be at least 1, got 0"):
        AttnRes(n_depth_heads=0)
