import sys
import xml.etree.ElementTree as ET

import pytest
import torch
from kernel_inputs import DEVICE, normal

pytest.importorskip("triton")

from kernels import bench, bench_rows, reference
from kernels.bench_figure import write_figure


def row(op="msar", n=9, D=2112, which="forward", ratio=2.0, implementation="triton"):
    values = dict.fromkeys(bench_rows.FIELDS, "")
    return values | {
        "op": op,
        "implementation": implementation,
        "n": str(n),
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


def test_figure_has_a_panel_per_operation_and_pass_and_a_line_per_width(tmp_path):
    rows = [
        row(op, n, D, which, ratio=n / 3)
        for op in ("attnres", "msar")
        for n in (3, 9)
        for D in (2048, 2112)
        for which in ("forward", "forward_backward")
    ]
    others = [row(implementation="eager", ratio=500.0), row(n=57, ratio="") | {"note": "failed: out of memory"}]
    others.append(row("depth_msar", 8, ratio=7.0))  # one point is no line
    write_figure([*rows, *others], tmp_path / "bench.svg")
    root = ET.parse(tmp_path / "bench.svg").getroot()
    assert len(root.findall("{*}polyline")) == 2 * 2 * 2
    assert len(root.findall("{*}rect")) == 1 + 2 * 2


def test_figure_of_a_single_count_shows_its_points(tmp_path):
    rows = [row("msar", 9, D, which, ratio=7.0) for D in (2048, 2112) for which in ("forward", "forward_backward")]
    write_figure(rows, tmp_path / "bench.svg")
    assert len(ET.parse(tmp_path / "bench.svg").getroot().findall("{*}circle")) == 4


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
    x.sources = [normal(1, 4, 8) for _ in range(2)]
    x.taps = [normal(2, 8) for _ in range(n_taps)]
    x.reads = [(normal(2, 8), normal(2, 2, 8), normal(1), normal(2)) for _ in range(2)]
    if op not in bench.OF_A_BLOCK:
        x.taps = x.taps[:2]
    expected, found = bench.run_op(op, bench.reference, x), bench.run_triton(op, x)
    assert len(found) == len(expected)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("op", ["attnres", "msar"])
def test_errors_of_the_kernels_are_those_of_rounding(op, monkeypatch):
    monkeypatch.setattr(bench, "KERNEL_SIZES", (1, 2))
    monkeypatch.setattr(bench, "CHECKED_TOKENS", 3)
    x = bench.Inputs(op, 2, 16, 5, device=DEVICE)
    error, gradient_error = bench.errors(op, bench.implementations(op, with_peers=False)["triton"], x)
    assert 0 < error < 1e-2
    assert 0 < gradient_error < 2e-2


def stacked_read(x):
    """A peer that takes the sources stacked."""
    return [reference.attnres_read(list(bench.stacked(x).unbind()), x.query, x.gain, bench.EPS)]


def test_errors_compare_the_gradients_of_stacked_sources():
    x = bench.Inputs("attnres", 3, 16, 70, device=DEVICE)
    error, gradient_error = bench.errors("attnres", stacked_read, x)
    assert max(error, gradient_error) < 1e-2
    wrong = bench.errors("attnres", lambda x: [stacked_read(x)[0] + 0.5 * bench.stacked(x)[1]], x)
    assert min(wrong) > 0.1


def test_peers_are_those_installed_and_fail_only_when_called(monkeypatch):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: name == "fla")
    monkeypatch.setitem(sys.modules, "fla.ops.attnres", None)
    assert list(bench.peers()) == ["fla-core"]
    with pytest.raises(ModuleNotFoundError):
        bench.peers()["fla-core"](bench.Inputs("attnres", 2, 16, 3, device=DEVICE))
