"""Tokenizing processes behind futures: as many blocks in flight as keep them busy, in bounded memory."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path

from data.documents import Tokenized
from data.inputs import Block
from data.tokenizer import Tokenizer
from data.worker import receive, send

IN_FLIGHT_BYTES = 1 << 26  # of text handed out and not yet written: 64 MiB, or one longer line


def available_cores() -> int:
    """Cores that this process may use; a batch system often gives fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class TokenizerPool:
    """`workers` processes that tokenize blocks; results come in the order of the blocks."""

    def __init__(self, tokenizer: Tokenizer, workers: int, eod_token: str | None, skip_bad_lines: bool) -> None:
        env = os.environ | {
            # One thread a process: the processes are the parallelism.
            "TOKENIZERS_PARALLELISM": "false",
            "RAYON_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])),
        }
        self.workers = workers
        self._skip = skip_bad_lines
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "data.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
            )
            for _ in range(workers)
        ]
        setup = (str(tokenizer.path.resolve()), eod_token)
        self._threads = [threading.Thread(target=self._serve, args=(p, setup), daemon=True) for p in self._processes]
        for thread in self._threads:
            thread.start()

    def map(self, blocks: Iterable[tuple[dict, Block]]) -> Iterator[tuple[dict, Block, Tokenized]]:
        """Tokenizes (where the block belongs, block) pairs and yields them with their tokens, in order.

        Args:
            blocks: each with a dict that has `name`, `is_text` and `split` as `documents.tokenize` takes them.
        Raises:
            ValueError: a bad line.
            RuntimeError: a worker ended by itself.
        """
        pending: deque[tuple[dict, Block, Future]] = deque()
        n_bytes = 0
        for where, block in blocks:
            while pending and (len(pending) >= 3 * self.workers or n_bytes + len(block.data) > IN_FLIGHT_BYTES):
                n_bytes -= len(pending[0][1].data)
                yield self._pop(pending)
            header = {key: where[key] for key in ("name", "is_text", "split")}
            header |= {"line": block.line, "skip": self._skip}
            future: Future = Future()
            self._tasks.put((header, block.data, future))
            pending.append((where, block, future))
            n_bytes += len(block.data)
        while pending:
            yield self._pop(pending)

    @staticmethod
    def _pop(pending: deque) -> tuple[dict, Block, Tokenized]:
        where, block, future = pending.popleft()
        return where, block, future.result()

    def _serve(self, process: subprocess.Popen, setup: tuple) -> None:
        """Feeds one process; once it has failed, answers with that failure, so that no future waits for ever."""
        failure = None
        with contextlib.suppress(OSError):  # the first block will find out
            send(process.stdin, setup)
        while (task := self._tasks.get()) is not None:
            header, data, future = task
            del task
            try:
                if failure is not None:
                    raise failure
                send(process.stdin, header, data)
                answer = receive(process.stdout)
                if answer is None:
                    raise OSError("end of file")
            except OSError:
                failure = failure or RuntimeError(_epitaph(process, header))
                future.set_exception(failure)
                continue
            except RuntimeError as e:
                future.set_exception(e)
                continue
            result = answer[0]
            del data, answer
            future.set_exception(result) if isinstance(result, Exception) else future.set_result(result)
            del result, future

    def close(self) -> None:
        """Ends the processes, whatever they are doing."""
        for _ in self._threads:
            self._tasks.put(None)
        for process in self._processes:
            process.kill()
            process.wait()
        for thread in self._threads:
            thread.join()
        for process in self._processes:
            with contextlib.suppress(OSError):  # closing flushes what a killed process no longer reads
                process.stdin.close()
            process.stdout.close()

    def __enter__(self) -> "TokenizerPool":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _epitaph(process: subprocess.Popen, header: dict) -> str:
    code = process.wait()
    where = f"{header['name']} from line {header['line']} on"
    if code == -signal.SIGKILL:
        return f"a tokenizing process was killed (signal 9) at {where}; if memory ran out, use fewer --workers"
    return f"a tokenizing process ended with exit code {code} at {where}; what it said is above"
