"""What a checkpoint says of the model it holds, in plain values; a checkpoint never runs code."""

from dataclasses import asdict, dataclass
from typing import Any

from lit_msar.model.config import DecoderConfig
from lit_msar.residual.base import Residual
from lit_msar.residual.registry import strategies


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
        known = strategies()
        if self.residual not in known:
            raise ValueError(
                f"the checkpoint needs the residual strategy {self.residual}, which is not among "
                f"{', '.join(sorted(known))}; import the module that defines it first"
            )
        return DecoderConfig(**self.decoder), known[self.residual](**self.options)


# Options that change how a model runs, not what it computes.
_FREE_OPTIONS = {"moe", "attention", "kernels", "aux_loss", "schedule"}


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
