"""What a run writes down: scalars at every logging step, depth maps and a sample of text at every validation."""

import resource
import statistics
import time

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn

from lit_msar.analysis.cost import training_flops_per_token
from lit_msar.analysis.depth import DepthMaps, depth_maps
from lit_msar.analysis.peak import peak_flops
from lit_msar.analysis.plots import depth_figure
from lit_msar.inference.decode import generate
from lit_msar.model.moe import RouterStats
from lit_msar.training.metrics import loss_report
from lit_msar.training.module import Batch, LanguageModel


class Stopwatch:
    """Seconds and tokens of training since the last reading, validation left out."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._paused: float | None = None
        self.steps = 0

    def pause(self) -> None:
        self._paused = time.perf_counter()

    def resume(self) -> None:
        if self._paused is not None:
            self._started += time.perf_counter() - self._paused
            self._paused = None

    def read(self) -> tuple[float, int]:
        """Seconds and optimizer steps since the last call; starts anew."""
        now = time.perf_counter()
        seconds, steps = now - self._started, self.steps
        self._started, self.steps = now, 0
        return seconds, steps


class Monitor(L.Callback):
    """Logs training scalars every `trainer.log_every_n_steps` optimizer steps, and views of the model per validation.

    Args:
        depth_maps: draw the depth-attention weights and log the gates at each validation.
        sample_prompt: text to continue at each validation; null for no sample.
        sample_tokens: tokens of the sample.
    """

    def __init__(self, depth_maps: bool = True, sample_prompt: str | None = "The ", sample_tokens: int = 48) -> None:
        self.draws_depth_maps = depth_maps
        self._stopwatch = Stopwatch()
        self.sample_prompt = sample_prompt
        self.sample_tokens = sample_tokens
        self.latest: dict[str, float] = {}
        """The newest scalars, for the progress bar."""
        self._step_seconds: list[float] = []

    def on_train_start(self, trainer: L.Trainer, module: LanguageModel) -> None:
        data = trainer.datamodule
        self._flops_per_token = training_flops_per_token(module.config, module.decoder.residual, data.seq_len)
        peak = peak_flops(trainer.strategy.root_device)
        self._peak = peak and peak * trainer.world_size
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            if peak is None:
                rank_zero_warn("no MFU: the peak of this device is not known (lit_msar/analysis/peak.py)")
        self._stopwatch = Stopwatch()
        self._tokens_at_reading = module.tokens_seen

    def on_train_batch_end(
        self, trainer: L.Trainer, module: LanguageModel, outputs: object, batch: Batch, batch_idx: int
    ) -> None:
        if module.last_window is None:
            return  # inside an accumulation window
        window, module.last_window = module.last_window, None
        self._stopwatch.steps += 1
        if trainer.global_step % trainer.log_every_n_steps and trainer.global_step != trainer.max_steps:
            return
        scalars = self._losses(trainer, module) | self._speed(module)
        scalars["optimizer/lr"] = module.used_lr
        scalars["optimizer/grad_norm"] = module.grad_norm
        scalars["progress/tokens"] = module.tokens_seen
        if window.router is not None:
            scalars |= self._routing(module, window.router, window.n_micro * trainer.world_size)
        self.latest = scalars
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=trainer.global_step)

    def median_step_seconds(self) -> float | None:
        """Median over the logging intervals of the seconds per optimizer step, the first interval left out."""
        intervals = self._step_seconds[1:] or self._step_seconds
        return statistics.median(intervals) if intervals else None

    def _losses(self, trainer: L.Trainer, module: LanguageModel) -> dict[str, float]:
        data = trainer.datamodule
        report = loss_report(*module.train_loss.compute(), data.set_names, data.bytes_per_token("train"), "train")
        module.train_loss.reset()
        return report

    def _speed(self, module: LanguageModel) -> dict[str, float]:
        seconds, steps = self._stopwatch.read()
        tokens = module.tokens_seen - self._tokens_at_reading
        self._tokens_at_reading = module.tokens_seen
        self._step_seconds.append(seconds / steps)
        speed = {"speed/tokens_per_second": tokens / seconds, "speed/step_seconds": seconds / steps}
        if self._peak:
            speed["speed/mfu"] = self._flops_per_token * tokens / seconds / self._peak
        speed["memory/peak_gib"] = _peak_memory_gib(module.device)
        return speed

    def _routing(self, module: LanguageModel, router: RouterStats, n_forwards: int) -> dict[str, float]:
        """Imbalance is the largest load over the mean load; a dead expert got no token in the whole step."""
        imbalance = router.load.amax(1) / router.load.mean(1)
        dead = (router.load == 0).sum(1).float()
        table = torch.stack([imbalance, dead, router.entropy / n_forwards]).tolist()
        names = ("imbalance", "dead_experts", "router_entropy")
        return {
            f"moe_{name}/layer_{layer:02d}": row[i]
            for name, row in zip(names, table, strict=True)
            for i, layer in enumerate(module.config.moe_layers)
        }

    def on_validation_start(self, trainer: L.Trainer, module: LanguageModel) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._stopwatch.pause()
        self._views_due = True

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        module: LanguageModel,
        outputs: object,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._views_due and self.draws_depth_maps and not trainer.sanity_checking:
            self._log_depth(trainer, depth_maps(module.decoder, batch["tokens"], batch.get("position")))
        self._views_due = False

    def on_validation_end(self, trainer: L.Trainer, module: LanguageModel) -> None:
        if trainer.sanity_checking:
            return
        if self.sample_prompt is not None:
            self._log_sample(trainer, module)
        if trainer.state.fn == "fit":
            self._stopwatch.resume()

    def _log_depth(self, trainer: L.Trainer, maps: DepthMaps) -> None:
        gates = {f"gates/stream_{j + 1}": value for j, value in enumerate(maps.gates.mean(0).tolist())}
        for logger in trainer.loggers:
            if gates:
                logger.log_metrics(gates, step=trainer.global_step)
            if maps.weights.size and _is_tensorboard(logger):
                logger.experiment.add_figure("depth_attention", depth_figure(maps), trainer.global_step)

    def _log_sample(self, trainer: L.Trainer, module: LanguageModel) -> None:
        tokenizer = trainer.datamodule.tokenizer()
        prompt = torch.tensor([tokenizer.encode(self.sample_prompt) or [tokenizer.eod_id]], device=module.device)
        # on every rank: a sharded model's forward needs them all
        tokens = generate(
            module.decoder, prompt, self.sample_tokens, temperature=0.8, max_context=trainer.datamodule.seq_len
        )
        text = tokenizer.decode(tokens[0].tolist())
        for logger in trainer.loggers:
            if _is_tensorboard(logger):
                indented = "    " + text.replace("\n", "\n    ")  # a Markdown code block
                logger.experiment.add_text("sample", indented, trainer.global_step)


def _is_tensorboard(logger: L.pytorch.loggers.Logger) -> bool:
    return isinstance(logger, L.pytorch.loggers.TensorBoardLogger) and L.pytorch.utilities.rank_zero_only.rank == 0


def _peak_memory_gib(device: torch.device) -> float:
    """Most memory held so far: allocated on a GPU, resident of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
