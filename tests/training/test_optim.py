import copy

import pytest
import torch
from conftest import small_decoder

from lit_msar.residual import MSAR
from lit_msar.training.optim import OptimizerConfig, adamw, prepare_step, wsd_factor


def test_schedule_warms_up_stays_and_decays_exponentially():
    factor = wsd_factor(OptimizerConfig(warmup_steps=10, decay_fraction=0.2, final_lr_ratio=0.1), max_steps=100)
    assert [factor(s) for s in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert {factor(s) for s in range(10, 80)} == {1.0}
    assert factor(89) == pytest.approx(0.1**0.5)
    assert factor(99) == pytest.approx(0.1)
    ratios = [factor(s + 1) / factor(s) for s in range(80, 99)]
    assert ratios == pytest.approx([ratios[0]] * len(ratios))


def test_schedule_without_decay_or_warmup_is_constant():
    factor = wsd_factor(OptimizerConfig(warmup_steps=0, decay_fraction=0.0), max_steps=5)
    assert [factor(s) for s in range(6)] == [1.0] * 6


def test_schedule_needs_an_end():
    with pytest.raises(ValueError, match=r"trainer\.max_steps must be set"):
        wsd_factor(OptimizerConfig(), max_steps=-1)


@pytest.mark.parametrize(
    "changes", [{"lr": 0.0}, {"warmup_steps": -1}, {"decay_fraction": 1.5}, {"final_lr_ratio": 0.0}], ids=str
)
def test_wrong_options_are_refused_by_name(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        OptimizerConfig(**changes)


def test_groups_hold_every_trained_parameter_once():
    model = small_decoder(MSAR(train_queries=False))
    optimizer = adamw(model, model.no_decay_names(), OptimizerConfig(weight_decay=0.3))
    decayed, undecayed = (set(group["params"]) for group in optimizer.param_groups)
    assert decayed | undecayed == {p for p in model.parameters() if p.requires_grad}
    assert not decayed & undecayed
    assert model.head.weight in decayed
    assert model.head.norm.weight in undecayed
    assert model.residual.query[0] not in decayed | undecayed
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert optimizer.defaults["eps"] == 1e-15
    assert optimizer.defaults["betas"] == (0.9, 0.95)


def test_tiny_eps_survives_a_step_without_gradient():
    """eps 1e-15 vanishes in fp32 beside any gradient; an expert that never got a token must not become 0/0."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = adamw(torch.nn.ParameterDict({"weight": weight}), set(), OptimizerConfig())
    weight.grad = torch.zeros(3)
    optimizer.step()
    assert weight.isfinite().all()


def stepped(factor, stopped, before=1):
    """Weights, moments, step counts and gradients after `before` plain steps and one prepared one."""
    torch.manual_seed(0)
    weight = torch.nn.Linear(8, 4, bias=False)
    optimizer = adamw(weight, set(), OptimizerConfig())
    for i in range(before + 1):
        weight.weight.grad = torch.ones(4, 8) * (i + 1)
        plain = copy.deepcopy((weight.weight.detach(), optimizer.state_dict()["state"]))
        prepare_step(optimizer, *(torch.tensor(v) for v in ((factor, stopped) if i == before else (1.0, 0.0))))
        optimizer.step()
    return plain, (weight.weight.detach(), optimizer.state_dict()["state"]), weight.weight.grad


@pytest.mark.parametrize("factor", [0.5, float("nan"), 0.0])
def test_stopped_step_changes_nothing(factor):
    before, after, _ = stepped(factor, 1.0)
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_prepared_step_takes_the_scaled_gradient():
    _, (weight, state), grad = stepped(0.25, 0.0)
    torch.testing.assert_close(grad, torch.full((4, 8), 0.5))
    torch.testing.assert_close(state[0]["exp_avg"], torch.full((4, 8), 0.1 * (0.9 * 1.0 + 0.5)))
    assert state[0]["step"] == 2
    assert not torch.equal(weight, stepped(0.25, 1.0)[1][0])
