"""Does a run fit? Memory of one GPU, communication and time of a step, from the config alone.

Everything here is an estimate from shapes: what FSDP2 keeps and gathers, what autograd saves per sublayer, what the
depth state holds (counted by running the strategy on the meta device). docs/scale.md says where it was measured.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
from rich.console import Console
from rich.table import Table

from lit_msar.analysis.cost import backbone, residual_cost, training_flops_per_token
from lit_msar.model import DecoderConfig
from lit_msar.model.decoder import Checkpointing
from lit_msar.model.loss import chunk_rows
from lit_msar.residual import Residual, Vanilla, sites

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
    """Counts: all, one MoE layer as a rank gathers it, embedding or head."""

    total: int
    layer: int
    table: int
    residual: int


def parameters(setup: Setup) -> Parameters:
    """Of a setup; a layer's experts are gathered from the ranks that do not spread them."""
    config, parts = setup.config, backbone(setup.config)
    residual = residual_cost(config, setup.residual).parameters
    n_moe = len(config.moe_layers)
    experts = parts.experts / max(1, n_moe) / setup.expert_parallel
    moe = parts.attention / config.n_layers + experts + (parts.shared_experts + parts.routers) / max(1, n_moe)
    dense = parts.attention / config.n_layers + parts.dense_mlp / max(1, config.n_layers - n_moe)
    return Parameters(parts.total + residual, int(max(moe if n_moe else 0, dense)), parts.head, residual)


# ------------------------------------------------------------------------------------------ activations


def state_bytes(setup: Setup) -> tuple[float, float]:
    """Of the depth state, per token: what must stay until the backward, and what one site's state holds at most.

    Without recomputation every tensor that the state ever held stays, and what reads keep; with `full`, those between
    segments. A state that is itself what the sublayer reads, as Vanilla's, counts among what the sublayer keeps.
    """
    residual, config = setup.residual, setup.config
    options = json.dumps(residual.options, sort_keys=True)
    return _state_bytes(type(residual), options, config.d_model, config.n_layers, setup.checkpointing == "full")


@cache
def _state_bytes(
    kind: type[Residual], options: str, d_model: int, n_layers: int, between_segments: bool
) -> tuple[float, float]:
    n_tokens = 8
    with torch.device("meta"), torch.no_grad():
        strategy = kind(**json.loads(options))
        strategy.build(d_model, n_layers)
        state = strategy.begin(torch.empty(1, n_tokens, d_model, dtype=torch.bfloat16))
        kept, reads, largest = {id(t): t for t in state}, [], 0
        for site in sites(n_layers)[:-1]:
            x, state = strategy.read(state, site)
            reads.append(x)
            state = strategy.write(state, site, torch.empty(1, n_tokens, d_model, dtype=torch.bfloat16))
            if not between_segments or (site.index + 1) % (2 * strategy.segment_layers) == 0:
                kept |= {id(t): t for t in state}
            largest = max(largest, sum(t.nbytes for t in state))
    of_reads = [2 * strategy.kept_by_read(site) for site in sites(n_layers)]
    if between_segments:
        of_segment = sum(of_reads[: 2 * strategy.segment_layers])
        return sum(t.nbytes for t in kept.values()) / n_tokens, largest / n_tokens + of_segment
    stays = sum(t.nbytes for t in kept.values() if all(t is not x for x in reads))
    return stays / n_tokens + sum(of_reads), largest / n_tokens


def attention_bytes(config: DecoderConfig) -> float:
    """Saved per token: the read, its norm, q k v, q and k after norm and rotation, the output, log-sum-exp."""
    n_q, n_kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    return 2 * (2 * config.d_model + (n_q + 2 * n_kv) + (n_q + n_kv) + n_q) + 4 * config.n_heads


def mlp_bytes(config: DecoderConfig, layer: int) -> float:
    """Saved per token: the read, its norm, and what the products and SwiGLU keep."""
    D = config.d_model
    if not config.is_moe(layer):
        return 2 * (2 * D + 4 * config.d_ff)
    k, F = config.top_k, config.d_expert
    router = 4 * D + 4 * 4 * config.n_experts  # an fp32 copy of the norm; scores and their shares
    return 2 * (2 * D + k * (2 * D + 4 * F) + 4 * config.n_shared_experts * F) + router


def kept_bytes(setup: Setup, layer: int) -> float:
    """What the sublayers of a layer keep until its backward, per token."""
    config = setup.config
    if setup.checkpointing == "full":
        return 0.0
    if setup.checkpointing == "selective":
        return attention_bytes(config) + 4 * config.d_model + 8 * config.top_k
    return attention_bytes(config) + mlp_bytes(config, layer)


def working_bytes(setup: Setup, layer: int) -> float:
    """A layer in its backward, per token: what is computed again, and gradients of what its widest sublayer saved."""
    of_mlp = mlp_bytes(setup.config, layer)
    again = {"none": 0.0, "selective": of_mlp, "full": attention_bytes(setup.config) + of_mlp}[setup.checkpointing]
    return again + state_bytes(setup)[1] + 0.6 * of_mlp


def head_bytes(setup: Setup) -> float:
    """Logits of a chunk, which become their gradient, the hidden states' gradient, the head's own in fp32 and bf16."""
    D, V = setup.config.d_model, setup.config.vocab_size
    chunk = min(setup.tokens, chunk_rows(setup.tokens, V, 2))
    return 2 * chunk * V + 2 * setup.tokens * D + (4 + 2) * V * D


# ------------------------------------------------------------------------------------------ one GPU


def memory(setup: Setup) -> dict[str, float]:
    """Bytes on one GPU at the peak, by what holds them.

    The peak is the loss, when all activations are kept, or the backward of some layer: on the way down activations go
    and gradients come, unless earlier micro-steps left them.
    """
    return max(_moments(setup), key=lambda moment: sum(moment.values()))


def _moments(setup: Setup) -> Iterator[dict[str, float]]:
    count, n_layers = parameters(setup), setup.config.n_layers
    share = count.total / setup.n_shards
    if setup.sharded:
        n_live = n_layers if not setup.reshard_after_forward else min(2 + setup.prefetch, n_layers)
        # gradients of one layer in bf16, and two layers' copies in fp32 on their way through the reduction
        reduced, own = 2 * count.layer + 2 * 4 * count.layer, 4 * count.residual
    else:
        n_live = 1 if setup.checkpointing == "full" else n_layers
        reduced, own = 2 * count.layer, 0
    state = state_bytes(setup)[0]
    kept = [kept_bytes(setup, layer) for layer in range(n_layers)]

    def moment(done: float, n_gathered: int, n_kept: int, working: float) -> dict[str, float]:
        gradients = 1.0 if setup.accumulate > 1 else done
        parts = {
            "parameters (fp32)": 4 * share,
            "AdamW's moments (fp32)": 8 * share,
            "gradients (fp32)": 4 * share * gradients,
        }
        if setup.offload_states:
            parts = dict.fromkeys(parts, 0.0)
        return parts | {
            "gathered weights (bf16)": 2 * (n_gathered * count.layer + count.table) + own,
            "depth state": setup.tokens * state * n_kept / n_layers,
            "sublayers, kept": setup.tokens * sum(kept[:n_kept]),
            "head, or one layer's backward with its reduction": working,
        }

    n_gathered = n_live if not (setup.sharded and setup.reshard_after_forward) else 1
    yield moment(0.0, n_gathered, n_layers, head_bytes(setup))
    for layer in reversed(range(n_layers)):
        working = setup.tokens * working_bytes(setup, layer) + reduced
        # the tables' gradients are the first and the last
        done = (count.table + (n_layers - layer) * (count.total - 2 * count.table) / n_layers) / count.total
        yield moment(done if layer else 1.0, n_live, layer + 1, working)


def total_gib(setup: Setup) -> float:
    """Peak of one GPU, the reserve included."""
    return sum(memory(setup).values()) / GIB + RESERVE_GIB


def host_gib(setup: Setup) -> float:
    """States in one node's memory: offloaded, and the copy that an asynchronous save writes from."""
    per_gpu = (16 * setup.offload_states + STATE_BYTES * setup.async_save) * parameters(setup).total / setup.n_shards
    return per_gpu * min(setup.gpus_per_node, setup.n_gpus) / GIB


def remedies(setup: Setup, gpu_memory: float) -> Iterator[tuple[str, Setup]]:
    """Changes that make a setup fit, cheapest first; each builds on the ones before it."""
    steps = [
        ("--trainer.strategy.reshard_after_forward=true", {"reshard_after_forward": True}),
        ("--model.checkpointing=selective", {"checkpointing": "selective"}),
        ("--data.batch_size=1 with more --trainer.accumulate_grad_batches", {"batch_size": 1}),
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
    order, taken = ["none", "selective", "full"], []
    for name, change in steps:
        (key, value), current = *change.items(), setup
        weaker = key == "checkpointing" and order.index(value) <= order.index(current.checkpointing)
        if weaker or getattr(current, key) == value:
            continue
        setup = replace(setup, **change)
        taken = [*(t for t in taken if key != "checkpointing" or "checkpointing" not in t), name]
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
    gathered = config.n_layers * count.layer + 2 * count.table
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
