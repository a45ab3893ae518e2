import torch
from strategies import ToyModel, built, embedding

from lit_msar.residual import MHC, AttnRes, AttnResMHC


def test_a_read_is_the_sum_of_both_reads_and_both_states_are_written():
    model = ToyModel(built(AttnResMHC(block_size=2)))
    attnres, mhc = built(AttnRes(block_size=2)), built(MHC())
    attnres.load_state_dict(model.residual.attnres.state_dict())
    mhc.load_state_dict(model.residual.mhc.state_dict())
    x = embedding()
    position = torch.arange(9).expand(2, -1)
    state, sources, lanes = model.residual.begin(x, position), attnres.begin(x, position), mhc.begin(x)
    for site in model.sites[:-1]:
        h, state = model.residual.read(state, site)
        from_sources, sources = attnres.read(sources, site)
        from_lanes, lanes = mhc.read(lanes, site)
        torch.testing.assert_close(h, from_sources + from_lanes)
        y = model.sublayer(site.index, h)
        state = model.residual.write(state, site, y)
        sources, lanes = attnres.write(sources, site, y), mhc.write(lanes, site, y)
        assert all(torch.equal(a, b) for a, b in zip(state, (*lanes, *sources), strict=True))
    torch.testing.assert_close(model.residual.finish(state), attnres.finish(sources) + mhc.finish(lanes))


def test_inspect_shows_both():
    model = ToyModel(built(AttnResMHC(block_size=2)))
    seen = model.residual.inspect(model.residual.begin(embedding()), model.sites[0])
    assert seen.keys() == {"weights", "pre", "post", "res"}
