"""Loading ahead keeps order, raises in place and stops when told."""

import threading
import time

import numpy as np
import pytest
import torch
from training.conftest import data_of

from lit_msar.training.loader import AHEAD, count_padding, document_boundaries, in_order


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_items_come_in_order_whoever_is_faster(threads: int) -> None:
    def load(i: int) -> int:
        time.sleep(0.001 * (i % 3))
        return i * i

    assert list(in_order(load, range(40), threads)) == [i * i for i in range(40)]


@pytest.mark.parametrize("threads", [0, 2])
def test_an_error_is_raised_in_its_place(threads: int) -> None:
    def load(i: int) -> int:
        if i == 5:
            raise FileNotFoundError("shard-00005.bin")
        return i

    stream = in_order(load, range(9), threads)
    assert [next(stream) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(FileNotFoundError, match=r"^shard-00005.bin$"):
        next(stream)


def test_endless_items_are_loaded_a_few_ahead_and_no_more_once_closed() -> None:
    loaded: list[int] = []

    def endless():
        i = 0
        while True:
            yield i
            i += 1

    stream = in_order(lambda i: loaded.append(i) or i, endless(), 2)
    assert [next(stream) for _ in range(10)] == list(range(10))
    time.sleep(0.05)
    assert len(loaded) <= 10 + 2 * AHEAD + 1
    stream.close()
    n = len(loaded)
    time.sleep(0.05)
    assert len(loaded) == n
    assert not [t for t in threading.enumerate() if t.name.startswith("load")]


def test_padding_counts_as_one_document():
    position = np.array([[0, 1, 2, 0, 0, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0]])
    targets = np.array([[5, 5, -100, -100, -100, -100], [5, 5, 5, 5, 5, 5], [-100] * 6])
    counted = count_padding(position, targets)
    assert counted.tolist() == [[0, 1, 2, 0, 1, 2], [0, 0, 0, 0, 1, 0], [0, 1, 2, 3, 4, 5]]


def test_boundaries_are_the_documents_of_all_rows_end_to_end():
    position = np.array([[0, 1, 2, 0, 1], [7, 8, 0, 0, 1]])  # the second row begins inside a document
    boundaries = document_boundaries(position)
    assert boundaries.dtype == np.int32
    assert boundaries.tolist() == [0, 3, 5, 7, 8] + [10] * 12
    assert document_boundaries(np.zeros((1, 17), dtype=np.int64)).tolist() == [*range(17), *[17] * 16]


def test_batches_of_packed_documents_carry_their_boundaries(prepared):
    data = data_of(prepared, seq_len=64, reset_at_document=True)
    batch = next(iter(data.train_dataloader()))
    starts = set(torch.nonzero(batch["position"].flatten() == 0).flatten().tolist()) | {64 * row for row in range(4)}
    assert sorted(starts) == sorted(set(batch["boundaries"].tolist()) - {256})
