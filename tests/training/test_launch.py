"""Sharded runs from the command line: two gloo processes that end well, are asked to stop, or die."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import python_path

ROOT = Path(__file__).parents[2]
SMALL = [
    "--config=configs/base.yaml", "--config=configs/size/tiny.yaml", "--config=configs/strategy/fsdp_cpu.yaml",
    "--model.decoder.d_model=16", "--model.decoder.n_layers=2", "--model.decoder.head_dim=4",
    "--model.decoder.d_expert=8", "--model.decoder.d_ff=16", "--model.decoder.vocab_size=320",
    "--data.seq_len=16", "--data.batch_size=2", "--data.workers=0",
    "--trainer.limit_val_batches=2", "--monitor.sample_tokens=4", "--checkpoint.every_n_steps=2",
]  # fmt: skip
PYTHON = [sys.executable, "-m", "lit_msar", "fit"]
TORCHRUN = ["bash", "configs/launch/torchrun.sh"]

pytestmark = pytest.mark.slow


def launch(start, prepared, out, *more):
    """A running command; its output in `out/screen.txt`."""
    out.mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": python_path("tests"), "OMP_NUM_THREADS": "1"}
    environment |= {"GPUS": "2", "PYTHON": sys.executable}
    command = [*start, *SMALL, f"--data.path={prepared}", f"--trainer.default_root_dir={out}", *more]
    with (out / "screen.txt").open("w") as screen:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=screen, stderr=subprocess.STDOUT)


def wait_for(path, process, seconds=60):
    end = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, "the run ended early"
        assert time.monotonic() < end, f"no {path} after {seconds} s"
        time.sleep(0.1)


def test_sigterm_saves_on_all_ranks_and_last_goes_on(prepared, tmp_path):
    """The signal reaches rank 0 alone; all ranks stop after the same step."""
    out = tmp_path / "run"
    process = launch(PYTHON, prepared, out, "--trainer.max_steps=100000")
    wait_for(out / "checkpoints" / "last.ckpt", process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    screen = (out / "screen.txt").read_text()
    last = (out / "checkpoints" / "last.ckpt").resolve()
    step = int(last.name.removeprefix("step=").removesuffix(".ckpt"))
    assert screen.strip().splitlines()[-1] == (
        f"error: stopped by signal 15 after step {step}, which is saved; go on with --ckpt_path last"
    )
    assert screen.count("error:") == 1, "said once, not by every rank"
    process = launch(PYTHON, prepared, out, f"--trainer.max_steps={step + 3}", "--ckpt_path=last")
    assert process.wait(60) == 0
    assert (out / "checkpoints" / "last.ckpt").resolve().name == f"step={step + 3}.ckpt"
    assert len(list(out.glob("events.out*"))) == 2, "one set of logs for each of the two starts"


@pytest.mark.parametrize(
    ("start", "rank"), [(PYTHON, 0), (PYTHON, 1), (TORCHRUN, 1)], ids=["own-0", "own-1", "torchrun"]
)
def test_failing_rank_takes_the_others_down_and_its_error_is_last(start, rank, prepared, tmp_path):
    fail = "--trainer.callbacks=training.sharded_runs.Fail"
    more = [fail, f"--trainer.callbacks.rank={rank}", "--trainer.callbacks.step=3", "--trainer.callbacks.how=raise"]
    out = tmp_path / "run"
    process = launch(start, prepared, out, "--trainer.max_steps=100000", *more)
    wait_for(out / "checkpoints" / "last.ckpt", process)  # after step 2; the failure comes with step 4
    started = time.monotonic()
    assert process.wait(30) != 0
    assert time.monotonic() - started < 30
    lines = [line for line in (out / "screen.txt").read_text().splitlines() if line.strip(" =")]
    assert lines[-1].endswith(f"RuntimeError: the disk of rank {rank} is full")


def test_killed_rank_takes_the_others_down(prepared, tmp_path):
    fail = ["--trainer.callbacks=training.sharded_runs.Fail", "--trainer.callbacks.rank=1"]
    more = [*fail, "--trainer.callbacks.step=3", "--trainer.callbacks.how=kill", "--trainer.max_steps=100000"]
    process = launch(TORCHRUN, prepared, tmp_path / "run", *more)
    wait_for(tmp_path / "run" / "checkpoints" / "last.ckpt", process)
    assert process.wait(30) != 0
    assert "Signal 9 (SIGKILL)" in (tmp_path / "run" / "screen.txt").read_text()
