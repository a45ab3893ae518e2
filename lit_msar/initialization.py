"""Parameters that know how they start, so that a model made on the meta device can be filled later.

A parameter's first values depend on the seed and on its name alone: not on the order of creation, the number of ranks
or the other parameters of the model, so two models share the start of whatever they have in common.
"""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

Init = Callable[[Tensor, torch.Generator], object]


def normal(std: float) -> Init:
    """N(0, std^2)."""
    return lambda p, generator: p.normal_(0.0, std, generator=generator)


def uniform(bound: float) -> Init:
    """U(-bound, bound)."""
    return lambda p, generator: p.uniform_(-bound, bound, generator=generator)


def constant(value: float) -> Init:
    """The same value everywhere."""
    return lambda p, generator: p.fill_(value)


def values(tensor: Tensor) -> Init:
    """A given tensor of the parameter's shape; made with device="cpu", or it is empty under a meta-device context."""
    return lambda p, generator: p.copy_(tensor)


class Initialized(nn.Module):
    """A module whose parameters and buffers are declared together with their start."""

    def __init__(self) -> None:
        super().__init__()
        self.inits: dict[str, Init] = {}

    def declare(self, name: str, shape: tuple[int, ...], init: Init) -> None:
        """Register the fp32 parameter `name`; its start is written by `initialize`."""
        self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.inits[name] = init

    def declare_list(self, name: str, shape: tuple[int, ...], inits: list[Init]) -> None:
        """Register a ParameterList `name` of one fp32 parameter per start."""
        setattr(self, name, nn.ParameterList(nn.Parameter(torch.empty(shape)) for _ in inits))
        self.inits.update({f"{name}.{i}": init for i, init in enumerate(inits)})

    def declare_buffer(self, name: str, shape: tuple[int, ...], init: Init) -> None:
        """Register the persistent fp32 buffer `name`; its start is written by `initialize`."""
        self.register_buffer(name, torch.empty(shape))
        self.inits[name] = init


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Write the start of every declared parameter and buffer of `model`, in place.

    Raises:
        ValueError: a parameter of the model is not declared, so nothing says how it starts.
    """
    declared = set()
    for prefix, module in model.named_modules():
        for name, init in getattr(module, "inits", {}).items():
            full_name = f"{prefix}.{name}" if prefix else name
            tensor = module.get_parameter(name) if _is_parameter(module, name) else module.get_buffer(name)
            init(tensor, torch.Generator(tensor.device).manual_seed(_seed_of(seed, full_name)))
            declared.add(full_name)
    missing = {name for name, _ in model.named_parameters()} - declared
    if missing:
        raise ValueError(f"parameters without a declared start: {sorted(missing)}; use Initialized.declare")


def _seed_of(seed: int, name: str) -> int:
    """One generator seed of both; hashed, for the CPU's generator sees the low 32 bits only."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "little")


def _is_parameter(module: nn.Module, name: str) -> bool:
    return name in {n for n, _ in module.named_parameters()}
