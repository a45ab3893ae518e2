"""The tables of docs/kernels.md in one command and a bounded time: `python -m lit_msar.analysis.kernel_table`.

Rows are measured one after the other, the most wanted first, each within a time limit, and written as they come; what
is in bench.csv already is not measured again. They run in a child process, which is started anew, without the row it
was at, when that row hangs or leaves the GPU in error. Kernels are compiled beforehand, by many processes at once.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from kernels import bench, bench_hyper, bench_rows
from kernels.bench_figure import write_figure
from kernels.bench_rows import Row, Subject
from lit_msar.analysis import depth_pass

TOKENS, SHORT = 8192, 2048
WIDTHS, COUNTS, MANY = (2112, 2560, 2048), (9, 6, 3), (17, 57)
ROW_SECONDS = 30
SILENT_SECONDS = 45
MAX_PROCESSES = 12  # that compile at once; each holds a row's tensors on the GPU
LISTS = ("ours", "peers", "depth", "hyper", "many", "short")


def lists(peers: tuple[str, ...], lanes: tuple[str, ...]) -> dict[str, list[Row]]:
    """Rows by what they are for; `peers` are the AttnRes packages installed, `lanes` the implementations of mHC."""
    reads = ("attnres", "msar", "msar_reader")
    others = ("torch.compile", "eager")
    return {
        # the read of the issue first, at the widths of the presets
        "ours": [
            *(Row(op, "triton", 9, D, TOKENS) for D in WIDTHS for op in bench.OPS),
            *(Row(op, "triton", n, D, TOKENS) for n in COUNTS[1:] for D in WIDTHS for op in bench.OPS),
        ],
        "peers": [
            *(
                Row("attnres", name, n, D, TOKENS)
                for n, D in itertools.product(COUNTS, WIDTHS)
                for name in (*peers, *others)
            ),
            *(Row(op, name, n, D, TOKENS) for D, n, op, name in itertools.product(WIDTHS, COUNTS, reads[1:], others)),
        ],
        "depth": [
            *(Row(op, "triton", depth_pass.HEAD_SOURCES, D, TOKENS) for D in WIDTHS[:2] for op in depth_pass.OPS),
            *(
                Row(op, "torch.compile", depth_pass.HEAD_SOURCES, WIDTHS[0], TOKENS)
                for op in ("depth_attnres", "depth_msar")
            ),
        ],
        "hyper": [Row(bench_hyper.OP, name, bench_hyper.N_LANES, D, TOKENS) for D in WIDTHS for name in lanes],
        "many": [Row(op, "triton", n, WIDTHS[0], TOKENS) for n in MANY for op in bench.OPS],
        "short": [Row(op, "triton", 9, D, SHORT) for D in WIDTHS for op in bench.OPS],
    }


def rows(wanted: tuple[str, ...] = LISTS) -> list[Row]:
    """What is measured here, most wanted first."""
    found = lists(tuple(bench.peers()), tuple(bench_hyper.available()))
    return [row for name in wanted for row in found[name]]


def prepare(row: Row) -> Subject:
    if row.op in depth_pass.OPS:
        return depth_pass.prepare(row)
    return (bench_hyper if row.op == bench_hyper.OP else bench).prepare(row)


def missing(output: Path, wanted: tuple[str, ...]) -> list[Row]:
    """Rows of the lists that bench.csv lacks; a failure is not tried again."""
    done = bench_rows.done(output / "bench.csv")
    return [row for row in rows(wanted) if row.key not in done]


# -------------------------------------------------------------------------------------------------- a child


class Expired(Exception):
    """A row took longer than its limit."""


def raise_expired(*_: object) -> None:
    raise Expired(f"more than {ROW_SECONDS} s")


def child(output: Path, deadline: float, wanted: tuple[str, ...]) -> int:
    """Measure what is missing; 3 if the GPU is of no more use to this process."""
    signal.signal(signal.SIGALRM, raise_expired)
    bandwidth = bench_rows.copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s", flush=True)
    for row in missing(output, wanted):
        if time.time() > deadline:
            print("out of time", flush=True)
            break
        print(f"BEGIN {json.dumps(row)}", flush=True)
        signal.alarm(ROW_SECONDS)
        for measured in bench_rows.attempt(row, prepare, bandwidth):
            signal.alarm(ROW_SECONDS)
            bench_rows.append(output / "bench.csv", measured)
            bench_rows.print_row(measured)
        signal.alarm(0)
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            return 3
    return 0


def warm(todo: list[Row]) -> None:
    """Run the calls of rows once, so that their kernels are in the compilers' caches."""
    for row in todo:
        try:
            for call in prepare(row).calls.values():
                call()
        except Exception as error:
            print(f"{row.name}: {type(error).__name__}: {str(error)[:200]}", flush=True)  # its own turn will say more
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------------ the parent


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "lit_msar.analysis.kernel_table", *arguments]


def warm_all(todo: list[Row], seconds: float) -> None:
    """Compile for all rows, as far as the time goes; each process takes its share, the most wanted first."""
    todo = [row for row in todo if row.implementation != "eager"]
    n_processes = min(len(todo), max(1, (os.cpu_count() or 2) - 2), MAX_PROCESSES)
    # or each of these processes would start inductor's own pool of compilers
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    begin = time.time()
    processes = [
        subprocess.Popen(command("--warm", json.dumps(todo[i::n_processes])), env=environment)
        for i in range(n_processes)
    ]
    killed = 0
    for process in processes:
        try:
            process.wait(max(0.1, begin + seconds - time.time()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            killed += 1
    print(f"compiled for {time.time() - begin:.0f} s; {killed} of {n_processes} processes were stopped", flush=True)


def run_child(output: Path, deadline: float, wanted: tuple[str, ...]) -> tuple[int, Row | None]:
    """One child until it ends or has been silent for too long; its exit code and the row it was at."""
    arguments = command("--child", "--output", str(output), "--deadline", str(deadline), "--rows", *wanted)
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    at = None

    def watched() -> threading.Timer:
        timer = threading.Timer(SILENT_SECONDS, process.kill)
        timer.start()
        return timer

    timer = watched()
    for line in process.stdout:
        timer.cancel()
        timer = watched()
        if line.startswith("BEGIN "):
            at = Row(*json.loads(line.removeprefix("BEGIN ")))
        else:
            print(line, end="", flush=True)
    timer.cancel()
    return process.wait(), at


def run(output: Path, seconds: float, warm_seconds: float, wanted: tuple[str, ...]) -> int:
    """Measure the tables into `output`; ends within `seconds` and the last row's limit."""
    deadline = time.time() + seconds
    path = output / "bench.csv"
    warm_all(missing(output, wanted), warm_seconds)
    while time.time() < deadline:
        code, at = run_child(output, deadline, wanted)
        if code == 0 or at is None:
            break
        if at.key not in bench_rows.done(path):
            row = bench_rows.failed(at, f"ended its process ({code})")
            bench_rows.append(path, row)
            bench_rows.print_row(row)
    write_figure(bench_rows.read_rows(path), output / "bench.svg")
    left = [row.name for row in missing(output, wanted)]
    print(f"not measured: {'; '.join(left) or 'nothing'}", flush=True)
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lit_msar.analysis.kernel_table", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--output", type=Path, default=Path("results/kernels/table"), help="folder of bench.csv")
    parser.add_argument("--seconds", type=float, default=420, help="start no row after this (default 420)")
    parser.add_argument("--warm_seconds", type=float, default=180, help="of these for compiling (default 180)")
    parser.add_argument("--rows", nargs="+", choices=LISTS, default=LISTS, help="which lists, in this order")
    parser.add_argument("--warm", help=argparse.SUPPRESS)  # compile for these rows, given as JSON, and end
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)  # measure here, for a parent
    parser.add_argument("--deadline", type=float, default=0.0, help=argparse.SUPPRESS)  # of --child, since the epoch
    args = parser.parse_args(arguments)
    if args.warm:
        warm([Row(*row) for row in json.loads(args.warm)])
        return 0
    if args.child:
        return child(args.output, args.deadline, tuple(args.rows))
    if not torch.cuda.is_available():
        print("error: the tables are measured on a GPU, and there is none", file=sys.stderr)
        return 2
    args.output.mkdir(parents=True, exist_ok=True)
    return run(args.output, args.seconds, args.warm_seconds, tuple(args.rows))


if __name__ == "__main__":
    sys.exit(main())
