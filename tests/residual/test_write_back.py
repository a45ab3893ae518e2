import pytest
import torch
from strategies import ToyModel, built, embedding

from lit_msar.residual import WriteBack


def test_a_source_is_its_output_times_the_gates_written_with_it():
    model = ToyModel(built(WriteBack(block_size=1, n_candidates=3)))
    strategy, site = model.residual, model.sites[2]
    state = model.run(strategy.begin(embedding()), 0, 2)
    x, between = strategy.read(state, site)
    gates, y = between[-1], model.sublayer(2, x)
    assert gates.shape == (2, 9, 3)
    assert ((gates > 0) & (gates < 2)).all()
    written = strategy.write(between, site, y)
    assert len(written) == len(state) + 1
    for j in range(3):
        torch.testing.assert_close(written[-1][:, :, j], gates[..., j, None] * y)


def test_candidates_of_one_output_have_the_same_key():
    """The paper's finding: the key norm takes out the gate, the only thing in which candidates differ."""
    model = ToyModel(built(WriteBack(block_size=1)))
    state = model.run(model.residual.begin(embedding()), 0, 6)
    for source in state[1:]:
        keys = torch.nn.functional.rms_norm(source, source.shape[-1:], eps=1e-12)
        torch.testing.assert_close(keys, keys[:, :, :1].expand_as(keys), rtol=1e-6, atol=1e-6)
        assert (source[:, :, 1] - source[:, :, 0]).abs().max() > 0.1


def test_the_start_writes_plain_copies_and_mixes_them_evenly():
    strategy = built(WriteBack(), d_model=64, spread=0.0)
    site = ToyModel(strategy).sites[0]
    x = embedding(D=64)
    state = strategy.begin(x)
    read, between = strategy.read(state, site)
    torch.testing.assert_close(between[-1], torch.ones_like(between[-1]), rtol=0.01, atol=0)
    torch.testing.assert_close(read, x, rtol=0.01, atol=0)


def test_one_candidate_is_refused():
    with pytest.raises(ValueError, match=r"n_candidates must be at least 2 \(one is residual=AttnRes\), got 1"):
        WriteBack(n_candidates=1)
