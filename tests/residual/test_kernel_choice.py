"""Depth-attention strategies with the Triton reads, in the interpreter or on a GPU."""

import pytest
import torch
from strategies import ToyModel
from torch.utils.checkpoint import checkpoint

import kernels
from kernels import reference
from lit_msar.initialization import initialize
from lit_msar.residual import MSAR, AttnRes, Residual, sites

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def built(strategy: Residual) -> Residual:
    strategy.build(16, 2)
    initialize(strategy, 0)
    with torch.no_grad():
        for parameter in strategy.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return strategy.to(DEVICE)


STRATEGIES = {
    "attnres": lambda kernels: AttnRes(2, kernels=kernels),
    "msar": lambda kernels: MSAR(2, kernel_sizes=(1, 3), kernels=kernels, schedule="per_read"),
    "msar_full": lambda kernels: MSAR(1, kernel_sizes=(1, 3), kernels=kernels),
    "msar_per_block": lambda kernels: MSAR(2, kernel_sizes=(1, 3), kernels=kernels, schedule="per_block"),
    "msar_reader_owned": lambda kernels: MSAR(2, kernel_sizes=(1, 3), conv_owner="reader", kernels=kernels),
}


PACKED = [("msar_per_block", True), ("msar", True)]


class CheckpointedToy(ToyModel):
    """The toy model with every sublayer's read and write recomputed in the backward pass."""

    def run(self, state, start, stop):
        for site in self.sites[start:stop]:
            state = checkpoint(self.one_sublayer, site, *state, use_reentrant=False)
        return state

    def one_sublayer(self, site, *state):
        x, state = self.residual.read(state, site)
        return self.residual.write(state, site, self.sublayer(site.index, x))


def outcome(make, kernels: str, position=None, model=ToyModel) -> list[torch.Tensor]:
    torch.manual_seed(0)
    strategy = built(make(kernels))
    toy = model(strategy)
    toy.weights = [w.float().to(DEVICE) for w in toy.weights]
    x = torch.randn(1, 5, 16, device=DEVICE, requires_grad=True)
    h = toy(x, position)
    h.square().sum().backward()
    return [h.detach(), x.grad, *[p.grad for p in strategy.parameters()]]


@pytest.mark.parametrize(("name", "packed"), [*((name, False) for name in STRATEGIES), *PACKED])
def test_triton_and_reference_give_the_same_output_and_gradients(name, packed):
    position = (torch.arange(5, device=DEVICE) % 3)[None] if packed else None
    for fused, plain in zip(*(outcome(STRATEGIES[name], k, position) for k in ("triton", "reference")), strict=True):
        torch.testing.assert_close(fused, plain, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["attnres", "msar", "msar_full", "msar_per_block"])
def test_checkpointed_layers_give_the_same_numbers(name):
    plain, recomputed = outcome(STRATEGIES[name], "triton"), outcome(STRATEGIES[name], "triton", model=CheckpointedToy)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


def test_auto_is_the_reference_on_a_cpu():
    assert kernels.implementation("auto", torch.device("cpu"), has_triton=True) is reference


def test_auto_is_triton_on_cuda_where_there_are_kernels():
    assert kernels.implementation("auto", torch.device("cuda"), has_triton=True).__name__ == "kernels.fused"
    assert kernels.implementation("auto", torch.device("cuda")) is reference


def test_triton_without_kernels_for_the_strategy_is_an_error():
    with pytest.raises(ValueError, match="kernels=triton: no Triton kernels"):
        kernels.implementation("triton", torch.device("cuda"))
    with pytest.raises(ValueError, match="n_depth_heads=4"):
        AttnRes(n_depth_heads=4, kernels="triton")


def test_several_depth_heads_run_on_what_was_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(kernels, "implementation", lambda name, device: asked.append(name) or reference)
    strategy = built(AttnRes(n_depth_heads=4, kernels="compiled"))
    strategy.read(strategy.begin(torch.randn(1, 4, 16, device=DEVICE)), sites(2)[0])
    assert asked == ["compiled"]


@pytest.mark.parametrize("options", [{"conv_owner": "reader"}, {"mix": "mean"}, {"kernel_sizes": (1,)}])
def test_per_block_names_what_it_needs(options):
    with pytest.raises(ValueError, match="schedule=per_block needs conv_owner=producer and mix=adaptive"):
        MSAR(schedule="per_block", **options)


@pytest.mark.parametrize("options", [{"block_size": 3, "schedule": "per_block"}, {"block_size": 4}])
def test_inspect_sees_the_same_sources_inside_a_block(options):
    maps = []
    for kernels_option in ("triton", "reference"):
        torch.manual_seed(0)
        strategy = built(MSAR(kernel_sizes=(1, 3), kernels=kernels_option, **options))
        state = strategy.begin(torch.randn(1, 4, 16, device=DEVICE))
        for site in sites(2)[:2]:
            x, state = strategy.read(state, site)
            state = strategy.write(state, site, torch.tanh(x))
        maps.append(strategy.inspect(state, sites(2)[2])["weights"])
    torch.testing.assert_close(*maps, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block_size", [1, 2])
def test_a_completed_source_carries_its_scores_for_all_reads_to_come(block_size):
    strategy = built(MSAR(block_size, kernel_sizes=(1, 3), kernels="triton", schedule="per_read"))
    state, carried = strategy.begin(torch.randn(1, 4, 16, device=DEVICE)), []
    for site in sites(2):
        x, state = strategy.read(state, site)
        carried.append([len(x) - 1 for x in state if x.ndim == 4])
        state = state if site.is_head else strategy.write(state, site, x)
    assert (
        carried
        == {1: [[5], [5, 4], [5, 4, 3], [5, 4, 3, 2], [5, 4, 3, 2]], 2: [[5], [5], [5, 3], [5, 3], [5, 3]]}[block_size]
    )
