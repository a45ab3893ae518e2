import pytest
import torch
from conftest import small_decoder

from lit_msar.inference.decode import generate, pick
from lit_msar.residual import MSAR


def test_greedy_continuation_takes_the_likeliest_token_of_a_full_forward():
    model = small_decoder(MSAR(), dtype=torch.float64)
    prompt = torch.randint(97, (2, 5))
    tokens = generate(model, prompt, 4, temperature=0)
    assert torch.equal(tokens[:, :5], prompt)
    for t in range(5, 9):
        assert torch.equal(tokens[:, t], model(tokens[:, :t]).logits[:, -1].argmax(-1))


def test_a_seed_fixes_the_sample():
    model, prompt = small_decoder(), torch.randint(97, (1, 3))
    samples = [generate(model, prompt, 8, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(samples[0], samples[1])
    assert not torch.equal(samples[0], samples[2])


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    generator = torch.Generator().manual_seed(0)
    drawn = {pick(logits, 1.0, 0.75, generator).item() for _ in range(200)}
    assert drawn == {0, 1}
    assert {pick(logits, 1.0, 0.2, generator).item() for _ in range(50)} == {0}


def test_temperature_sharpens():
    logits = torch.tensor([[1.0, 0.0]])
    generator = torch.Generator().manual_seed(0)
    shares = [
        sum(pick(logits, temperature, 1.0, generator).item() == 0 for _ in range(400)) / 400
        for temperature in (0.3, 3.0)
    ]
    assert shares[0] > 0.93
    assert shares[1] < 0.68


def test_rows_end_at_the_stop_id():
    model = small_decoder()
    prompt = torch.randint(97, (2, 3))
    greedy = generate(model, prompt, 6, temperature=0)
    stop = greedy[0, 3].item()
    stopped = generate(model, prompt[:1], 6, temperature=0, stop_id=stop)
    assert stopped.tolist() == greedy[:1, :4].tolist()


@pytest.mark.parametrize(
    "options", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}], ids=lambda o: next(iter(o))
)
def test_wrong_sampling_options_are_refused_by_name(options):
    arguments = {"max_new_tokens": 1} | options
    with pytest.raises(ValueError, match=next(iter(options))):
        generate(small_decoder(), torch.zeros(1, 1, dtype=torch.long), **arguments)
