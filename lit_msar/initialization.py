"""Parameters that know how they start, so that a model made on the meta device can be filled later.

A parameter's first values depend on the seed and on its name alone: not on the order of creation, the number of ranks
or the other parameters of the model, so two models share the start of whatever they have in common. A sharded
parameter is drawn whole on every rank, its shard kept and the rest freed at once: the same bits on any number of ranks
as on one, for the memory of one parameter (2.3 GB for the experts of a 28B layer).
"""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

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
def initialize(model: nn.Module, seed: int, device: torch.device | None = None) -> None:
    """Write the start of every declared parameter and buffer of `model`, in place.

    Args:
        device: where the values are drawn (a CPU and a GPU draw different ones); None for where each tensor lies.
    Raises:
        ValueError: a parameter of the model is not declared, so nothing says how it starts.
    """
    declared = set()
    for prefix, module in model.named_modules():
        for name, init in getattr(module, "inits", {}).items():
            full_name = f"{prefix}.{name}" if prefix else name
            tensor = module.get_parameter(name) if _is_parameter(module, name) else module.get_buffer(name)
            _write_start(tensor, init, _seed_of(seed, full_name), device or tensor.device)
            declared.add(full_name)
    missing = {name for name, _ in model.named_parameters()} - declared
    if missing:
        raise ValueError(f"parameters without a declared start: {sorted(missing)}; use Initialized.declare")


def _write_start(tensor: Tensor, init: Init, seed: int, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(seed)
    if not isinstance(tensor, DTensor) and tensor.device == device:
        init(tensor, generator)
        return
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    init(whole, generator)
    local_part(tensor).copy_(whole[local_slices(tensor)])


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of `tensor`: all of a plain one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Where `local_part(tensor)` lies in the whole tensor; every axis is sharded by one mesh dimension at most."""
    slices = [slice(0, size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return tuple(slices)
    sharded = [p for p in tensor.placements if not isinstance(p, Replicate)]
    assert all(type(p) is Shard for p in sharded), tensor.placements
    assert len({p.dim for p in sharded}) == len(sharded), tensor.placements
    for mesh_dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            size, n_parts = tensor.shape[placement.dim], tensor.device_mesh.size(mesh_dim)
            step = -(-size // n_parts)  # torch.chunk's parts: the last ones may be short or empty
            start = min(step * tensor.device_mesh.get_coordinate()[mesh_dim], size)
            slices[placement.dim] = slice(start, min(start + step, size))
    return tuple(slices)


def _seed_of(seed: int, name: str) -> int:
    """One generator seed of both; hashed, for the CPU's generator sees the low 32 bits only."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "little")


def _is_parameter(module: nn.Module, name: str) -> bool:
    return name in {n for n, _ in module.named_parameters()}
