"""Which sample comes when: pure functions of (seed, position), without tables that grow with the corpus.

A permutation of [0, n) is a balanced Feistel network over the next even number of bits, walked until it lands below n.
Each epoch, and in a mixture each set, has its own keys. A mixture repeats a pattern of a million positions that holds
each set exactly by its weight.
"""

import numpy as np

PERIOD = 1_000_000  # positions of a mixture's pattern: every window of this length has the exact counts
ROUNDS = 6
LOOKAHEAD = 1024  # positions computed at once
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix64(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: a bijection of uint64 in which every input bit moves every output bit. Any shape."""
    with np.errstate(over="ignore"):
        x = (x + _GOLDEN).astype(np.uint64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def stream_key(*parts: int) -> np.uint64:
    """One key from several integers, order mattering."""
    key = np.zeros(1, dtype=np.uint64)
    for part in parts:
        key = mix64(key ^ np.uint64(part & 0xFFFFFFFFFFFFFFFF))
    return key[0]


def permute(index: np.ndarray, n: int, key: int | np.uint64) -> np.ndarray:
    """Maps [0, n) onto itself.

    Args:
        index: [m] integers in [0, n).
        n: size of the range, up to 2^62.
        key: which permutation.
    Returns:
        [m] int64 in [0, n); distinct for distinct indices under one key.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    round_keys = [stream_key(int(key), r) for r in range(ROUNDS)]
    x = np.asarray(index).astype(np.uint64)
    todo = np.arange(x.size)  # walked until below n: the network's range is at most 4 n
    while todo.size:
        left, right = x[todo] >> shift, x[todo] & mask
        for round_key in round_keys:
            left, right = right, left ^ (mix64(right ^ round_key) & mask)
        x[todo] = (left << shift) | right
        todo = todo[x[todo] >= np.uint64(n)]
    return x.astype(np.int64)


def permute_epochs(draws: np.ndarray, n: int, *seed: int) -> np.ndarray:
    """The index in [0, n) at each draw of an endless sequence that is reshuffled every n draws. [m] -> [m] int64."""
    epochs, index = np.divmod(draws, n)
    out = np.empty(len(draws), dtype=np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        out[here] = permute(index[here], n, stream_key(*seed, int(epoch)))
    return out


class Shuffle:
    """All samples of all sets as one pool, reshuffled each epoch.

    Args:
        sizes: samples of each set.
        seed: changes every epoch's order.
    Attributes:
        epoch_samples: samples of an epoch.
    """

    def __init__(self, sizes: list[int], seed: int) -> None:
        self.epoch_samples = sum(sizes)
        self._seed = seed
        self._bounds = np.cumsum([0, *sizes])

    def __call__(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Set and sample within the set of each position of the run, [m] int64 each."""
        picked = permute_epochs(np.asarray(positions, dtype=np.int64), self.epoch_samples, self._seed)
        sets = np.searchsorted(self._bounds, picked, side="right") - 1
        return sets, picked - self._bounds[sets]


class Mixture:
    """Sets drawn by weight, each reshuffled whenever it has been used up.

    The weights are rounded to millionths; every window of a million positions holds exactly that many samples of each
    set, and any shorter one is within a few samples of its share.

    Args:
        sizes: samples of each set.
        weights: of each set, in any unit; zero leaves a set out.
        seed: changes pattern and orders.
    Attributes:
        quotas: samples of each set in a window of a million.
        epoch_samples: samples of all sets with a weight; a length for epochs, no promise that each set was seen once.
    """

    def __init__(self, sizes: list[int], weights: list[float], seed: int) -> None:
        self._sizes = np.array(sizes, dtype=np.int64)
        self._seed = seed
        self.quotas = quotas_of(weights)
        self.epoch_samples = int(self._sizes[self.quotas > 0].sum())
        # Draw j of a set with quota q lies at a random point of [j/q, (j+1)/q): even over the pattern, and no beat with
        # batch or rank.
        members = np.repeat(np.arange(len(sizes), dtype=np.int16), self.quotas)
        ranks = np.arange(PERIOD) - np.repeat(np.cumsum(self.quotas) - self.quotas, self.quotas)
        jitter = mix64(np.arange(PERIOD, dtype=np.uint64) ^ stream_key(seed, 0xA11CE)).astype(np.float64) / 2.0**64
        order = np.argsort((ranks + jitter) / self.quotas[members], kind="stable")
        self._members, self._ranks = members[order], ranks[order].astype(np.int32)  # 6 MB, whatever the corpus

    def __call__(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Set and sample within the set of each position of the run, [m] int64 each."""
        period, at = np.divmod(np.asarray(positions, dtype=np.int64), PERIOD)
        sets = self._members[at].astype(np.int64)
        draw = period * self.quotas[sets] + self._ranks[at]  # how often the set was drawn before
        samples = np.empty(len(sets), dtype=np.int64)
        for s in np.unique(sets):
            here = sets == s
            samples[here] = permute_epochs(draw[here], int(self._sizes[s]), self._seed, int(s) + 1)
        return sets, samples


class Lookahead:
    """The order of one reader's batches, computed about a thousand positions at a time.

    NumPy costs half a millisecond per call however few positions are asked for; this way a sample costs a microsecond.

    Args:
        order: of the run.
        batch_size: positions of a batch.
        stride: positions from one batch of this reader to its next.
    """

    def __init__(self, order: Shuffle | Mixture, batch_size: int, stride: int) -> None:
        self._order, self._batch_size, self._stride = order, batch_size, stride
        self._first = 0  # of the batches kept
        self._kept: list[tuple[np.ndarray, np.ndarray]] = []

    def __call__(self, first: int) -> tuple[np.ndarray, np.ndarray]:
        """Set and sample within the set of the positions [first, first + batch_size), [batch_size] int64 each."""
        k, beside = divmod(first - self._first, self._stride)
        if beside or not 0 <= k < len(self._kept):
            n = -(-LOOKAHEAD // self._batch_size)
            starts = first + self._stride * np.arange(n)
            sets, samples = self._order((starts[:, None] + np.arange(self._batch_size)).ravel())
            shape = (n, self._batch_size)
            self._first, self._kept = first, list(zip(sets.reshape(shape), samples.reshape(shape), strict=True))
            k = 0
        return self._kept[k]


def quotas_of(weights: list[float]) -> np.ndarray:
    """Whole millionths of each weight, summing to a million (by largest remainders). [sets] int64."""
    shares = np.array(weights, dtype=np.float64) / np.sum(weights) * PERIOD
    quotas = np.floor(shares).astype(np.int64)
    order = np.argsort(-(shares - quotas), kind="stable")
    quotas[order[: PERIOD - int(quotas.sum())]] += 1
    return quotas
