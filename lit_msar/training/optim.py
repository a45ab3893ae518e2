"""AdamW groups and the warm-up - stable - decay schedule."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class OptimizerConfig:
    """AdamW and its schedule (defaults: the 18B run's, as xHC arXiv 2607.14530 states them).

    Args:
        lr: peak learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: of AdamW.
        weight_decay: on matrices; none on norms, biases, queries and gates' scalars.
        warmup_steps: linear warm-up, optimizer steps.
        decay_fraction: last part of the run that decays exponentially.
        final_lr_ratio: learning rate at the end, relative to the peak.
    """

    lr: float = 4e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-15
    weight_decay: float = 0.1
    warmup_steps: int = 500
    decay_fraction: float = 0.2
    final_lr_ratio: float = 0.1

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"lr must be positive, got {self.lr}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must not be negative, got {self.warmup_steps}")
        if not 0 <= self.decay_fraction <= 1:
            raise ValueError(f"decay_fraction must lie between 0 and 1, got {self.decay_fraction}")
        if not 0 < self.final_lr_ratio <= 1:
            raise ValueError(f"final_lr_ratio must lie in (0, 1], got {self.final_lr_ratio}")

    def group_options(self) -> dict:
        """What every parameter group is made with, weight decay aside."""
        return {"lr": self.lr, "betas": (self.beta1, self.beta2), "eps": self.eps}


def adamw(model: nn.Module, no_decay: set[str], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW with one decayed and one undecayed group of the trained parameters.

    Args:
        no_decay: full parameter names without weight decay.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    unknown = no_decay - {name for name, _ in model.named_parameters()}
    assert not unknown, f"no such parameters: {sorted(unknown)}"
    groups = [
        {"params": [p for name, p in trained if name not in no_decay], "weight_decay": config.weight_decay},
        {"params": [p for name, p in trained if name in no_decay], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], fused=True, **config.group_options())


def prepare_step(optimizer: torch.optim.AdamW, factor: Tensor, stopped: Tensor) -> None:
    """Make the next step take the gradients times `factor`, or change nothing at all.

    Both travel the way of a gradient scaler's values: the fused kernel multiplies as it reads, writes the scaled
    gradients back, and where `stopped` is 1 leaves weights, moments and step counts alone; the host need not know.

    Args:
        factor: [], finite and positive unless `stopped` is 1.
        stopped: [], 0 or 1.
    """
    device = optimizer.param_groups[0]["params"][0].device  # the host's where states are offloaded
    optimizer.grad_scale = factor.reciprocal().to(device, torch.float32)
    optimizer.found_inf = stopped.to(device, torch.float32)


def clipped_step(*optimizers: torch.optim.AdamW) -> None:
    """One update of all by gradients clipped to a common norm of 1, and free them; none if the norm is not finite."""
    gradients = [p.grad for o in optimizers for group in o.param_groups for p in group["params"] if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    factor, stopped = (1.0 / norm).clamp(max=1.0), 1 - norm.isfinite().float()
    for optimizer in optimizers:
        prepare_step(optimizer, factor, stopped)
        optimizer.step()
        optimizer.zero_grad()


def wsd_factor(config: OptimizerConfig, max_steps: int) -> Callable[[int], float]:
    """Factor on the peak learning rate at each optimizer step (counted from 0) of a run of `max_steps`.

    Linear warm-up to 1, constant, then exponential decay over the last `decay_fraction` to `final_lr_ratio`.
    """
    if max_steps < 1:
        raise ValueError(f"trainer.max_steps must be set: the decay phase ends there; got {max_steps}")
    decay_steps = round(config.decay_fraction * max_steps)
    decay_start = max_steps - decay_steps

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        if step < decay_start or not decay_steps:
            return 1.0
        return config.final_lr_ratio ** min((step + 1 - decay_start) / decay_steps, 1.0)

    return factor
