import re

import pytest
from training.conftest import data_of, module_of, trainer_of

from lit_msar.training import progress as progress_module
from lit_msar.training.monitor import Monitor
from lit_msar.training.progress import Bar, StepProgress


@pytest.fixture
def every_line(monkeypatch):
    """Lines without waiting."""
    monkeypatch.setattr(progress_module, "LINE_SECONDS", 0.0)


def trainer_with_bar(root, max_steps=4, **options):
    monitor = Monitor(depth_maps=False, sample_prompt=None)
    options = {"log_every_n_steps": 1, "logger": True} | options
    return trainer_of(root, max_steps, [monitor, StepProgress()], **(options | {"enable_progress_bar": True}))


def test_fit_shows_loss_rate_and_remaining_time(tmp_path, prepared, every_line, capsys):
    trainer_with_bar(tmp_path).fit(module_of(), data_of(prepared))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert len(lines) == 4
    assert re.fullmatch(r"step 4/4  loss \d\.\d{3}  [\d,]+ tokens/s  left 0 s", lines[-1])


def test_validation_inside_fit_is_shown(tmp_path, prepared, every_line, capsys):
    options = {"limit_val_batches": 2, "val_check_interval": 2}
    trainer_with_bar(tmp_path, **options).fit(module_of(), data_of(prepared))
    err = capsys.readouterr().err
    assert "validating 2/2" in err
    assert re.fullmatch(r"step 4/4  loss \d\.\d+  val \d\.\d+  [\d,]+ tokens/s  left 0 s", err.splitlines()[-1])


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_evaluations_count_batches(tmp_path, prepared, every_line, capsys, command):
    limits = {f"limit_{kind}_batches": 3 for kind in ("val", "test", "predict")}
    trainer = trainer_with_bar(tmp_path, **limits)
    getattr(trainer, command)(module_of(), data_of(prepared))
    assert "batch 3/3" in capsys.readouterr().err


def test_lines_are_rare_but_the_last_one_comes(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress_module.time, "perf_counter", lambda: now[0])
    bar = Bar("train", "step", 100, 40)
    for step in range(41, 101):
        now[0] += 1.0
        bar.update(step, "note")
    bar.update(100, "validated")
    bar.stop()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "step 41/100  note  left 59 s"
    assert lines[-1] == "step 100/100  validated  left 0 s"
    assert len(lines) == 1 + 5 + 1
