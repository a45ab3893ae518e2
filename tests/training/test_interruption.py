import os
import signal
import subprocess
import sys
import time

import lightning as L
import pytest
import torch
from training.conftest import data_of, module_of, trainer_of

from lit_msar.inference.load import read_checkpoint
from lit_msar.training.checkpoint import Checkpoint
from lit_msar.training.interruption import Interrupted


class SignalAt(L.Callback):
    def __init__(self, number, micro_step):
        self.number, self.micro_step = number, micro_step

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == self.micro_step:
            os.kill(os.getpid(), self.number)
            time.sleep(0.2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_saves_at_the_end_of_the_step_and_stops(tmp_path, prepared, number):
    """The signal comes within an accumulation window, whose gradients belong to the step that is saved."""
    before = signal.getsignal(number)
    trainer = trainer_of(
        tmp_path, 50, [SignalAt(number, 3), Checkpoint()], enable_checkpointing=True, accumulate_grad_batches=2
    )
    with pytest.raises(Interrupted, match=rf"signal {number:d} after step 2") as stop:
        trainer.fit(module_of(), data_of(prepared))
    assert stop.value.exit_code == 128 + number
    assert read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == 2
    assert signal.getsignal(number) == before


def test_signal_in_the_last_step_is_no_interruption(tmp_path, prepared):
    trainer = trainer_of(tmp_path, 4, [SignalAt(signal.SIGUSR1, 3), Checkpoint()], enable_checkpointing=True)
    trainer.fit(module_of(), data_of(prepared))
    assert read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == 4


def stuck(has_failed, grace):
    """A process whose main thread waits, as in a collective, and gets SIGTERM; its exit code, screen and seconds."""
    code = (
        "import os, signal, threading, time\n"
        "from lit_msar.training.interruption import Interruption\n"
        f"Interruption({grace}, lambda: {has_failed}).listen()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "threading.Lock().acquire(); time.sleep(30)\n"
    )
    started = time.monotonic()
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return run.returncode, run.stderr, time.monotonic() - started


def test_rank_that_reaches_no_step_end_leaves_after_the_grace():
    code, screen, _ = stuck(False, 0.2)
    assert code == 128 + signal.SIGTERM
    assert screen == "error: no step ended within 0.2 s of SIGTERM; ended without saving\n"


def test_rank_leaves_at_once_and_silently_when_another_failed():
    code, screen, seconds = stuck(True, 25.0)
    assert (code, screen) == (1, "")
    assert seconds < 25


def test_no_signal_is_agreed_on_without_one():
    from lit_msar.training.interruption import Interruption

    interruption = Interruption(1.0)
    interruption.listen()
    assert interruption.agreed(torch.device("cpu")) == 0
    interruption.close()
