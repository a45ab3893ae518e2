"""The standard residual stream: x <- x + F(x)."""

from torch import Tensor

from lit_msar.residual.base import Cost, Residual, Site, State


class Vanilla(Residual):
    """Running sum of all sublayer outputs: `x <- x + F_l(x)` (PreNorm).

    State: the sum, one [B, T, D].
    """

    def __init__(self) -> None:
        super().__init__()

    def begin(self, x: Tensor, position: Tensor | None = None) -> State:
        return (x,)

    def read(self, state: State, site: Site) -> tuple[Tensor, State]:
        return state[0], state

    def write(self, state: State, site: Site, y: Tensor) -> State:
        return (state[0] + y,)

    def cost(self, site: Site) -> Cost:
        if site.is_head:
            return Cost()
        return Cost(multiply_adds=self.d_model, elements=3 * self.d_model)
