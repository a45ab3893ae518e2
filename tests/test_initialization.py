import pytest
import torch
from torch import nn

from lit_msar.initialization import Initialized, constant, initialize, normal, uniform, values


class Part(Initialized):
    def __init__(self, d_model: int = 400):
        super().__init__()
        self.declare("weight", (d_model, d_model), normal(0.02))
        self.declare("bias", (d_model,), constant(3.0))
        self.declare_list("taps", (d_model,), [uniform(0.5), uniform(0.5)])
        self.declare_buffer("scale", (3,), values(torch.tensor([1.0, 2.0, 3.0], device="cpu")))


def initialized(module: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    initialize(module, seed)
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_starts_have_the_declared_distribution():
    start = initialized(Part())
    assert start["weight"].std().item() == pytest.approx(0.02, rel=0.02)
    assert (start["bias"] == 3).all()
    assert 0.45 < start["taps.0"].abs().max() <= 0.5
    assert not torch.equal(start["taps.0"], start["taps.1"])
    assert start["scale"].tolist() == [1, 2, 3]


def test_seed_and_name_alone_decide_the_start():
    alone = initialized(nn.ModuleDict({"b": Part()}))
    among_others = initialized(nn.ModuleDict({"a": Part(8), "b": Part(), "c": Part()}))
    for name, value in alone.items():
        assert torch.equal(among_others[name], value), name
    assert not torch.equal(among_others["b.weight"], among_others["c.weight"])
    assert not torch.equal(initialized(nn.ModuleDict({"b": Part()}), seed=1)["b.weight"], alone["b.weight"])


def test_the_global_generator_is_neither_read_nor_moved():
    torch.manual_seed(0)
    first = initialized(Part())
    expected = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(initialized(Part())["weight"], first["weight"])


def test_a_model_made_on_the_meta_device_starts_the_same():
    with torch.device("meta"):
        part = Part()
    part.to_empty(device="cpu")
    assert all(torch.equal(value, initialized(Part())[name]) for name, value in initialized(part).items())


def test_an_undeclared_parameter_is_refused():
    part = Part()
    part.forgotten = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"without a declared start: \['forgotten.bias', 'forgotten.weight'\]"):
        initialize(part, 0)
