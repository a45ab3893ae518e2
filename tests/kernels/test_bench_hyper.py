import csv

import pytest
import torch
from kernel_inputs import DEVICE

pytest.importorskip("triton")

from kernels import bench_hyper


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it needs where there is no GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert bench_hyper.main(["--widths", "64"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["triton, read and write apart", "eager"])
def test_errors_of_the_formula_are_those_of_rounding(name, monkeypatch):
    monkeypatch.setattr(bench_hyper, "CHECKED_TOKENS", 4)
    monkeypatch.setattr(bench_hyper, "N_ROUNDS", 3)
    lanes, y, parameters = bench_hyper.inputs(2, 32, 6, device=DEVICE)
    run, given = bench_hyper.IMPLEMENTATIONS[name][1](lanes, y, parameters)
    error, gradient_error = bench_hyper.errors(run, lanes, y, given, parameters)
    assert 0 < error < 1e-2
    assert 0 < gradient_error < 2e-2


def test_errors_show_a_wrong_write():
    lanes, y, parameters = bench_hyper.inputs(2, 32, 6, device=DEVICE)

    def wrong(lanes, y, given):
        h, written = bench_hyper.plain(lanes, y, given)
        return h, written.flip(2)

    assert min(bench_hyper.errors(wrong, lanes, y, parameters, parameters)) > 0.1


@pytest.mark.gpu
def test_rows_hold_times_floors_and_errors(tmp_path):
    path = tmp_path / "rows" / "hyper.csv"
    arguments = ["--output", str(path), "--widths", "64", "--tokens", "512", "--only", "triton", "plain"]
    assert bench_hyper.main(arguments) == 0
    rows = list(csv.DictReader(path.open()))
    assert [row["pass"] for row in rows] == ["forward", "forward_backward"] * 2
    for forward, both in zip(rows[::2], rows[1::2], strict=True):
        assert 0 < float(forward["ms"]) < float(both["ms"])
        assert float(both["byte_floor_ms"]) == pytest.approx(39 / 14 * float(forward["byte_floor_ms"]), rel=0.05)
        assert float(both["error"]) < 0.01
