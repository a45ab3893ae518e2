import csv

import pytest
import torch

pytest.importorskip("triton")

from kernels import bench_hyper


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it needs where there is no GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert bench_hyper.main(["--widths", "64"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
def test_rows_hold_times_floors_and_errors(tmp_path):
    path = tmp_path / "rows" / "hyper.csv"
    arguments = ["--output", str(path), "--widths", "64", "--tokens", "512", "--only", "triton", "plain"]
    assert bench_hyper.main(arguments) == 0
    rows = list(csv.DictReader(path.open()))
    assert [row["implementation"].split(",")[0] for row in rows] == ["triton", "triton", "plain formula (eager)"]
    for row in rows:
        assert 0 < float(row["forward_ms"]) < float(row["both_ms"])
        assert float(row["both_floor_ms"]) == pytest.approx(39 / 14 * float(row["forward_floor_ms"]), rel=0.05)
        assert float(row["error_lanes"]) < 0.01
        assert float(row["error_dphi"]) < 0.01
