"""The tokenizing process: `python -m data.worker` answers each block on its standard input with that block's tokens.

Plain pipes instead of `multiprocessing`: no worker imports the caller's main module, and when the caller is killed the
pipe ends and so does the worker. A message is two lengths (little-endian uint64), a pickled header and raw bytes.
"""

import os
import pickle
import signal
import struct
import sys
from typing import Any, BinaryIO


def send(pipe: BinaryIO, header: Any, data: bytes = b"") -> None:
    """Writes one message."""
    head = pickle.dumps(header, protocol=5)
    pipe.write(struct.pack("<QQ", len(head), len(data)))
    pipe.write(head)
    pipe.write(data)
    pipe.flush()


def receive(pipe: BinaryIO) -> tuple[Any, bytes] | None:
    """Reads one message; None where the other side has closed the pipe, mid-message too."""
    sizes = pipe.read(16)
    if len(sizes) < 16:
        return None
    n_head, n_data = struct.unpack("<QQ", sizes)
    head, data = pipe.read(n_head), pipe.read(n_data)
    if len(head) < n_head or len(data) < n_data:
        return None
    return pickle.loads(head), data


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the group; the caller closes the pipe
    stdin, stdout = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not get between the messages

    from data.documents import tokenize
    from data.tokenizer import Tokenizer

    setup = receive(stdin)
    if setup is None:
        return
    tokenizer = Tokenizer(*setup[0])
    while (message := receive(stdin)) is not None:
        header, data = message
        del message  # a 100 MB line is held once
        try:
            result: Any = tokenize(tokenizer, data, **header)
        except ValueError as e:
            result = e
        del data
        try:
            send(stdout, result)
        except BrokenPipeError:  # the caller was killed
            os._exit(1)


if __name__ == "__main__":
    main()
