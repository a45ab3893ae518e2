"""Checkpoint directories of sharded runs: tensors by name in PyTorch's distributed format, the rest in one small file.

Tensors are `model.NAME` and `optimizer.NAME.KEY`; the names are the module's, whatever the parameter groups, meshes and
ranks were, so a directory loads on any number of ranks, with expert parallelism or without.
"""

from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from lit_msar.inference.load import REST_FILE, is_sharded, read_checkpoint, read_rest
from lit_msar.initialization import local_part, local_slices

__all__ = ["load", "named", "optimizer_tensors", "read_rest", "write", "write_beside", "write_rest"]

MODEL, OPTIMIZER = "model.", "optimizer."


def named(model: dict[str, Tensor], *optimizers: dict[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of a checkpoint by their full names."""
    tensors = {f"{MODEL}{name}": tensor for name, tensor in model.items()}
    for optimizer in optimizers:
        tensors |= {f"{OPTIMIZER}{name}": tensor for name, tensor in optimizer.items()}
    return tensors


def optimizer_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as `NAME.KEY`; made, as zeros, where a parameter has none yet.

    Options of the groups are left out: they are the config's.
    """
    tensors = {}
    for name, parameter in trained(module, optimizer):
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=local_part(parameter).device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        tensors |= {f"{name}.{key}": value for key, value in state.items()}
    return tensors


def trained(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterable[tuple[str, nn.Parameter]]:
    """The optimizer's parameters with their names, in the order of its groups."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    return [(names[p], p) for group in optimizer.param_groups for p in group["params"]]


# ------------------------------------------------------------------------------------------ writing


def write_rest(rest: dict[str, Any], path: Path) -> None:
    """Everything that is not a parameter or its state: plain values and small tensors."""
    torch.save(rest, path / REST_FILE)


def write(tensors: dict[str, Tensor], path: Path) -> None:
    """Write all ranks' parts; returns on every rank when all are on disk."""
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(path, sync_files=True))


def write_beside(tensors: dict[str, Tensor], path: Path, group: dist.ProcessGroup) -> Future:
    """Copy this rank's parts to the host's memory, then write them in a thread; done when all ranks' are on disk."""
    return dcp.async_save(
        tensors,
        storage_writer=dcp.FileSystemWriter(path, sync_files=True),
        process_group=group,
        async_stager=BlockingAsyncStager(),
    )


# ------------------------------------------------------------------------------------------ reading


@torch.no_grad()
def load(path: Path, rest: dict[str, Any], module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Fill a sharded module and its optimizers in place.

    Args:
        path: directory of a sharded run, or the single file of another.
        rest: what `read_rest` gave for it.
        optimizers: none to load weights alone.
    Raises:
        ValueError: the checkpoint lacks a tensor.
    """
    tensors = named(module.state_dict(), *(optimizer_tensors(module, optimizer) for optimizer in optimizers))
    if is_sharded(path):
        _load_directory(path, tensors)
        return
    whole = _file_tensors(read_checkpoint(path), module, optimizers)
    _check_names(path, tensors, whole)
    for name, tensor in tensors.items():
        local_part(tensor).copy_(whole[name][local_slices(tensor)])


def _load_directory(path: Path, tensors: dict[str, Tensor]) -> None:
    reader = dcp.FileSystemReader(path)
    _check_names(path, tensors, reader.read_metadata().state_dict_metadata)
    dcp.load(tensors, storage_reader=reader)


def _check_names(path: Path, tensors: dict[str, Tensor], held: dict[str, Any]) -> None:
    missing = sorted(tensors.keys() - held.keys())
    if missing:
        raise ValueError(f"{path} lacks {len(missing)} tensors that the model needs, such as {missing[0]}")


def _file_tensors(
    checkpoint: dict[str, Any], module: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> dict[str, Tensor]:
    """Whole tensors of a single file, on disk until used."""
    tensors = {f"{MODEL}{name}": tensor for name, tensor in checkpoint["state_dict"].items()}
    for optimizer, saved in zip(optimizers, checkpoint["optimizer_states"] if optimizers else [], strict=True):
        for number, name in enumerate(_file_order(module, optimizer)):
            state = saved["state"].get(number, {})
            tensors |= {f"{OPTIMIZER}{name}.{key}": value for key, value in state.items()}
    return tensors


def _file_order(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names as a single file numbers its states: the decayed group, then the undecayed, each in the module's order."""
    names = {name for name, _ in trained(module, optimizer)}
    ordered = [name for name, _ in module.named_parameters() if name in names]
    undecayed = module.no_decay_names()
    return sorted(ordered, key=lambda name: name in undecayed)
