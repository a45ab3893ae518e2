"""Strategies on the Triton kernels at a real width in bf16, as a run on a GPU uses them."""

import pytest
import torch
from kernel_inputs import DEVICE
from residual.sharded_kernels import STRATEGIES, gradients_of_decoder, on_each_rank
from strategies import ToyModel
from torch import Tensor, distributed
from torch.utils.checkpoint import checkpoint

from lit_msar.initialization import initialize

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

D, T, N_LAYERS = 2112, 256, 4
every_strategy = pytest.mark.parametrize("name", STRATEGIES)


class Layered(ToyModel):
    """The toy model in bf16, as a function of the embedding that can recompute its layers."""

    def __init__(self, name: str) -> None:
        strategy = STRATEGIES[name]("triton")
        strategy.build(D, N_LAYERS)
        strategy.to(DEVICE)
        initialize(strategy, 0)
        with torch.no_grad():
            for parameter in strategy.parameters():
                parameter += 0.02 * torch.randn_like(parameter)
        super().__init__(strategy)
        self.weights = [weight.to(DEVICE, torch.bfloat16) for weight in self.weights]
        self.recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        state, layers = self.residual.begin(x), 2 * self.residual.segment_layers
        for start in range(0, self.residual.n_sublayers, layers):
            if self.recomputes:
                state = checkpoint(self.run, state, start, start + layers, use_reentrant=False)
            else:
                state = self.run(state, start, start + layers)
        return self.residual.finish(state)


def normal() -> Tensor:
    return torch.randn(1, T, D, device=DEVICE).bfloat16().requires_grad_()


def outcome(model, x: Tensor, dh: Tensor) -> list[Tensor]:
    """Output, and gradients of the embedding and of every parameter."""
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    h = model(x)
    return [h.detach(), *(g for g in torch.autograd.grad(h, leaves, dh, allow_unused=True) if g is not None)]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) > 1
    for a, b in zip(found, expected, strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)


@every_strategy
def test_two_runs_are_bitwise_equal(name):
    model, x, dh = Layered(name), normal(), normal().detach()
    assert_equal(outcome(model, x, dh), outcome(model, x, dh))


@every_strategy
def test_a_captured_step_replays_with_new_inputs(name):
    """Reads and writes of the whole depth, forward and backward, in one CUDA graph."""
    model, x, dh = Layered(name), normal(), normal().detach()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        outcome(model, x, dh)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = outcome(model, x, dh)
    with torch.no_grad():
        x.normal_()
        dh.normal_()
        for parameter in model.parameters():
            parameter.mul_(1.1)
    graph.replay()
    assert_equal(replayed, outcome(model, x, dh))


@every_strategy
def test_recomputed_layers_give_bitwise_the_same(name):
    model, x, dh = Layered(name), normal(), normal().detach()
    kept = outcome(model, x, dh)
    model.recomputes = True
    assert_equal(outcome(model, x, dh), kept)


@every_strategy
def test_compiled_parts_around_the_kernels_change_nothing(name):
    """The kernels break the graph; what is compiled between them is the same operations."""
    model, x, dh = Layered(name), normal(), normal().detach()
    expected = outcome(model, x, dh)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for found, value in zip(outcome(compiled, x, dh), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-2, atol=1e-2 * float(value.abs().max()))


@pytest.fixture
def _one_rank():
    distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@every_strategy
@pytest.mark.usefixtures("_one_rank")
def test_sharded_on_one_rank_equals_unsharded(name):
    tokens = torch.randint(0, 97, (2, 32), device=DEVICE)
    plain, sharded = (gradients_of_decoder(name, tokens, is_sharded) for is_sharded in (False, True))
    for key, value in plain.items():
        torch.testing.assert_close(
            sharded[key], value, rtol=1e-4, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_sharded_over_two_ranks_equals_unsharded(tmp_path):
    tokens = torch.randint(0, 97, (2, 32))
    torch.save(tokens, tmp_path / "tokens.pt")
    torch.multiprocessing.spawn(on_each_rank, (2, str(tmp_path)), nprocs=2)
    for name in STRATEGIES:
        plain = gradients_of_decoder(name, tokens.to(DEVICE), is_sharded=False)
        sharded = torch.load(tmp_path / f"{name}.pt")
        for key, value in plain.items():
            # FSDP averages over ranks what one process sums over the batch
            torch.testing.assert_close(2 * sharded[key].to(DEVICE), value, rtol=1e-4, atol=1e-5)
