"""fit, validate, test and predict, read from one config over Trainer, module and data."""

import logging
import signal
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_msar.analysis.plan import Setup, print_plan
from lit_msar.errors import OneLineErrors
from lit_msar.residual.registry import strategy_names
from lit_msar.training import saves
from lit_msar.training.checkpoint import Checkpoint
from lit_msar.training.datamodule import TokenData
from lit_msar.training.interruption import Interrupted
from lit_msar.training.module import LanguageModel
from lit_msar.training.monitor import Monitor
from lit_msar.training.progress import StepProgress
from lit_msar.training.result import Predictions, RunFiles
from lit_msar.training.strategy import FullyShard


class TrainParser(OneLineErrors, LightningArgumentParser):
    """Parser of Lightning's commands."""

    def error(self, message: str, ex: Exception | None = None) -> None:
        if 'key "model.residual"' in message:
            message = f"{message}; the strategies are {', '.join(strategy_names())}"
        super().error(message, ex)


class TrainCLI(LightningCLI):
    """fit, validate, test, predict: `trainer`, `model` and `data` from configs and dotted overrides."""

    def __init__(self, args: list[str] | None = None, run: bool = True) -> None:
        quieten_lightning()
        super().__init__(
            LanguageModel,
            TokenData,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={
                "default_root_dir": "runs/default",
                "max_epochs": -1,
                "use_distributed_sampler": False,
                "enable_model_summary": False,
            },
            seed_everything_default=0,
            parser_kwargs={"prog": "python -m lit_msar"},
            parser_class=TrainParser,
            args=args,
            run=run,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: list[str] | None) -> None:
        self.config = parser.parse_args(args)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(Checkpoint, "checkpoint")
        parser.add_lightning_class_args(Monitor, "monitor")

    def _parse_ckpt_path(self) -> None:
        """Nothing: the command line wins over whatever a checkpoint says."""

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        config = self._get(self.config_init, "trainer")
        trains = self.subcommand == "fit"
        if not trains:  # the run's directory holds the config and the curves of its training
            self.save_config_callback = None
        if config["logger"] in (None, True):
            # one directory without versions: a resumed run goes on with its own curves
            root = config["default_root_dir"]
            kwargs["logger"] = TensorBoardLogger(root, name="", version="") if trains else DummyLogger()
        # after Monitor, whose figures the bar shows
        bar = [StepProgress()] if config["enable_progress_bar"] is not False else []
        self.trainer_defaults["callbacks"] = [RunFiles(), *bar, Predictions()]
        return super().instantiate_trainer(**kwargs)

    # ------------------------------------------------------------------------------------------ the commands

    def fit(self, ckpt_path: str | None = None, **options: Any) -> None:
        self._start("fit", ckpt_path, options)

    def validate(self, ckpt_path: str | None = None, **options: Any) -> None:
        self._start("validate", ckpt_path, options)

    def test(self, ckpt_path: str | None = None, **options: Any) -> None:
        self._start("test", ckpt_path, options)

    def predict(self, ckpt_path: str | None = None, **options: Any) -> None:
        self._start("predict", ckpt_path, options)

    def _start(self, command: str, ckpt_path: str | None, options: dict[str, Any]) -> None:
        path = self._last(command) if ckpt_path == "last" else ckpt_path
        if path is not None:
            self._check(Path(path))
        elif command == "fit" and ckpt_path is None:
            self._refuse_second_run()
        elif command != "fit" and self.model.init_from is None:
            raise ValueError(f"{command} needs weights: --ckpt_path PATH (or last), or --model.init_from PATH")
        # a checkpoint never runs code
        try:
            getattr(self.trainer, command)(**options | {"ckpt_path": path, "weights_only": True})
        except SIGTERMException as stop:  # outside of training; the process would end as if all were done
            raise Interrupted(f"{command} was stopped by signal 15; nothing was saved", signal.SIGTERM) from stop

    def _last(self, command: str) -> str | None:
        directory = Path(self.trainer.default_root_dir) / "checkpoints"
        path = saves.newest(directory)
        if path is None and command != "fit":
            raise ValueError(f"ckpt_path last: no complete checkpoint in {directory}")
        if path is None:
            rank_zero_info(f"no complete checkpoint in {directory} yet: starting at step 0")
        return None if path is None else str(path)

    def _check(self, path: Path) -> None:
        if not path.exists():
            raise FileNotFoundError(f"ckpt_path: no checkpoint at {path}")
        if why := saves.defect(path):
            raise ValueError(f"ckpt_path {path} is not complete: {why}; --ckpt_path last takes the newest that is")
        if path.is_dir() and not isinstance(self.trainer.strategy, FullyShard):
            raise ValueError(
                f"ckpt_path {path} is a sharded run's directory: add --config configs/strategy/fsdp.yaml (one process "
                "will do), or start from its weights with --model.init_from"
            )

    def _refuse_second_run(self) -> None:
        root = Path(self.trainer.default_root_dir)
        if any((root / "checkpoints").glob("step=*.ckpt")):
            raise ValueError(
                f"{root} already holds checkpoints: continue that run with --ckpt_path last, "
                "or choose another --trainer.default_root_dir"
            )


class ConfigCLI(TrainCLI):
    """Reads a training config without making a Trainer: for commands that only look at the model and the data.

    Args:
        args: command line.
        function: its parameters become options beside the config's, and its docstring their help.
        skip: parameters of `function` that are no options.
    """

    def __init__(self, args: list[str], function: Callable | None = None, skip: tuple[str, ...] = ()) -> None:
        self._function, self._skip = function, set(skip)
        super().__init__(args=args, run=False)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        if self._function is not None:
            self._own = parser.add_function_arguments(self._function, skip=self._skip)

    @property
    def options(self) -> dict[str, Any]:
        """What the command line says of the parameters of `function`."""
        return {name: self.config_init[name] for name in self._own}

    def instantiate_classes(self) -> None:
        self.config_init = self.parser.instantiate_classes(self.config)
        self.model: LanguageModel = self.config_init["model"]
        self.datamodule: TokenData = self.config_init["data"]


def plan(config: ConfigCLI, gpus: int = 8, gpu_memory: float = 80.0, gpus_per_node: int = 8, mfu: float = 0.35) -> None:
    """Estimate whether a run fits its GPUs, and what makes it fit.

    Args:
        gpus: of the whole run.
        gpu_memory: of one GPU (GiB).
        gpus_per_node: that NVLink connects.
        mfu: model FLOP utilisation to assume for the time of a step, recomputation counted as work; in (0, 1].
    """
    print_plan(setup_of(config, gpus, gpus_per_node), gpu_memory, mfu)


def setup_of(cli: ConfigCLI, n_gpus: int, gpus_per_node: int) -> Setup:
    """What a config's memory depends on, on so many GPUs."""
    trainer, module, data = cli.config_init["trainer"], cli.model, cli.datamodule
    strategy = trainer["strategy"]
    sharded = isinstance(strategy, FullyShard)
    if not sharded and n_gpus > 1:
        raise ValueError(f"gpus={n_gpus} needs a sharded strategy: add --config configs/strategy/fsdp.yaml")
    options = {}
    if sharded:
        nodes = max(1, n_gpus // gpus_per_node)
        options = {
            "replicate": nodes if strategy.replicate == "nodes" else strategy.replicate,
            "expert_parallel": strategy.expert_parallel,
            "async_save": strategy.async_save,
            **asdict(strategy.options),
        }
    return Setup(
        module.config,
        module.residual,
        module.checkpointing,
        data.batch_size,
        data.seq_len,
        trainer["accumulate_grad_batches"],
        n_gpus,
        gpus_per_node,
        compiles=module.compiles,
        sharded=sharded,
        **options,
    )


def quieten_lightning() -> None:
    """Drop the lines of Lightning that say nothing about the run."""
    chatter = ("\U0001f4a1 Tip", "TPU available", "Seed set to", "`Trainer.fit` stopped: `max_steps")
    chatter += ("-" * 20,)

    def tells_something(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(chatter)

    # of a rank that failed; it says so itself
    logging.getLogger("lightning.fabric.strategies.launchers.subprocess_script").setLevel(logging.WARNING)
    for name in ("pytorch.utilities.rank_zero", "fabric.utilities.rank_zero", "fabric.utilities.seed"):
        logging.getLogger(f"lightning.{name}").addFilter(tells_something)
    warnings.filterwarnings("ignore", message=".*isinstance\\(treespec, LeafSpec\\).*")
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # nothing in the model works in place on what a unit returns
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
