"""What the Trainer iterates over: this rank's batches, in one global order whatever the ranks and threads.

Threads load, not processes: reading and converting release the interpreter lock, a batch need not pass through shared
memory (157M against 18M tokens/s at 8192 tokens, 2 cores), nothing is forked beside CUDA, and errors arrive as raised.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from data.order import Lookahead, permute
from data.split import IGNORE, TokenSplit

if TYPE_CHECKING:
    from lit_msar.training.datamodule import TokenData

Batch = dict[str, Tensor]
Item = TypeVar("Item")
Picks = tuple[np.ndarray, np.ndarray]  # set (or -1 for a masked row) and sample of each row of a batch
VAL_KEY = 0  # of the validation order, whatever the seed: any first batches are a fair sample of all sets
FEWEST_DOCUMENTS = 16  # that the boundaries of a batch have room for
AHEAD = 4  # batches loaded ahead by each thread


class TrainLoader:
    """This rank's micro-batches from the module's position on, without end; its length is one epoch.

    An epoch is rounded up to whole optimizer steps, so no step is smaller than the others; what it takes from the next
    shuffling of the data, the next epoch does not see again. Not a `DataLoader`, so that Lightning leaves it as it is.
    """

    def __init__(self, data: "TokenData") -> None:
        self._data = data
        self._stream: Iterator[Batch] | None = None
        self._next = 0  # position of the micro-batch that comes next from the stream

    def __len__(self) -> int:
        data = self._data
        steps = math.ceil(data.order.epoch_samples / data.step_samples)
        return steps * data.step_samples // (data.batch_size * data.shard()[1])

    def __iter__(self) -> "TrainLoader":
        if getattr(self._data.trainer, "overfit_batches", 0):
            self._data.position = 0  # the same batches in each epoch
        if self._next != self._data.position + self._data._pending:
            self.close()
        return self

    def __next__(self) -> Batch:
        data = self._data
        rank, n_ranks = data.shard()
        stride = data.batch_size * n_ranks
        if self._stream is None:  # only now: a checkpoint may have been loaded after iter()
            self._next = data.position + data._pending
            order = Lookahead(data.order, data.batch_size, stride)
            picks = map(order, count(self._next + rank * data.batch_size, stride))
            self._stream = in_order(Reader(data, data.train_split), picks, data.workers)
        self._next += stride
        return next(self._stream)

    def close(self) -> None:
        """Forgets what was loaded ahead; the next batch starts anew from the module's position."""
        if self._stream is not None:
            self._stream.close()
        self._stream = None

    # Lightning asks whether a loader can resume. It can, but not through rank 0's copy of its state:
    # `TokenData.state_dict` has it.

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load, see `state_dict`."""


class ValLoader:
    """This rank's validation batches: each sample once over all ranks, in a fixed order, all ranks equally many.

    Past the last sample rows are masked.
    """

    def __init__(self, data: "TokenData") -> None:
        self._data = data
        self._sizes = np.array(data.val_split.sizes)
        self._counts = np.minimum(self._sizes, data.val_samples or self._sizes.max())
        self._bounds = np.cumsum([0, *self._counts])

    def __len__(self) -> int:
        return math.ceil(int(self._bounds[-1]) / (self._data.val_batch_size * self._data.shard()[1]))

    def __iter__(self) -> Iterator[Batch]:
        picks = map(self._picks, range(len(self)))
        return in_order(Reader(self._data, self._data.val_split), picks, self._data.workers)

    def _picks(self, batch: int) -> Picks:
        rank, n_ranks = self._data.shard()
        size, n = self._data.val_batch_size, int(self._bounds[-1])
        index = (batch * n_ranks + rank) * size + np.arange(size)
        real = index < n
        index = permute(np.where(real, index, 0), n, VAL_KEY)
        sets = np.searchsorted(self._bounds, index, side="right") - 1
        spaced = (index - self._bounds[sets]) * self._sizes[sets] // self._counts[sets]
        return np.where(real, sets, -1), spaced


class Reader:
    """Reads picked samples of a split as a batch."""

    def __init__(self, data: "TokenData", split: TokenSplit) -> None:
        self._split, self._with_position = split, data.reset_at_document
        self._set_ids = np.array([data.set_names.index(s.name) for s in split.sets], dtype=np.int64)
        self._pin = torch.cuda.is_available()

    def __call__(self, picks: Picks) -> Batch:
        sets, samples = picks
        arrays = self._split.batch(sets, samples, self._with_position) | {"set_id": self._set_ids[np.maximum(sets, 0)]}
        if self._with_position:
            arrays["position"] = count_padding(arrays["position"], arrays["targets"])
            arrays["boundaries"] = document_boundaries(arrays["position"])
        batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return {name: tensor.pin_memory() for name, tensor in batch.items()} if self._pin else batch


def count_padding(position: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """`position` [B, T] with the padding at a row's end counted up: one more document, not one for each of its tokens.

    Args:
        targets: [B, T], -100 where masked, as all padding is.
    """
    is_padding = (targets == IGNORE) & (position == 0)
    at_end = np.logical_and.accumulate(is_padding[:, ::-1], axis=1)[:, ::-1]
    return position + np.where(at_end, at_end.cumsum(1) - 1, 0)


def document_boundaries(position: np.ndarray) -> np.ndarray:
    """Where documents begin and end in a batch whose rows are laid end to end.

    Args:
        position: [B, T], 0 where a document begins; a row begins one too.
    Returns:
        [n + 1] int32, ascending from 0 to B T, repeated at the end until n is a power of two: so few lengths occur that
        little is allocated or compiled anew.
    """
    begins = position == 0
    begins[:, 0] = True
    starts = np.flatnonzero(begins)
    n = max(FEWEST_DOCUMENTS, 1 << (len(starts) - 1).bit_length())
    boundaries = np.full(n + 1, position.size, dtype=np.int32)
    boundaries[: len(starts)] = starts
    return boundaries


def in_order(load: Callable[[Item], Batch], items: Iterable[Item], threads: int) -> Iterator[Batch]:
    """Loads items in threads, a few ahead of what is asked for, and yields them in order; without threads, one by one.

    What `load` raises is raised in its item's place.
    """
    if not threads:
        yield from map(load, items)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="load")
    pending: deque = deque()
    try:
        for item in items:
            pending.append(pool.submit(load, item))
            if len(pending) > AHEAD * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
