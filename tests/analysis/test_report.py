import json

import pytest
from rich.console import Console

from lit_msar.analysis.report import read_results, runs_table


def write_run(root, name, residual, loss, seconds):
    row = {"name": name, "residual": residual, "parameters": 10, "residual_parameters": 1, "steps": 5, "tokens": 50}
    row |= {"step_seconds": seconds, "metrics": {"val/loss": loss} if loss else {}}
    (root / name).mkdir(parents=True)
    (root / name / "result.json").write_text(json.dumps(row))


def printed(table):
    console = Console(width=150, record=True, file=open("/dev/null", "w"))
    console.print(table)
    return console.export_text()


def test_table_sorts_by_loss_and_compares_step_times(tmp_path):
    write_run(tmp_path, "a", "Vanilla", 4.0, 0.5)
    write_run(tmp_path, "b", "MSAR", 3.5, 1.0)
    write_run(tmp_path, "c", "MHC", None, None)
    text = printed(runs_table(read_results(tmp_path)))
    rows = [line for line in text.splitlines() if "│" in line]
    assert ["MSAR" in rows[0], "Vanilla" in rows[1], "MHC" in rows[2]] == [True] * 3
    assert rows[0].rstrip(" │").endswith("2.00")
    assert rows[1].rstrip(" │").endswith("1.00")


def test_no_finished_run_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no finished run"):
        read_results(tmp_path)
