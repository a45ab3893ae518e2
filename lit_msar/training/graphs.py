"""A micro-step as a CUDA graph: one launch instead of thousands, for models so small that a step waits for the host."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Outputs = tuple[Tensor, ...]

MAX_FORMS = 4
WARM_UP = 3


def check_graphs(device: torch.device, world_size: int) -> None:
    """Raise ValueError unless a run on this device, of so many processes, can replay its steps."""
    if device.type != "cuda" or world_size > 1:
        where = f"{device.type}" if world_size == 1 else f"{world_size} processes"
        raise ValueError(f"model.cuda_graphs needs one CUDA device, this run is on {where}: set it to false")


def capture(run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
    """What replays `run` on the current device, and the tensors that it then writes to."""
    graph = torch.cuda.CUDAGraph()
    # other threads go on copying batches and allocating for them
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = run()
    return graph.replay, outputs


class GraphedStep:
    """Forward and backward of batches, replayed for every batch that looks like one seen before.

    The first batch of each form, the names and shapes of its tensors, is run a few times and captured. A replay reads
    and writes the same memory every time: batches are copied in, what `step` gives is copied out, and gradients are
    added to those that the parameters have, which therefore are never None: zero them in place. Parameters and buffers
    must be changed in place too, as optimizers and `load_state_dict` do.

    Args:
        parameters: that get gradients.
        step: runs a batch forward and backward and gives tensors without gradient; it must not wait for the device.
    """

    def __init__(self, parameters: list[nn.Parameter], step: Callable[[dict[str, Tensor]], Outputs]) -> None:
        self._parameters, self._step = parameters, step
        self._forms: dict[tuple, tuple[dict[str, Tensor], Callable[[], None], Outputs]] = {}
        self._gradients: list[Tensor] = []

    def __call__(self, batch: dict[str, Tensor]) -> Outputs:
        form = tuple((name, *x.shape) for name, x in batch.items())
        self._hold_gradients()
        if form not in self._forms:
            if len(self._forms) == MAX_FORMS:
                return self._step(batch)
            self._forms[form] = self._captured(batch)
        inputs, replay, outputs = self._forms[form]
        for name, x in inputs.items():
            x.copy_(batch[name])
        replay()
        return tuple(x.clone() for x in outputs)

    def _hold_gradients(self) -> None:
        """Make the gradients that graphs add to, and see that they are still the parameters'."""
        if not self._forms:
            for parameter in self._parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            self._gradients = [parameter.grad for parameter in self._parameters]
        elif any(p.grad is not held for p, held in zip(self._parameters, self._gradients, strict=True)):
            raise RuntimeError("a gradient was replaced after a step was captured; zero gradients in place")

    def _captured(self, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], Callable[[], None], Outputs]:
        inputs = {name: x.clone() for name, x in batch.items()}
        gradients = [parameter.grad.clone() for parameter in self._parameters]  # of earlier micro-steps
        self._warm_up(inputs)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad.copy_(gradient)
        return inputs, *capture(lambda: self._step(inputs))

    def _warm_up(self, inputs: dict[str, Tensor]) -> None:
        """Compile and choose kernels, on a stream of its own as capturing asks for."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._step(inputs)
        torch.cuda.current_stream().wait_stream(stream)
