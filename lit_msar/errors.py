"""How a wrong command ends: one line that names what is wrong."""

import os
import sys
from typing import Any

from jsonargparse import ArgumentParser


class StopTraining(RuntimeError):
    """Training cannot go on, and nothing on the command line is wrong; raised on all ranks alike."""

    exit_code = 1


class OneLineErrors:
    """Parser mixin: ends a wrong command line with exit code 2 and one line; takes no abbreviated options."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **({"allow_abbrev": False} | kwargs))

    def error(self, message: str, ex: Exception | None = None) -> None:
        if os.environ.get("LIT_MSAR_DEBUG") and ex is not None:
            raise ex
        print(f"error: {one_line(message)}", file=sys.stderr)
        raise SystemExit(2)


class CommandParser(OneLineErrors, ArgumentParser):
    """Parser of a typed function."""


def one_line(message: object) -> str:
    """`message` with its line breaks folded."""
    return " ".join(str(message).split())
