import math

import lightning as L
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training.conftest import data_of, module_of, trainer_of

from lit_msar.analysis.cost import training_flops_per_token
from lit_msar.residual import MHC, Vanilla
from lit_msar.training import monitor as monitor_module
from lit_msar.training.monitor import Monitor, Stopwatch


def run(tmp_path, prepared, residual=None, monitor=None, max_steps=4, data=None, **options):
    logger = L.pytorch.loggers.TensorBoardLogger(tmp_path, name="", version="")
    options = {"logger": logger, "limit_val_batches": 2, "val_check_interval": 2, "log_every_n_steps": 2} | options
    monitor = monitor or Monitor(sample_tokens=4)
    module = module_of(residual)
    trainer_of(tmp_path, max_steps, [monitor], **options).fit(module, data or data_of(prepared))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    return events, monitor, module


def test_a_run_writes_every_scalar_image_and_text(tmp_path, prepared):
    events, _, _ = run(tmp_path, prepared)
    tags = events.Tags()
    for prefix in ("train", "val"):
        for quantity in ("loss", "perplexity", "bits_per_byte"):
            assert f"{prefix}/{quantity}" in tags["scalars"]
            assert {f"{prefix}_{quantity}/Prose", f"{prefix}_{quantity}/Code"} <= set(tags["scalars"])
    expected = {"optimizer/lr", "optimizer/grad_norm", "progress/tokens", "speed/tokens_per_second"}
    expected |= {"speed/step_seconds", "memory/peak_gib", *(f"gates/stream_{j}" for j in range(1, 5))}
    expected |= {
        f"moe_{name}/layer_{layer:02d}" for name in ("imbalance", "dead_experts", "router_entropy") for layer in (1, 2)
    }
    assert expected <= set(tags["scalars"])
    assert "speed/mfu" not in tags["scalars"], "a CPU has no peak to compare with"
    assert tags["images"] == ["depth_attention"]
    assert tags["tensors"] == ["sample/text_summary"]


def test_scalars_are_what_they_say(tmp_path, prepared):
    events, monitor, _ = run(tmp_path, prepared)
    assert [e.step for e in events.Scalars("train/loss")] == [2, 4]
    assert [e.value for e in events.Scalars("progress/tokens")] == [2 * 64, 4 * 64]
    loss, perplexity = (events.Scalars(f"train/{name}")[0].value for name in ("loss", "perplexity"))
    assert perplexity == pytest.approx(math.exp(loss), rel=1e-4)
    latest = monitor.latest
    assert latest["speed/tokens_per_second"] * latest["speed/step_seconds"] == pytest.approx(64, rel=1e-6)
    gates = [events.Scalars(f"gates/stream_{j}")[0].value for j in range(1, 5)]
    assert gates == pytest.approx([0.25] * 4, abs=0.05)
    assert 0 < events.Scalars("moe_router_entropy/layer_01")[0].value <= math.log(6) + 1e-5
    assert events.Scalars("moe_imbalance/layer_01")[0].value >= 1


def test_learning_rate_is_the_one_the_step_used(tmp_path, prepared):
    events, _, _ = run(tmp_path, prepared, max_steps=2, log_every_n_steps=1, limit_val_batches=0)
    assert [e.value for e in events.Scalars("optimizer/lr")] == pytest.approx([5e-3, 1e-2])


def test_accumulation_averages_entropy_and_counts_steps_not_micro_steps(tmp_path, prepared):
    events, _, _ = run(tmp_path, prepared, accumulate_grad_batches=3, log_every_n_steps=1, max_steps=2)
    assert events.Scalars("moe_router_entropy/layer_01")[0].value <= math.log(6) + 1e-5
    assert [e.step for e in events.Scalars("progress/tokens")] == [1, 2]
    assert events.Scalars("progress/tokens")[1].value == 2 * 3 * 64


def test_strategies_without_depth_attention_draw_nothing(tmp_path, prepared):
    for residual in (Vanilla(), MHC()):
        events, _, _ = run(tmp_path / type(residual).__name__, prepared, residual, max_steps=2)
        assert events.Tags()["images"] == []
        assert not any(tag.startswith("gates/") for tag in events.Tags()["scalars"])


def test_utilisation_is_flops_over_peak_and_does_not_move_with_accumulation(tmp_path, prepared, monkeypatch):
    monkeypatch.setattr(monitor_module, "peak_flops", lambda device: 1e9)
    for accumulate in (1, 2):
        _, monitor, module = run(
            tmp_path / str(accumulate), prepared, accumulate_grad_batches=accumulate, limit_val_batches=0
        )
        flops = training_flops_per_token(module.config, module.decoder.residual, 16)
        expected = flops * monitor.latest["speed/tokens_per_second"] / 1e9
        assert monitor.latest["speed/mfu"] == pytest.approx(expected)


def test_views_can_be_switched_off(tmp_path, prepared):
    events, _, _ = run(tmp_path, prepared, monitor=Monitor(depth_maps=False, sample_prompt=None), max_steps=2)
    tags = events.Tags()
    assert tags["images"] == tags["tensors"] == []
    assert "val/loss" in tags["scalars"]


def test_validation_does_not_change_training(tmp_path, prepared):
    weights = []
    for limit in (0, 2):
        _, _, module = run(tmp_path / str(limit), prepared, limit_val_batches=limit)
        weights.append(module.decoder.head.weight)
    assert torch.equal(*weights)


def test_stopwatch_leaves_pauses_out(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(monitor_module.time, "perf_counter", lambda: now[0])
    watch = Stopwatch()
    watch.steps = 4
    now[0] = 3.0
    watch.pause()
    now[0] = 10.0
    watch.resume()
    now[0] = 12.0
    assert watch.read() == (5.0, 4)
    now[0] = 13.0
    assert watch.read() == (1.0, 0)
