"""What a training step costs, by part and by residual strategy: one backbone in memory, strategies swapped in turn.

Attention, MLP, embedding and head are wrapped in stamps that let the tensors through unchanged and note the time in the
forward and, from autograd, in the backward; the time between two stamps belongs to the part they enclose. What no part
encloses is the residual's: reads, writes, and in the backward their gradients. On a GPU the stamps are CUDA events, so
nothing waits for the host.
"""

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from lit_msar.analysis.cost import (
    FLOPS_PER_MULTIPLY_ADD,
    default_strategies,
    multiply_adds_per_token,
    training_flops_per_token,
)
from lit_msar.analysis.peak import peak_flops
from lit_msar.analysis.roofline import measure_roofs, roofline_figure, step_work
from lit_msar.initialization import initialize
from lit_msar.model import Decoder, DecoderConfig
from lit_msar.model.attention import usable_backend
from lit_msar.model.loss import Losses
from lit_msar.residual import Residual, Site, State
from lit_msar.residual.registry import parse_strategies
from lit_msar.training.bench_rows import PARTS, BenchRow, bench_table, growth_table, write_csv
from lit_msar.training.module import LanguageModel
from lit_msar.training.optim import OptimizerConfig, adamw, clipped_step
from lit_msar.training.result import commit, device_name


class Clock:
    """A timeline of steps on one device, and of entering and leaving parts in them."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[tuple[str | None, torch.cuda.Event | float]] = []
        self._starts: list[int] = []

    def mark(self, part: str | None) -> None:
        """From here on time belongs to `part`; None leaves the current one."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((part, event))
        else:
            self._marks.append((part, time.perf_counter()))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time inside belongs to `name`."""
        self.mark(name)
        yield
        self.mark(None)

    def start(self, part: str) -> None:
        """A step begins, in this part; the step before ends here, in whatever part it is."""
        self._starts.append(len(self._marks))
        self.mark(part)

    def read(self) -> list[dict[str, float]]:
        """Seconds by part of every step, the last of which ends here; forgets them."""
        if not self._starts:
            return []
        self.mark(None)
        if self._is_cuda:
            torch.cuda.synchronize()
        ends = [*self._starts[1:], len(self._marks) - 1]
        steps = [self._seconds(self._marks[i : j + 1]) for i, j in zip(self._starts, ends, strict=True)]
        self._marks.clear()
        self._starts.clear()
        return steps

    def _seconds(self, marks: list[tuple[str | None, torch.cuda.Event | float]]) -> dict[str, float]:
        seconds: dict[str, float] = defaultdict(float)
        inside: list[str] = []
        for (part, start), (_, end) in itertools.pairwise(marks):
            if part is None:
                inside.pop()
            else:
                inside.append(part)
            seconds[inside[-1]] += start.elapsed_time(end) / 1e3 if self._is_cuda else end - start
        return dict(seconds)


class _Stamp(torch.autograd.Function):
    """Lets a tensor through; marks the forward now and the backward when its gradient passes."""

    @staticmethod
    def forward(ctx, x: Tensor, clock: Clock, forward: str | None, backward: str | None) -> Tensor:
        clock.mark(forward)
        ctx.clock, ctx.part = clock, backward
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.clock.mark(ctx.part)
        return grad, None, None, None


class Timed(nn.Module):
    """A part of the model between two stamps: in the forward it is entered first, in the backward left last."""

    def __init__(self, part: nn.Module, name: str, clock: Clock) -> None:
        super().__init__()
        self.part, self.name, self.clock = part, name, clock

    def forward(self, x: Tensor, *args: object) -> object:
        if x.is_floating_point():
            x = _Stamp.apply(x, self.clock, self.name, None)
        else:  # token ids: no gradient flows back into them, so nothing leaves this part in the backward
            self.clock.mark(self.name)
        output = self.part(x, *args)
        if isinstance(output, Losses):
            return output._replace(total=_Stamp.apply(output.total, self.clock, None, self.name))
        if isinstance(output, tuple):  # an MLP's output and its router's statistics
            return (_Stamp.apply(output[0], self.clock, None, self.name), *output[1:])
        return _Stamp.apply(output, self.clock, None, self.name)


class TimedResidual(Residual):
    """Stands in for a strategy; its calls are the residual's time also where a backward recomputes a forward."""

    def __init__(self, residual: Residual, clock: Clock) -> None:
        super().__init__()
        object.__setattr__(self, "timed", residual)  # not a submodule: its parameters have an owner
        self.segment_layers, self._part = residual.segment_layers, lambda: clock.part("residual")

    def begin(self, x: Tensor, position: Tensor | None = None) -> State:
        with self._part():
            return self.timed.begin(x, position)

    def read(self, state: State, site: Site) -> tuple[Tensor, State]:
        with self._part():
            return self.timed.read(state, site)

    def write(self, state: State, site: Site, y: Tensor) -> State:
        with self._part():
            return self.timed.write(state, site, y)

    def finish(self, state: State) -> Tensor:
        with self._part():
            return self.timed.finish(state)


def time_parts(decoder: Decoder, clock: Clock) -> None:
    """Wrap the parts of a decoder in place; it is for measuring only from then on."""
    decoder.embedding = Timed(decoder.embedding, "embedding", clock)
    decoder.head = Timed(decoder.head, "loss", clock)
    for layer in decoder.layers:
        layer.attention = Timed(layer.attention, "attention", clock)
        layer.mlp = Timed(layer.mlp, "mlp", clock)


@dataclass
class Contestant:
    """A strategy with its own optimizer, to be swapped into the shared backbone."""

    name: str
    residual: Residual
    optimizer: torch.optim.AdamW | None
    """None where nothing is trained or updated."""


class Bench:
    """One backbone, several strategies, whole training steps on random tokens.

    Args:
        config: shape.
        module: checkpointing, compile choice, optimizer and seed of the run.
        strategies: not built yet, by name.
        batch_size, seq_len: tokens of a step.
        device: where it runs.
        update: whether a step ends with clipping and AdamW.
    """

    def __init__(
        self,
        config: DecoderConfig,
        module: LanguageModel,
        strategies: dict[str, Residual],
        batch_size: int,
        seq_len: int,
        device: torch.device,
        update: bool = True,
    ) -> None:
        if module.cuda_graphs:
            raise ValueError("bench times the parts of a step, and a CUDA graph has none: leave out model.cuda_graphs")
        self.config, self.device = config, device
        self.batch_size, self.seq_len = batch_size, seq_len
        self.clock = Clock(device)
        dtype = module.activation_dtype(device)
        first = next(iter(strategies.values()))
        with torch.device("meta"):
            self.decoder = Decoder(config, first, dtype, module.checkpointing)
        self.decoder.to_empty(device=device).initialize(module.seed)
        if module.compiles:
            self.decoder.compile_parts()
        options = module.optimizer_config if update else None
        backbone = nn.ModuleList([self.decoder.embedding, self.decoder.layers, self.decoder.head])
        # shared: its states exist once, as in a run
        self.backbone_optimizer = None if options is None else adamw(backbone, set(), options)
        self.contestants = [self._contestant(name, s, s is first, options) for name, s in strategies.items()]
        time_parts(self.decoder, self.clock)
        vocab = config.vocab_size
        generator = torch.Generator().manual_seed(0)
        stream = torch.randint(vocab, (batch_size, seq_len + 1), generator=generator).to(device)
        self.inputs, self.targets = stream[:, :-1].contiguous(), stream[:, 1:].contiguous()

    def _contestant(self, name: str, residual: Residual, is_built: bool, options: OptimizerConfig | None) -> Contestant:
        if not is_built:
            with torch.device("meta"):
                residual.build(self.config.d_model, self.config.n_layers)
            residual.to_empty(device=self.device)
            initialize(residual, seed=0)
        trained = [p for p in residual.parameters() if p.requires_grad]
        optimizer = adamw(residual, set(), options) if trained and options is not None else None
        return Contestant(name, residual, optimizer)

    def step(self, contestant: Contestant) -> Tensor:
        """One training step, queued: the loss. The clock has its times once it is read."""
        residual = TimedResidual(contestant.residual, self.clock)
        optimizers = [o for o in (self.backbone_optimizer, contestant.optimizer) if o is not None]
        self.clock.start("residual")
        # a recomputation that stopped early would leave a part it never entered
        with set_checkpoint_early_stop(False):
            loss = self.decoder(self.inputs, self.targets, residual=residual).losses.total / self.targets.numel()
            loss.backward()
        self.clock.mark(None)  # the embedding, whose backward is the last to be entered
        self.clock.mark("optimizer")  # until the next step starts
        if optimizers:
            clipped_step(*optimizers)
        else:
            self.decoder.zero_grad()
            contestant.residual.zero_grad()
        return loss.detach()

    def run(
        self, warmup: int, steps: int, rounds: int, report: Callable[[int, list[BenchRow]], None] = lambda *_: None
    ) -> list[BenchRow]:
        """Interleaved: in every round each strategy takes `steps` timed steps, after `warmup` in the first.

        Nothing is read between the steps of a round: as in training, the host runs ahead of the device.

        Args:
            report: told after each round how many are done, and the rows so far.
        """
        times: dict[str, list[dict[str, float]]] = defaultdict(list)
        losses, peaks = {}, {}
        for round_index in range(rounds):
            for contestant in self.contestants:
                for _ in range(warmup if round_index == 0 else 1):
                    self.step(contestant)
                self.clock.read()
                if self.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                for _ in range(steps):
                    loss = self.step(contestant)
                times[contestant.name] += self.clock.read()
                losses[contestant.name] = loss.item()
                if self.device.type == "cuda":
                    peaks[contestant.name] = torch.cuda.max_memory_allocated() / 2**30
            rows = [self._row(c, times[c.name], peaks.get(c.name), losses[c.name]) for c in self.contestants]
            report(round_index + 1, rows)
        return rows

    def _row(self, contestant: Contestant, times: list[dict[str, float]], peak: float | None, loss: float) -> BenchRow:
        step = statistics.median(sum(parts.values()) for parts in times)
        names = [name for name in PARTS if self.backbone_optimizer is not None or name != "optimizer"]
        parts = {name: statistics.median(t.get(name, 0.0) for t in times) for name in names}
        flops = training_flops_per_token(self.config, contestant.residual, self.seq_len)
        flops *= self.batch_size * self.seq_len
        device_peak = peak_flops(self.device)
        mfu = flops / step / device_peak if device_peak else None
        shape = (self.config.n_layers, self.batch_size, self.seq_len)
        return BenchRow(contestant.name, *shape, step, parts, mfu, peak, loss)

    def trace(self, contestant: Contestant, path: Path) -> None:
        """One step through the torch profiler, as a Chrome trace."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profile:
            self.step(contestant)
            self.clock.read()
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(path))


def bench(
    module: LanguageModel,
    batch_size: int,
    seq_len: int,
    residual: str | None = None,
    steps: int = 10,
    warmup: int = 5,
    rounds: int = 3,
    lengths: list[int] | None = None,
    depths: list[int] | None = None,
    output: str | None = None,
    trace: bool = False,
    peer: bool = False,
    update: bool = True,
) -> list[BenchRow]:
    """Time whole training steps of several strategies over one backbone, by part, and print a table.

    Args:
        residual: strategies by class name, options in brackets, as "A, B(block_size=2)"; the first is what the others
            are compared with. Default: those of the literature.
        steps: timed steps of a strategy in a round.
        warmup: steps before the first timed one.
        rounds: times that every strategy has its turn.
        lengths: measure at each of these seq_len in turn, and print how the residual grows (tokens).
        depths: the same for numbers of layers.
        output: directory for bench.csv (written after every round), roofline.png and traces; null for none.
        trace: write a Chrome trace of one step of each strategy to `output`.
        peer: time transformers' Glm4Moe of the same shape in pure bf16 afterwards.
        update: false leaves out clipping and AdamW, for a model whose optimizer states do not fit beside its gradients.
    """
    _check(steps, warmup, rounds, lengths, depths, trace or peer)
    if peer and not update:
        raise ValueError("the peer's step has an update: leave peer out, or update true")
    if trace and output is None:
        raise ValueError("trace needs --output DIR to write to")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console = Console(width=180)
    about = {"device": device_name(device), "torch": torch.__version__, "commit": commit()}
    about |= {"model": module.spec.decoder}
    attention = usable_backend(module.config, module.activation_dtype(device), device)
    print(f"attention: {attention}", flush=True)
    rows: list[BenchRow] = []

    def report(round_index: int, latest: list[BenchRow]) -> None:
        times = ", ".join(f"{row.strategy} {1e3 * row.step:.1f} ms" for row in latest)
        shape = f"{latest[0].n_layers} layers, {latest[0].seq_len} tokens"
        print(f"{shape}, round {round_index}/{rounds}: {times}", flush=True)
        if output is not None:
            write_csv(rows + latest, Path(output) / "bench.csv", about)

    for n_layers in depths or [module.config.n_layers]:
        for length in lengths or [seq_len]:
            strategies = default_strategies() if residual is None else parse_strategies(residual)
            torch.compiler.reset()  # else a second length would be compiled for any length, and be slower
            config = replace(module.config, n_layers=n_layers)
            run = Bench(config, module, strategies, batch_size, length, device, update)
            latest = run.run(warmup, steps, rounds, report)
            if trace:
                for contestant in run.contestants:
                    run.trace(contestant, Path(output) / f"trace-{contestant.name}.json.gz")
            tokens = torch.cat([run.inputs, run.targets[:, -1:]], dim=1)
            del run  # the next needs the memory
            if peer:
                latest.append(_peer_row(module.config, tokens, warmup, steps * rounds))
            rows += latest
            console.print(bench_table(latest))
    if lengths or depths:
        console.print(growth_table(rows, "seq_len" if lengths else "n_layers"))
    if output is not None:
        write_csv(rows, Path(output) / "bench.csv", about)
        if not (lengths or depths):
            work = {name: step_work(module.config, s, batch_size, seq_len) for name, s in strategies.items()}
            figure = roofline_figure({row.strategy: row.parts for row in rows}, work, measure_roofs(device))
            figure.savefig(Path(output) / "roofline.png", dpi=120)
    return rows


def _check(
    steps: int, warmup: int, rounds: int, lengths: list[int] | None, depths: list[int] | None, one_shape_only: bool
) -> None:
    for name, value, least in (("steps", steps, 1), ("warmup", warmup, 0), ("rounds", rounds, 1)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    for name, values in (("lengths", lengths), ("depths", depths)):
        if values is not None and (not values or min(values) < 1 or len(set(values)) < len(values)):
            raise ValueError(f"{name} must be different numbers of at least 1, got {values}")
        if values and one_shape_only:
            raise ValueError(f"{name} measures several shapes, trace and peer are for one: leave either out")
    if lengths and depths:
        raise ValueError("lengths and depths are two tables: ask for one at a time")


def _peer_row(config: DecoderConfig, tokens: Tensor, warmup: int, steps: int) -> BenchRow:
    from lit_msar.training.peer import peer_step_seconds

    seconds, peak = peer_step_seconds(config, tokens, warmup, steps)
    B, T = tokens.shape[0], tokens.shape[1] - 1
    device_peak = peak_flops(tokens.device)
    flops = FLOPS_PER_MULTIPLY_ADD * multiply_adds_per_token(config, T) * B * T
    mfu = flops / seconds / device_peak if device_peak else None
    return BenchRow("transformers Glm4Moe, bf16", config.n_layers, B, T, seconds, {}, mfu, peak, float("nan"))
