"""Times the depth-attention kernels against their floors: `python -m kernels.bench [--op msar] [--peers]`.

The byte floor counts every source, output and gradient once, at the copy bandwidth measured first:

    forward (N + 1) D        backward (2 N + 1) D        elements a token, per read

The FMA floor is the arithmetic a read cannot avoid in fp32 units when every source is expanded for it: 28 multiply-adds
per element and source forward for kernel sizes (1, 4, 8, 12), and 104 more backward. Rows (`kernels.bench_rows`) are
appended as they are measured; a run that is started again measures what is missing.
"""

import argparse
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from kernels import attnres_read, bench_rows, compiled, msar_ahead, msar_block, msar_read, reference
from kernels.bench_figure import write_figure
from kernels.bench_rows import Row, Subject

KERNEL_SIZES = (1, 4, 8, 12)
READS = 8  # of a block
EPS = 1e-5
FP32_PEAK = 67e12  # multiply-adds count two; H200 SXM
FORWARD_FMA, BACKWARD_FMA = 28, 104
CHECKED_TOKENS = 64
OPS = ("attnres", "msar", "msar_reader", "msar_ahead", "msar_block")
OF_A_BLOCK = ("msar_ahead", "msar_block")  # a row of these is the mean of READS reads
SOURCES = {"all": (3, 6, 9, 17, 57), "peers": (3, 6, 9)}
WIDTHS = {"all": (2048, 2080, 2112, 2560), "peers": (2048, 2112, 2560)}


class Inputs:
    """Random inputs of one shape; sources in bf16, parameters in fp32, all with gradients."""

    def __init__(self, op: str, n_sources: int, d_model: int, tokens: int, device: str = "cuda") -> None:
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(*shape, device=device, generator=generator)).requires_grad_()

        m, K, D = len(KERNEL_SIZES), reference.n_taps(KERNEL_SIZES), d_model
        self.sources = [normal(1, tokens, D).detach().bfloat16().requires_grad_() for _ in range(n_sources)]
        self.dh = torch.randn(1, tokens, D, device=device, generator=generator).bfloat16()
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

    def exact(self, tokens: int) -> "Inputs":
        """The first tokens in float64."""
        other = object.__new__(Inputs)

        def to(x: Tensor) -> Tensor:
            return x.detach().double().requires_grad_()

        other.sources, other.dh = [to(x[:, :tokens]) for x in self.sources], self.dh[:, :tokens].double()
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
    n_scored = n if op == "msar_ahead" else n - 1  # the block scores its newest itself
    scored = [
        msar_ahead.score_source(source, taps, queries, kernel_sizes=KERNEL_SIZES)
        for source, taps in zip(x.sources[:n_scored], x.taps[:n_scored], strict=True)
    ]
    scores, sources = [scores for scores, _ in scored], (*(source for _, source in scored), *x.sources[n_scored:n])
    if op == "msar_ahead":
        partial, out = (x.sources[n],), []
        for r, read in enumerate(x.reads):
            seen = (*sources, *partial) if r else sources
            taps = [*x.taps[:n], x.taps[n + r - 1]][: len(seen)]
            h, through = msar_read.msar_read_through(
                seen, taps, *read, kernel_sizes=KERNEL_SIZES, scores=scores, rows=[r] * n
            )
            sources, partial, scores = through[:n], through[n : len(seen)] or partial, through[len(seen) :]
            out.append(h)
        return out
    reads = ([0] * (n - 1), queries, len(queries))
    waiting, _, _ = msar_block.open_block(sources, x.taps[:n], scores, *reads, kernel_sizes=KERNEL_SIZES)
    partial, out = x.sources[n], []
    for r, read in enumerate(x.reads):
        given = (partial, x.taps[n + r - 1]) if r else (None, None)
        h, through = msar_block.read_block(*waiting[2 * r : 2 * r + 2], *given, *read, kernel_sizes=KERNEL_SIZES)
        partial = through if r else partial
        out.append(h)
    return out


def liger(x: Inputs) -> Tensor:
    ops = importlib.import_module("liger_kernel.ops.attn_res")
    return ops.LigerAttnResFunction.apply(stacked(x), x.query, x.gain, EPS)


def fla(x: Inputs) -> Tensor:
    return importlib.import_module("fla.ops.attnres").fused_attnres(x.query, x.sources, x.gain, rms_eps=EPS)


def fast_attnres(x: Inputs) -> Tensor:
    """It takes the query in bf16, rounded here within the timed part as a model would have to."""
    values = stacked(x)
    return importlib.import_module("attnres").attnres(values, (x.query * x.gain).to(values.dtype), eps=EPS)


def flash_attn_res(x: Inputs) -> Tensor:
    """Its first phase, which reads completed blocks for several queries, with one query."""
    phase = importlib.import_module("flash_attn_res.ops.phase_1")
    return phase.phase_1_batched_attention_triton_op(stacked(x), (x.query * x.gain)[None], EPS)[0][0]


# name of the package -> what tells that it is installed, its AttnRes read
PEERS: dict[str, tuple[str, Callable[[Inputs], Tensor]]] = {
    "liger-kernel": ("liger_kernel", liger),
    "fla-core": ("fla", fla),
    "fast-attnres": ("attnres", fast_attnres),
    "flash-attn-res": ("flash_attn_res", flash_attn_res),
}


def peers() -> dict[str, Callable[[Inputs], Tensor]]:
    """AttnRes reads of other packages that are installed here; one that cannot be imported fails when it is called."""
    return {name: read for name, (module, read) in PEERS.items() if importlib.util.find_spec(module)}


def implementations(
    op: str, with_peers: bool, only: list[str] | None = None
) -> dict[str, Callable[[Inputs], list[Tensor]]]:
    found: dict[str, Callable] = {"triton": lambda x: run_triton(op, x)}
    if with_peers:
        found["torch.compile"] = lambda x: run_op(op, compiled, x)
        found["eager"] = lambda x: run_op(op, reference, x)
        if op == "attnres":
            for name, read in peers().items():
                found[name] = lambda x, read=read: [read(x)]
    return {name: run for name, run in found.items() if not only or name in only}


def stacked(x: Inputs) -> Tensor:
    """The sources in one tensor [N, B, T, D], made once: peers that want it are not charged for the copy."""
    if x.stack is None:
        x.stack = torch.stack([source.detach() for source in x.sources]).requires_grad_()
    return x.stack


# ---------------------------------------------------------------------------------------------------- measuring


def calls(op: str, run: Callable[[Inputs], list[Tensor]], x: Inputs) -> dict[str, Callable[[], object]]:
    def forward() -> list[Tensor]:
        with torch.no_grad():
            return run(x)

    def forward_backward() -> tuple[Tensor | None, ...]:
        return gradients(op, run(x), x, x.dh)

    return {"forward": forward, "forward_backward": forward_backward}


def gradients(op: str, out: list[Tensor], x: Inputs, dh: Tensor) -> tuple[Tensor | None, ...]:
    """Of every leaf, and of the stacked sources where an implementation took those."""
    leaves = [*x.leaves(op), *([] if x.stack is None else [x.stack])]
    return torch.autograd.grad(out, leaves, [dh] * len(out), allow_unused=True)


def errors(op: str, run: Callable[[Inputs], list[Tensor]], x: Inputs) -> tuple[float, float]:
    """Worst relative error of the outputs and of the gradients of the first tokens, against the reference in float64.

    Run at the shape that is timed; later tokens have no gradient, and the first see none of them. A gradient that an
    implementation does not give (of a source where it took them stacked) does not count, nor do those of a few scalars,
    where sums of both signs over a whole read leave little to compare.
    """
    exact, dh = x.exact(CHECKED_TOKENS), x.dh.clone()
    dh[:, CHECKED_TOKENS:] = 0
    oracle, out = run_op(op, reference, exact), run(x)
    wanted, found = gradients(op, oracle, exact, exact.dh), gradients(op, out, x, dh)
    of_outputs = [bench_rows.relative_error(h[:, :CHECKED_TOKENS], true) for h, true in zip(out, oracle, strict=True)]
    if x.stack is not None and found[-1] is not None:
        found = (*found[-1].unbind(), *found[len(x.sources) :])
    of_gradients = [
        bench_rows.relative_error(ours[:, :CHECKED_TOKENS] if ours.shape == x.dh.shape else ours, true)
        for ours, true in zip(found[: len(wanted)], wanted, strict=True)
        if ours is not None and true is not None and true.numel() >= x.dh.shape[-1]
    ]
    return bench_rows.worst(of_outputs), bench_rows.worst(of_gradients)


def floors(op: str, n: int, D: int, tokens: int, which: str, bandwidth: float) -> tuple[float, float]:
    """Byte floor and FMA floor in ms of one read (of the mean read, for a block)."""
    backward = which == "forward_backward"
    elements = (n + 1) + (2 * n + 1 if backward else 0)
    fma = 3 + (6 if backward else 0) if op == "attnres" else FORWARD_FMA + (BACKWARD_FMA if backward else 0)
    return elements * D * tokens * 2 / bandwidth * 1e3, n * fma * D * tokens * 2 / FP32_PEAK * 1e3


# --------------------------------------------------------------------------------------------------------- rows


def rows(args: argparse.Namespace) -> Iterator[Row]:
    which = "peers" if args.peers else "all"
    for op in args.op or OPS:
        for tokens, D, n in itertools.product(args.tokens, args.d_model or WIDTHS[which], args.n or SOURCES[which]):
            for name in implementations(op, args.peers, args.implementation):
                yield Row(op, name, n, D, tokens)


def prepare(row: Row) -> Subject:
    """One operation, implementation and shape, checked and ready to be timed."""
    op, run = row.op, implementations(row.op, with_peers=True)[row.implementation]
    x = Inputs(op, row.n, row.d_model, row.tokens)
    reads = READS if op in OF_A_BLOCK else 1
    measured = bench_rows.checked(*errors(op, run, x))
    measured["extra_mib"] = f"{bench_rows.extra_mib(lambda: run(x)) / reads:.1f}"

    def floor(which: str, bandwidth: float) -> tuple[float, float]:
        return floors(op, row.n, row.d_model, row.tokens, which, bandwidth)

    return Subject(calls(op, run, x), floor, reads, measured)


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
    path = args.output / "bench.csv"
    done = bench_rows.done(path)
    bandwidth = bench_rows.copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s", flush=True)
    for row in rows(args):
        if row.key in done:
            continue
        for measured in bench_rows.attempt(row, prepare, bandwidth):
            bench_rows.append(path, measured)
            bench_rows.print_row(measured)
        torch.cuda.empty_cache()
    write_figure(bench_rows.read_rows(path), args.output / "bench.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
