"""Meshes and placements at many ranks, in one process: torch's fake process group answers for the others."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from conftest import small_config
from torch.testing._internal.distributed.fake_pg import FakeStore

from lit_msar.initialization import local_part
from lit_msar.model import Decoder, DecoderConfig
from lit_msar.residual import MSAR
from lit_msar.training.parallel import (
    ExpertPlacement,
    Meshes,
    ShardOptions,
    SpreadExpertPlacement,
    gradient_norm,
    shard_decoder,
)

SIZES = {"10b": (2080, 720), "18b": (2112, 672), "28b": (2560, 768)}


@contextlib.contextmanager
def ranks(n_ranks, rank=0):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=n_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(n_ranks, rank=0, config=None, replicate=1, expert_parallel=1):
    """A decoder on the meta device, cut for `rank`; use it within `ranks`."""
    with torch.device("meta"):
        decoder = Decoder(config or small_config(), MSAR(block_size=2))
    shard_decoder(decoder, Meshes.make("cpu", n_ranks, replicate, expert_parallel), ShardOptions())
    return decoder


@pytest.mark.parametrize(
    ("replicate", "expert_parallel", "dense", "experts"),
    [(1, 1, (8,), None), (2, 1, (2, 4), None), (1, 4, (8,), (2,)), (2, 2, (2, 4), (2, 2)), (1, 8, (8,), (1,))],
    ids=["shard", "hybrid", "experts", "hybrid-experts", "experts-everywhere"],
)
def test_meshes_cover_the_ranks(replicate, expert_parallel, dense, experts):
    with ranks(8):
        meshes = Meshes.make("cpu", 8, replicate, expert_parallel)
        assert tuple(meshes.dense.shape) == dense
        assert (meshes.experts and tuple(meshes.experts.shape)) == experts
        assert meshes.expert_group is None or meshes.expert_group.size() == expert_parallel


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"replicate": 3}, "replicate=3 must divide the number of ranks, 8"),
        ({"replicate": 2, "expert_parallel": 8}, r"expert_parallel=8 must divide .* 4 \(8 ranks / replicate=2\)"),
    ],
    ids=["replicate", "expert_parallel"],
)
def test_sizes_that_do_not_divide_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        Meshes.make("cpu", 8, **options)


def test_experts_that_the_group_does_not_divide_are_refused():
    with ranks(4), pytest.raises(ValueError, match="expert_parallel=4 must divide n_experts=6"):
        sharded(4, expert_parallel=4)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("n_ranks", [2, 3, 4, 8, 9, 16, 32, 48, 64])
def test_experts_are_cut_whole_where_the_ranks_divide_them(size, n_ranks):
    d_model, d_expert = SIZES[size]
    for shape in ((144, 2 * d_expert, d_model), (144, d_model, d_expert)):
        axis = ExpertPlacement(n_ranks)(torch.empty(shape, device="meta")).dim
        if 144 % n_ranks == 0:
            assert axis == 0
        else:
            assert shape[axis] % n_ranks == 0 or axis == 0, "unevenly along axis 0 alone"


def test_matrices_and_vectors_are_cut_along_axis_0():
    assert ExpertPlacement(8)(torch.empty(3, 16)).dim == 0


def test_spread_experts_are_cut_along_another_axis_or_refused():
    assert SpreadExpertPlacement(4)(torch.empty(36, 10, 8)).dim == 2
    with pytest.raises(ValueError, match=r"3 ranks per expert divide no axis of experts of shape \(10, 8\)"):
        SpreadExpertPlacement(3)(torch.empty(36, 10, 8))


def test_no_rank_of_eight_holds_more_than_its_share_of_28b():
    config = DecoderConfig(
        d_model=2560, n_layers=32, n_heads=24, n_kv_heads=4, head_dim=128, d_ff=10944,
        n_experts=144, top_k=8, d_expert=768, vocab_size=152064,
    )  # fmt: skip
    with ranks(8, 7):
        decoder = sharded(8, 7, config)
        total = sum(p.numel() for p in decoder.parameters())
        held = sum(local_part(p).numel() for p in decoder.parameters())
    assert total == pytest.approx(28.0e9, rel=0.01)
    assert held == pytest.approx(total / 8, rel=1e-3)


def test_depth_parameters_and_routers_compute_in_fp32():
    with ranks(2):
        with torch.device("meta"):
            decoder = Decoder(small_config(), MSAR(block_size=2), torch.bfloat16)
        shard_decoder(decoder, Meshes.make("cpu", 2), ShardOptions())
        units = {"root": decoder, "layer": decoder.layers[1], "router": decoder.layers[1].mlp.router}
        policies = {name: unit._get_fsdp_state()._mp_policy for name, unit in units.items()}
    assert {name: p.param_dtype for name, p in policies.items()} == {
        "root": torch.float32,
        "layer": torch.bfloat16,
        "router": torch.float32,
    }
    assert all(p.reduce_dtype == torch.float32 for p in policies.values())
    assert not any(p.cast_forward_inputs for p in policies.values())


def test_norm_of_plain_gradients_is_the_norm_of_their_concatenation():
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (5,), (0,), (2, 2))]
    for p in parameters[:3]:
        p.grad = torch.randn_like(p)
    expected = torch.cat([p.grad.flatten() for p in parameters[:3]]).norm()
    torch.testing.assert_close(gradient_norm(parameters, torch.device("cpu")), expected)
    assert gradient_norm(parameters[3:], torch.device("cpu")) == 0
