import torch

from lit_msar.model.loss import token_losses


def test_chunks_give_the_plain_cross_entropy_and_its_gradients():
    hidden, weight = torch.randn(2, 7, 16), torch.randn(31, 16)
    targets = torch.randint(31, (2, 7))
    targets[0, 3:] = -100
    results = []
    for chunk_size in (3, 100):
        inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        losses = token_losses(*inputs, targets, chunk_size)
        losses.sum().backward()
        results.append((losses, *(t.grad for t in inputs)))
    inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    log_probabilities = (inputs[0] @ inputs[1].T).log_softmax(-1)
    picked = -log_probabilities.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets >= 0)
    picked.sum().backward()
    for result in results:
        for ours, expected in zip(result, (picked, *(t.grad for t in inputs)), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_fully_masked_batch_loses_nothing():
    losses = token_losses(torch.randn(1, 4, 8), torch.randn(5, 8), torch.full((1, 4), -100))
    assert losses.tolist() == [[0.0] * 4]


def test_half_precision_losses_come_in_fp32():
    losses = token_losses(torch.randn(1, 4, 8).bfloat16(), torch.randn(5, 8), torch.zeros(1, 4, dtype=torch.long))
    assert losses.dtype == torch.float32
