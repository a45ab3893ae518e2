"""Rows of the kernels' benches: what is timed, how, and the CSV file that keeps them.

A row is one operation, implementation and shape, forward or forward and backward. Its time is the median of CUDA-graph
replays with a cold L2 (of plain launches where an implementation cannot be captured). What an implementation computes
is compared with float64 before it is timed; one that fails, or computes something else, is a row whose `note` says why.
"""

import csv
import datetime
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch import Tensor

KEY = ("op", "implementation", "n", "d_model", "tokens")
FIELDS = (
    *KEY,
    *("pass", "ms", "byte_floor_ms", "ratio", "fma_floor_ms", "extra_mib", "error", "gradient_error", "timing", "note"),
    *("device", "torch", "triton", "date"),
)
PASSES = ("forward", "forward_backward")
FLUSH_BYTES = 256 << 20  # more than any L2
REPEATS, SECONDS = 20, 1.0  # timed calls of a row: so many, or as fit into a second
# half-precision results of the same formula differ from float64 by about 2e-3, sums over tokens by up to ten times that
MAX_ERROR, MAX_GRADIENT_ERROR = 2e-2, 6e-2


class Row(NamedTuple):
    """What one measurement is of: `n` counts sources, or lanes for op mhc."""

    op: str
    implementation: str
    n: int
    d_model: int
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.op} {self.implementation} n={self.n} D={self.d_model} T={self.tokens}"

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(str(value) for value in self)


class Subject(NamedTuple):
    """An implementation ready to be timed.

    Attributes:
        calls: by pass, what is timed.
        floor: of a pass and a bandwidth, the byte floor and the FMA floor (None: not known) of one read in ms.
        reads: how many reads a call does.
        measured: fields of the rows that are known already.
    """

    calls: dict[str, Callable[[], object]]
    floor: Callable[[str, float], tuple[float, float | None]]
    reads: int
    measured: dict[str, str]


# ------------------------------------------------------------------------------------------------------- timing


def flush(cold: Tensor) -> None:
    """Put `cold` into the L2 by reading it: lines left by a write would be written back on the timed call's account."""
    torch.sum(cold)


def median_ms(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median time of CUDA events around a call, with a cold L2; fewer repeats for calls that take long."""
    cold = torch.zeros(FLUSH_BYTES // 4, device="cuda")
    times: list[float] = []
    begin = time.monotonic()
    for i in range(repeats + 3):
        flush(cold)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
        if i >= 5 and time.monotonic() - begin > SECONDS:
            break
    return statistics.median(times[3:])


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large copy on this device."""
    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    # not as a graph, where a copy goes to the slower copy engine
    return 2 * x.numel() / (median_ms(lambda: y.copy_(x)) * 1e-3)


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


def extra_mib(call: Callable[[], object]) -> float:
    """Memory that a forward pass keeps for the backward pass, its outputs included."""
    call()
    before = torch.cuda.memory_allocated()
    out = call()
    after = torch.cuda.memory_allocated()
    del out
    return (after - before) / 2**20


# ------------------------------------------------------------------------------------------------------- checks


def relative_error(found: Tensor, oracle: Tensor) -> float:
    """||found - oracle|| / ||oracle||, or ||found|| where the oracle is zero; NaN stays NaN."""
    distance, length = (found.double() - oracle).norm(), oracle.double().norm()
    return float((distance / length if length > 0 else distance).detach())


def worst(errors: Sequence[float]) -> float:
    """The largest error; NaN if one is NaN."""
    return max(errors, key=lambda error: (error != error, error), default=0.0)


def checked(error: float, gradient_error: float) -> dict[str, str]:
    """The fields of these errors; ArithmeticError unless they are errors of rounding."""
    if not (error <= MAX_ERROR and gradient_error <= MAX_GRADIENT_ERROR):
        raise ArithmeticError(f"not the same result: error {error:.1e}, of gradients {gradient_error:.1e}")
    return {"error": f"{error:.1e}", "gradient_error": f"{gradient_error:.1e}"}


# --------------------------------------------------------------------------------------------------------- rows


def described(row: Row) -> dict[str, str]:
    """What was measured, and on what; every field of a row, those not measured empty."""
    where = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
    }
    return dict.fromkeys(FIELDS, "") | dict(zip(KEY, row.key, strict=True)) | where


def measure(row: Row, subject: Subject, bandwidth: float) -> Iterator[dict[str, str]]:
    """One row for each pass."""
    for which, call in subject.calls.items():
        replay, timing = captured(call)
        ms = median_ms(replay) / subject.reads
        byte_floor, fma_floor = subject.floor(which, bandwidth)
        times = {
            "pass": which,
            "ms": f"{ms:.4f}",
            "byte_floor_ms": f"{byte_floor:.4g}",
            "ratio": f"{ms / byte_floor:.2f}",
            "fma_floor_ms": "" if fma_floor is None else f"{fma_floor:.4f}",
            "timing": timing,
        }
        yield described(row) | subject.measured | times


def failed(row: Row, reason: object) -> dict[str, str]:
    """The row of what could not be measured."""
    text = f"{type(reason).__name__}: {reason}" if isinstance(reason, Exception) else str(reason)
    return described(row) | {"note": f"failed: {' '.join(text.split())[:200]}"}


def attempt(row: Row, prepare: Callable[[Row], Subject], bandwidth: float) -> Iterator[dict[str, str]]:
    """The rows of a measurement, or the one that says how it failed: nobody's error stops a table."""
    try:
        yield from measure(row, prepare(row), bandwidth)
    except Exception as error:
        yield failed(row, error)


def read_rows(path: Path) -> list[dict]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append(path: Path, row: dict) -> None:
    """Add a row to a file of the same fields, or begin one."""
    is_new = not path.exists()
    if not is_new:
        with path.open(newline="") as file:
            header = next(csv.reader(file), None)
        if header != list(FIELDS):
            raise ValueError(f"{path} holds other fields than {', '.join(FIELDS)}; choose another output")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def done(path: Path) -> set[tuple[str, ...]]:
    """Keys of the rows that need no more measuring: both passes, or a failure; delete a line to measure it again."""
    finished = [row for row in read_rows(path) if row["pass"] == PASSES[1] or row["note"]]
    return {tuple(row[key] for key in KEY) for row in finished}


def print_row(row: dict) -> None:
    what = f"{row['op']:<13}{row['implementation']:<30}n={row['n']:<4}D={row['d_model']:<6}T={row['tokens']:<6}"
    if row["note"]:
        print(what + row["note"], flush=True)
        return
    fma = f"  fp32 {row['fma_floor_ms']} ms" if row["fma_floor_ms"] else ""
    print(
        f"{what}{row['pass']:<18}{row['ms']:>9} ms  {row['ratio']:>6}x bytes ({row['byte_floor_ms']} ms){fma}  "
        f"kept {row['extra_mib'] or '-':>8} MiB  error {row['error'] or '-'} {row['gradient_error'] or '-'}",
        flush=True,
    )
