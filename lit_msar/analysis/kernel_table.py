"""The table of docs/kernels.md in one command and a bounded time: `python -m lit_msar.analysis.kernel_table`.

Rows are measured one after the other, the most wanted first, each within a time limit; what is in bench.csv already is
not measured again. They run in a child process, which is started anew, without the row it was at, when that row hangs
or leaves the GPU in error. Kernels are compiled beforehand by as many processes as the list has operations and widths.
"""

import argparse
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from kernels import bench
from lit_msar.analysis import depth_pass

TOKENS = 8192
WARM_SECONDS = 90
ROW_SECONDS = 30
SILENT_SECONDS = 45
N_PROCESSES = 12


class Row(NamedTuple):
    op: str
    implementation: str
    n_sources: int
    d_model: int

    @property
    def name(self) -> str:
        return f"{self.op} {self.implementation} N={self.n_sources} D={self.d_model}"


def rows(packages: tuple[str, ...] = ()) -> list[Row]:
    """What is measured, in this order; `packages` are the importable AttnRes peers."""
    ours = [Row(op, "triton", 9, D) for D in (2112, 2560) for op in bench.OPS]
    # the head's read of 28 layers in blocks of 8 sees 8 sources
    depth = [Row(op, "triton", 8, D) for D in (2112, 2560) for op in depth_pass.OPS]
    peers = [Row("attnres", name, n, 2112) for n in (9, 6, 3) for name in (*packages, "torch.compile")]
    compiled = [Row(op, "torch.compile", n, 2112) for op in ("msar", "msar_reader") for n in (9, 6, 3)]
    fewer = [Row(op, "triton", n, 2112) for op in ("attnres", "msar", "msar_reader") for n in (6, 3)]
    whole = [Row(op, "torch.compile", 8, 2112) for op in ("depth_attnres", "depth_msar")]
    return [*ours, *depth, *fewer, *peers, *compiled, *whole]


def measure(row: Row, bandwidth: float) -> Iterator[dict]:
    if row.op in depth_pass.OPS:
        return depth_pass.measure(row.op, row.implementation, row.d_model, TOKENS, bandwidth)
    run = bench.implementations(row.op, row.implementation != "triton")[row.implementation]
    return bench.measure(row.op, row.n_sources, row.d_model, TOKENS, row.implementation, run, bandwidth)


def missing(output: Path, skipped: set[str]) -> list[Row]:
    """Rows of the list that bench.csv lacks and that did not fail before."""
    measured = bench.read_rows(output / "bench.csv")
    done = {tuple(row[key] for key in bench.FIELDS[:5]) for row in measured if row["pass"] == "forward_backward"}
    wanted = rows(tuple(bench.peers()))
    return [
        row
        for row in wanted
        if row.name not in skipped
        and (row.op, row.implementation, str(row.n_sources), str(row.d_model), str(TOKENS)) not in done
    ]


class Expired(Exception):
    """A row took longer than its limit."""


def raise_expired(*_: object) -> None:
    raise Expired(f"more than {ROW_SECONDS} s")


def child(output: Path, deadline: float, skipped: set[str]) -> int:
    """Measure what is missing; 3 if the GPU is of no more use to this process."""
    signal.signal(signal.SIGALRM, raise_expired)
    bandwidth = bench.copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s", flush=True)
    for row in missing(output, skipped):
        if time.time() > deadline:
            print("out of time", flush=True)
            break
        print(f"BEGIN {row.name}", flush=True)
        signal.alarm(ROW_SECONDS)
        try:
            for measured in measure(row, bandwidth):
                bench.append(output / "bench.csv", measured)
                bench.print_row(measured)
        except Exception as error:
            print(f"FAILED {row.name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        finally:
            signal.alarm(0)
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            return 3
    return 0


def warm(row: Row) -> int:
    """Run a row's calls once, so that its kernels are in the compilers' caches."""
    if row.op in depth_pass.OPS:
        depth = depth_pass.DepthPass(row.op, row.implementation, row.d_model, depth_pass.N_LAYERS, "cuda")
        x = torch.randn(1, TOKENS, row.d_model, device="cuda").bfloat16().requires_grad_()
        torch.autograd.grad(depth(x).sum(), [x])
        return 0
    run = bench.implementations(row.op, row.implementation != "triton")[row.implementation]
    x = bench.Inputs(row.op, row.n_sources, row.d_model, TOKENS)
    for call in bench.calls(row.op, run, x).values():
        call()
    bench.error(row.op, run, x)
    return 0


def warm_all(todo: list[Row]) -> None:
    """Compile for all rows at once, as far as the time goes."""
    waiting = [row for row in todo if row.implementation in ("triton", "torch.compile")]
    running: list[tuple[Row, subprocess.Popen]] = []
    end = time.time() + WARM_SECONDS
    while (waiting or running) and time.time() < end:
        while waiting and len(running) < N_PROCESSES:
            row = waiting.pop(0)
            command = [sys.executable, "-m", "lit_msar.analysis.kernel_table", "--warm", json.dumps(row)]
            running.append((row, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)))
        for row, process in list(running):
            if process.poll() is not None:
                running.remove((row, process))
                print(f"warm {row.name}: {'failed' if process.returncode else 'compiled'}", flush=True)
        time.sleep(0.2)
    for row, process in running:
        process.kill()
        print(f"warm {row.name}: stopped after {WARM_SECONDS} s", flush=True)


def run_child(output: Path, deadline: float, skipped: set[str]) -> tuple[int, str | None]:
    """One child until it ends or has been silent for too long; its exit code and the row it was at."""
    command = [
        sys.executable,
        "-m",
        "lit_msar.analysis.kernel_table",
        "--child",
        str(output),
        "--deadline",
        str(deadline),
    ]
    process = subprocess.Popen([*command, "--skip", *skipped], stdout=subprocess.PIPE, text=True)
    timer, at = None, None

    def watched() -> threading.Timer:
        started = threading.Timer(SILENT_SECONDS, process.kill)
        started.start()
        return started

    timer = watched()
    for line in process.stdout:
        timer.cancel()
        timer = watched()
        at = line.removeprefix("BEGIN ").strip() if line.startswith("BEGIN ") else at
        print(line, end="", flush=True)
    timer.cancel()
    return process.wait(), at


def run(output: Path, seconds: float) -> int:
    """Measure the table into `output`; ends within `seconds` and the last row's limit."""
    deadline, skipped = time.time() + seconds, set()
    warm_all(missing(output, skipped))
    while time.time() < deadline:
        code, at = run_child(output, deadline, skipped)
        if code == 0 or at is None:
            break
        print(f"row {at} ended its process ({code}); going on without it", flush=True)
        skipped.add(at)
    bench.write_figure(bench.read_rows(output / "bench.csv"), output / "bench.svg")
    left = [row.name for row in missing(output, set())]
    print(f"not measured: {', '.join(left) or 'nothing'}", flush=True)
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lit_msar.analysis.kernel_table", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--output", type=Path, default=Path("results/kernels/table"), help="folder of bench.csv")
    parser.add_argument("--seconds", type=float, default=230, help="start no row after this (default 230)")
    parser.add_argument("--warm", help="compile the kernels of one row, given as JSON, and end (for its own use)")
    parser.add_argument("--child", type=Path, help="measure into this folder (for its own use)")
    parser.add_argument("--deadline", type=float, default=0.0, help="of --child, seconds since the epoch")
    parser.add_argument("--skip", nargs="*", default=[], help="rows that --child leaves out")
    args = parser.parse_args(arguments)
    if args.warm:
        return warm(Row(*json.loads(args.warm)))
    if args.child:
        return child(args.child, args.deadline, set(args.skip))
    if not torch.cuda.is_available():
        print("error: the table is measured on a GPU, and there is none", file=sys.stderr)
        return 2
    args.output.mkdir(parents=True, exist_ok=True)
    return run(args.output, args.seconds)


if __name__ == "__main__":
    sys.exit(main())
