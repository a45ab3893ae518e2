"""The first step that is not finite ends the run, and no weight changes with it or after it."""

import copy

import lightning as L
import pytest
import torch
from conftest import small_config
from torch.utils._python_dispatch import TorchDispatchMode
from training.conftest import Poison, data_of, module_of, trainer_of
from training.test_launch import PYTHON, launch

from lit_msar.training.checkpoint import Checkpoint
from lit_msar.training.guard import LAG, NonFiniteError
from lit_msar.training.monitor import Monitor
from lit_msar.training.progress import StepProgress

FIRST_BAD = 3  # step, counted from 1; poisoned before it


class PoisonGradient(L.Callback):
    """Makes one weight's gradient infinite in one step; the loss stays finite."""

    def __init__(self, step):
        self.step = step

    def on_after_backward(self, trainer, module):
        if trainer.global_step == self.step:
            module.decoder.layers[0].attention.out.weight.grad[0, 0] = float("inf")


class Snapshots(L.Callback):
    """Copies of everything that a step may change, after every step."""

    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        states = trainer.optimizers[0].state_dict()["state"]
        self.steps.append(copy.deepcopy({"model": module.decoder.state_dict(), "optimizer": states}))


def fit(root, prepared, callbacks, max_steps=20, check_finite="lagged", **options):
    module = module_of(check_finite=check_finite)
    trainer = trainer_of(root, max_steps, callbacks, **({"log_every_n_steps": 100} | options))
    trainer.fit(module, data_of(prepared))
    return module


def assert_equal(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_looking_later_changes_no_bit(tmp_path, prepared):
    late, at_once = Snapshots(), Snapshots()
    module = fit(tmp_path, prepared, [late], max_steps=4)
    fit(tmp_path, prepared, [at_once], max_steps=4, check_finite="every_step")
    assert_equal(late.steps, at_once.steps)
    assert module.tokens_seen == 4 * 4 * 16


@pytest.mark.parametrize("poison", [Poison, PoisonGradient], ids=["loss", "gradient"])
def test_nothing_changes_from_the_first_bad_step_on(tmp_path, prepared, poison):
    """Weights, moments, step counts and balance biases; Poison sets one weight itself, before the step."""
    seen = Snapshots()
    reason = "loss nan" if poison is Poison else r"loss \d.*, gradient norm inf"
    with pytest.raises(NonFiniteError, match=rf"step 3 \(samples 8 to 11\): {reason}"):
        fit(tmp_path, prepared, [poison(FIRST_BAD - 1), seen])
    assert len(seen.steps) == FIRST_BAD - 1 + LAG
    for step in seen.steps:
        step["model"].pop("head.norm.weight")
    for after in seen.steps[FIRST_BAD - 1 :]:
        assert_equal(after, seen.steps[FIRST_BAD - 2])


@pytest.mark.parametrize(
    "options",
    [{"max_steps": FIRST_BAD}, {"log_every_n_steps": FIRST_BAD}, {"val_check_interval": FIRST_BAD}, {}],
    ids=["end", "log", "validation", "checkpoint"],
)
def test_host_looks_before_anything_is_logged_or_saved(tmp_path, prepared, options):
    seen, checkpoint = Snapshots(), Checkpoint(every_n_steps=100 if options else FIRST_BAD)
    callbacks = [Poison(FIRST_BAD - 1), checkpoint, seen]
    more = {"check_val_every_n_epoch": None, "limit_val_batches": 1, "enable_checkpointing": True} | options
    with pytest.raises(NonFiniteError, match="step 3 "):
        fit(tmp_path, prepared, callbacks, **more)
    assert len(seen.steps) <= FIRST_BAD
    assert not list(tmp_path.glob("checkpoints/step=*"))


class NoReads(TorchDispatchMode):
    """Fails where the host reads a value of a tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a tensor"
        return func(*args, **(kwargs or {}))


class ReadNothing(L.Callback):
    """Forbids reads within every step but the last, which is logged; the last callback of a trainer."""

    def __init__(self):
        self.mode, self.guarded = None, 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step + 1 < trainer.max_steps:
            self.mode = NoReads()
            self.mode.__enter__()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if self.mode is not None:
            with pytest.raises(AssertionError, match="the host reads a tensor"):
                _ = module.tokens_seen
            self.guarded += 1
        self._leave()

    def on_exception(self, trainer, module, exception):
        self._leave()

    def _leave(self):
        if self.mode is not None:
            self.mode.__exit__(None, None, None)
            self.mode = None


def test_step_reads_nothing_from_the_device(tmp_path, prepared):
    watch = ReadNothing()
    callbacks = [Monitor(depth_maps=False, sample_prompt=None), StepProgress(), watch]
    options = {"logger": True, "enable_progress_bar": True, "check_val_every_n_epoch": None}
    fit(tmp_path, prepared, callbacks, max_steps=6, limit_val_batches=1, val_check_interval=2, **options)
    assert watch.guarded == 5


@pytest.mark.slow
def test_all_ranks_end_with_one_message_and_save_nothing(prepared, tmp_path):
    out = tmp_path / "run"
    poison = ["--trainer.callbacks=training.conftest.Poison", f"--trainer.callbacks.step={FIRST_BAD - 1}"]
    more = ["--trainer.max_steps=100", "--trainer.log_every_n_steps=50", "--model.check_finite=lagged"]
    process = launch(PYTHON, prepared, out, *poison, *more)
    assert process.wait(60) == 1
    screen = (out / "screen.txt").read_text()
    assert screen.count("error: step 3 (samples 8 to 11): loss nan, gradient norm nan") == 1
    assert [path.name for path in out.glob("checkpoints/step=*")] == ["step=2.ckpt"]


# ------------------------------------------------------------------------------------------ on a GPU


def gpu_module(**options):
    decoder = small_config(vocab_size=320, d_model=64, head_dim=16, d_expert=32)
    return module_of(decoder=decoder, **options)


class SyncIsAnError(L.Callback):
    """Between the first step, which compiles, and the last, which is logged, waiting for the device raises."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        torch.cuda.set_sync_debug_mode("error" if 0 < trainer.global_step < trainer.max_steps - 1 else "default")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_step_does_not_wait_for_the_gpu(tmp_path, prepared, compiled):
    callbacks = [Monitor(depth_maps=False, sample_prompt=None), SyncIsAnError()]
    trainer = trainer_of(tmp_path, 5, callbacks, log_every_n_steps=100, accelerator="gpu", devices=1)
    try:
        trainer.fit(gpu_module(compile=compiled), data_of(prepared))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.global_step == 5


@pytest.mark.gpu
def test_gpu_run_ends_lagged_with_the_weights_of_the_step_before(tmp_path, prepared):
    seen = Snapshots()
    trainer = trainer_of(tmp_path, 20, [PoisonGradient(FIRST_BAD - 1), seen], accelerator="gpu", devices=1)
    with pytest.raises(NonFiniteError, match=r"step 3 \(samples 8 to 11\)"):
        trainer.fit(gpu_module(), data_of(prepared))
    assert len(seen.steps) == FIRST_BAD - 1 + LAG
    assert_equal(seen.steps[-1], seen.steps[FIRST_BAD - 2])


class RecompileIsAnError(L.Callback):
    """After two steps nothing may be compiled again, though the router sends tokens elsewhere in each."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        torch._dynamo.config.error_on_recompile = trainer.global_step >= 2
        for router in module.decoder.routers():
            router.balance_bias.copy_(torch.randn_like(router.balance_bias))

    def on_train_end(self, trainer, module):
        torch._dynamo.config.error_on_recompile = False


@pytest.mark.gpu
def test_changing_expert_counts_compile_nothing_again(tmp_path, prepared):
    torch.compiler.reset()
    trainer = trainer_of(tmp_path, 6, [RecompileIsAnError()], accelerator="gpu", devices=1)
    try:
        trainer.fit(gpu_module(compile=True, balance_rate=0.0), data_of(prepared))
    finally:
        torch._dynamo.config.error_on_recompile = False
    assert trainer.global_step == 6
