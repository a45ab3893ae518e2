"""The working directory of a preparation: one process at a time, a journal to continue from, one rename at the end.

    OUTPUT.partial/lock        held by the process that works
    OUTPUT.partial/state.json  the journal: what is safely written, replaced as a whole
    OUTPUT.partial/data/       becomes OUTPUT

A kill at any moment leaves either OUTPUT complete or the journal and files at least as long as it says.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

JOURNAL_SECONDS = 3.0  # between two entries: the work a kill can cost


class Job:
    """Exclusive use of `OUTPUT.partial`.

    Args:
        output: the directory to make.
        identity: what determines its bytes; an unfinished job of another identity is refused.
        say: told when another process holds the lock.
    Attributes:
        state: the journal's last entry, None before the first.
    Raises:
        ValueError: the partial directory belongs to another job.
    """

    def __init__(self, output: Path, identity: dict, say: Callable[[str], None]) -> None:
        self.output = output
        self.partial = output.with_name(output.name + ".partial")
        self.data = self.partial / "data"
        self._journal = self.partial / "state.json"
        self._identity = identity
        self._lock = self._acquire(say)
        self.state: dict | None = None
        saved = json.loads(self._journal.read_text()) if self._journal.is_file() else {}
        if saved.get("identity") == identity:
            self.state = saved["state"]
        elif saved.get("state") is not None:
            keys = sorted(k for k in identity if saved["identity"].get(k) != identity[k])
            self._release()
            raise ValueError(
                f"output {output}: {self.partial} is an unfinished preparation with other {', '.join(keys)}; "
                "repeat it with its own options, delete it, or choose another --output"
            )
        else:  # what is there is not known to be this job's
            shutil.rmtree(self.data, ignore_errors=True)
        self.data.mkdir(exist_ok=True)
        for draft in self.data.glob(".*"):  # of a file that was being written
            draft.unlink()

    def _acquire(self, say: Callable[[str], None]) -> int:
        said = False
        while True:
            self.partial.mkdir(parents=True, exist_ok=True)
            try:
                lock = os.open(self.partial / "lock", os.O_CREAT | os.O_RDWR, 0o644)
            except FileNotFoundError:
                continue  # removed between the two lines by the process that finished
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not said:
                    say(f"another process is preparing {self.output}; waiting for it")
                    said = True
                fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                if os.fstat(lock).st_ino == os.stat(self.partial / "lock").st_ino:
                    return lock
            except FileNotFoundError:
                pass
            os.close(lock)  # the lock of a directory that is gone

    def save(self, state: dict | None) -> None:
        """Replaces the journal; the files it speaks of must be on the disk. None: only a tokenizer is ready."""
        self.state = state
        write_atomic(self._journal, json.dumps({"identity": self._identity, "state": state}))

    def publish(self) -> None:
        """Turns the working directory into the output, and ends the job."""
        sync_tree(self.data)
        os.rename(self.data, self.output)  # an empty directory of that name gives way
        sync_directory(self.output.parent)
        self.discard()

    def discard(self) -> None:
        """Removes the working directory, and ends the job."""
        shutil.rmtree(self.partial, ignore_errors=True)
        self._release()

    def keep(self) -> None:
        """Ends the job and leaves what the journal knows for the next run; without shards, leaves nothing."""
        if self.state is not None:
            self._release()
        else:
            self.discard()

    def _release(self) -> None:
        os.close(self._lock)


def sweep(output: Path) -> None:
    """Removes what a process left that was killed after its output had got its name; one that waits tries again."""
    partial = output.with_name(output.name + ".partial")
    if partial.is_dir() and not (partial / "data").exists():
        shutil.rmtree(partial, ignore_errors=True)


def write_atomic(path: Path, text: str | bytes) -> None:
    """Writes a file as a whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with open(draft, "wb") as f:
        f.write(text.encode() if isinstance(text, str) else text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(draft, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Puts a directory's entries on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(root: Path) -> None:
    """Puts the entries of all directories below `root` on the disk (files are synced when written)."""
    for folder, _, _ in os.walk(root):
        sync_directory(Path(folder))
