import math

import pytest
import torch

from lit_msar.training.metrics import SetLoss, loss_report


def test_mean_weighs_by_tokens_not_by_micro_batches():
    metric = SetLoss(1)
    one, nine = torch.full((1, 10), -100), torch.full((1, 10), -100)
    one[0, :1] = 1
    nine[0, :9] = 1
    metric.update(torch.where(one >= 0, 8.0, 0.0), one, torch.tensor([0]))
    metric.update(torch.where(nine >= 0, 2.0, 0.0), nine, torch.tensor([0]))
    report = loss_report(*metric.compute(), ["all"], torch.tensor([4.0]), "val")
    assert report == {
        "val/loss": pytest.approx(2.6),
        "val/perplexity": pytest.approx(math.exp(2.6)),
        "val/bits_per_byte": pytest.approx(2.6 / math.log(2) / 4),
    }


def test_sets_are_told_apart_and_bits_per_byte_weighs_by_bytes():
    metric = SetLoss(3)
    losses = torch.tensor([[1.0, 1.0], [3.0, 3.0]])
    metric.update(losses, torch.ones(2, 2, dtype=torch.long), torch.tensor([0, 2]))
    report = loss_report(*metric.compute(), ["a", "b", "c"], torch.tensor([1.0, 9.0, 5.0]), "train")
    assert report["train_loss/a"] == 1
    assert report["train_loss/c"] == 3
    assert not any(key.endswith("/b") for key in report), "a set without tokens has no loss"
    assert report["train/bits_per_byte"] == pytest.approx(8 / math.log(2) / (2 * 1 + 2 * 5))


def test_no_tokens_no_report():
    assert loss_report(*SetLoss(2).compute(), ["a", "b"], torch.ones(2), "val") == {}


def test_metric_accumulates_in_double_precision():
    metric = SetLoss(1)
    metric.nats += 1e9
    metric.update(torch.full((1, 1), 1e-3), torch.ones(1, 1, dtype=torch.long), torch.tensor([0]))
    assert metric.compute()[0].item() - 1e9 == pytest.approx(1e-3, rel=1e-3)
