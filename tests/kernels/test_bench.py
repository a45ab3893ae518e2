import xml.etree.ElementTree as ET

import pytest
import torch

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


@pytest.mark.parametrize("op", ["msar", "msar_reader", "msar_ahead", "msar_block"])
def test_kernels_and_reference_of_an_operation_are_given_the_same_reads(op, monkeypatch):
    monkeypatch.setattr(bench, "READS", 2)
    monkeypatch.setattr(bench, "KERNEL_SIZES", (1, 2))
    x = object.__new__(bench.Inputs)
    n_taps = 1 if op == "msar_reader" else 3
    x.sources = [torch.randn(1, 4, 8) for _ in range(2)]
    x.taps = [torch.randn(2, 8) for _ in range(n_taps)]
    x.reads = [(torch.randn(2, 8), torch.randn(2, 2, 8), torch.randn(1), torch.randn(2)) for _ in range(2)]
    if op not in bench.OF_A_BLOCK:
        x.taps = x.taps[:2]
    expected, found = bench.run_op(op, bench.reference, x), bench.run_triton(op, x)
    assert len(found) == len(expected)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
