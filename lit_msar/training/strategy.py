"""The Trainer's strategy for sharded training: FSDP2 over any number of ranks, and its checkpoint directories."""

from collections.abc import Mapping
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn

from lit_msar.initialization import initialize
from lit_msar.model import Decoder
from lit_msar.training import sharded
from lit_msar.training.parallel import Meshes, ShardOptions, reshard, shard_decoder
from lit_msar.training.watch import FailureWatch


class FullyShard(ModelParallelStrategy):
    """Shards parameters, gradients and optimizer states over all ranks, with FSDP2; one process works too.

    Every rank reads its own data. Checkpoints are directories that load on any number of ranks.

    Args:
        replicate: copies of the model; ranks / replicate share one. `nodes`: one copy per node.
        expert_parallel: ranks that hold a layer's experts together and send tokens to each other instead of gathering
            weights; must divide the ranks that share one copy.
        reshard_after_forward: free gathered weights after the forward and gather them again in the backward; false
            keeps them: a gather less, for 2 bytes per parameter on every rank.
        prefetch: layers gathered ahead of the one that computes.
        offload_states: keep parameters, gradients and optimizer states in the host's memory (16 bytes per parameter
            over all ranks), and step there.
        async_save: write checkpoints beside training, from a copy in the host's memory (12 bytes per parameter).
        timeout_minutes: after which a collective without answer ends the run (minutes).
    """

    def __init__(
        self,
        replicate: int | Literal["nodes"] = 1,
        expert_parallel: int = 1,
        reshard_after_forward: bool = True,
        prefetch: int = 1,
        offload_states: bool = False,
        async_save: bool = False,
        timeout_minutes: float = 30.0,
    ) -> None:
        if prefetch < 0:
            raise ValueError(f"prefetch must not be negative, got {prefetch}")
        super().__init__(timeout=timedelta(minutes=timeout_minutes))
        self.replicate, self.expert_parallel = replicate, expert_parallel
        self.options = ShardOptions(reshard_after_forward, prefetch, offload_states)
        self.async_save = async_save
        self.meshes: Meshes | None = None
        self.watch: FailureWatch | None = None
        self._save_group: dist.ProcessGroup | None = None
        self._writing: Future | None = None

    # ------------------------------------------------------------------------------------------ ranks

    def setup_environment(self) -> None:
        # Lightning's own mesh says which ranks read different data: all of them
        self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()
        if self.world_size > 1:
            self.watch = FailureWatch()
        replicate = self.num_nodes if self.replicate == "nodes" else self.replicate
        self.meshes = Meshes.make(self.root_device.type, self.world_size, replicate, self.expert_parallel)

    def _get_process_group_backend(self) -> str:
        # gloo beside NCCL: collectives on host memory, for offloaded states and for saving beside training
        return "gloo" if self.root_device.type == "cpu" else "cpu:gloo,cuda:nccl"

    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized():
            dist.barrier()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self.watch is not None:
            watch, self.watch = self.watch, None
            watch.report(exception)

    def teardown(self) -> None:
        if self.watch is not None:
            self.barrier()  # the store goes with rank 0: nobody may still be watching
            self.watch.stop()
            self.watch = None
        super().teardown()

    # ------------------------------------------------------------------------------------------ model

    def make(self, decoder: Decoder, seed: int) -> None:
        """Shard a decoder that is on the meta device, and write its start: the same for any number of ranks."""
        shard_decoder(decoder, self.meshes, self.options)
        decoder.to_empty(device="cpu" if self.options.offload_states else self.root_device)
        self._place_buffers(decoder)
        initialize(decoder, seed, self.root_device)

    def begin_micro_step(self, decoder: Decoder, is_last: bool) -> None:
        """Let gradients cross from copy to copy once per optimizer step: until the last micro-step they only gather."""
        if self.meshes.dense.ndim > 1:
            decoder.set_requires_all_reduce(is_last)

    def model_to_device(self) -> None:
        if not self.options.offload_states:
            super().model_to_device()
            return
        self._place_buffers(self.model)
        for metric in self.model.children():
            if not any(True for _ in metric.parameters()):
                metric.to(self.root_device)

    def _place_buffers(self, model: nn.Module) -> None:
        """Buffers are no states of the optimizer: they stay where the model computes."""
        for module in model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                persistent = name not in module._non_persistent_buffers_set
                module.register_buffer(name, buffer.to(self.root_device), persistent)

    # ------------------------------------------------------------------------------------------ checkpoints

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        reshard(self.model)
        return self.model.state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        reshard(self.model)
        return sharded.optimizer_tensors(self.model, optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write the shards and what is not sharded into the directory `filepath`; with `async_save`, begin to."""
        path = Path(self.broadcast(str(filepath)))
        tensors = sharded.named(checkpoint.pop("state_dict"), *checkpoint.pop("optimizer_states", []))
        if self.is_global_zero:
            path.mkdir(parents=True, exist_ok=True)
            sharded.write_rest(checkpoint, path)
        self.barrier()
        if not self.async_save:
            sharded.write(tensors, path)
            return
        if self._save_group is None:
            self._save_group = dist.new_group(backend="gloo")
        self._writing = sharded.write_beside(tensors, path, self._save_group)

    def take_writing(self) -> Future | None:
        """The asynchronous save that the last `save_checkpoint` began; None for one that is written already."""
        writing, self._writing = self._writing, None
        return writing

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Fill the model and its optimizer from a directory or a single file, each rank reading its own part."""
        path = Path(self.broadcast(str(checkpoint_path)))
        rest = sharded.read_rest(path)
        self.lightning_module.refuse_other_model(rest)
        reshard(self.model)
        optimizers = self.optimizers if self._is_fitting() else []
        sharded.load(path, rest, self.model, optimizers)
        return rest

    def _is_fitting(self) -> bool:
        trainer: L.Trainer = self.lightning_module.trainer
        return trainer.state.fn == "fit"

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing: `load_checkpoint` did it."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: `load_checkpoint` did it."""
