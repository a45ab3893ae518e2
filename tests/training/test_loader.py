"""Loading ahead keeps order, raises in place and stops when told."""

import threading
import time

import pytest

from lit_msar.training.loader import AHEAD, in_order


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
