"""Dry runs of the launch scripts, without GPUs and without SLURM; training/test_launch.py trains by torchrun.sh."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODEL = ["--config=configs/base.yaml", "--config=configs/size/28b.yaml", "--model.checkpointing=full"]
SCRIPTS = {
    "torchrun.sh": ("fsdp", {"NODES": "2", "GPUS": "8", "NODE_RANK": "1", "MASTER_ADDR": "first"}, "--node_rank 1"),
    "slurm.sbatch": ("fsdp_multi", {"NODES": "2", "GPUS": "8"}, "srun --kill-on-bad-exit=1"),
}


@pytest.mark.parametrize(
    ("script", "strategy", "settings", "named"), [(k, *v) for k, v in SCRIPTS.items()], ids=SCRIPTS
)
def test_dry_run_prints_the_plan_and_the_command(script, strategy, settings, named):
    environment = os.environ | settings | {"DRY_RUN": "1", "PYTHON": sys.executable, "GPU_MEMORY": "141"}
    command = ["bash", f"configs/launch/{script}", *MODEL, f"--config=configs/strategy/{strategy}.yaml"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert f"ranks: 16; mesh (replicate x shard): {'2 x 8' if strategy == 'fsdp_multi' else '16'}" in run.stdout
    assert "tokens per step: 131,072" in run.stdout
    assert "a checkpoint: 313 GiB" in run.stdout
    last = run.stdout.strip().splitlines()[-1]
    assert named in last
    assert last.endswith("--trainer.num_nodes 2 --trainer.devices 8 --ckpt_path last")


@pytest.mark.parametrize("script", SCRIPTS)
def test_dry_run_of_a_wrong_option_ends_with_its_error(script):
    environment = os.environ | SCRIPTS[script][1] | {"DRY_RUN": "1", "PYTHON": sys.executable}
    command = ["bash", f"configs/launch/{script}", *MODEL, "--model.decoder.n_head=3"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 2
    assert "n_head" in run.stderr.splitlines()[-1]
