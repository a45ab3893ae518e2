"""Ends a run at its first step whose loss or gradient is not finite, without the host waiting for the device.

On the device a flag rises at that step and stays up; fused AdamW reads it (as `found_inf`) and from then on leaves
weights, moments and step counts as they are. The host learns of it from copies that travel beside the computation: it
looks at a step's copy when `LAG` further steps are under way, so that the device always has work, and at all of them
before anything is logged, validated or saved. All ranks look at the same steps, and so end together.
"""

import math
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_msar.errors import StopTraining

LAG = 2
"""Optimizer steps between a step and the host's look at it."""


class NonFiniteError(StopTraining):
    """Loss or gradient is not finite; raised on every rank, with the weights of the step before."""


@dataclass
class Verdict:
    """One step's loss and gradient norm on their way to the host."""

    step: int
    samples: str
    values: Tensor
    """[2] float64 on the host: loss and gradient norm."""
    arrival: torch.cuda.Event | None
    """When the values are there; None for a copy that is complete."""

    def look(self) -> None:
        """Wait for the values, and raise NonFiniteError if they are not finite."""
        if self.arrival is not None:
            self.arrival.synchronize()
        loss, grad_norm = self.values.tolist()
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise NonFiniteError(
                f"step {self.step} (samples {self.samples}): loss {loss}, gradient norm {grad_norm}; "
                "stopped before the weights changed"
            )


class FiniteGuard:
    """Judges every optimizer step of a run.

    Args:
        device: of losses and norms.
        is_lagged: whether the host looks later; else it looks at once, and waits for the device in every step.
    """

    def __init__(self, device: torch.device, is_lagged: bool) -> None:
        self._lag = LAG if is_lagged else 0
        self._is_cuda = device.type == "cuda"
        self.stopped = torch.zeros((), device=device)
        """[] fp32: 1 from the first step on that is not finite, else 0."""
        self._verdicts: deque[Verdict] = deque()

    def judge(self, loss: Tensor, grad_norm: Tensor, step: int, samples: str) -> None:
        """Take in a step before its update, and look at the one that is due.

        Args:
            loss, grad_norm: [], the same on all ranks.
            step: counted from 1, for messages.
            samples: what the step consumed, for messages.
        Raises:
            NonFiniteError: the step that is due was not finite.
        """
        latest = torch.stack([loss.double(), grad_norm.double()])
        self.stopped = torch.maximum(self.stopped, 1 - latest.isfinite().all().float())
        self._verdicts.append(Verdict(step, samples, *self._to_host(latest)))
        self._look(self._lag)

    def settle(self) -> None:
        """Look at every step so far; raises NonFiniteError for the first that was not finite."""
        self._look(0)

    def _look(self, n_unseen: int) -> None:
        while len(self._verdicts) > n_unseen:
            self._verdicts.popleft().look()

    def _to_host(self, latest: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        if not self._is_cuda:
            return latest, None
        values = torch.empty(latest.shape, dtype=latest.dtype, pin_memory=True)
        values.copy_(latest, non_blocking=True)
        arrival = torch.cuda.Event()
        arrival.record()
        return values, arrival
