"""Does a run fit? Memory of one GPU, communication and time of a step, from the config alone.

Everything here is an estimate from shapes: what FSDP2 keeps and gathers, what sublayers keep (`activations`), what the
depth state holds (counted by running the strategy on the meta device). docs/scale.md says where it was measured.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from lit_msar.analysis.activations import (
    alive_in_mlp,
    kept_by_attention,
    kept_by_mlp,
    mlp_parameters,
    shared_parameters,
)
from lit_msar.analysis.cost import backbone, residual_cost, training_flops_per_token
from lit_msar.analysis.depth_state import DepthState, held_by_depth
from lit_msar.model import DecoderConfig
from lit_msar.model.decoder import Checkpointing
from lit_msar.model.loss import chunk_rows
from lit_msar.residual import Residual, Vanilla

GIB = 2**30
STATE_BYTES = 12
"""Of a checkpoint, per parameter: fp32 weight and AdamW's two moments."""
RESERVE_GIB = 3.0
"""CUDA context, NCCL's buffers and what the allocator cannot use."""
PEAK_FLOPS = 989e12
"""Dense bf16 of an H100 or H200."""
NODE_BYTES_PER_SECOND, NETWORK_BYTES_PER_SECOND = 300e9, 40e9
"""Of a collective per GPU, assumed: NVLink inside of a node, one 400 Gbit/s adapter per GPU between nodes."""
RECOMPUTATION = {"none": 1.0, "selective": 1.2, "full": 4 / 3}
"""Executed over counted FLOPs."""


@dataclass(frozen=True)
class Setup:
    """What decides a run's memory. `sharded=False` is one GPU without FSDP2."""

    config: DecoderConfig
    residual: Residual
    checkpointing: Checkpointing = "none"
    batch_size: int = 1
    seq_len: int = 8192
    accumulate: int = 1
    n_gpus: int = 8
    gpus_per_node: int = 8
    replicate: int = 1
    expert_parallel: int = 1
    reshard_after_forward: bool = True
    prefetch: int = 1
    offload_states: bool = False
    async_save: bool = False
    compiles: bool = False
    sharded: bool = True

    def __post_init__(self) -> None:
        if self.n_gpus < 1:
            raise ValueError(f"gpus must be at least 1, got {self.n_gpus}")
        if self.replicate < 1 or self.n_gpus % self.replicate:
            raise ValueError(f"replicate={self.replicate} must divide gpus={self.n_gpus}")
        if self.expert_parallel < 1 or self.n_shards % self.expert_parallel:
            raise ValueError(
                f"expert_parallel={self.expert_parallel} must divide the {self.n_shards} GPUs that share one copy"
            )

    @property
    def n_shards(self) -> int:
        """GPUs that share one copy of the states."""
        return self.n_gpus // self.replicate if self.sharded else 1

    @property
    def tokens(self) -> int:
        """Of one micro-step on one GPU."""
        return self.batch_size * self.seq_len


# ------------------------------------------------------------------------------------------ parameters


@dataclass(frozen=True)
class Parameters:
    """Counts: all, each layer, each layer as a rank gathers it, embedding or head, the strategy's own."""

    total: int
    layers: tuple[int, ...]
    gathered: tuple[int, ...]
    table: int
    residual: int


def parameters(setup: Setup) -> Parameters:
    """Of a setup, norms left out of layers; a layer's experts are gathered from the ranks that do not spread them."""
    config, parts = setup.config, backbone(setup.config)
    residual = residual_cost(config, setup.residual).parameters
    layers, gathered = [], []
    for layer in range(config.n_layers):
        around, of_mlp = parts.attention // config.n_layers, mlp_parameters(config, layer)
        if config.is_moe(layer):
            around += (parts.shared_experts + parts.routers) // len(config.moe_layers)
        layers.append(around + of_mlp)
        gathered.append(around + of_mlp // (setup.expert_parallel if config.is_moe(layer) else 1))
    return Parameters(parts.total + residual, tuple(layers), tuple(gathered), parts.head, residual)


# ------------------------------------------------------------------------------------------ activations


def depth_state(setup: Setup) -> DepthState:
    """Of a setup's strategy."""
    config = setup.config
    return held_by_depth(setup.residual, config.d_model, config.n_layers, setup.checkpointing == "full")


def kept_bytes(setup: Setup, layer: int) -> float:
    """What the sublayers of a layer keep until its backward, per token."""
    config = setup.config
    if setup.checkpointing == "full":
        return 0.0
    attention, mlp = kept_by_attention(config), kept_by_mlp(config, layer, setup.compiles)
    if setup.checkpointing == "selective":
        choice = (4 + 3 * 8) * config.top_k if config.is_moe(layer) else 0  # top-k's and sort's values and indices
        return sum(attention.values()) + mlp["read"] + choice
    return sum(attention.values()) + sum(mlp.values())


def working_bytes(setup: Setup, layer: int) -> float:
    """At the peak of an MLP's backward, beside what was kept: what is computed again, and gradients."""
    config, recomputes = setup.config, setup.checkpointing != "none"
    stays, moments = alive_in_mlp(config, layer, setup.compiles, recomputes)
    # a gradient is bf16 as the product gives it; of fp32 weights there is an fp32 copy
    of_weight = 2 if setup.sharded else 2 + 4
    of_mlp = of_weight * mlp_parameters(config, layer) / setup.expert_parallel
    of_shared = of_weight * shared_parameters(config, layer)
    if setup.checkpointing == "none":  # the sublayers' part counts all that was kept; some of it is gone
        per_token = sum(stays.values()) - sum(kept_by_mlp(config, layer, setup.compiles).values())
    else:
        per_token = sum(stays.values()) - stays["read"]
    if setup.checkpointing == "full":
        per_token += stays["read"] + _kept_by_segment(setup, layer)
    per_token += depth_state(setup).working[layer]
    return max(
        setup.tokens * (per_token + held.per_token) + of_mlp * held.gradient + of_shared * (held.gradient > 0)
        for held in moments
    )


def _kept_by_segment(setup: Setup, layer: int) -> float:
    """What the sublayers before the MLP of `layer` keep, per token, once its segment has been computed again."""
    config = setup.config
    first = layer - layer % setup.residual.segment_layers
    mlps = sum(sum(kept_by_mlp(config, i, setup.compiles).values()) for i in range(first, layer))
    return mlps + (layer + 1 - first) * sum(kept_by_attention(config).values())


# ------------------------------------------------------------------------------------------ one GPU


def memory(setup: Setup) -> dict[str, float]:
    """Bytes on one GPU at the peak, by what holds them.

    The peak is the loss, when all activations are kept, or the backward of some MLP: on the way down activations go and
    gradients come, unless earlier micro-steps left them.
    """
    return max(_moments(setup), key=lambda moment: sum(moment.values()))


def _moments(setup: Setup) -> Iterator[dict[str, float]]:
    count, n_layers = parameters(setup), setup.config.n_layers
    state, last, table = depth_state(setup).kept, n_layers - 1, count.table
    kept = [setup.tokens * kept_bytes(setup, layer) for layer in range(n_layers)]
    n_gathered = _gathered(setup, count, last)
    resharded = setup.sharded and setup.reshard_after_forward
    of_hidden = 2 * 2 * setup.tokens * setup.config.d_model  # norm of the hidden states, and its gradient

    def moment(working: float, n_kept: int = n_layers, state: float = state[-1], **counts: float) -> dict[str, float]:
        activations = {
            "depth state": setup.tokens * state,
            "sublayers, kept": sum(kept[:n_kept]),
            "head, or one MLP's backward": working,
        }
        return _weights(setup, count, **counts) | activations

    # the loss: logits of a chunk, which become their gradient; the head's gradient in fp32; its weights, and the
    # buffer they were gathered in
    chunk = min(setup.tokens, chunk_rows(setup.tokens, setup.config.vocab_size, 2))
    in_loss = 2 * chunk * setup.config.vocab_size + of_hidden + 4 * table
    yield moment(in_loss, gathered=(0 if resharded else n_gathered) + (1 + setup.sharded) * table)
    # the head's backward: that gradient, scaled, and where weights are gathered in bf16
    scaled = of_hidden + (4 + 4 + 2 * setup.sharded) * table
    yield moment(scaled, gathered=(count.gathered[last] if resharded else n_gathered) + table)
    done = table
    for layer in reversed(range(n_layers)):
        # a unit's gradients leave in one fp32 buffer, which stays until the next unit's do
        leaving = table if layer == last else count.gathered[layer + 1]
        n_gathered, working = _gathered(setup, count, layer), working_bytes(setup, layer)
        yield moment(working, layer + 1, state[layer], done=done, gathered=n_gathered, leaving=leaving)
        done += count.layers[layer]
    # the embedding's backward
    leaving = max(table, count.gathered[0])
    yield moment(2 * table, 0, 0.0, done=done, gathered=table * setup.sharded, leaving=leaving)


def _weights(
    setup: Setup, count: Parameters, done: float = 0.0, gathered: float = 0.0, leaving: float = 0.0
) -> dict[str, float]:
    """Bytes of parameters and what belongs to them.

    Args:
        done: parameters whose gradients the ranks share.
        gathered: those that are whole in bf16.
        leaving: those whose gradients are on their way to their ranks.
    """
    share, all_done = count.total / setup.n_shards, setup.accumulate > 1
    states = {
        "parameters (fp32)": 4 * share,
        "AdamW's moments (fp32)": 8 * share,
        "gradients (fp32)": 4 * (count.total if all_done else done) / setup.n_shards,
    }
    if setup.offload_states:
        states = dict.fromkeys(states, 0.0)
    # the root unit stays gathered, and its gradients are the last to leave
    own = 4 * count.residual * setup.sharded
    return states | {
        "gathered weights": 2 * gathered + own,
        "gradients on their way": 4 * leaving * setup.sharded + own,
    }


def _gathered(setup: Setup, count: Parameters, layer: int) -> int:
    """Parameters that are whole in bf16 while `layer` is differentiated."""
    up_to = sum(count.gathered[: layer + 1])
    if not setup.sharded:  # casts, which autograd keeps
        return count.gathered[layer] if setup.checkpointing == "full" else up_to
    if not setup.reshard_after_forward:
        return up_to
    n_ahead = setup.prefetch
    if not setup.config.is_moe(layer):  # untold, FSDP2 gathers one unit ahead; for a MoE layer that is its router
        n_ahead = max(1, n_ahead)
    embedding = count.table if layer == 0 and not setup.config.is_moe(0) else 0
    return sum(count.gathered[max(0, layer - n_ahead) : layer + 1]) + embedding


def total_gib(setup: Setup) -> float:
    """Peak of one GPU, the reserve included."""
    return sum(memory(setup).values()) / GIB + RESERVE_GIB


def host_gib(setup: Setup) -> float:
    """States in one node's memory: offloaded, and the copy that an asynchronous save writes from."""
    per_gpu = (16 * setup.offload_states + STATE_BYTES * setup.async_save) * parameters(setup).total / setup.n_shards
    return per_gpu * min(setup.gpus_per_node, setup.n_gpus) / GIB


def remedies(setup: Setup, gpu_memory: float) -> Iterator[tuple[str, Setup]]:
    """Changes that make a setup fit, cheapest first; each builds on the ones before it."""
    micro_batches = {"batch_size": 1, "accumulate": setup.accumulate * setup.batch_size}
    steps = [
        ("--trainer.strategy.reshard_after_forward=true", {"reshard_after_forward": True}),
        ("--model.checkpointing=selective", {"checkpointing": "selective"}),
        ("--data.batch_size=1 with more --trainer.accumulate_grad_batches", micro_batches),
        ("--model.checkpointing=full", {"checkpointing": "full"}),
        ("--trainer.strategy.prefetch=0", {"prefetch": 0}),
    ]
    options = setup.residual.options
    if options.get("schedule", "per_read") != "per_read":
        leaner = type(setup.residual)(**options | {"schedule": "per_read"})
        steps.insert(2, ("--model.residual.init_args.schedule=per_read", {"residual": leaner}))
    spread = [k for k in (2, 4, 8) if setup.n_shards % k == 0 and setup.config.n_experts % k == 0]
    if setup.sharded and spread:
        steps.append((f"--trainer.strategy.expert_parallel={spread[-1]}", {"expert_parallel": spread[-1]}))
    if setup.sharded:
        steps.append(("--trainer.strategy.offload_states=true", {"offload_states": True}))
    taken = []
    for name, change in steps:
        changed = replace(setup, **change)
        if total_gib(changed) >= total_gib(setup):
            continue
        setup = changed
        taken = [*(t for t in taken if "checkpointing" not in change or "checkpointing" not in t), name]
        if total_gib(setup) <= gpu_memory:
            yield " ".join(taken), setup
            return


def enough_gpus(setup: Setup, gpu_memory: float, most: int = 4096) -> int | None:
    """The fewest GPUs, by doubling, on which the setup fits as it is, everything sharded over all of them."""
    n_gpus = setup.n_gpus
    while n_gpus <= most:
        if total_gib(replace(setup, n_gpus=n_gpus, replicate=1, sharded=True)) <= gpu_memory:
            return n_gpus
        n_gpus *= 2
    return None


# ------------------------------------------------------------------------------------------ a step


def step_seconds(setup: Setup, mfu: float) -> tuple[float, float]:
    """Of an optimizer step: computing at an assumed MFU with recomputation on top, and communication beside it."""
    flops = training_flops_per_token(setup.config, setup.residual, setup.seq_len)
    computing = setup.accumulate * setup.tokens * flops * RECOMPUTATION[setup.checkpointing] / (mfu * PEAK_FLOPS)
    if not setup.sharded or setup.n_gpus == 1:
        return computing, 0.0
    count, config = parameters(setup), setup.config
    gathered = sum(count.gathered) + 2 * count.table
    gathers = 1 + setup.reshard_after_forward
    part = (setup.n_shards - 1) / setup.n_shards
    sharding = part * gathered * (2 * gathers + 4)
    if setup.expert_parallel > 1:
        ways = 4 + 2 * (setup.checkpointing != "none")
        sharding += ways * len(config.moe_layers) * setup.tokens * config.top_k * config.d_model * 2
    inside = setup.n_shards <= setup.gpus_per_node
    seconds = setup.accumulate * sharding / (NODE_BYTES_PER_SECOND if inside else NETWORK_BYTES_PER_SECOND)
    if setup.replicate > 1:  # once per step, whatever the micro-steps
        between = setup.n_gpus > setup.gpus_per_node
        averaging = 2 * 4 * count.total / setup.n_shards
        seconds += averaging / (NETWORK_BYTES_PER_SECOND if between else NODE_BYTES_PER_SECOND)
    return computing, seconds


def print_plan(setup: Setup, gpu_memory: float, mfu: float) -> None:
    """Print memory, fit, remedies and a step's time."""
    if gpu_memory <= RESERVE_GIB:
        raise ValueError(f"gpu_memory must be more than {RESERVE_GIB:g} GiB, got {gpu_memory:g}")
    if not 0 < mfu <= 1:
        raise ValueError(f"mfu must lie in (0, 1], got {mfu:g}")
    console = Console(width=120)
    console.print(_table(setup, gpu_memory))
    console.print(_fit(setup, gpu_memory), soft_wrap=True)
    console.print(_step(setup, mfu), soft_wrap=True)


def _table(setup: Setup, gpu_memory: float) -> Table:
    table = Table(title=f"Memory of one of {setup.n_gpus} GPUs, GiB (estimated)")
    table.add_column("what")
    name = type(setup.residual).__name__
    baseline = replace(setup, residual=Vanilla())
    columns = {name: memory(setup)} | ({"Vanilla": memory(baseline)} if name != "Vanilla" else {})
    for column in columns:
        table.add_column(column, justify="right")
    for row in columns[name]:
        table.add_row(row, *(f"{values[row] / GIB:.2f}" for values in columns.values()))
    table.add_row("reserve", *[f"{RESERVE_GIB:.2f}"] * len(columns))
    table.add_section()
    table.add_row("total", *(f"{sum(values.values()) / GIB + RESERVE_GIB:.2f}" for values in columns.values()))
    table.add_row("of", *[f"{gpu_memory:.2f}"] * len(columns))
    return table


def _fit(setup: Setup, gpu_memory: float) -> str:
    if total_gib(setup) <= gpu_memory:
        return f"fits: {gpu_memory - total_gib(setup):.1f} GiB to spare on each GPU"
    lines = [f"does not fit: {total_gib(setup) - gpu_memory:.1f} GiB too much on each GPU"]
    for change, fitting in remedies(setup, gpu_memory):
        lines.append(f"fits with {change}: {total_gib(fitting):.1f} GiB")
    if (n_gpus := enough_gpus(setup, gpu_memory)) is not None:
        lines.append(f"fits as it is on {n_gpus} GPUs, everything sharded over all of them")
    if len(lines) == 1:
        lines.append("no change of checkpointing, batch, gathering or offloading makes it fit")
    return "\n".join(lines)


def _step(setup: Setup, mfu: float) -> str:
    count = parameters(setup)
    computing, communication = step_seconds(setup, mfu)
    tokens = setup.tokens * setup.accumulate * setup.n_gpus
    mesh = f"{setup.replicate} x {setup.n_shards}" if setup.replicate > 1 else f"{setup.n_shards}"
    spread = f", experts over groups of {setup.expert_parallel}" if setup.expert_parallel > 1 else ""
    lines = [
        f"ranks: {setup.n_gpus}; mesh (replicate x shard): {mesh}{spread}",
        f"parameters: {count.total / 1e9:.2f}B; a checkpoint: {STATE_BYTES * count.total / GIB:.0f} GiB, "
        f"{STATE_BYTES * count.total / setup.n_gpus / GIB:.1f} per rank",
        f"tokens per step: {tokens:,} ({setup.n_gpus} ranks x {setup.accumulate} micro-steps x {setup.batch_size} "
        f"sequences x {setup.seq_len:,})",
        f"a step: {computing:.2f} s of computing if the kernels reach {100 * mfu:.0f} % of {PEAK_FLOPS / 1e12:.0f} "
        f"TFLOP/s (recomputation counted as work), and {communication:.2f} s of communication beside it",
    ]
    if host_gib(setup):
        lines.append(f"host memory per node: {host_gib(setup):.0f} GiB for states")
    return "\n".join(lines)
