"""What a checkpoint says of the model it holds, in plain values; a checkpoint never runs code."""

from dataclasses import asdict, dataclass
from typing import Any

from lit_msar.model.config import DecoderConfig
from lit_msar.residual.base import Residual


@dataclass
class ModelSpec:
    """Enough to make a decoder again: its shape, the strategy's class name and its options."""

    decoder: dict[str, Any]
    residual: str
    options: dict[str, Any]

    @classmethod
    def of(cls, config: DecoderConfig, residual: Residual) -> "ModelSpec":
        return cls(asdict(config), type(residual).__name__, dict(residual.options))

    def make(self) -> tuple[DecoderConfig, Residual]:
        """Shape and strategy, the latter looked up by name among the strategies that are imported.

        Raises:
            ValueError: no strategy of that name.
        """
        strategies = _strategies()
        if self.residual not in strategies:
            raise ValueError(
                f"the checkpoint needs the residual strategy {self.residual}, which is not among "
                f"{', '.join(sorted(strategies))}; import the module that defines it first"
            )
        return DecoderConfig(**self.decoder), strategies[self.residual](**self.options)


# Options that change how a model runs, not what it computes.
_FREE_OPTIONS = {"moe", "kernels", "aux_loss", "schedule"}


def explain_difference(saved: ModelSpec, wanted: ModelSpec) -> str:
    """The first few ways in which two models differ, as `name: saved, wanted`; empty if they are the same model."""
    if saved.residual != wanted.residual:
        return f"residual: {saved.residual} in the checkpoint, {wanted.residual} in the config"
    differences = []
    for a, b in ((saved.decoder, wanted.decoder), (saved.options, wanted.options)):
        for name in sorted((a.keys() | b.keys()) - _FREE_OPTIONS):
            if a.get(name) != b.get(name):
                differences.append(f"{name}: {a.get(name)} in the checkpoint, {b.get(name)} in the config")
    return "; ".join(differences[:4])


def strategy_names() -> list[str]:
    """Class names of all strategies that are imported, sorted."""
    return sorted(_strategies())


def _strategies() -> dict[str, type[Residual]]:
    """Every subclass that implements the whole protocol, by class name."""
    found, queue = {}, [Residual]
    while queue:
        cls = queue.pop()
        queue.extend(cls.__subclasses__())
        if cls.cost is not Residual.cost:
            found[cls.__name__] = cls
    return found
