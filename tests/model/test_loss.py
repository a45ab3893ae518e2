import pytest
import torch

from lit_msar.model import loss
from lit_msar.model.loss import chunk_rows, cross_entropy


def plain(hidden, weight, targets):
    """Log-softmax of all logits at once."""
    log_probabilities = (hidden @ weight.to(hidden.dtype).T).log_softmax(-1)
    return -log_probabilities.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets >= 0)


def problem(dtype=torch.float64, vocab=31):
    hidden, weight = torch.randn(2, 7, 16, dtype=dtype), torch.randn(vocab, 16, dtype=dtype)
    targets = torch.randint(vocab, (2, 7))
    targets[0, 3:] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), targets


@pytest.mark.parametrize("chunk_size", [1, 3, 14, None])
def test_chunks_give_the_plain_cross_entropy_and_its_gradients(chunk_size):
    hidden, weight, targets = problem()
    expected = plain(hidden, weight, targets)
    losses = cross_entropy(hidden, weight, targets, chunk_size)
    torch.testing.assert_close(losses.each, expected)
    torch.testing.assert_close(losses.total, expected.sum())
    ours = torch.autograd.grad(losses.total * 0.3, (hidden, weight))
    for grad, wanted in zip(ours, torch.autograd.grad(expected.sum() * 0.3, (hidden, weight)), strict=True):
        torch.testing.assert_close(grad, wanted)


def test_single_losses_carry_no_gradient():
    assert not cross_entropy(*problem()).each.requires_grad


def test_without_gradients_nothing_is_saved():
    hidden, weight, targets = problem()
    with torch.no_grad():
        assert not cross_entropy(hidden, weight, targets).total.requires_grad


def test_frozen_weight_or_input_still_works():
    hidden, weight, targets = problem()
    cross_entropy(hidden.detach(), weight, targets).total.backward()
    assert hidden.grad is None
    assert weight.grad.any()


def test_fully_masked_batch_loses_nothing():
    hidden, weight, _ = problem()
    losses = cross_entropy(hidden, weight, torch.full((2, 7), -100))
    assert losses.total == 0
    assert not losses.each.any()
    losses.total.backward()
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_half_precision_keeps_losses_and_weight_gradients_in_fp32():
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 64, 32).bfloat16().requires_grad_(), (0.1 * torch.randn(301, 32)).requires_grad_()
    targets = torch.randint(301, (2, 64))
    losses = cross_entropy(hidden, weight, targets, chunk_size=10)
    losses.total.backward()
    assert losses.each.dtype == losses.total.dtype == weight.grad.dtype == torch.float32
    assert hidden.grad.dtype == torch.bfloat16
    exact = hidden.detach().double().requires_grad_()
    exact_weight = weight.detach().double().requires_grad_()
    plain(exact, exact_weight, targets).sum().backward()
    for ours, wanted in ((hidden.grad, exact.grad), (weight.grad, exact_weight.grad)):
        assert (ours.double() - wanted).norm() / wanted.norm() < 1e-2


def test_extreme_logits_stay_finite():
    hidden, weight, targets = problem(torch.float32)
    losses = cross_entropy(1e4 * hidden, weight, targets)
    losses.total.backward()
    assert losses.total.isfinite()
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("n_tokens", [1, 255, 7000, 16384, 100_000])
@pytest.mark.parametrize("vocab_size", [97, 16384, 152064])
def test_chunks_are_even_and_within_their_bytes(n_tokens, vocab_size):
    rows = chunk_rows(n_tokens, vocab_size, 2)
    assert 2 * rows * vocab_size <= loss.CHUNK_BYTES
    n_chunks = -(-n_tokens // rows)
    assert (n_chunks - 1) * rows < n_tokens
    least = -(-n_tokens * 2 * vocab_size // loss.CHUNK_BYTES)
    assert n_chunks <= least + 1


def test_a_vocabulary_larger_than_a_chunk_goes_row_by_row(monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_BYTES", 100)
    assert chunk_rows(10, 97, 2) == 1
