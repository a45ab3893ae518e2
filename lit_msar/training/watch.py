"""A rank that fails takes the others down within seconds, and its own error is the last on the screen.

Collectives wait for a missing rank until their time-out. So the first rank that fails says so in the process group's
store; the others look there twice a second and leave without a word.
"""

import faulthandler
import os
import sys
import threading
import time

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from lit_msar.errors import StopTraining

COUNT, RANK = "lit_msar/failures", "lit_msar/failed_rank"
"""Keys in the store."""
POLL_SECONDS = 0.5
LINGER_SECONDS = 2.0
"""A failing rank keeps its connections so long, lest the others' libraries print errors about them after its own."""
PATIENCE_SECONDS = 4.0
"""The others wait so long for a rank to print its error; not for rank 0, whose end they would only see as lost
connections."""
ELASTIC_SECONDS = 15.0
"""torchrun ends all ranks of its node itself, and blames the one that ends first: leave that to it at first."""
HANG_SECONDS = 10
"""After an error, a process that has not ended by then is ended: the process group's destructor may wait for others."""


class FailureWatch:
    """Watches for the failure of any rank from `__init__` to `stop`."""

    def __init__(self) -> None:
        self._store = _get_default_store().clone()  # a connection of its own: the main thread's may be waiting
        self._is_elastic = dist.is_torchelastic_launched()
        self._stopped = threading.Event()
        self.has_failed = False
        threading.Thread(target=self._run, name="failure watch", daemon=True).start()

    def stop(self) -> None:
        """Watch no more: what the others do from now on is not this rank's business."""
        self._stopped.set()

    def report(self, error: BaseException) -> None:
        """Tell the others that this rank failed. Returns for the rank whose error is to be shown; ends any other.

        A `StopTraining` is raised on all ranks: rank 0's is shown.
        """
        self.stop()
        exit_code = getattr(error, "exit_code", 1)
        if isinstance(error, StopTraining):
            if dist.get_rank():
                time.sleep(LINGER_SECONDS)
                _leave(exit_code)
            return
        try:
            is_first = self._store.add(COUNT, 1) == 1
            if is_first:
                self._store.set(RANK, str(dist.get_rank()))
        except RuntimeError:  # the store went with the rank that failed first
            is_first = False
        if not is_first:
            if self._is_elastic:  # this error may come of the other rank's end: let torchrun see that end first
                time.sleep(PATIENCE_SECONDS)
            _leave(exit_code)
        faulthandler.dump_traceback_later(LINGER_SECONDS + HANG_SECONDS, exit=True, file=open(os.devnull, "w"))
        if self._is_elastic:
            get_error_handler().record_exception(error)  # torchrun shows it under the ranks it had to end
        else:
            time.sleep(LINGER_SECONDS)

    def _run(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            try:
                self.has_failed = self._store.check([RANK])
                failed_rank = int(self._store.get(RANK)) if self.has_failed else None
            except RuntimeError:  # the process that keeps the store is gone
                self.has_failed, failed_rank = True, None
            if self.has_failed:
                self._follow(failed_rank)
                return

    def _follow(self, failed_rank: int | None) -> None:
        if failed_rank == 0 and not self._is_elastic:
            _leave(0)  # rank 0 tells the exit code; a parent would kill itself over another one before it prints
        if not self._stopped.wait(ELASTIC_SECONDS if self._is_elastic else PATIENCE_SECONDS):
            _leave(1)


def _leave(exit_code: int) -> None:
    sys.stdout.flush()
    os._exit(exit_code)
