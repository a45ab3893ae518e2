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

KEY = "lit_msar/failures"
POLL_SECONDS = 0.5
LINGER_SECONDS = 2.0
"""The failing rank waits so long before it prints its error: the others are gone by then."""
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
            is_first = self._store.add(KEY, 1) == 1
        except RuntimeError:  # the store went with the rank that failed first
            is_first = False
        if not is_first:
            _leave(exit_code)
        faulthandler.dump_traceback_later(LINGER_SECONDS + HANG_SECONDS, exit=True, file=open(os.devnull, "w"))
        if self._is_elastic:
            get_error_handler().record_exception(error)  # torchrun shows it under the ranks it had to end
        else:
            time.sleep(LINGER_SECONDS)

    def _run(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            try:
                self.has_failed = self._store.check([KEY])
            except RuntimeError:
                self.has_failed = True
            if self.has_failed:
                break
        else:
            return
        # rank 0 may be the parent of the failing rank: it stays until the error is printed
        patience = LINGER_SECONDS + 2 if dist.get_rank() == 0 else 0.0
        if not self._stopped.wait(ELASTIC_SECONDS if self._is_elastic else patience):
            _leave(1)


def _leave(exit_code: int) -> None:
    sys.stdout.flush()
    os._exit(exit_code)
