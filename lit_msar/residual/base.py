"""The residual protocol: how a sublayer gets its input out of the depth state, and how its output goes into it.

A strategy is one module that owns all depth parameters of a model. The decoder runs

    state = residual.begin(embedding)
    for every sublayer F at site l:   x, state = read(state, l);  state = write(state, l, F(norm(x)))
    hidden = residual.finish(state)

and never asks which strategy it has. To add one: subclass `Residual` in a file of its own, implement build, begin,
read, write, finish, inspect and cost, and export the class in `lit_msar/residual/__init__.py`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from lit_msar.initialization import Initialized

State = tuple[Tensor, ...]


@dataclass(frozen=True)
class Site:
    """A place in depth: sublayer `index` (attention and MLP in turn, from 0), or the head's read after the last one."""

    index: int
    n_sublayers: int

    @property
    def is_head(self) -> bool:
        return self.index == self.n_sublayers

    @property
    def kind(self) -> str:
        if self.is_head:
            return "head"
        return "mlp" if self.index % 2 else "attention"

    @property
    def layer(self) -> int:
        """The Transformer layer, from 0; the head's read counts as layer n_layers."""
        return self.index // 2


def sites(n_layers: int) -> list[Site]:
    """All 2 n_layers + 1 reads of a model, the head's last."""
    return [Site(index, 2 * n_layers) for index in range(2 * n_layers + 1)]


@dataclass(frozen=True)
class Cost:
    """What one read and the write after it cost; per token and forward pass where not said otherwise.

    Attributes:
        parameters: learned values at this site.
        multiply_adds: arithmetic of the forward pass.
        elements: values moved to and from memory by a fused forward pass (times the bytes of the state's dtype).
    """

    parameters: int = 0
    multiply_adds: float = 0.0
    elements: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.parameters + other.parameters,
            self.multiply_adds + other.multiply_adds,
            self.elements + other.elements,
        )


class Residual(Initialized):
    """A residual strategy. `__init__` takes options only; parameters are made in `build`.

    Pure: nothing is kept on `self` between calls and no tensor of the state is written in place, so that layers can be
    checkpointed, cut into pipeline stages and sharded, and give the same numbers.
    """

    no_decay: ClassVar[frozenset[str]] = frozenset()
    """Parameter names (the part before the first dot) that get no weight decay."""

    segment_layers: int = 1
    """Layers of a segment: the state may be cut (checkpointing, pipeline stages) only between segments."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        """The arguments of `__init__`, enough to make the strategy again."""

    def build(self, d_model: int, n_layers: int) -> None:
        """Make the parameters of a model with `n_layers` layers of width `d_model`. Called once."""
        self.d_model, self.n_layers, self.n_sublayers = d_model, n_layers, 2 * n_layers

    def begin(self, x: Tensor, position: Tensor | None = None) -> State:
        """The state that holds nothing but the embedding.

        Args:
            x: [B, T, D] token embeddings in the compute dtype, which the whole state keeps.
            position: [B, T] integer place of each token in its document; given only where packed documents must not
                see each other.
        """
        raise NotImplementedError

    def read(self, state: State, site: Site) -> tuple[Tensor, State]:
        """The input [B, T, D] of sublayer `site`, before its PreNorm, and the state to hand to `write`."""
        raise NotImplementedError

    def write(self, state: State, site: Site, y: Tensor) -> State:
        """The state after sublayer `site` gave `y` [B, T, D]."""
        raise NotImplementedError

    def finish(self, state: State) -> Tensor:
        """The head's read: [B, T, D], before the final norm."""
        return self.read(state, Site(self.n_sublayers, self.n_sublayers))[0]

    def inspect(self, state: State, site: Site) -> dict[str, Tensor]:
        """What `read` decides at this site, for logs and maps.

        Keys by strategy: `weights` [B, T, m, N] (depth attention), `gates` [B, T, m] (mix), `pre`, `post` [B, T, n] and
        `res` [B, T, n, n] (Hyper-Connections); empty where nothing is decided.
        """
        return {}

    def cost(self, site: Site) -> Cost:
        """Cost of the read at `site` and of the write after it."""
        raise NotImplementedError

    def kept_by_read(self, site: Site) -> int:
        """Elements of two bytes, per token, that a fused read keeps for the backward beside sources and statistics."""
        return 0

    def kept_by_write(self, site: Site) -> int:
        """The same of the write: y, where its weight has a gradient; then the gradient of y is a tensor of its own."""
        return 0

    def waiting(self, site: Site) -> int:
        """Elements of two bytes, per token, that wait in the state after sublayer `site` for reads to come.

        In the backward pass the gradients that these reads left wait there instead.
        """
        return 0

    def is_without_decay(self, name: str) -> bool:
        """Whether the parameter `name` (relative to the strategy) gets no weight decay."""
        return name.split(".", 1)[0] in self.no_decay

    def output_std_factor(self) -> float:
        """Factor on the start of the sublayers' output projections; 1 unless the strategy's paper says otherwise."""
        return 1.0
