"""Runs over several processes: what each rank does, and how a test starts them and reads what they saw."""

import os
import signal
import socket
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
import torch.multiprocessing
from conftest import small_config
from training.conftest import data_of, module_of, trainer_of

from lit_msar.initialization import local_part
from lit_msar.residual import HC, MHC, MSAR, AttnRes, Vanilla
from lit_msar.training.checkpoint import Checkpoint
from lit_msar.training.strategy import FullyShard

STEPS = 20
BATCH = 4  # samples of an optimizer step, over all ranks

RESIDUALS = {
    "vanilla": Vanilla,
    "hc": HC,
    "mhc": MHC,
    "attnres": lambda: AttnRes(block_size=2),
    "msar": lambda: MSAR(block_size=2),
}

# scenario: residual, options of the module, options of the strategy
TWO_RANKS = {
    **{name: (name, {}, {}) for name in RESIDUALS},
    "expert_parallel": ("msar", {}, {"expert_parallel": 2}),
    "kept_gathered": ("msar", {}, {"reshard_after_forward": False, "prefetch": 0}),
    "prefetch_two": ("msar", {}, {"prefetch": 2}),
    "recomputed": ("mhc", {"checkpointing": "full"}, {}),
    "offloaded": ("msar", {}, {"offload_states": True}),
    "aux_loss": ("msar", {"aux_loss_coef": 0.1}, {"expert_parallel": 2}),
    "accumulated": ("msar", {}, {}),
    "lagged": ("msar", {"check_finite": "lagged"}, {}),
    "idle_experts": ("msar", {"balance_rate": 0.0}, {"expert_parallel": 2}),
}
FOUR_RANKS = {
    "hybrid": ("msar", {}, {"replicate": 2}),
    "hybrid_expert_parallel": ("msar", {}, {"replicate": 2, "expert_parallel": 2}),
    "sharded_and_expert_parallel": ("msar", {}, {"expert_parallel": 2}),
    "hybrid_accumulated": ("msar", {}, {"replicate": 2, "expert_parallel": 2}),
}
ACCUMULATED = {"accumulated": 2, "hybrid_accumulated": 2}
"""Micro-steps of an optimizer step, where not 1."""

SHORT = {"kept_gathered", "prefetch_two", "recomputed", "offloaded", "aux_loss", "sharded_and_expert_parallel"}
SHORT |= {*ACCUMULATED, "idle_experts", "lagged"}
"""What the first steps show."""

TOKENS = torch.arange(40).view(2, 20)
STEP_TWO = "checkpoints/step=2.ckpt"
SAVES = {"plain": {}, "async": {"async_save": True}, "expert_parallel_saved": {"expert_parallel": 2}}
# scenario: run that saved, options of the strategy
RESUMES = {
    "same": ("plain", {}),
    "from_async": ("async", {}),
    "from_one_rank": ("one_rank", {}),
    "from_file": ("file", {}),
    "from_file_to_expert_parallel": ("file", {"expert_parallel": 2}),
    "to_expert_parallel": ("plain", {"expert_parallel": 2}),
    "from_expert_parallel": ("expert_parallel_saved", {}),
}


class Idle(L.Callback):
    """Sends every token to the first two experts: the second rank of an expert group gets no row at all."""

    def on_train_start(self, trainer, module):
        for router in module.decoder.routers():
            router.balance_bias[:2] += 10


class Record(L.Callback):
    """Losses, gradient norms and the first step's gradients, whole."""

    def __init__(self):
        self.losses, self.norms, self.gradients = [], [], {}

    def on_train_start(self, trainer, module):
        # now: after a forward, units that stay gathered show their gathered parameters
        self.parameters = dict(module.decoder.named_parameters())
        self.start = {name: whole(value).clone() for name, value in module.decoder.state_dict().items()}
        trainer.optimizers[0].register_step_post_hook(self._after_step)

    def _after_step(self, *_):
        if not self.gradients:
            grads = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
            self.gradients = {name: whole(grad).clone() for name, grad in grads.items()}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if module.last_window is None:
            return
        window, module.last_window = module.last_window, None
        self.losses.append((window.nats / window.tokens).item())
        self.norms.append(module.grad_norm)

    def seen(self, module):
        return {
            "start": self.start,
            "losses": self.losses,
            "norms": self.norms,
            "gradients": self.gradients,
            "balance_bias": torch.stack([router.balance_bias for router in module.decoder.routers()]),
            "weights": {name: whole(value) for name, value in module.decoder.state_dict().items()},
        }


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def fit(
    root, prepared, name="msar", module=(), strategy=None, max_steps=STEPS, callbacks=(), ckpt_path=None, **options
):
    """One run; what it recorded, its module and trainer."""
    n_ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    record, model = Record(), module_of(RESIDUALS[name](), small_config(vocab_size=320), **dict(module))
    if strategy is not None:
        options |= {"strategy": FullyShard(**strategy), "devices": n_ranks}
    enable = {"enable_checkpointing": any(isinstance(c, Checkpoint) for c in callbacks)}
    trainer = trainer_of(root, max_steps, [record, *callbacks], **enable, **options)
    data = data_of(prepared, batch_size=BATCH // n_ranks)
    trainer.fit(model, data, ckpt_path=ckpt_path, weights_only=True)
    return record.seen(model), model, trainer


def run_everything(root: Path, prepared: Path):
    """All runs in one start of four processes, since importing takes longer than most runs.

    Each stage is a process group of its own, of the first 1, 2 or 4 processes; the others wait for the next.
    """
    ports = [_free_port() for _ in STAGES]
    torch.multiprocessing.spawn(_enter, (ports, root, prepared), nprocs=4)


def _free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _enter(rank, ports, root, prepared):
    torch.set_num_threads(1)
    for (n_ranks, stage), port in zip(STAGES, ports, strict=True):
        if rank < n_ranks:
            _join(rank, n_ranks, port)
            stage(rank, root, prepared)
            dist.destroy_process_group()


def _join(rank, n_ranks, port):
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n_ranks, "LOCAL_WORLD_SIZE": n_ranks, "GROUP_RANK": 0}
    os.environ.update({name: str(value) for name, value in numbers.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="test", OMP_NUM_THREADS="1")


def _save_on_one_rank(rank, root, prepared):
    _save(rank, "one_rank", {}, root, prepared)


def _run_on_two_ranks(rank, root, prepared):
    _run(rank, TWO_RANKS, root, prepared)
    for name, strategy in SAVES.items():
        _save(rank, name, strategy, root, prepared)
    for name, (source, strategy) in RESUMES.items():
        _resume(rank, name, source, strategy, root, prepared)


def _resume_on_one_rank(rank, root, prepared):
    _resume(rank, "on_one_rank", "plain", {}, root, prepared)
    _resume(rank, "on_one_rank_from_expert_parallel", "expert_parallel_saved", {}, root, prepared)


def _run_on_four_ranks(rank, root, prepared):
    _run(rank, FOUR_RANKS, root, prepared)


STAGES = [(1, _save_on_one_rank), (2, _run_on_two_ranks), (1, _resume_on_one_rank), (4, _run_on_four_ranks)]


def _run(rank, scenarios, root, prepared):
    """Each rank writes what it saw to `root/SCENARIO.RANK.pt`."""
    for scenario, (name, module, strategy) in scenarios.items():
        max_steps = 4 if scenario in SHORT else STEPS
        accumulate = {"accumulate_grad_batches": ACCUMULATED.get(scenario, 1)}
        callbacks = [Idle()] if scenario == "idle_experts" else []
        seen, model, _ = fit(root / scenario, prepared, name, module, strategy, max_steps, callbacks, **accumulate)
        seen["held"] = sum(local_part(p).numel() for p in model.decoder.parameters())
        torch.save(seen, root / f"{scenario}.{rank}.pt")


def _save(rank, name, strategy, root, prepared):
    """Five steps, saved after 2, 4 and 5."""
    checkpoint = Checkpoint(every_n_steps=2, keep_last=-1)
    seen, model, _ = fit(root / name, prepared, strategy=strategy, max_steps=5, callbacks=[checkpoint])
    with torch.no_grad():
        seen["logits"] = model.decoder(TOKENS).logits
    torch.save(seen, root / f"{name}.{rank}.pt")


def _resume(rank, name, source, strategy, root, prepared):
    """Steps 3 to 5 from another run's step 2."""
    path = root / source / STEP_TWO
    seen, _, _ = fit(root / "resumed", prepared, strategy=strategy, max_steps=5, ckpt_path=path)
    torch.save(seen, root / f"resumed_{name}.{rank}.pt")


class Fail(L.Callback):
    """Fails on one rank when a step ends, while the others go on to the next collective."""

    def __init__(self, rank: int, step: int, how: str) -> None:
        self.rank, self.step, self.how = rank, step, how

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if (trainer.global_rank, trainer.global_step) != (self.rank, self.step):
            return
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError(f"the disk of rank {self.rank} is full")
