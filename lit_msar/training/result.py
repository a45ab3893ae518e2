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
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info

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
        path = Path(trainer.default_root_dir) / "result.json"
        if trainer.global_step < trainer.max_steps:
            return
        if not module.has_trained:  # a finished run, started again
            if trainer.strategy.broadcast(path.exists()):
                return
            module.evaluate()  # it was stopped in its last evaluation
        if not trainer.is_global_zero:
            return
        unfinished = path.with_suffix(".json.unfinished")
        unfinished.write_text(json.dumps(result_row(trainer, module), indent=1) + "\n")
        os.replace(unfinished, path)


class Predictions(L.Callback):
    """`predict` writes a line of JSON per sequence: its set, unmasked tokens, and their log-likelihood in nats.

    Into `OUT/predictions.jsonl`; of several ranks, each its part, into `OUT/predictions.rank=N.jsonl`.
    """

    def on_predict_start(self, trainer: L.Trainer, module: LanguageModel) -> None:
        rank = "" if trainer.world_size == 1 else f".rank={trainer.global_rank}"
        self._path = Path(trainer.default_root_dir) / f"predictions{rank}.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.with_suffix(".jsonl.unfinished").open("w")

    def on_predict_batch_end(
        self, trainer: L.Trainer, module: LanguageModel, outputs: dict, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        names = trainer.datamodule.set_names
        for log_likelihood, tokens, set_id in zip(*(x.tolist() for x in outputs.values()), strict=True):
            if tokens:  # else a row that fills the batch
                row = {"set": names[set_id], "tokens": tokens, "log_likelihood": log_likelihood}
                self._file.write(json.dumps(row) + "\n")

    def on_predict_end(self, trainer: L.Trainer, module: LanguageModel) -> None:
        self._file.close()
        os.replace(self._file.name, self._path)
        rank_zero_info(f"log-likelihoods in {self._path}")


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
        "metrics": module.evaluated,
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
