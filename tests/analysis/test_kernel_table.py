import time

import pytest
import torch

pytest.importorskip("triton")

from kernels import bench, bench_rows
from kernels.bench_rows import Row, Subject
from lit_msar.analysis import depth_pass, kernel_table

ROWS = [Row("attnres", "triton", n, 64, 8) for n in (1, 2, 3)]


@pytest.fixture
def no_gpu(monkeypatch):
    """The parts that need a GPU, replaced."""
    monkeypatch.setattr(bench_rows, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(bench_rows, "captured", lambda call: (call, "events"))
    monkeypatch.setattr(bench_rows, "median_ms", lambda call: call() or 1.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(kernel_table, "rows", lambda wanted: ROWS)


def subject(call=lambda: None):
    return Subject(dict.fromkeys(bench_rows.PASSES, call), lambda *_: (1.0, None), 1, {})


def test_a_row_that_fails_or_takes_too_long_does_not_stop_the_others(no_gpu, monkeypatch, tmp_path):
    def prepare(row):
        if row.n == 1:
            raise RuntimeError("no such luck")
        return subject((lambda: time.sleep(5)) if row.n == 2 else (lambda: None))

    monkeypatch.setattr(kernel_table, "prepare", prepare)
    monkeypatch.setattr(kernel_table, "ROW_SECONDS", 1)
    assert kernel_table.child(tmp_path, time.time() + 60, ()) == 0
    rows = bench_rows.read_rows(tmp_path / "bench.csv")
    assert [(row["n"], row["pass"], row["note"]) for row in rows] == [
        ("1", "", "failed: RuntimeError: no such luck"),
        ("2", "", "failed: Expired: more than 1 s"),
        ("3", "forward", ""),
        ("3", "forward_backward", ""),
    ]
    assert kernel_table.missing(tmp_path, ()) == []


def test_a_row_that_ends_its_process_is_left_out_of_the_next(no_gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(kernel_table, "warm_all", lambda todo, seconds: None)
    died, left = [(-9, ROWS[0]), (3, ROWS[1]), (0, ROWS[2])], []

    def run_child(output, deadline, wanted):
        left.append([row.n for row in kernel_table.missing(output, wanted)])
        return died[len(left) - 1]

    monkeypatch.setattr(kernel_table, "run_child", run_child)
    assert kernel_table.run(tmp_path, 60, 0, ()) == 0
    assert left == [[1, 2, 3], [2, 3], [3]]


def test_no_row_begins_after_the_deadline(no_gpu, tmp_path, capsys):
    assert kernel_table.child(tmp_path, time.time() - 1, ()) == 0
    assert "BEGIN" not in capsys.readouterr().out


def test_table_holds_each_row_once_ours_first():
    rows = [row for part in kernel_table.lists(("liger-kernel",), ("triton", "eager")).values() for row in part]
    assert len(set(rows)) == len(rows)
    assert [row.op for row in rows[: len(bench.OPS)]] == list(bench.OPS)
    assert rows[0].name == "attnres triton n=9 D=2112 T=8192"
    assert {Row("attnres", "liger-kernel", 3, 2560, 8192), Row("mhc", "eager", 4, 2048, 8192)} < set(rows)


@pytest.mark.parametrize("op", depth_pass.OPS)
def test_depth_pass_reads_all_sites_and_reaches_every_parameter(op):
    depth = depth_pass.DepthPass(op, "eager", d_model=16, n_layers=5, device="cpu")
    x = torch.randn(1, 4, 16, requires_grad=True)
    depth(x).sum().backward()
    assert depth.n_sources() == [1, *[2] * 8, 3, 3]
    assert all(p.grad is not None for p in depth.strategy.parameters())
