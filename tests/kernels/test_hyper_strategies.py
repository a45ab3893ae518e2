"""The lane strategies on the Triton kernels: the same model as on the reference, however it is run."""

import pytest
import torch
from conftest import small_decoder
from kernel_inputs import DEVICE, HALF_FACTOR, normal, relative_error
from strategies import ToyModel
from torch import Tensor, distributed
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from lit_msar.initialization import initialize
from lit_msar.residual import HC, MHC, AttnResMHC

pytest.importorskip("triton")

STRATEGIES = {
    "hc": lambda kernels: HC(kernels=kernels),
    "hc_static": lambda kernels: HC(dynamic=False, kernels=kernels),
    "hc_one_lane": lambda kernels: HC(n_lanes=1, kernels=kernels),
    "mhc": lambda kernels: MHC(kernels=kernels),
    "mhc_three_lanes": lambda kernels: MHC(n_lanes=3, sinkhorn_eps=1e-6, start="megatron", kernels=kernels),
    "mhc_learned_contraction": lambda kernels: MHC(n_lanes=2, contract="learned", kernels=kernels),
    "attnres_mhc": lambda kernels: AttnResMHC(block_size=2, n_lanes=2, kernels=kernels),
}
every_strategy = pytest.mark.parametrize("name", STRATEGIES)


def model_of(name: str, kernels: str, dtype: torch.dtype = torch.float32, D: int = 16, n_layers: int = 1) -> ToyModel:
    """A toy model in fp32 parameters, moved off their start; `dtype` float64 makes those float64 too."""
    strategy = STRATEGIES[name](kernels)
    strategy.build(D, n_layers)
    initialize(strategy, 0)
    strategy.to(DEVICE, dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in strategy.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator).to(parameter)
    model = ToyModel(strategy)
    model.weights = [weight.to(DEVICE) for weight in model.weights]
    return model


def gradients(model: ToyModel, x: Tensor, checkpointed: bool = False) -> dict[str, Tensor]:
    """Output, and gradients of the embedding and of every parameter."""
    leaf = x.clone().requires_grad_()
    state = model.residual.begin(leaf)
    for start in range(0, model.residual.n_sublayers, 2):
        arguments = state, start, start + 2
        state = checkpoint(model.run, *arguments, use_reentrant=False) if checkpointed else model.run(*arguments)
    out = model.residual.finish(state)
    parameters = dict(model.residual.named_parameters())
    found = torch.autograd.grad(out.float().sin().sum(), [leaf, *parameters.values()], allow_unused=True)
    return {"output": out.detach(), "embedding": found[0]} | dict(zip(parameters, found[1:], strict=True))


@every_strategy
def test_strategy_on_kernels_equals_the_reference(name):
    x = normal(1, 5, 16)
    expected = gradients(model_of(name, "reference"), x)
    found = gradients(model_of(name, "triton"), x)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", ["hc", "mhc"])
def test_strategy_in_half_precision_is_as_near_to_the_exact_one(name):
    x = normal(1, 5, 16, dtype=torch.bfloat16)
    exact = gradients(model_of(name, "reference", torch.float64), x.double())
    plain, fused = (gradients(model_of(name, kernels), x) for kernels in ("reference", "triton"))
    for key in ("output", "embedding"):
        bound = HALF_FACTOR[torch.bfloat16] * relative_error(plain[key], exact[key])
        assert relative_error(fused[key], exact[key]) <= bound, key


@pytest.mark.parametrize(("name", "n_layers"), [("mhc_learned_contraction", 2), ("attnres_mhc", 1)])
def test_checkpointed_strategy_gives_bitwise_the_same(name, n_layers):
    x = normal(1, 3, 16)
    plain, saved = (gradients(model_of(name, "triton", n_layers=n_layers), x, again) for again in (False, True))
    assert all(torch.equal(plain[key], saved[key]) for key in plain)


def test_a_write_leaves_the_projection_of_the_next_read_in_the_state():
    model = model_of("mhc", "triton")
    state = model.run(model.residual.begin(normal(1, 5, 16)), 0, 1)
    assert [tuple(part.shape) for part in state] == [(1, 5, 4, 16), (1, 5, 25)]
    # a state that comes without it, as a cut of the pipeline may send it, is as good
    torch.testing.assert_close(model.run(state[:1], 1, 2)[0], model.run(state, 1, 2)[0], rtol=1e-6, atol=1e-6)


def test_too_many_lanes_for_the_kernels_are_refused():
    with pytest.raises(ValueError, match="kernels=triton takes 1 to 8 lanes, got n_lanes=9; use kernels=auto"):
        MHC(n_lanes=9, kernels="triton")


@pytest.fixture
def _one_rank():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.skipif(DEVICE != "cpu", reason="one gloo rank on the CPU")
@pytest.mark.usefixtures("_one_rank")
def test_sharded_depth_parameters_get_the_same_gradients():
    """The fp32 depth parameters belong to the root unit, which is gathered while the model runs."""
    tokens = torch.randint(0, 97, (1, 4))
    found = []
    for sharded in (False, True):
        decoder = small_decoder(MHC(n_lanes=2, kernels="triton"), n_layers=1)
        if sharded:
            mesh = distributed.init_device_mesh("cpu", (1,))
            for layer in decoder.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(decoder, mesh=mesh)
        decoder(tokens).logits.sin().sum().backward()
        grads = {name: p.grad for name, p in decoder.named_parameters() if name.startswith("residual.")}
        found.append({name: grad.full_tensor() if sharded else grad for name, grad in grads.items()})
    assert found[0].keys() == found[1].keys() != set()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
