"""What a run leaves in its directory besides checkpoints and logs: its tokenizer, and one row of results."""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import lightning as L
import torch

from lit_msar.training.module import LanguageModel
from lit_msar.training.monitor import Monitor


class RunFiles(L.Callback):
    """Copies the tokenizer to `OUT` at the start, and writes `OUT/result.json` when the last step is reached."""

    def on_fit_start(self, trainer: L.Trainer, module: LanguageModel) -> None:
        if not trainer.is_global_zero:
            return
        root, tokenizer = Path(trainer.default_root_dir), trainer.datamodule.tokenizer()
        root.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(tokenizer.path, root / f"tokenizer{tokenizer.path.suffix}")
        parameters = sum(p.numel() for p in module.decoder.parameters())
        of_residual = sum(p.numel() for p in module.decoder.residual.parameters())
        print(
            f"{module.spec.residual}: {parameters:,} parameters, {of_residual:,} of them the residual's, "
            f"on {device_name(module.device)}; logs and checkpoints in {root}",
            file=sys.stderr,
        )

    def on_fit_end(self, trainer: L.Trainer, module: LanguageModel) -> None:
        if trainer.global_step < trainer.max_steps or not trainer.is_global_zero:
            return
        path = Path(trainer.default_root_dir) / "result.json"
        unfinished = path.with_suffix(".json.unfinished")
        unfinished.write_text(json.dumps(result_row(trainer, module), indent=1) + "\n")
        os.replace(unfinished, path)


def result_row(trainer: L.Trainer, module: LanguageModel) -> dict:
    """Plain values that identify a run and say how it ended; losses in nats per token, times in seconds."""
    monitor = next((c for c in trainer.callbacks if isinstance(c, Monitor)), None)
    parameters = list(module.decoder.parameters())
    spec = asdict(module.spec)
    return {
        "name": Path(trainer.default_root_dir).resolve().name,
        "residual": module.spec.residual,
        "model_hash": hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:12],
        "model": spec,
        "parameters": sum(p.numel() for p in parameters),
        "residual_parameters": sum(p.numel() for p in module.decoder.residual.parameters()),
        "steps": trainer.global_step,
        "tokens": module.tokens_seen,
        "seed": module.seed,
        "step_seconds": monitor.median_step_seconds() if monitor else None,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "device": device_name(module.device),
        "torch": torch.__version__,
        "commit": commit(),
    }


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's architecture and core count."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def commit() -> str | None:
    """The commit of the checkout this code runs from, `+` appended if it has changes; None outside of one."""
    root = Path(__file__).resolve().parents[2]
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12"], cwd=root, capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    return run.stdout.strip() or None
