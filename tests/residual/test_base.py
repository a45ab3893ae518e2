import pytest
import torch
from strategies import VARIANTS, ToyModel, built, embedding, every_variant, toy
from torch.utils.checkpoint import checkpoint

from lit_msar.initialization import initialize
from lit_msar.residual import Cost, Site, sites

# Weights that map channels to channels or taps; everything else is a bias, a gain, a query or a scalar.
DECAYED = {"taps", "mix_weight", "write_weight", "weight", "phi", "head_weight"}


def test_sites_are_all_sublayers_and_the_head():
    assert [(site.kind, site.layer) for site in sites(2)] == [
        ("attention", 0),
        ("mlp", 0),
        ("attention", 1),
        ("mlp", 1),
        ("head", 2),
    ]


def test_costs_add_by_component():
    assert Cost(1, 2.0, 3.0) + Cost(10, 20.0, 30.0) == Cost(11, 22.0, 33.0)


@every_variant
def test_every_parameter_gets_a_gradient(name):
    model = toy(name)
    model(embedding().requires_grad_()).square().sum().backward()
    for parameter_name, parameter in model.residual.named_parameters():
        if not parameter.requires_grad:
            assert name == "msar_frozen_queries"
            continue
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        # the first read of depth attention has one source, whose weight is 1 whatever the query
        has_one_source = parameter_name.removeprefix("attnres.") in ("query.0", "key_gain.0")
        assert parameter.grad.any() != has_one_source, parameter_name


@every_variant
def test_output_depends_on_no_later_token(name):
    model, x = toy(name), embedding(T=30).requires_grad_()
    model(x)[:, :20].square().sum().backward()
    assert not x.grad[:, 20:].any()
    assert x.grad[:, :20].all()


@every_variant
def test_checkpointed_and_plain_gradients_are_equal(name):
    model, x = toy(name), embedding()

    def gradients(run):
        leaf = x.clone().requires_grad_()
        state = model.residual.begin(leaf)
        for start in range(0, model.residual.n_sublayers, 2):
            state = run(state, start)
        trained = [p for p in model.residual.parameters() if p.requires_grad]
        return torch.autograd.grad(model.residual.finish(state).square().sum(), [leaf, *trained])

    plain = gradients(lambda state, start: model.run(state, start, start + 2))
    saved = gradients(lambda state, start: checkpoint(model.run, state, start, start + 2, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(plain, saved, strict=True))


@every_variant
def test_a_cut_after_any_sublayer_gives_the_same_output(name):
    model, x = toy(name), embedding()
    later = ToyModel(built(VARIANTS[name](), seed=1))
    later.residual.load_state_dict(model.residual.state_dict())
    n_sublayers = model.residual.n_sublayers
    expected = model(x)
    for cut in range(n_sublayers + 1):
        state = model.run(model.residual.begin(x), 0, cut)
        assert all(part.shape[:2] == x.shape[:2] for part in state)
        sent = tuple(part.detach().clone(memory_format=torch.contiguous_format) for part in state)
        # sent lanes lie contiguous, which begin's do not: a product may add them in another order
        after = later.residual.finish(later.run(sent, cut, n_sublayers))
        torch.testing.assert_close(after, expected, rtol=1e-12, atol=1e-12)


@every_variant
def test_packed_documents_do_not_see_each_other(name):
    model, first, second = toy(name), embedding(T=7), embedding(T=5)
    position = torch.cat([torch.arange(7), torch.arange(5)]).expand(2, -1)
    packed = model(torch.cat([first, second], dim=1), position)
    torch.testing.assert_close(packed[:, :7], model(first), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(packed[:, 7:], model(second), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["msar", "msar_reader_owned", "vanilla_conv"])
def test_documents_see_each_other_without_positions(name):
    model, first, second = toy(name), embedding(T=7), embedding(T=5)
    packed = model(torch.cat([first, second], dim=1))
    assert not torch.allclose(packed[:, 7:], model(second))


@every_variant
def test_state_dict_makes_the_same_strategy_again(name):
    model, x = toy(name, seed=0), embedding()
    again = type(model.residual)(**model.residual.options)
    restored = ToyModel(built(again, seed=1))
    if any(p.requires_grad for p in model.residual.parameters()):
        assert not torch.equal(restored(x), model(x))
    restored.residual.load_state_dict(model.residual.state_dict())
    assert torch.equal(restored(x), model(x))


@every_variant
def test_reads_and_writes_change_nothing_in_place(name):
    model, x = toy(name), embedding()
    residual = model.residual
    state = residual.begin(x)
    for site in model.sites[:-1]:
        before = [part.clone() for part in state]
        h, between = residual.read(state, site)
        held, y = [part.clone() for part in between], model.sublayer(site.index, h)
        after = residual.write(between, site, y)
        assert all(torch.equal(a, b) for a, b in zip([*before, *held], [*state, *between], strict=True))
        state = after


@every_variant
def test_state_and_reads_keep_the_compute_dtype(name):
    residual = VARIANTS[name]()
    residual.build(8, 3)
    initialize(residual, 0)
    model = ToyModel(residual)
    state = residual.begin(embedding().bfloat16())
    for site in model.sites[:-1]:
        x, state = residual.read(state, site)
        assert x.dtype == torch.bfloat16
        state = residual.write(state, site, model.sublayer(site.index, x))
        assert {part.dtype for part in state} == {torch.bfloat16}
    assert residual.finish(state).dtype == torch.bfloat16


@every_variant
def test_half_precision_output_is_near_the_exact_one(name):
    residual = VARIANTS[name]()
    residual.build(64, 3)
    initialize(residual, 0)
    model, x = ToyModel(residual), embedding(D=64).bfloat16()
    output, exact = model(x).double(), model.double()(x.double())
    # a handful of roundings of 2^-8 each, over 6 sublayers
    assert (output - exact).norm() < 0.02 * exact.norm()


@every_variant
def test_start_from_the_meta_device_equals_a_direct_start(name):
    direct = VARIANTS[name]()
    direct.build(8, 3)
    initialize(direct, 5)
    with torch.device("meta"):
        strategy = VARIANTS[name]()
        strategy.build(8, 3)
    assert all(p.is_meta for p in strategy.parameters())
    strategy.to_empty(device="cpu")
    initialize(strategy, 5)
    for key, value in direct.state_dict().items():
        assert torch.equal(strategy.state_dict()[key], value), key


@every_variant
def test_parameters_can_be_sharded(name):
    with torch.device("meta"):
        strategy = VARIANTS[name]()
        strategy.build(16, 3)
    assert all(p.dtype == torch.float32 and p.dim() >= 1 for p in strategy.parameters())


@every_variant
def test_weight_decay_leaves_out_biases_gains_queries_and_scalars(name):
    strategy = built(VARIANTS[name]())
    for parameter_name, _ in strategy.named_parameters():
        own_name = parameter_name.removeprefix("attnres.").removeprefix("mhc.").split(".")[0]
        assert strategy.is_without_decay(parameter_name) == (own_name not in DECAYED), parameter_name


@every_variant
@pytest.mark.parametrize("n_layers", [1, 5], ids=["one_layer", "five_layers"])
def test_cost_counts_the_parameters_that_exist(name, n_layers):
    strategy = built(VARIANTS[name](), n_layers=n_layers)
    cost = sum((strategy.cost(site) for site in sites(n_layers)), Cost())
    assert cost.parameters == sum(p.numel() for p in strategy.parameters())
    assert cost.multiply_adds > 0
    assert cost.elements >= 3 * 8 * 2 * n_layers  # nothing moves less than one read and one write of a sum


@every_variant
def test_inspect_shows_normalised_weights_at_every_site(name):
    model, (B, T, D) = toy(name), (2, 9, 8)
    state = model.residual.begin(embedding(B, T, D))
    for site in model.sites:
        seen = model.residual.inspect(state, site)
        assert seen.keys() <= {"weights", "gates", "pre", "post", "res"}
        assert all(view.shape[:2] == (B, T) for view in seen.values())
        if "weights" in seen:
            m, N = seen["weights"].shape[2:]
            assert N == len(state) - (1 if name == "attnres_mhc" else 0)
            assert seen.get("gates", torch.empty(B, T, m)).shape == (B, T, m)
            torch.testing.assert_close(seen["weights"].sum(-1), torch.ones(B, T, m, dtype=torch.float64))
        if not site.is_head:
            state = model.run(state, site.index, site.index + 1)


@every_variant
def test_nothing_is_kept_between_calls(name):
    model, x = toy(name), embedding()
    first = model(x)
    model(embedding(B=1, T=4))
    assert torch.equal(model(x), first)


def test_the_head_read_is_the_one_after_the_last_sublayer():
    assert Site(6, 6).is_head
    assert not Site(5, 6).is_head
