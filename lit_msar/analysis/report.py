"""Tables over finished runs."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table


def read_results(runs: str | Path) -> list[dict]:
    """The rows of all finished runs below a directory, by name.

    Raises:
        FileNotFoundError: no run below it has finished.
    """
    paths = sorted(Path(runs).glob("**/result.json"))
    if not paths:
        raise FileNotFoundError(f"no finished run (result.json) below {runs}")
    return [json.loads(path.read_text()) for path in paths]


def runs_table(results: list[dict], baseline: str = "Vanilla") -> Table:
    """Validation loss, parameters and step time of each run, the time also relative to the baseline strategy's."""
    reference = next((row["step_seconds"] for row in results if row["residual"] == baseline), None)
    table = Table(title="Runs, best validation loss first")
    for heading in ("run", "strategy", "val loss", "bits/byte", "parameters", "of the residual", "steps", "tokens"):
        table.add_column(heading, justify="left" if heading in ("run", "strategy") else "right")
    table.add_column("s/step", justify="right")
    table.add_column(f"over {baseline}", justify="right")
    for row in sorted(results, key=lambda row: row["metrics"].get("val/loss", float("inf"))):
        seconds = row["step_seconds"]
        table.add_row(
            row["name"],
            row["residual"],
            _number(row["metrics"].get("val/loss"), ".4f"),
            _number(row["metrics"].get("val/bits_per_byte"), ".4f"),
            f"{row['parameters']:,}",
            f"{row['residual_parameters']:,}",
            f"{row['steps']:,}",
            f"{row['tokens']:,}",
            _number(seconds, ".3f"),
            _number(seconds / reference if seconds and reference else None, ".2f"),
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def report(runs: str, baseline: str = "Vanilla") -> None:
    """Print a table of all finished runs below a directory.

    Args:
        runs: directory with runs below it.
        baseline: strategy whose step time the others are compared with.
    """
    Console(width=150).print(runs_table(read_results(runs), baseline))
