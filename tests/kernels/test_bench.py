import xml.etree.ElementTree as ET

import pytest

pytest.importorskip("triton")

from kernels import bench
from kernels.bench_figure import write_figure


def row(op="msar", n=9, D=2112, which="forward", ratio=2.0, implementation="triton"):
    values = dict.fromkeys(bench.FIELDS, "")
    return values | {
        "op": op,
        "implementation": implementation,
        "n_sources": str(n),
        "d_model": str(D),
        "tokens": "8192",
        "pass": which,
        "ratio": str(ratio),
    }


def test_byte_floor_counts_each_source_output_and_gradient_once():
    # KERNELS of 9 sources, 8192 tokens, D = 2048 at 4.27 TB/s: 0.079 ms forward, 0.228 ms with the backward pass
    forward, _ = bench.floors("attnres", 9, 2048, 8192, "forward", 4.27e12)
    both, _ = bench.floors("attnres", 9, 2048, 8192, "forward_backward", 4.27e12)
    assert (round(forward, 3), round(both, 3)) == (0.079, 0.228)


def test_rows_are_appended_under_one_header(tmp_path):
    path = tmp_path / "bench.csv"
    for n in (3, 9):
        bench.append(path, row(n=n))
    assert [read["n_sources"] for read in bench.read_rows(path)] == ["3", "9"]


def test_rows_of_a_file_that_is_not_there_are_none(tmp_path):
    assert bench.read_rows(tmp_path / "bench.csv") == []


def test_figure_has_a_panel_per_operation_and_pass_and_a_line_per_width(tmp_path):
    rows = [
        row(op, n, D, which, ratio=n / 3)
        for op in ("attnres", "msar")
        for n in (3, 9)
        for D in (2048, 2112)
        for which in ("forward", "forward_backward")
    ]
    write_figure([*rows, row(implementation="eager", ratio=500.0)], tmp_path / "bench.svg")
    root = ET.parse(tmp_path / "bench.svg").getroot()
    assert len(root.findall("{*}polyline")) == 2 * 2 * 2
    assert len(root.findall("{*}rect")) == 1 + 2 * 2


def test_bench_without_a_gpu_says_so(capsys, monkeypatch):
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: False)
    assert bench.main([]) == 2
    assert "finds none" in capsys.readouterr().err
