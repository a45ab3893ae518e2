"""What a strategy's depth state holds while a layer is differentiated: counted by running it on the meta device."""

import json
from dataclasses import dataclass
from functools import cache

import torch

from lit_msar.residual import Residual, State, sites


@dataclass(frozen=True)
class DepthState:
    """Bytes of the depth state per token, by layer: while its MLP is differentiated. The last `kept` is of the loss.

    `kept` is what stays until the backward: every tensor that the state ever held, and what reads and writes keep; with
    checkpointing `full`, what passes between segments. A tensor that is itself what a sublayer reads, as Vanilla's,
    counts among what the sublayer keeps. `working` is the state's gradient and what the layer's segment made again.
    """

    kept: tuple[float, ...]
    working: tuple[float, ...]


class _Tensors:
    """Tensors that a state held, each counted once, without those that sublayers read."""

    def __init__(self, state: State, n_tokens: int, counted: bool = True) -> None:
        self._held, self._reads, self._n_tokens, self._more = {}, [], n_tokens, 0.0
        self._before = [] if counted else list(state)  # kept alive: ids are not used again
        if counted:
            self.add(state, None, 0)

    def add(self, state: State, read: torch.Tensor | None, n_bytes: int) -> None:
        """The tensors of a state, a sublayer's read and bytes per token beside them."""
        self._held |= {id(t): t for t in state}
        self._more += n_bytes
        if read is not None:
            self._reads.append(read)

    @property
    def bytes(self) -> float:
        """Per token."""
        others = {id(t) for t in (*self._reads, *self._before)}
        return sum(t.nbytes for key, t in self._held.items() if key not in others) / self._n_tokens + self._more


@cache
def _held(kind: type[Residual], options: str, d_model: int, n_layers: int, between_segments: bool) -> DepthState:
    n_tokens = 8

    def tokens() -> torch.Tensor:
        return torch.empty(1, n_tokens, d_model, dtype=torch.bfloat16)

    with torch.device("meta"), torch.no_grad():
        strategy = kind(**json.loads(options))
        strategy.build(d_model, n_layers)
        state = strategy.begin(tokens())
        held = _Tensors(state, n_tokens)  # until the backward
        again = _Tensors((), n_tokens)  # by the segment
        kept, working = [], []
        for site in sites(n_layers)[:-1]:
            made = again if between_segments else held
            x, state = strategy.read(state, site)
            made.add(state, x, 2 * strategy.kept_by_read(site))
            at_backward = held.bytes, again.bytes if between_segments else 0.0
            state = strategy.write(state, site, tokens())
            of_write = 2 * strategy.kept_by_write(site)
            made.add(state, None, of_write)
            if site.kind == "attention":
                continue
            kept.append(at_backward[0])
            gradient = sum(t.nbytes for t in state) / n_tokens + of_write + 2 * strategy.waiting(site)
            working.append(at_backward[1] + gradient)
            if between_segments and (site.layer + 1) % strategy.segment_layers == 0:
                held.add(state, None, 2 * strategy.waiting(site))
                again = _Tensors(state, n_tokens, counted=False)
        *_, last, head = sites(n_layers)
        if not between_segments:  # else counted with the last segment
            held.add((), None, 2 * strategy.waiting(last))
        held.add((strategy.finish(state),), None, 2 * strategy.kept_by_read(head))
    return DepthState((*kept, held.bytes), tuple(working))


def held_by_depth(residual: Residual, d_model: int, n_layers: int, between_segments: bool) -> DepthState:
    """Of a strategy, built or not, at a decoder's size.

    Args:
        between_segments: whether segments are recomputed, so that only what passes between them stays.
    """
    options = json.dumps(residual.options, sort_keys=True)
    return _held(type(residual), options, d_model, n_layers, between_segments)
