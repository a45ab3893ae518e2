"""Sharding of a decoder over ranks: the meshes, FSDP2's units and their precision, the norm of sharded gradients.

Units: the embedding, every layer, and norm + head compute in the compute dtype; routers and the root, which holds the
depth parameters alone, in fp32. All parameters, gradients, reductions and optimizer states are fp32.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from lit_msar.initialization import local_part
from lit_msar.model import Decoder
from lit_msar.model.decoder import Layer
from lit_msar.training.experts import spread_experts

EXPERT = "expert"
"""Mesh dimension over which experts are spread."""


@dataclass(frozen=True)
class Meshes:
    """Who shares what. Ranks that shard one copy lie next to each other; of those, ranks of one expert group."""

    dense: DeviceMesh
    """Of all parameters but spread experts: (shard) or (replicate, shard)."""
    experts: DeviceMesh | None = None
    """Of spread experts: the same without the ranks of an expert group."""
    expert_group: DeviceMesh | None = None
    """Ranks that hold one copy's experts together."""

    @classmethod
    def make(cls, device_type: str, n_ranks: int, replicate: int = 1, expert_parallel: int = 1) -> "Meshes":
        """Meshes over all ranks; every rank must call it.

        Raises:
            ValueError: the sizes do not divide the ranks.
        """
        if replicate < 1 or n_ranks % replicate:
            raise ValueError(f"replicate={replicate} must divide the number of ranks, {n_ranks}")
        shard = n_ranks // replicate
        if expert_parallel < 1 or shard % expert_parallel:
            raise ValueError(
                f"expert_parallel={expert_parallel} must divide the ranks that shard one copy, {shard} "
                f"({n_ranks} ranks / replicate={replicate})"
            )
        names, sizes = (("shard",), (shard,)) if replicate == 1 else (("replicate", "shard"), (replicate, shard))
        dense = init_device_mesh(device_type, sizes, mesh_dim_names=names)
        if expert_parallel == 1:
            return cls(dense)
        sizes = (*sizes[:-1], shard // expert_parallel, expert_parallel)
        whole = init_device_mesh(device_type, sizes, mesh_dim_names=(*names, EXPERT))
        return cls(dense, whole[names] if len(names) > 1 else whole["shard"], whole[EXPERT])


@dataclass(frozen=True)
class ShardOptions:
    """How `shard_decoder` trades memory for communication; see `FullyShard`."""

    reshard_after_forward: bool = True
    prefetch: int = 1
    offload_states: bool = False


def shard_decoder(decoder: Decoder, meshes: Meshes, options: ShardOptions) -> None:
    """Turn a decoder on the meta device into FSDP2 units in place; its parameters become DTensors, still on meta."""
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if options.offload_states else OffloadPolicy()
    common = {"mesh": meshes.dense, "offload_policy": offload}
    # inputs keep their dtype: the depth state holds fp32 values that a cast to bf16 would damage
    computing = MixedPrecisionPolicy(decoder.compute_dtype, torch.float32, cast_forward_inputs=False)
    exact = MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=False)
    reshard = options.reshard_after_forward
    fully_shard(decoder.embedding, mp_policy=computing, reshard_after_forward=reshard, **common)
    for i, layer in enumerate(decoder.layers):
        if decoder.config.is_moe(i):
            fully_shard(layer.mlp.router, mp_policy=exact, reshard_after_forward=reshard, **common)
            if meshes.expert_group is not None:
                _shard_spread_experts(layer, meshes, computing, reshard, offload)
        place = ExpertPlacement(meshes.dense.size(-1))
        fully_shard(layer, mp_policy=computing, reshard_after_forward=reshard, shard_placement_fn=place, **common)
    # the backward begins with the head: gathering it again would gain nothing
    fully_shard(decoder.head, mp_policy=computing, reshard_after_forward=False, **common)
    fully_shard(decoder, mp_policy=exact, reshard_after_forward=False, **common)
    _prefetch(list(decoder.layers), options.prefetch)


def _shard_spread_experts(
    layer: Layer, meshes: Meshes, policy: MixedPrecisionPolicy, reshard: bool, offload: OffloadPolicy
) -> None:
    experts = layer.mlp.experts
    spread_experts(experts, meshes.expert_group)
    n_parts = meshes.experts.size(-1)
    fully_shard(
        experts,
        mesh=meshes.experts,
        mp_policy=policy,
        reshard_after_forward=reshard,
        offload_policy=offload,
        shard_placement_fn=SpreadExpertPlacement(n_parts),
    )


class ExpertPlacement:
    """Axis along which FSDP2 cuts a parameter: for experts the first that divides evenly, axis 0 for all else.

    Whole experts per rank need no copy around a gather. Where no axis divides, axis 0 is cut unevenly.
    """

    axes = (0, 1, 2)

    def __init__(self, n_parts: int) -> None:
        self.n_parts = n_parts

    def __call__(self, parameter: nn.Parameter) -> Shard:
        if parameter.ndim < 3:
            return Shard(0)
        return Shard(next((axis for axis in self.axes if parameter.shape[axis] % self.n_parts == 0), 0))


class SpreadExpertPlacement(ExpertPlacement):
    """The same for experts that are spread already: axis 0 is taken."""

    axes = (1, 2)

    def __call__(self, parameter: nn.Parameter) -> Shard:
        placement = super().__call__(parameter)
        if placement.dim not in self.axes:
            raise ValueError(
                f"{self.n_parts} ranks per expert divide no axis of experts of shape {tuple(parameter.shape[1:])}: "
                "raise expert_parallel, or set d_expert to a multiple of them"
            )
        return placement


def _prefetch(layers: list[Layer], n_ahead: int) -> None:
    """Gather the next `n_ahead` layers while one computes, in both directions."""
    units = [[layer, *_inner_units(layer)] for layer in layers]
    for i, layer in enumerate(layers):
        after = [unit for group in units[i + 1 : i + 1 + n_ahead] for unit in group]
        before = [unit for group in reversed(units[max(0, i - n_ahead) : i]) for unit in group]
        if after:
            layer.set_modules_to_forward_prefetch(after)
        if before:
            layer.set_modules_to_backward_prefetch(before)


def _inner_units(layer: Layer) -> list[nn.Module]:
    return [module for module in layer.modules() if module is not layer and isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Leave every unit its own part alone: after a forward without backward some still show gathered parameters."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# ------------------------------------------------------------------------------------------ gradients and optimizer


@torch.no_grad()
def average_spread_experts(parameters: Iterable[nn.Parameter]) -> None:
    """Make the gradients of spread experts means over all ranks, as FSDP2 makes all others; once per optimizer step.

    An expert's own gradient sums over the tokens of its group, and FSDP2 averages over the other ranks alone.
    """
    for p in parameters:
        if p.grad is not None and isinstance(p, DTensor) and EXPERT in p.device_mesh.mesh_dim_names:
            local_part(p.grad).div_(p.device_mesh[EXPERT].size())


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter], device: torch.device) -> Tensor:
    """L2 norm of the gradient over all parameters, meshes and ranks: [] fp32 on `device`, the same on all ranks."""
    grads = [p.grad for p in parameters if p.grad is not None]
    parts: dict[int, list[Tensor]] = defaultdict(list)  # by how many ranks hold the same
    for grad in grads:
        if (part := local_part(grad)).numel():
            parts[_n_copies(grad)].append(part)
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for copies, held in parts.items():
        norms = torch.stack(torch._foreach_norm(held)).to(device, torch.float64)
        squares += norms.square().sum() / copies
    if any(isinstance(grad, DTensor) for grad in grads):
        dist.all_reduce(squares)
    return squares.sqrt().float()


def _n_copies(tensor: Tensor) -> int:
    """How many ranks hold the same part of `tensor`."""
    if not isinstance(tensor, DTensor):
        return 1
    copies = 1
    for mesh_dim, placement in enumerate(tensor.placements):
        copies *= tensor.device_mesh.size(mesh_dim) if isinstance(placement, Replicate) else 1
    return copies


def group_by_mesh(optimizer: torch.optim.Optimizer) -> None:
    """Split parameter groups that mix meshes, in place: one fused update takes tensors of one mesh."""
    groups = []
    for group in optimizer.param_groups:
        by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = {}
        for p in group["params"]:
            by_mesh.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
        groups += [{**group, "params": parameters} for parameters in by_mesh.values()]
    optimizer.param_groups[:] = groups
