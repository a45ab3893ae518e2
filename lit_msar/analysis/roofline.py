"""Where the parts of a training step stand under the machine's two roofs: arithmetic and memory.

Work is counted, not measured: FLOPs of forward and backward, and the least bytes that a fused implementation moves.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from lit_msar.analysis.cost import FLOPS_PER_MULTIPLY_ADD, backbone, residual_cost
from lit_msar.model import DecoderConfig
from lit_msar.residual import Residual

ACTIVATION_BYTES = 2  # bf16
WEIGHT_BYTES = 4 + 2 + 2 + 2 + 4  # fp32 read, bf16 copy written, read twice more in the backward; fp32 gradient written
OPTIMIZER_BYTES = 4 * 4 + 3 * 4  # parameter, gradient and both moments read; all but the gradient written
OPTIMIZER_FLOPS = 15  # per parameter of one AdamW update
PASSES = 3  # a tensor that passes a part is met in the forward, and as itself and as its gradient in the backward


@dataclass(frozen=True)
class Work:
    """What a part of a step has to do at least."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Roofs:
    """What the machine does at most, measured."""

    flops: float
    """Per second, of a large matrix product."""
    bytes: float
    """Per second, of a large copy, read and written."""


def step_work(config: DecoderConfig, residual: Residual, batch_size: int, seq_len: int) -> dict[str, Work]:
    """Work of one training step by part, named as `lit_msar bench` names them."""
    parts, tokens = backbone(config), batch_size * seq_len
    boundary = 2 * PASSES * tokens * config.d_model * ACTIVATION_BYTES  # what enters a sublayer, and what leaves it
    attention = parts.attention + config.n_layers * config.n_heads * config.head_dim * (seq_len + 1)
    mlp_active = parts.dense_mlp + parts.experts - parts.inactive + parts.shared_experts + parts.routers
    mlp_weights = mlp_active + parts.inactive
    own = residual_cost(config, residual)
    trained = parts.total + own.parameters
    return {
        "attention": _work(tokens, attention, parts.attention, config.n_layers * boundary),
        "mlp": _work(tokens, mlp_active, mlp_weights, config.n_layers * boundary),
        "loss": _work(tokens, parts.head, parts.head, boundary),
        "residual": Work(
            FLOPS_PER_MULTIPLY_ADD * tokens * own.multiply_adds, PASSES * tokens * own.elements * ACTIVATION_BYTES
        ),
        "optimizer": Work(OPTIMIZER_FLOPS * trained, OPTIMIZER_BYTES * trained),
    }


def _work(tokens: int, multiply_adds: float, weights: int, boundary: float) -> Work:
    return Work(FLOPS_PER_MULTIPLY_ADD * tokens * multiply_adds, WEIGHT_BYTES * weights + boundary)


def measure_roofs(device: torch.device) -> Roofs:
    """Roofs of a device: the best of a few products (bf16 on a GPU, fp32 on a CPU) and of a few copies."""
    is_cuda = device.type == "cuda"
    size, n_bytes = (8192, 2**30) if is_cuda else (1024, 2**26)
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if is_cuda else torch.float32)
    source = torch.empty(n_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product = _best_seconds(lambda: a @ a, device)
    copy = _best_seconds(lambda: target.copy_(source), device)
    return Roofs(2 * size**3 / product, 2 * n_bytes / copy)


def _best_seconds(run, device: torch.device, repeats: int = 5) -> float:
    best = float("inf")
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best


def roofline_figure(
    seconds: Mapping[str, Mapping[str, float]], work: Mapping[str, Mapping[str, Work]], roofs: Roofs
) -> Figure:
    """A point per part and strategy: FLOP per byte against FLOP per second, under the two roofs.

    Args:
        seconds: measured time by strategy and part.
        work: counted work by strategy and part.
        roofs: of the machine.
    """
    figure, axis = plt.subplots(figsize=(7.5, 5), layout="constrained")
    intensities = [w.flops / w.bytes for parts in work.values() for w in parts.values() if w.flops]
    low, high = min(intensities) / 3, max(*intensities, roofs.flops / roofs.bytes) * 3
    ridge = roofs.flops / roofs.bytes
    axis.plot([low, ridge, high], [low * roofs.bytes, roofs.flops, roofs.flops], color="0.3", linewidth=1.5)
    markers = {"attention": "o", "mlp": "s", "loss": "^", "residual": "*", "optimizer": "D"}
    for i, (strategy, parts) in enumerate(work.items()):
        for part, marker in markers.items():
            if seconds[strategy].get(part) and parts[part].flops:
                flops = parts[part].flops
                point = (flops / parts[part].bytes, flops / seconds[strategy][part])
                axis.plot(*point, marker, color=f"C{i}", markersize=9, alpha=0.8, label=f"{strategy}: {part}")
    axis.set(xscale="log", yscale="log", xlim=(low, high))
    axis.set_xlabel("FLOP per byte (counted, fused)")
    axis.set_ylabel("FLOP per second (counted over measured)")
    axis.grid(True, which="both", alpha=0.2)
    axis.legend(fontsize=6, ncols=max(1, len(work) // 2), loc="lower right")
    plt.close(figure)
    return figure
