"""Permutations are permutations, epochs are complete, mixtures are exact."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.order import PERIOD, Mixture, Shuffle, permute, quotas_of


@settings(max_examples=150, deadline=None)
@given(n=st.integers(1, 3000), key=st.integers(0, 2**63))
def test_permute_is_a_bijection(n: int, key: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, key)), np.arange(n))


@pytest.mark.parametrize("n", [2**40 + 1, 2**61 - 7], ids=["trillion", "2^61"])
def test_permute_of_huge_ranges_stays_inside_without_collisions(n: int) -> None:
    index = np.concatenate([np.arange(50_000), n - 1 - np.arange(50_000)])
    out = permute(index, n, 7)
    assert out.min() >= 0
    assert out.max() < n
    assert len(np.unique(out)) == len(out)
    # far from the identity: neighbours land anywhere
    assert abs(np.mean(out / n) - 0.5) < 0.005


def test_permute_is_uniform_over_keys() -> None:
    """Each of 12 values comes first, and follows each other one, as often as chance has it (chi-squared, 99.9 %)."""
    n, keys = 12, 3000
    orders = np.array([permute(np.arange(n), n, key) for key in range(keys)])
    for counts in (np.bincount(orders[:, 0], minlength=n), np.bincount((orders[:, 1] - orders[:, 0]) % n)[1:]):
        expected = keys / len(counts)
        assert ((counts - expected) ** 2 / expected).sum() < 31.3  # 11 degrees of freedom


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any),
    seed=st.integers(-5, 2**70),
    batch=st.integers(1, 17),
)
def test_each_epoch_holds_every_sample_once(sizes: list[int], seed: int, batch: int) -> None:
    order = Shuffle(sizes, seed)
    n = order.epoch_samples
    parts = [order(np.arange(at, at + batch)) for at in range(0, 3 * n, batch)]
    sets, samples = (np.concatenate(x)[: 3 * n] for x in zip(*parts, strict=True))
    everything = {(s, i) for s, size in enumerate(sizes) for i in range(size)}
    for epoch in range(3):
        here = slice(epoch * n, (epoch + 1) * n)
        assert set(zip(sets[here].tolist(), samples[here].tolist(), strict=True)) == everything


def test_seed_and_epoch_change_the_order() -> None:
    orders = {tuple(Shuffle([500], seed)(np.arange(e * 500, e * 500 + 500))[1]) for seed in range(3) for e in range(3)}
    assert len(orders) == 9


@settings(max_examples=10, deadline=None)
@given(
    weights=st.lists(st.floats(0.001, 1000), min_size=1, max_size=6),
    start=st.integers(0, 3 * PERIOD),
    seed=st.integers(0, 99),
)
def test_mixture_is_exact_in_any_window_of_a_million(weights: list[float], start: int, seed: int) -> None:
    order = Mixture([10**7] * len(weights), weights, seed)
    sets, _ = order(np.arange(start, start + PERIOD))
    counts = np.bincount(sets, minlength=len(weights))
    assert counts.tolist() == order.quotas.tolist()
    assert np.abs(counts / PERIOD - np.array(weights) / sum(weights)).max() <= 1e-6


def test_mixture_is_even_in_short_windows() -> None:
    order = Mixture([10_000, 10_000, 10_000], [0.5, 0.3, 0.2], seed=1)
    for start in (0, 1234, 999_900):
        sets, _ = order(np.arange(start, start + 200))
        assert np.abs(np.bincount(sets, minlength=3) - [100, 60, 40]).max() <= 3


def test_mixture_uses_up_a_set_before_it_repeats() -> None:
    order = Mixture([7, 300], [0.9, 0.1], seed=3)
    sets, samples = order(np.arange(3500))
    for s, size in ((0, 7), (1, 300)):
        drawn = samples[sets == s]
        epochs = [drawn[i : i + size] for i in range(0, len(drawn) - size + 1, size)]
        assert all(len(set(e.tolist())) == size for e in epochs)
        assert len(epochs) >= 1
    assert len({tuple(e) for e in (samples[sets == 0][:7], samples[sets == 0][7:14], samples[sets == 0][14:21])}) > 1


def test_mixture_gives_the_same_at_any_batching() -> None:
    order = Mixture([50, 60], [1, 2], seed=5)
    whole = order(np.arange(PERIOD - 50, PERIOD + 50))
    single = [order(np.array([i])) for i in range(PERIOD - 50, PERIOD + 50)]
    assert whole[0].tolist() == [int(s[0]) for s, _ in single]
    assert whole[1].tolist() == [int(i[0]) for _, i in single]


def test_quotas_sum_to_a_million_and_keep_zeros() -> None:
    quotas = quotas_of([1, 1, 1, 0])
    assert quotas.sum() == PERIOD
    assert quotas[3] == 0
    assert sorted(quotas.tolist()) == [0, 333_333, 333_333, 333_334]
