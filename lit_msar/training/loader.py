"""What the Trainer iterates over: this rank's batches, in one global order whatever the ranks and workers."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from data.order import Lookahead, permute
from data.split import TokenSplit

if TYPE_CHECKING:
    from lit_msar.training.datamodule import TokenData

Batch = dict[str, Tensor]
VAL_KEY = 0  # of the validation order, whatever the seed: any first batches are a fair sample of all sets


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
        if self._stream is not None and self._next != self._data.position + self._data._pending:
            self.close()
        return self

    def __next__(self) -> Batch:
        data = self._data
        stride = data.batch_size * data.shard()[1]
        if self._stream is None:  # only now: a checkpoint may have been loaded after iter()
            self._next = data.position + data._pending
            self._stream = iter(_loader(TrainBatches(data), _Count(self._next, stride), data.workers))
        self._next += stride
        return next(self._stream)

    def close(self) -> None:
        """Ends the loading processes; the next batch starts them again."""
        self._stream = None

    # Lightning asks whether a loader can resume. It can, but not through rank 0's copy of its state:
    # `TokenData.state_dict` has it.

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load, see `state_dict`."""


class ValLoader:
    """This rank's validation batches: each sample once over all ranks, in a fixed order, all ranks equally many."""

    def __init__(self, data: "TokenData") -> None:
        self._batches = ValBatches(data)
        self._workers = data.workers

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(_loader(self._batches, range(len(self._batches)), self._workers))


class TrainBatches(Dataset):
    """The micro-batch of one rank that begins at a position of the run."""

    def __init__(self, data: "TokenData") -> None:
        rank, n_ranks = data.shard()
        self.split, self.position = data.train_split, data.reset_at_document
        self.offset = rank * data.batch_size
        self.order = Lookahead(data.order, data.batch_size, data.batch_size * n_ranks)
        self.set_ids = _set_ids(data, data.train_split)

    def __getitem__(self, start: int) -> dict[str, np.ndarray]:
        sets, samples = self.order(start + self.offset)
        return self.split.batch(sets, samples, self.position) | {"set_id": self.set_ids[sets]}


class ValBatches(Dataset):
    """Batch b of one rank; past the last sample rows are masked, so that all ranks have the same number of batches."""

    def __init__(self, data: "TokenData") -> None:
        self.rank, self.n_ranks = data.shard()
        self.split, self.position = data.val_split, data.reset_at_document
        self.batch_size = data.val_batch_size
        self.set_ids = _set_ids(data, data.val_split)
        self.counts = np.minimum(self.split.sizes, data.val_samples or max(self.split.sizes))
        self.bounds = np.cumsum([0, *self.counts])

    def __len__(self) -> int:
        return math.ceil(int(self.bounds[-1]) / (self.batch_size * self.n_ranks))

    def __getitem__(self, batch: int) -> dict[str, np.ndarray]:
        first = (batch * self.n_ranks + self.rank) * self.batch_size
        index = np.arange(first, first + self.batch_size)
        n = int(self.bounds[-1])
        real = index < n
        index = permute(np.where(real, index, 0), n, VAL_KEY)
        sets = np.searchsorted(self.bounds, index, side="right") - 1
        spaced = (index - self.bounds[sets]) * np.array(self.split.sizes)[sets] // self.counts[sets]
        arrays = self.split.batch(np.where(real, sets, -1), spaced, self.position)
        return arrays | {"set_id": self.set_ids[sets]}


class _Count:
    """start, start + step, ... without end."""

    def __init__(self, start: int, step: int) -> None:
        self._start, self._step = start, step

    def __iter__(self) -> Iterator[int]:
        at = self._start
        while True:
            yield at
            at += self._step


def _set_ids(data: "TokenData", split: TokenSplit) -> np.ndarray:
    """Index into `set_names` of each of the split's sets."""
    return np.array([data.set_names.index(s.name) for s in split.sets], dtype=np.int64)


def _loader(batches: Dataset, sampler: Any, workers: int) -> DataLoader:
    """A DataLoader whose every item is a whole batch."""
    return DataLoader(
        batches,
        batch_size=None,
        sampler=sampler,
        num_workers=workers,
        collate_fn=_tensors,
        pin_memory=torch.cuda.is_available(),
        prefetch_factor=4 if workers else None,
    )


def _tensors(arrays: dict[str, np.ndarray]) -> Batch:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
