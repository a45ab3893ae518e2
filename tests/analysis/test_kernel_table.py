import time

import pytest
import torch

pytest.importorskip("triton")

from kernels import bench
from lit_msar.analysis import depth_pass, kernel_table
from lit_msar.analysis.kernel_table import Row


@pytest.fixture
def no_gpu(monkeypatch):
    """The parts that need a GPU, replaced."""
    monkeypatch.setattr(bench, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(kernel_table, "rows", lambda packages: [Row("attnres", "triton", n, 64) for n in (1, 2, 3)])


def measured(row):
    values = dict.fromkeys(bench.FIELDS, "1")
    return values | {
        "op": row.op,
        "implementation": row.implementation,
        "n_sources": row.n_sources,
        "d_model": row.d_model,
        "tokens": kernel_table.TOKENS,
        "pass": "forward_backward",
    }


def test_a_row_that_fails_or_takes_too_long_does_not_stop_the_others(no_gpu, monkeypatch, tmp_path, capsys):
    def measure(row, bandwidth):
        if row.n_sources == 1:
            raise RuntimeError("no such luck")
        if row.n_sources == 2:
            time.sleep(5)
        yield measured(row)

    monkeypatch.setattr(kernel_table, "measure", measure)
    monkeypatch.setattr(kernel_table, "ROW_SECONDS", 1)
    assert kernel_table.child(tmp_path, time.time() + 60, set()) == 0
    assert [row["n_sources"] for row in bench.read_rows(tmp_path / "bench.csv")] == ["3"]
    printed = capsys.readouterr().out
    assert "FAILED attnres triton N=1 D=64: RuntimeError: no such luck" in printed
    assert "FAILED attnres triton N=2 D=64: Expired: more than 1 s" in printed


def test_rows_that_are_measured_or_skipped_are_not_measured_again(no_gpu, monkeypatch, tmp_path):
    bench.append(tmp_path / "bench.csv", measured(Row("attnres", "triton", 2, 64)))
    assert [row.n_sources for row in kernel_table.missing(tmp_path, {"attnres triton N=1 D=64"})] == [3]


def test_no_row_begins_after_the_deadline(no_gpu, tmp_path, capsys):
    assert kernel_table.child(tmp_path, time.time() - 1, set()) == 0
    assert "BEGIN" not in capsys.readouterr().out


def test_table_holds_each_row_once_ours_first():
    rows = kernel_table.rows(("liger-kernel",))
    assert len(set(rows)) == len(rows)
    assert [row.op for row in rows[: len(bench.OPS)]] == list(bench.OPS)
    assert Row("attnres", "liger-kernel", 3, 2112) in rows


@pytest.mark.parametrize("op", depth_pass.OPS)
def test_depth_pass_reads_all_sites_and_reaches_every_parameter(op):
    depth = depth_pass.DepthPass(op, "eager", d_model=16, n_layers=5, device="cpu")
    x = torch.randn(1, 4, 16, requires_grad=True)
    depth(x).sum().backward()
    assert depth.n_sources() == [1, *[2] * 8, 3, 3]
    assert all(p.grad is not None for p in depth.strategy.parameters())
