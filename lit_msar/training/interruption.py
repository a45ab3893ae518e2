"""Requests to stop, by SIGTERM or SIGUSR1: noted at once, agreed on by all ranks when an optimizer step ends.

The signal number arrives through a pipe in a thread of its own, so it is seen while the main thread waits in a
collective. A signal handler that saved would save in the middle of a step.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from lit_msar.errors import StopTraining

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Interrupted(StopTraining):
    """The run was asked to stop, and has saved; the exit code is 128 + the signal's number, as a shell's."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class Interruption:
    """Listens for the signals between `listen` and `close`.

    Args:
        grace: seconds from SIGTERM to the end of a step; after that the process ends without one, for a launcher that
            ends a run because another rank died waits for ranks that wait for the dead one.
        has_failed: whether another rank failed; then SIGTERM ends the process at once.
    """

    def __init__(self, grace: float, has_failed: Callable[[], bool] = lambda: False) -> None:
        self.grace, self._has_failed = grace, has_failed
        self._number = 0
        self._at_boundary = threading.Event()

    def listen(self) -> None:
        """Replace whatever handled the signals before. Only the main thread can; elsewhere none is heard."""
        self._write = None
        if threading.current_thread() is not threading.main_thread():
            return
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        self._write, self._previous = write, signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, _ignore)
        threading.Thread(target=self._run, name="interruption", daemon=True).start()

    def close(self) -> None:
        """Listen no more; the handlers stay until someone sets others."""
        self._at_boundary.set()
        if self._write is not None:
            signal.set_wakeup_fd(self._previous)
            os.close(self._write)  # ends the thread

    def agreed(self, device: torch.device) -> int:
        """The signal that some rank got, the same on all ranks; 0 for none. Every rank calls it when a step ends."""
        number = self._number
        if dist.is_initialized() and dist.get_world_size() > 1:
            flag = torch.tensor(number, device=device)
            dist.all_reduce(flag, dist.ReduceOp.MAX)
            number = int(flag)
        if number:
            self._at_boundary.set()
        return number

    def _run(self) -> None:
        while received := os.read(self._read, 1):
            if received[0] in SIGNALS:
                self._number = received[0]
                if received[0] == signal.SIGTERM and self._has_failed():
                    os._exit(1)
                if received[0] == signal.SIGTERM:
                    threading.Thread(target=self._give_up_later, daemon=True).start()
        os.close(self._read)

    def _give_up_later(self) -> None:
        if self._at_boundary.wait(self.grace):
            return
        print(f"error: no step ended within {self.grace:g} s of SIGTERM; ended without saving", file=sys.stderr)
        sys.stderr.flush()
        os._exit(128 + signal.SIGTERM)


def _ignore(number: int, frame: object) -> None:
    """The pipe has the number already; a handler must exist for that."""
