"""Times the depth-attention kernels against their floors: `python -m kernels.bench [--op msar] [--peers]`.

A row is one operation, implementation and shape, forward or forward and backward. Time is the median of CUDA-graph
replays with a cold L2 (of plain launches where an implementation cannot be captured). The byte floor counts every
source, output and gradient once, at the copy bandwidth measured first:

    forward (N + 1) D        backward (2 N + 1) D        elements a token, per read

The FMA floor is the arithmetic a read cannot avoid in fp32 units when every source is expanded for it: 28 multiply-adds
per element and source forward for kernel sizes (1, 4, 8, 12), and 104 more backward. Rows are appended as they are
measured; a run that is started again measures what is missing.
"""

import argparse
import csv
import datetime
import importlib.util
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import triton
from torch import Tensor

from kernels import attnres_read, compiled, msar_ahead, msar_block, msar_read, reference
from kernels.bench_figure import write_figure

KERNEL_SIZES = (1, 4, 8, 12)
READS = 8  # of a block
EPS = 1e-5
FP32_PEAK = 67e12  # multiply-adds count two; H200 SXM
FORWARD_FMA, BACKWARD_FMA = 28, 104
FIELDS = (
    "op implementation n_sources d_model tokens pass ms byte_floor_ms ratio fma_floor_ms extra_mib error timing device "
    "torch triton date"
).split()
OPS = ("attnres", "msar", "msar_reader", "msar_ahead", "msar_block")
OF_A_BLOCK = ("msar_ahead", "msar_block")  # a row of these is the mean of READS reads
SOURCES = {"all": (3, 6, 9, 17, 57), "peers": (3, 6, 9)}
WIDTHS = {"all": (2048, 2080, 2112, 2560), "peers": (2048, 2112, 2560)}


class Inputs:
    """Random inputs of one shape; sources in bf16, parameters in fp32, all with gradients."""

    def __init__(self, op: str, n_sources: int, d_model: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> None:
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(*shape, device="cuda", generator=generator)).requires_grad_()

        m, K, D = len(KERNEL_SIZES), reference.n_taps(KERNEL_SIZES), d_model
        self.sources = [normal(1, tokens, D).detach().to(dtype).requires_grad_() for _ in range(n_sources)]
        self.dh = torch.randn(1, tokens, D, device="cuda", generator=generator).to(dtype)
        n_groups = 0 if op == "attnres" else 1 if op == "msar_reader" else n_sources
        n_groups += READS - 1 if op in OF_A_BLOCK else 0  # each read of a block sees another partial sum
        self.taps = [normal(K, D, scale=0.3) for _ in range(n_groups)]
        self.reads = [
            (normal(m, D, scale=0.02), normal(m, m, D, scale=0.02), normal(1), normal(m))
            for _ in range(READS if op in OF_A_BLOCK else 1)
        ]
        self.query, self.gain = normal(D, scale=0.02), normal(D)
        self.stack: Tensor | None = None

    def leaves(self, op: str) -> list[Tensor]:
        if op == "attnres":
            return [*self.sources, self.query, self.gain]
        return [*self.sources, *self.taps, *itertools.chain.from_iterable(self.reads)]

    def cast(self, dtype: torch.dtype | None, tokens: int) -> "Inputs":
        """The same inputs in another precision (None: their own), cut to the first tokens."""
        other = object.__new__(Inputs)

        def to(x: Tensor, cut: bool = False) -> Tensor:
            value = x.detach()[:, :tokens] if cut else x.detach()
            return value.to(dtype or x.dtype).clone().requires_grad_()

        other.sources = [to(x, cut=True) for x in self.sources]
        other.dh = self.dh[:, :tokens].to(dtype or self.dh.dtype)
        other.taps = [to(x) for x in self.taps]
        other.reads = [tuple(to(x) for x in read) for read in self.reads]
        other.query, other.gain, other.stack = to(self.query), to(self.gain), None
        return other


def run_op(op: str, module, x: Inputs) -> list[Tensor]:
    """The outputs of one operation in an implementation that has the functions of `reference`."""
    if op == "attnres":
        return [module.attnres_read(x.sources, x.query, x.gain, EPS)]
    if op in ("msar", "msar_reader"):
        taps = x.taps if op == "msar" else x.taps * len(x.sources)
        return [module.msar_read(x.sources, taps, *x.reads[0], kernel_sizes=KERNEL_SIZES)]
    n = len(x.sources) - 1  # the last source stands for the partial sum
    out = []
    for r, read in enumerate(x.reads):
        sources = x.sources if r else x.sources[:n]
        taps = [*x.taps[:n], x.taps[n + r - 1]] if r else x.taps[:n]
        out.append(module.msar_read(sources, taps, *read, kernel_sizes=KERNEL_SIZES))
    return out


def run_triton(op: str, x: Inputs) -> list[Tensor]:
    if op == "attnres":
        return run_op(op, attnres_read, x)
    if op not in OF_A_BLOCK:
        return run_op(op, msar_read, x)
    n = len(x.sources) - 1
    queries = [read[0] for read in x.reads]
    if op == "msar_ahead":
        scored, sources = msar_ahead.score_block(x.sources[:n], x.taps[:n], queries, kernel_sizes=KERNEL_SIZES)
        sources, out = (*sources, x.sources[n]), []
        for r, read in enumerate(x.reads):
            seen = n + (r > 0)
            taps = [*x.taps[:n], x.taps[n + r - 1]][:seen]
            h, through = msar_read.msar_read_through(
                sources[:seen], taps, *read, kernel_sizes=KERNEL_SIZES, scored=scored[r]
            )
            sources = (*through, *sources[seen:])
            out.append(h)
        return out
    waiting, _ = msar_block.open_block(x.sources[:n], x.taps[:n], queries, kernel_sizes=KERNEL_SIZES)
    partial, out = x.sources[n], []
    for r, read in enumerate(x.reads):
        given = (partial, x.taps[n + r - 1]) if r else (None, None)
        h, through = msar_block.read_block(*waiting[2 * r : 2 * r + 2], *given, *read, kernel_sizes=KERNEL_SIZES)
        partial = through if r else partial
        out.append(h)
    return out


def peers() -> dict[str, Callable[[Inputs, Tensor], Tensor]]:
    """AttnRes reads of other packages that are importable here, as functions of the inputs and the stacked sources."""
    found: dict[str, Callable] = {}
    if liger := imported("liger_kernel.ops.attn_res"):
        found["liger-kernel"] = lambda x, v: liger.LigerAttnResFunction.apply(v, x.query, x.gain, EPS)
    if fla := imported("fla.ops.attnres"):
        found["fla-core"] = lambda x, v: fla.fused_attnres(x.query, x.sources, x.gain, rms_eps=EPS)
    if fast := imported("attnres"):
        found["fast-attnres"] = lambda x, v: fast.attnres(v, (x.query * x.gain).to(v.dtype), eps=EPS)
    return found


def imported(name: str):
    """The module of another package, or None where it is not installed."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        return None
    return importlib.import_module(name)


def implementations(
    op: str, with_peers: bool, only: list[str] | None = None
) -> dict[str, Callable[[Inputs], list[Tensor]]]:
    found: dict[str, Callable] = {"triton": lambda x: run_triton(op, x)}
    if with_peers:
        found["torch.compile"] = lambda x: run_op(op, compiled, x)
        found["eager"] = lambda x: run_op(op, reference, x)
        if op == "attnres":
            for name, read in peers().items():
                found[name] = lambda x, read=read: [read(x, stacked(x))]
    return {name: run for name, run in found.items() if not only or name in only}


def stacked(x: Inputs) -> Tensor:
    """The sources in one tensor [N, B, T, D], made once: peers that want it are not charged for the copy."""
    if x.stack is None:
        x.stack = torch.stack([source.detach() for source in x.sources]).requires_grad_()
    return x.stack


# ------------------------------------------------------------------------------------------------------- timing


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large copy on this device."""
    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.numel() / (median_ms(lambda: y.copy_(x)) * 1e-3)


def median_ms(call: Callable[[], object], repeats: int = 20) -> float:
    """Median time of CUDA events around a call, with a cold L2."""
    cold = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(repeats + 3):
        cold.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def captured(call: Callable[[], object]) -> tuple[Callable[[], object], str]:
    """The call as a CUDA graph, so that launches cost nothing; the call itself where it cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        torch.cuda.synchronize()
        return call, "events"
    return graph.replay, "graph"


def calls(op: str, run: Callable[[Inputs], list[Tensor]], x: Inputs) -> dict[str, Callable[[], object]]:
    def forward():
        with torch.no_grad():
            return run(x)

    def forward_backward():
        out = run(x)
        leaves = [*x.leaves(op), *([] if x.stack is None else [x.stack])]
        return torch.autograd.grad(out, leaves, [x.dh] * len(out), allow_unused=True)

    return {"forward": forward, "forward_backward": forward_backward}


def error(op: str, run: Callable[[Inputs], list[Tensor]], x: Inputs, tokens: int = 64) -> float:
    """||h - oracle|| / ||oracle|| of the first tokens against the reference in float64."""
    oracle = run_op(op, reference, x.cast(torch.float64, tokens))[-1]
    out = run(x.cast(None, tokens))[-1]
    return float(((out.double() - oracle).norm() / oracle.norm()).detach())


def extra_mib(run: Callable[[Inputs], list[Tensor]], x: Inputs) -> float:
    """Memory that a forward pass keeps for the backward pass, its outputs included."""
    run(x)
    before = torch.cuda.memory_allocated()
    out = run(x)
    after = torch.cuda.memory_allocated()
    del out
    return (after - before) / 2**20


def floors(op: str, n: int, D: int, tokens: int, which: str, bandwidth: float) -> tuple[float, float]:
    """Byte floor and FMA floor in ms of one read (of the mean read, for a block)."""
    backward = which == "forward_backward"
    elements = (n + 1) + (2 * n + 1 if backward else 0)
    fma = 3 + (6 if backward else 0) if op == "attnres" else FORWARD_FMA + (BACKWARD_FMA if backward else 0)
    return elements * D * tokens * 2 / bandwidth * 1e3, n * fma * D * tokens * 2 / FP32_PEAK * 1e3


# --------------------------------------------------------------------------------------------------------- rows


def shapes(args: argparse.Namespace) -> Iterator[tuple[str, int, int, int]]:
    which = "peers" if args.peers else "all"
    for op in args.op or OPS:
        for tokens, D, n in itertools.product(args.tokens, args.d_model or WIDTHS[which], args.n or SOURCES[which]):
            yield op, n, D, tokens


def measure(op: str, n: int, D: int, tokens: int, name: str, run: Callable, bandwidth: float) -> Iterator[dict]:
    """The rows of one operation, implementation and shape."""
    x = Inputs(op, n, D, tokens)
    per = READS if op in OF_A_BLOCK else 1
    measured = {"error": f"{error(op, run, x):.1e}", "extra_mib": f"{extra_mib(run, x) / per:.1f}"}
    for which, call in calls(op, run, x).items():
        floor = floors(op, n, D, tokens, which, bandwidth)
        yield described(op, name, n, D, tokens) | timed(which, call, per, floor) | measured


def described(op: str, name: str, n: int, D: int, tokens: int) -> dict:
    """What was measured, and on what."""
    return {
        "op": op,
        "implementation": name,
        "n_sources": n,
        "d_model": D,
        "tokens": tokens,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
    }


def timed(which: str, call: Callable[[], object], per: int, floor: tuple[float, float]) -> dict:
    """Time of a call that does `per` reads, beside the floors (ms) of one."""
    replay, timing = captured(call)
    ms = median_ms(replay) / per
    return {
        "pass": which,
        "ms": f"{ms:.4f}",
        "byte_floor_ms": f"{floor[0]:.4f}",
        "ratio": f"{ms / floor[0]:.2f}",
        "fma_floor_ms": f"{floor[1]:.4f}",
        "timing": timing,
    }


def read_rows(path: Path) -> list[dict]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append(path: Path, row: dict) -> None:
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def print_row(row: dict) -> None:
    print(
        f"{row['op']:<12}{row['implementation']:<14}N={row['n_sources']:<4}D={row['d_model']:<6}T={row['tokens']:<6}"
        f"{row['pass']:<18}{row['ms']:>9} ms  {row['ratio']:>6}x bytes ({row['byte_floor_ms']} ms)  "
        f"fp32 {row['fma_floor_ms']} ms  kept {row['extra_mib']:>8} MiB  error {row['error']}",
        flush=True,
    )


def parser() -> argparse.ArgumentParser:
    parsed = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__.split("\n")[0])
    parsed.add_argument("--op", nargs="*", choices=OPS, help="operations; all by default")
    parsed.add_argument("--n", nargs="*", type=int, help="sources of a read")
    parsed.add_argument("--d_model", nargs="*", type=int, help="widths")
    parsed.add_argument(
        "--tokens", nargs="*", type=int, default=[2048, 8192], help="sequence lengths (default 2048 8192)"
    )
    parsed.add_argument(
        "--peers", action="store_true", help="also torch.compile, eager and the packages importable here"
    )
    parsed.add_argument("--implementation", nargs="*", help="only these, by the names that a row prints")
    parsed.add_argument(
        "--output", type=Path, default=Path("results/kernels"), help="folder of bench.csv and bench.svg"
    )
    return parsed


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    if not torch.cuda.is_available():
        print("kernels.bench measures a GPU and finds none", file=sys.stderr)
        return 2
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / "bench.csv"
    keys = FIELDS[:5]
    done = {tuple(row[key] for key in keys) for row in read_rows(path) if row["pass"] == "forward_backward"}
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s", flush=True)
    for op, n, D, tokens in shapes(args):
        for name, run in implementations(op, args.peers, args.implementation).items():
            if (op, name, str(n), str(D), str(tokens)) in done:
                continue
            try:
                rows = list(measure(op, n, D, tokens, name, run, bandwidth))
            except torch.OutOfMemoryError:
                print(f"{op} {name} N={n} D={D} T={tokens}: out of memory", flush=True)
                continue
            finally:
                torch.cuda.empty_cache()
            for row in rows:
                append(path, row)
                print_row(row)
    write_figure(read_rows(path), args.output / "bench.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
