import numpy as np
import pytest
import torch
from strategies import ToyModel, built, embedding

from lit_msar.residual import MSAR, AttnRes


def rms_norm(v: np.ndarray, axis) -> np.ndarray:
    return v / np.sqrt((v * v).mean(axis, keepdims=True) + 1e-5)


def views(s: np.ndarray, taps: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    """u_j[t] = sum_{i<k_j} w_j[i] s[t - i] of a source [B, T, D]; width 1 is the source. [m, B, T, D]."""
    streams, row = [], 0
    for k in sizes:
        w, row = (taps[row : row + k], row + k) if k > 1 else (np.ones((1, s.shape[-1])), row)
        streams.append([sum(w[i] * s[:, t - i] for i in range(k) if i <= t) for t in range(s.shape[1])])
    return np.moveaxis(np.array(streams), 1, 2)


def msar_in_numpy(model: ToyModel, x: np.ndarray) -> np.ndarray:
    """Steps 1 to 5 of the method, a source kept with the number of the sublayer that wrote it last."""
    residual, n_sublayers = model.residual, model.residual.n_sublayers
    p = {name: value.detach().numpy() for name, value in residual.named_parameters()}
    blocks, partial = [(x, 0)], []
    for index in range(n_sublayers + 1):
        groups = [index if residual.reader_owns_convs else writer for _, writer in blocks + partial]
        sources = zip([s for s, _ in blocks + partial], groups, strict=True)
        u = np.stack([views(s, p[f"taps.{group}"], residual.kernel_sizes) for s, group in sources])  # [N, m, B, T, D]
        e = np.einsum("nmbtd,md->nmbt", rms_norm(u, -1), p[f"query.{index}"])
        r = np.einsum("nmbt,nmbtd->mbtd", np.exp(e) / np.exp(e).sum(0), u)
        logits = np.einsum("jbtd,kjd->kbt", rms_norm(r, (0, -1)), p[f"mix_weight.{index}"])
        logits = p[f"mix_scale.{index}"] * logits + p[f"mix_bias.{index}"][:, None, None]
        g = 1 / (1 + np.exp(-logits)) if residual.gate == "sigmoid" else np.exp(logits) / np.exp(logits).sum(0)
        h = np.einsum("mbt,mbtd->btd", g, r)
        if index < n_sublayers:
            written = sum(s for s, _ in partial) + np.tanh(h @ model.weights[index].numpy())
            partial = [(written, index + 1)]
        if (index + 1) % residual.block_size == 0:
            blocks, partial = blocks + partial, []
    return h


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("conv_owner", ["producer", "reader"])
def test_msar_equals_a_transcription_of_its_formula(conv_owner, block_size, gate):
    strategy = MSAR(block_size, kernel_sizes=(1, 2, 5), conv_owner=conv_owner, gate=gate)
    model, x = ToyModel(built(strategy)), embedding()
    np.testing.assert_allclose(model(x).detach().numpy(), msar_in_numpy(model, x.numpy()), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("block_size", [1, 4])
def test_one_stream_equals_attnres_without_key_gain(block_size):
    x = embedding()
    msar = ToyModel(built(MSAR(block_size, kernel_sizes=(1,))))
    attnres = ToyModel(built(AttnRes(block_size, key_gain=False)))
    with torch.no_grad():
        for query, row in zip(attnres.residual.query, msar.residual.query, strict=True):
            query.copy_(row[0])
    torch.testing.assert_close(msar(x), attnres(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("conv_owner", ["producer", "reader"])
@pytest.mark.parametrize("block_size", [1, None], ids=["full", "block"])
def test_msar_adds_44_widths_and_5_values_per_read(conv_owner, block_size):
    D, n_layers = 24, 5
    strategy = built(MSAR(block_size, conv_owner=conv_owner), d_model=D, n_layers=n_layers)
    assert sum(p.numel() for p in strategy.parameters()) == (2 * n_layers + 1) * (44 * D + 5)


def test_the_start_is_zero_queries_uniform_taps_and_even_gates():
    strategy = built(MSAR(), d_model=512, n_layers=1, spread=0.0)
    assert not any(query.any() for query in strategy.query)
    for taps in strategy.taps:
        for row, k in ((slice(0, 4), 4), (slice(4, 12), 8), (slice(12, 24), 12)):
            assert taps[row].abs().max() <= k**-0.5
            assert taps[row].std().item() == pytest.approx((3 * k) ** -0.5, rel=0.05)
    assert all(scale.item() == pytest.approx(0.01) for scale in strategy.mix_scale)
    assert all(weight.std().item() == pytest.approx(0.02, rel=0.05) for weight in strategy.mix_weight)
    state = strategy.begin(embedding(D=512))
    gates = strategy.inspect(state, ToyModel(strategy).sites[0])["gates"]
    torch.testing.assert_close(gates, torch.full_like(gates, 0.25), rtol=0.02, atol=0)


def test_the_delta_start_is_near_the_source_itself():
    strategy = built(MSAR(conv_init="delta"), d_model=512, n_layers=1, spread=0.0)
    for taps in strategy.taps:
        copies = torch.zeros(24, 512, dtype=torch.float64)
        copies[[0, 4, 12]] = 1
        assert (taps - copies).std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
@pytest.mark.parametrize("kernel_sizes", [(1, 4), (1, 4, 8, 12), (1, 2, 4, 6, 8, 12, 16, 24)])
def test_gates_start_at_one_over_m(gate, kernel_sizes):
    m = len(kernel_sizes)
    strategy = built(MSAR(kernel_sizes=kernel_sizes, gate=gate), spread=0.0)
    bias = strategy.mix_bias[0]
    gates = torch.sigmoid(bias) if gate == "sigmoid" else torch.softmax(bias, 0)
    torch.testing.assert_close(gates, torch.full_like(gates, 1 / m))


def test_frozen_queries_stay_zero_and_untrained():
    strategy = built(MSAR(train_queries=False))
    assert not any(query.requires_grad or query.any() for query in strategy.query)


def test_without_convs_there_are_no_taps():
    strategy = built(MSAR(kernel_sizes=(1, 1, 1, 1)), d_model=24)
    assert sum(p.numel() for p in strategy.parameters()) == 7 * (20 * 24 + 5)


@pytest.mark.parametrize(
    ("kernel_sizes", "message"),
    [
        ((4, 1), r"kernel_sizes must start with 1 \(the identity stream\), got \[4, 1\]"),
        ((), "kernel_sizes must start with 1"),
        ((1, 0), r"kernel_sizes must be positive conv widths, got \[1, 0\]"),
    ],
)
def test_bad_kernel_sizes_are_refused(kernel_sizes, message):
    with pytest.raises(ValueError, match=message):
        MSAR(kernel_sizes=kernel_sizes)
