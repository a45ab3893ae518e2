"""The LightningModule: one decoder over any residual strategy, trained on token-weighted cross-entropy."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lit_msar.inference.load import PREFIX, SPEC_KEY, load_weights, open_weights
from lit_msar.model import Decoder, DecoderConfig
from lit_msar.model.attention import usable_backend
from lit_msar.model.decoder import Checkpointing, DecoderOutput
from lit_msar.model.loss import IGNORED
from lit_msar.model.moe import RouterStats
from lit_msar.model.spec import ModelSpec, explain_difference
from lit_msar.residual import Residual
from lit_msar.training.graphs import GraphedStep, check_graphs
from lit_msar.training.guard import FiniteGuard
from lit_msar.training.metrics import SetLoss, loss_report
from lit_msar.training.optim import OptimizerConfig, adamw, prepare_step, wsd_factor
from lit_msar.training.parallel import average_spread_experts, gradient_norm, group_by_mesh
from lit_msar.training.strategy import FullyShard

Batch = dict[str, Tensor]
"""`tokens` [B, T], `targets` [B, T] (-100 where masked), `set_id` [B]; for packed documents `position` [B, T] and
`boundaries` [n + 1]."""


@dataclass
class StepWindow:
    """Sums over the micro-steps of one optimizer step, on the device."""

    tokens: Tensor
    nats: Tensor
    numel: int
    """What losses were divided by."""
    n_micro: int = 0
    router: RouterStats | None = None

    def add(self, nats: Tensor, tokens: Tensor, router: RouterStats | None) -> None:
        self.nats += nats.detach()
        self.tokens += tokens
        self.n_micro += 1
        if router is not None:
            detached = RouterStats(*(value.detach() for value in router))
            self.router = detached if self.router is None else RouterStats(*map(torch.add, self.router, detached))


class MicroStep(NamedTuple):
    """What comes of one batch."""

    loss: Tensor
    """[] what is differentiated."""
    nats: Tensor
    """[] sum of the losses of unmasked targets."""
    tokens: Tensor
    """[] unmasked targets."""
    each: Tensor
    """[B, T] single losses."""
    router: RouterStats | None

    def tensors(self) -> tuple[Tensor, ...]:
        """All of it, without gradients."""
        flat = (*self[:-1], *(self.router or ()))
        return tuple(x.detach() for x in flat)

    @classmethod
    def of(cls, tensors: tuple[Tensor, ...]) -> "MicroStep":
        """The inverse of `tensors`."""
        return cls(*tensors[:4], RouterStats(*tensors[4:]) if tensors[4:] else None)


def graph_inputs(batch: Batch) -> Batch:
    """What the decoder reads of a batch."""
    return {name: x for name, x in batch.items() if name != "set_id"}


class LanguageModel(L.LightningModule):
    """Trains a decoder on next-token prediction.

    Args:
        decoder: shape of the model.
        residual: residual strategy, by class name and its options.
        optimizer: AdamW and its schedule.
        compute_dtype: of activations and depth state; parameters and optimizer stay fp32. `auto` is bfloat16 on a GPU.
        checkpointing: activation checkpointing: `none`, `selective` (recompute the insides of MLPs) or `full` (keep
            what enters each layer); routing is always kept.
        compile: torch.compile the attention and MLP sublayers.
        cuda_graphs: replay forward and backward as one CUDA graph: for models so small that their steps wait for the
            host. On one GPU; what the backward pass needs stays allocated between steps.
        aux_loss_coef: weight of the sequence-wise balance loss; 0 leaves balancing to the router bias.
        balance_rate: step of the router's balance bias per optimizer step; 0 switches it off.
        check_finite: when the host looks whether loss and gradient are finite: `every_step` waits for the device;
            `lagged` looks two steps later, and before anything is logged or saved; either way no weight changes from
            the first bad step on, and the run ends. `auto` is lagged on a GPU that keeps its optimizer states.
        seed: of the initial weights.
        init_from: checkpoint or consolidated weights to start from instead, at step 0 and with a fresh optimizer.
    """

    def __init__(
        self,
        decoder: DecoderConfig,
        residual: Residual,
        optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008 (read only)
        compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        checkpointing: Checkpointing = "none",
        compile: bool = False,
        cuda_graphs: bool = False,
        aux_loss_coef: float = 0.0,
        balance_rate: float = 1e-3,
        check_finite: Literal["auto", "every_step", "lagged"] = "auto",
        seed: int = 0,
        init_from: str | None = None,
    ) -> None:
        super().__init__()
        if aux_loss_coef < 0:
            raise ValueError(f"aux_loss_coef must not be negative, got {aux_loss_coef}")
        decoder.aux_loss = decoder.aux_loss or aux_loss_coef > 0
        self.config, self.spec = decoder, ModelSpec.of(decoder, residual)
        self.optimizer_config = optimizer
        self.compute_dtype, self.checkpointing, self.compiles = compute_dtype, checkpointing, compile
        self.aux_loss_coef, self.balance_rate, self.seed = aux_loss_coef, balance_rate, seed
        self.check_finite, self.init_from = check_finite, init_from
        self.cuda_graphs = cuda_graphs
        self.graphed: GraphedStep | None = None
        self._residual = (residual,)  # in a tuple: not a submodule until the decoder owns it
        self.decoder: Decoder | None = None
        self.guard: FiniteGuard | None = None
        self._tokens_seen: int | Tensor = 0
        self._grad_norm: Tensor | None = None
        self._mean_factor: Tensor | None = None
        self._scale_by = 0
        """Targets of the first batch: losses are divided by as many, whatever is masked."""
        self.window: StepWindow | None = None
        self.last_window: StepWindow | None = None
        self.used_lr: float | None = None
        self.evaluated: dict[str, float] = {}
        """Losses of the latest evaluation, on the host."""

    # ------------------------------------------------------------------------------------------ building

    @property
    def residual(self) -> Residual:
        """The strategy; without parameters until `configure_model`."""
        return self._residual[0]

    def configure_model(self) -> None:
        """Build on the meta device, then fill on the device of the run. Called by the Trainer for every command."""
        if self.decoder is not None:
            return
        backend = usable_backend(self.config, self.activation_dtype(), self._target_device())
        if self._target_device().type == "cuda":
            rank_zero_info(f"attention: {backend}")
        with torch.device("meta"):
            decoder = Decoder(self.config, self.residual, self.activation_dtype(), self.checkpointing)
        if isinstance(strategy := self._strategy(), FullyShard):
            strategy.make(decoder, self.seed)
        else:
            decoder.to_empty(device=self._target_device())
            decoder.initialize(self.seed)
        if self.init_from is not None:
            self._start_from(decoder, self.init_from)
        if self.compiles:
            decoder.compile_parts()
        self.decoder = decoder

    def _start_from(self, decoder: Decoder, path: str) -> None:
        weights = open_weights(path)
        if difference := explain_difference(weights.spec, self.spec):
            raise ValueError(f"model.init_from={path} holds another model than the config: {difference}")
        load_weights(decoder, weights)

    def _strategy(self) -> L.pytorch.strategies.Strategy | None:
        return self.trainer.strategy if self._trainer is not None else None

    def _target_device(self) -> torch.device:
        strategy = self._strategy()
        return torch.device("cpu") if strategy is None else strategy.root_device

    @property
    def has_trained(self) -> bool:
        """Whether this process came to train: a finished run that is started again does not."""
        return self.guard is not None

    @property
    def tokens_seen(self) -> int:
        """Unmasked targets of all steps so far, over all ranks; waits for the device."""
        return int(self._tokens_seen)

    @property
    def grad_norm(self) -> float | None:
        """Norm of the latest step's gradient before clipping; waits for the device."""
        return None if self._grad_norm is None else self._grad_norm.item()

    def activation_dtype(self, device: torch.device | None = None) -> torch.dtype:
        """Of activations and depth state on a device; None is the run's."""
        if self.compute_dtype == "auto":
            return torch.bfloat16 if (device or self._target_device()).type == "cuda" else torch.float32
        return getattr(torch, self.compute_dtype)

    def setup(self, stage: str) -> None:
        if self.trainer.precision != "32-true":
            raise ValueError(
                f"trainer.precision must be 32-true, got {self.trainer.precision}: parameters and states are fp32; "
                "activations are what model.compute_dtype says"
            )
        if self.cuda_graphs and stage == "fit":
            check_graphs(self._target_device(), self.trainer.world_size)
        data = self.trainer.datamodule
        if data.vocab_size > self.config.vocab_size:
            raise ValueError(
                f"the tokenizer has {data.vocab_size} ids but the model {self.config.vocab_size}: "
                f"set --model.decoder.vocab_size to at least {data.vocab_size}"
            )
        n_sets = len(data.set_names)
        self.train_loss, self.val_loss = SetLoss(n_sets), SetLoss(n_sets)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = adamw(self.decoder, self.decoder.no_decay_names(), self.optimizer_config)
        group_by_mesh(optimizer)
        factor = wsd_factor(self.optimizer_config, self.trainer.max_steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    # ------------------------------------------------------------------------------------------ one step

    def forward(self, batch: Batch) -> DecoderOutput:
        packed = {"position": batch.get("position"), "boundaries": batch.get("boundaries")}
        return self.decoder(batch["tokens"], batch["targets"], **packed)

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        """Sum of losses over a constant; `on_before_optimizer_step` divides by the true count."""
        targets = batch["targets"]
        self._scale_by = self._scale_by or targets.numel()
        if isinstance(strategy := self._strategy(), FullyShard):
            strategy.begin_micro_step(self.decoder, is_last=not self.trainer.fit_loop._should_accumulate())
        step = self._micro_step(batch) if self.graphed is None else MicroStep.of(self.graphed(graph_inputs(batch)))
        if self.window is None:
            self.window = StepWindow(torch.zeros_like(step.tokens), torch.zeros_like(step.nats), self._scale_by)
        self.window.add(step.nats, step.tokens, step.router)
        self.train_loss.update(step.each, targets, batch["set_id"])
        # Lightning divides by accumulate_grad_batches; undo it, so that a shorter last window is no special case
        return step.loss * self.trainer.accumulate_grad_batches

    def _micro_step(self, batch: Batch) -> MicroStep:
        _, losses, router = self(batch)
        n_tokens = (batch["targets"] != IGNORED).sum()
        loss = losses.total
        if self.aux_loss_coef and router is not None:
            loss = loss + self.aux_loss_coef * n_tokens * router.aux_loss.sum()
        return MicroStep(loss / self._scale_by, losses.total, n_tokens, losses.each, router)

    def _whole_micro_step(self, batch: Batch) -> tuple[Tensor, ...]:
        """Forward and backward, as `graphs.GraphedStep` captures them."""
        step = self._micro_step(batch)
        step.loss.backward()
        return step.tensors()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Unless a graph has done it with the forward."""
        if self.graphed is None:
            super().backward(loss, *args, **kwargs)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        """Nothing: Lightning asks between forward and backward; `optimizer_step` has done it."""

    def on_validation_model_zero_grad(self) -> None:
        """Nothing: `optimizer_step` has done it, and graphs add to the gradients that are there."""

    def on_train_start(self) -> None:
        stepped_on = self.trainer.optimizers[0].param_groups[0]["params"][0].device
        is_lagged = stepped_on.type == "cuda" if self.check_finite == "auto" else self.check_finite == "lagged"
        self.guard = FiniteGuard(self._target_device(), is_lagged)
        if self.cuda_graphs:
            trained = [parameter for parameter in self.decoder.parameters() if parameter.requires_grad]
            self.graphed = GraphedStep(trained, self._whole_micro_step)
        if self._evaluation_is_due():
            self.evaluate()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Find the factor that makes the gradient the mean over all tokens of all micro-steps and ranks."""
        window = self.window
        window.tokens, window.nats = self._sum_over_ranks(window.tokens), self._sum_over_ranks(window.nats)
        # backward gave (rank mean of) sum of losses / numel; wanted: sum over ranks / tokens of all ranks
        self._mean_factor = window.numel * self.trainer.world_size / window.tokens.clamp(min=1)
        average_spread_experts(self.decoder.parameters())

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the global norm, and let no weight change if the norm or the loss is not finite.

        The gradient is scaled by the optimizer as it reads it: two passes over all gradients less.
        """
        if gradient_clip_algorithm not in (None, "norm"):
            raise ValueError(f"trainer.gradient_clip_algorithm must be norm, got {gradient_clip_algorithm}")
        factor = self._mean_factor
        norm = self._grad_norm = factor * gradient_norm(self.decoder.parameters(), self._target_device())
        if gradient_clip_val:
            factor = factor * (gradient_clip_val / (norm + 1e-6)).clamp(max=1.0)
        loss = self.window.nats / self.window.tokens.clamp(min=1)
        self.guard.judge(loss, norm, self.trainer.global_step + 1, self.trainer.datamodule.describe_next_step())
        prepare_step(optimizer, factor, self.guard.stopped)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer, optimizer_closure: Callable | None = None
    ) -> None:
        self.used_lr = optimizer.param_groups[0]["lr"]
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        # before the next forward: 4 bytes per parameter less beside all activations
        optimizer.zero_grad(set_to_none=self.graphed is None)
        window = self.window
        self._tokens_seen = self._tokens_seen + window.tokens
        if window.router is not None:
            window.router = RouterStats(*(self._sum_over_ranks(value) for value in window.router))
            if self.balance_rate:
                rate = self.balance_rate * (1 - self.guard.stopped)
                self.decoder.update_balance(window.router.load, rate)
        self.last_window, self.window = window, None
        step = self.trainer.global_step + 1
        if step % self.trainer.log_every_n_steps == 0 or step == self.trainer.max_steps:
            self.guard.settle()  # before this step's callbacks log it

    def on_validation_start(self) -> None:
        self._settle()

    def on_train_end(self) -> None:
        self._settle()
        self.graphed = None

    def _settle(self) -> None:
        if self.guard is not None:
            self.guard.settle()

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        return self.trainer.strategy.reduce(value, reduce_op="sum") if self.trainer.world_size > 1 else value

    # ------------------------------------------------------------------------------------------ evaluation

    def validation_step(self, batch: Batch, batch_index: int) -> None:
        self.val_loss.update(self(batch).losses.each, batch["targets"], batch["set_id"])

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val")

    def test_step(self, batch: Batch, batch_index: int) -> None:
        self.validation_step(batch, batch_index)

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    def _evaluation_is_due(self) -> bool:
        """Whether a run goes on at a step that is evaluated: the step was saved before, and a stop may have cut in."""
        trainer = self.trainer
        n_batches, interval = trainer.fit_loop.epoch_loop.total_batch_idx + 1, trainer.val_check_batch
        if n_batches == 0 or not interval or not trainer.enable_validation or trainer.check_val_every_n_epoch:
            return False
        return n_batches % interval == 0

    def evaluate(self) -> None:
        """Evaluate now, in `fit`, as Lightning does when it is due."""
        trainer, loop = self.trainer, self.trainer.fit_loop.epoch_loop.val_loop
        trainer.validating, loop.restarting = True, False  # from the first batch, whatever a checkpoint says
        loop.run()
        trainer.training = True

    def _log_evaluation(self, prefix: str) -> None:
        data = self.trainer.datamodule
        report = loss_report(*self.val_loss.compute(), data.set_names, data.bytes_per_token("val"), prefix)
        self.val_loss.reset()
        self.evaluated = report
        trains = self.trainer.state.fn == "fit"
        # these are of all ranks already, which Lightning need not know; it prints what it logs
        self.log_dict(report, logger=not trains, rank_zero_only=True, sync_dist=True)
        for logger in self.trainer.loggers if trains else ():  # Lightning would take the step before
            logger.log_metrics(report, self.trainer.global_step)

    def predict_step(self, batch: Batch, batch_index: int) -> dict[str, Tensor]:
        """Log-likelihood in nats and token count of every sequence, with the set it belongs to."""
        return {
            "log_likelihood": -self(batch).losses.each.sum(1),
            "tokens": (batch["targets"] != IGNORED).sum(1),
            "set_id": batch["set_id"],
        }

    # ------------------------------------------------------------------------------------------ checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._settle()  # nothing is written of a run that has met a step that is not finite
        checkpoint[SPEC_KEY] = {"spec": asdict(self.spec), "tokens_seen": self.tokens_seen}

    def no_decay_names(self) -> set[str]:
        """Names of the parameters without weight decay, as this module names them."""
        return {f"{PREFIX}{name}" for name in self.decoder.no_decay_names()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse another model's weights; the optimizer's options are the config's, not the checkpoint's."""
        self.refuse_other_model(checkpoint)
        self._tokens_seen = checkpoint[SPEC_KEY]["tokens_seen"]
        if self.trainer.training:
            self._prefer_own_options(checkpoint)

    def refuse_other_model(self, checkpoint: dict[str, Any]) -> None:
        """Raise ValueError if a checkpoint holds another model than the config, or does not say."""
        saved = checkpoint.get(SPEC_KEY)
        if saved is None:
            raise ValueError("the checkpoint was not written by this kit: it does not say which model it holds")
        if difference := explain_difference(ModelSpec(**saved["spec"]), self.spec):
            raise ValueError(f"the checkpoint holds another model than the config: {difference}")

    def _prefer_own_options(self, checkpoint: dict[str, Any]) -> None:
        config = self.optimizer_config
        lr = config.lr * wsd_factor(config, self.trainer.max_steps)(checkpoint["global_step"])
        saved = [group for state in checkpoint.get("optimizer_states", []) for group in state["param_groups"]]
        for group in saved:
            group.update(config.group_options(), initial_lr=config.lr, lr=lr)
        if saved:
            own = adamw(self.decoder, self.decoder.no_decay_names(), config).param_groups
            for group, fresh in zip(saved, own, strict=True):
                group["weight_decay"] = fresh["weight_decay"]
        # a sharded run's optimizer exists by now, and takes its states from the checkpoint but no options
        live = [group for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
        for group in live:
            group["lr"] = lr
        n_groups = len(live) or len(saved)
        for state in checkpoint["lr_schedulers"]:
            state.update(base_lrs=[config.lr] * n_groups, _last_lr=[lr] * n_groups)
