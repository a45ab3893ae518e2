"""Recomputation in the backward that keeps the choice of experts: a tie that flips would send a token elsewhere.

PyTorch's selective checkpointing matches every operation of the two runs; under FSDP2 they differ: weights that were
gathered ahead in one are gathered on the spot in the other. Here the kept operations alone are matched.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

KEPT = frozenset({torch.ops.aten.topk.default, torch.ops.aten.sort.stable})


def recomputed(function: Callable, *args: Any) -> Any:
    """`function(*args)`, run again in the backward instead of keeping its insides."""
    # nothing is drawn at random in a model, and a generator's state cannot be read while a CUDA graph is captured
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts)


def _contexts() -> tuple["_Keep", "_Replay"]:
    outputs: list[Any] = []
    return _Keep(outputs), _Replay(outputs)


class _Mode(TorchDispatchMode):
    def __init__(self, outputs: list[Any]) -> None:
        super().__init__()
        self.outputs = outputs

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled parts run as they are; the same code makes the same choice


class _Keep(_Mode):
    """Keeps what the operations give."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in KEPT:
            self.outputs.append(tree_map(torch.Tensor.detach, output))
        return output


class _Replay(_Mode):
    """Gives what was kept, in order."""

    def __enter__(self) -> "_Replay":
        self._remaining = iter(self.outputs)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in KEPT:
            return tree_map(torch.Tensor.detach, next(self._remaining))
        return func(*args, **(kwargs or {}))
