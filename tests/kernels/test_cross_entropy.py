import pytest
import torch
from kernel_inputs import DEVICE

from kernels.cross_entropy import BLOCK, cross_entropy_
from lit_msar.model.loss import IGNORED, cross_entropy, plain_cross_entropy


def problem(n_rows, vocab, dtype, scale=3.0):
    logits = (scale * torch.randn(n_rows, vocab, device=DEVICE)).to(dtype)
    targets = torch.randint(vocab, (n_rows,), device=DEVICE)
    targets[0], targets[-1] = vocab - 1, IGNORED
    return logits, targets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [5, 97, BLOCK, BLOCK + 1, 2 * BLOCK + 300])
def test_losses_and_gradient_are_the_plain_ones(vocab, dtype):
    logits, targets = problem(4, vocab, dtype)
    losses, gradient = plain_cross_entropy(logits.double(), targets, True)
    ours = cross_entropy_(logits, targets, IGNORED, True)
    torch.testing.assert_close(ours, losses.float(), rtol=1e-5, atol=1e-5)
    # rounding to the logits' dtype, and nothing else
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(logits.double(), gradient, rtol=2 * tolerance, atol=tolerance * 1e-2)
    assert not logits[-1].any()


def test_without_gradient_the_logits_stay():
    logits, targets = problem(3, 50, torch.float32)
    before = logits.clone()
    losses = cross_entropy_(logits, targets, IGNORED, False)
    assert torch.equal(logits, before)
    torch.testing.assert_close(losses, plain_cross_entropy(before, targets, False)[0])


def test_extreme_logits_stay_finite():
    logits, targets = problem(3, 300, torch.bfloat16, scale=1e4)
    logits[1] = float("-inf")
    logits[1, int(targets[1])] = 7.0
    losses = cross_entropy_(logits, targets, IGNORED, True)
    assert losses.isfinite().all()
    assert losses[1] == 0
    assert logits.isfinite().all()


def test_logits_that_are_not_contiguous_are_refused():
    logits, targets = problem(4, 60, torch.float32)
    with pytest.raises(ValueError, match="contiguous"):
        cross_entropy_(logits.T.contiguous().T, targets, IGNORED, True)


@pytest.mark.gpu
def test_decoder_loss_takes_the_kernel_and_agrees_with_the_plain_one():
    torch.manual_seed(0)
    hidden = torch.randn(2, 300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (0.1 * torch.randn(1001, 64, device="cuda")).requires_grad_()
    targets = torch.randint(1001, (2, 300), device="cuda")
    targets[0, 5:9] = IGNORED
    losses = cross_entropy(hidden, weight, targets, chunk_size=256)
    losses.total.backward()
    exact, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    expected = cross_entropy(exact, exact_weight, targets)
    expected.total.backward()
    assert (losses.each.double() - expected.each).norm() < 3e-3 * expected.each.norm()
    for ours, wanted in ((hidden.grad, exact.grad), (weight.grad, exact_weight.grad)):
        assert (ours.double() - wanted).norm() < 1e-2 * wanted.norm()
