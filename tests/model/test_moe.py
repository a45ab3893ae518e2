import pytest
import torch
from conftest import small_config

from lit_msar.initialization import initialize
from lit_msar.model.moe import Experts, MoE, Route, Router


def module_of(kind, **changes):
    config = small_config(**changes)
    module = kind(config) if kind is Router else kind(config, config.output_std)
    initialize(module, 0)
    return module


def dense_sum(experts: Experts, x, route):
    """Every expert on every token, weighted by the route: the definition."""
    y = torch.zeros_like(x)
    for e in range(experts.n_experts):
        gate, up = (x @ experts.gate_up[e].T).chunk(2, -1)
        out = (torch.nn.functional.silu(gate) * up) @ experts.down[e].T
        y = y + out * (route.weights * (route.experts == e)).sum(-1, keepdim=True)
    return y


ROUTES = {
    "spread": torch.tensor([[0, 1], [2, 3], [4, 5], [0, 3], [5, 1]]),
    "empty-experts": torch.tensor([[0, 2], [2, 0], [0, 2], [2, 0], [0, 2]]),
    "one-expert-has-all": torch.tensor([[3, 0], [3, 1], [3, 2], [3, 4], [3, 5]]),
}


@pytest.mark.parametrize("implementation", ["grouped_mm", "loop"])
@pytest.mark.parametrize("chosen", ROUTES.values(), ids=ROUTES)
def test_experts_match_the_dense_sum_forward_and_backward(implementation, chosen):
    experts = module_of(Experts, moe=implementation)
    x = torch.randn(5, 32)
    route = Route(chosen, torch.rand(5, 2))
    results = []
    for forward in (lambda x, r: experts(x, r)[0], lambda x, r: dense_sum(experts, x, r)):
        inputs = [x.clone().requires_grad_(), route.weights.clone().requires_grad_()]
        y = forward(inputs[0], Route(chosen, inputs[1]))
        y.square().sum().backward()
        results.append([y, *(t.grad for t in (*inputs, experts.gate_up, experts.down))])
        experts.zero_grad()
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7)


def test_what_down_gives_is_not_kept_for_the_backward():
    """The weight sits on the hidden channels: its gradient needs those, not the [N k, D] outputs."""
    experts = module_of(Experts)
    kept = []
    x, route = torch.randn(5, 32, requires_grad=True), Route(ROUTES["spread"], torch.rand(5, 2, requires_grad=True))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        experts(x, route)
    assert kept.count(torch.Size([10, 32])) == 1, "the sorted rows alone"
    assert torch.Size([5, 2, 32]) not in kept


def test_empty_expert_gets_a_gradient_of_exactly_zero_and_load_counts_every_choice():
    experts = module_of(Experts)
    chosen = ROUTES["empty-experts"]
    y, load = experts(torch.randn(5, 32), Route(chosen, torch.rand(5, 2)))
    y.sum().backward()
    assert load.tolist() == [5, 0, 5, 0, 0, 0]
    for grad in (experts.gate_up.grad, experts.down.grad):
        assert not grad[[1, 3, 4, 5]].any()
        assert grad[[0, 2]].any()


def test_router_renormalises_sigmoid_scores_of_the_biased_top_k():
    router = module_of(Router, route_scale=2.5)
    router.weight.data.normal_()
    router.balance_bias.copy_(torch.tensor([0.0, 0.0, 9.0, 0.0, 0.0, 0.0]))
    x = torch.randn(2, 3, 32)
    route, entropy, aux_loss = router(x)
    scores = torch.sigmoid(x @ router.weight.T).flatten(0, 1)
    assert (route.experts == 2).any(-1).all(), "the bias must force expert 2 into every choice"
    chosen = scores.gather(-1, route.experts)
    torch.testing.assert_close(route.weights, 2.5 * chosen / chosen.sum(-1, keepdim=True))
    share = scores / scores.sum(-1, keepdim=True)
    torch.testing.assert_close(entropy, torch.distributions.Categorical(share).entropy().mean())
    assert aux_loss == 0


def test_bias_changes_the_choice_but_not_the_weights_of_the_chosen():
    router = module_of(Router, n_experts=2, top_k=2)
    x = torch.randn(1, 4, 32)
    before = router(x)[0]
    router.balance_bias.copy_(torch.tensor([-3.0, 3.0]))
    after = router(x)[0]
    order = [route.experts.argsort(-1) for route in (before, after)]
    torch.testing.assert_close(before.weights.gather(1, order[0]), after.weights.gather(1, order[1]))


def test_sequence_aux_loss_is_one_when_even_and_reaches_the_router():
    router = module_of(Router, aux_loss=True)
    router.weight.data.zero_()
    _, _, aux_loss = router(torch.randn(2, 9, 32))
    assert aux_loss.item() == pytest.approx(1.0), "equal scores: sum_e f_e / E is 1 whatever is chosen"
    router.weight.data.normal_()
    router(torch.randn(2, 9, 32))[2].backward()
    assert router.weight.grad.any()


def test_update_balance_moves_towards_even_load_and_keeps_mean_zero():
    router = module_of(Router)
    router.update_balance(torch.tensor([9.0, 1.0, 4.0, 4.0, 4.0, 2.0]), rate=0.01)
    bias = router.balance_bias
    expected = torch.tensor([-0.01, 0.01, 0.0, 0.0, 0.0, 0.01])
    torch.testing.assert_close(bias, expected - expected.mean())
    assert bias.mean().abs() < 1e-8


def test_moe_adds_the_shared_expert_and_counts_tokens():
    moe = module_of(MoE)
    x = torch.randn(2, 7, 32)
    y, stats = moe(x)
    normed = moe.norm(x)
    routed = dense_sum(moe.experts, normed.flatten(0, 1), moe.router(normed)[0]).view_as(x)
    torch.testing.assert_close(y, routed + moe.shared(normed), rtol=1e-5, atol=1e-6)
    assert stats.load.sum() == 2 * 7 * 2


def test_moe_without_shared_expert():
    assert module_of(MoE, n_shared_experts=0).shared is None
