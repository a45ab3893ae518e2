import math

import pytest
import torch

pytest.importorskip("triton")

from kernels import bench_rows
from kernels.bench_rows import FIELDS, Row, Subject

ROW = Row("attnres", "someone", 9, 2112, 8192)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    """The parts that need a GPU, replaced."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(bench_rows, "captured", lambda call: (call, "events"))
    monkeypatch.setattr(bench_rows, "median_ms", lambda call: call() or 8.0)


def subject(call=lambda: None):
    calls = dict.fromkeys(bench_rows.PASSES, call)
    return Subject(calls, lambda which, bandwidth: (0.5, None), reads=8, measured={"error": "1e-3"})


def test_a_time_is_that_of_one_read_over_its_floor():
    rows = list(bench_rows.measure(ROW, subject(), 4e12))
    assert [(row["pass"], row["ms"], row["ratio"]) for row in rows] == [
        ("forward", "1.0000", "2.00"),
        ("forward_backward", "1.0000", "2.00"),
    ]
    assert all(tuple(row) == FIELDS and row["error"] == "1e-3" for row in rows)


def test_a_failure_is_a_row_that_says_why(capsys):
    def prepare(row):
        raise RuntimeError("no such\n  luck")

    (row,) = bench_rows.attempt(ROW, prepare, 4e12)
    assert row["note"] == "failed: RuntimeError: no such luck"
    bench_rows.print_row(row)
    assert "no such luck" in capsys.readouterr().out


def test_rows_are_done_when_both_passes_are_or_one_failed(tmp_path):
    path = tmp_path / "folder" / "bench.csv"
    assert bench_rows.done(path) == set()
    forward, backward = bench_rows.measure(ROW, subject(), 4e12)
    bench_rows.append(path, forward)
    assert bench_rows.done(path) == set()
    bench_rows.append(path, backward)
    bench_rows.append(path, bench_rows.failed(ROW._replace(n=3), "hung"))
    assert bench_rows.done(path) == {ROW.key, ROW._replace(n=3).key}
    assert len(path.read_text().splitlines()) == 4


def test_a_file_of_other_fields_is_not_appended_to(tmp_path):
    path = tmp_path / "bench.csv"
    path.write_text("op,ms\n")
    with pytest.raises(ValueError, match="choose another output"):
        bench_rows.append(path, bench_rows.failed(ROW, "hung"))


@pytest.mark.parametrize("errors", [(0.5, 0.0), (0.0, 0.5), (math.nan, 0.0), (0.0, math.nan)])
def test_other_results_are_not_taken_for_rounding(errors):
    assert bench_rows.checked(1e-3, 5e-3) == {"error": "1.0e-03", "gradient_error": "5.0e-03"}
    with pytest.raises(ArithmeticError, match="not the same result"):
        bench_rows.checked(*errors)


def test_the_worst_error_is_nan_if_one_is():
    assert math.isnan(bench_rows.worst([0.1, math.nan, 0.2]))
    assert bench_rows.worst([0.1, 0.3, 0.2]) == 0.3
    assert bench_rows.relative_error(torch.ones(4), torch.zeros(4).double()) == 2.0
