"""Rows of the bench: what was measured of one strategy at one shape, as tables and as CSV."""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.table import Table

PARTS = ("attention", "mlp", "embedding", "loss", "residual", "optimizer")


@dataclass
class BenchRow:
    """Medians over the timed steps of one strategy at one shape; seconds, GiB."""

    strategy: str
    n_layers: int
    batch_size: int
    seq_len: int
    step: float
    parts: dict[str, float]
    mfu: float | None
    peak_gib: float | None
    loss: float

    @property
    def tokens_per_second(self) -> float:
        return self.batch_size * self.seq_len / self.step


def bench_table(rows: list[BenchRow]) -> Table:
    """Milliseconds per step by part, of one shape; the last columns compare with the first row."""
    first = rows[0]
    shape = f"{first.n_layers} layers, {first.batch_size} x {first.seq_len} tokens"
    table = Table(title=f"Training step, median milliseconds ({shape})")
    table.add_column("strategy")
    for heading in ("step", *PARTS, "tokens/s", "MFU", "peak GiB", f"step over {first.strategy}", "peak over"):
        table.add_column(heading, justify="right")
    for row in rows:
        peak = "-" if row.peak_gib is None else f"{row.peak_gib:.2f}"
        peak_ratio = "-" if row.peak_gib is None else f"{row.peak_gib / first.peak_gib:.3f}"
        table.add_row(
            row.strategy,
            f"{1e3 * row.step:.1f}",
            *(f"{1e3 * row.parts[name]:.1f}" if name in row.parts else "-" for name in PARTS),
            f"{row.tokens_per_second:,.0f}",
            "-" if row.mfu is None else f"{100 * row.mfu:.1f} %",
            peak,
            f"{row.step / first.step:.3f}",
            peak_ratio,
        )
    return table


def growth_table(rows: list[BenchRow], axis: Literal["seq_len", "n_layers"]) -> Table:
    """How the residual's own time and the step over the first strategy's grow along one axis of the shape."""
    points = sorted({getattr(row, axis) for row in rows})
    cells = {(row.strategy, getattr(row, axis)): row for row in rows}
    names = list(dict.fromkeys(row.strategy for row in rows))
    table = Table(title=f"By {axis}: residual, milliseconds (step over {names[0]})")
    table.add_column("strategy")
    for point in points:
        table.add_column(f"{point:,}", justify="right")
    for name in names:
        pairs = [(cells[name, point], cells[names[0], point]) for point in points]
        table.add_row(name, *(f"{1e3 * r.parts['residual']:.1f} ({r.step / first.step:.3f})" for r, first in pairs))
    return table


def write_csv(rows: list[BenchRow], path: Path, about: dict[str, object]) -> None:
    """One line per strategy and shape: what was measured, then `about` (device, versions, model)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        shape = ("n_layers", "batch_size", "seq_len")
        parts = (f"{part}_seconds" for part in PARTS)
        writer.writerow(["strategy", *shape, "step_seconds", *parts, "tokens_per_second", "mfu", "peak_gib", *about])
        for row in rows:
            measured = [row.step, *(row.parts.get(part) for part in PARTS), row.tokens_per_second]
            values = [row.n_layers, row.batch_size, row.seq_len, *measured, row.mfu, row.peak_gib]
            writer.writerow([row.strategy, *values, *about.values()])
