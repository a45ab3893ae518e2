from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from conftest import small_config

from lit_msar.analysis.plan import (
    GIB,
    Setup,
    attention_bytes,
    enough_gpus,
    host_gib,
    memory,
    mlp_bytes,
    parameters,
    print_plan,
    remedies,
    state_bytes,
    step_seconds,
    total_gib,
)
from lit_msar.model import Decoder, DecoderConfig
from lit_msar.model.attention import sequence_of
from lit_msar.model.layers import RMSNorm
from lit_msar.residual import MHC, MSAR, Vanilla

SIZES = Path(__file__).parents[2] / "configs" / "size"


def setup_of(size="10b", residual=None, **options):
    config = yaml.safe_load((SIZES / f"{size}.yaml").read_text())["model"]["decoder"]
    return Setup(DecoderConfig(**config), residual or MSAR(), **options)


def states(setup):
    return sum(bytes_ for name, bytes_ in memory(setup).items() if "(fp32)" in name)


def test_states_are_16_bytes_per_parameter_over_the_ranks_that_share_a_copy():
    total = sum(p.numel() for p in meta_decoder(setup_of()).parameters())
    assert parameters(setup_of()).total == total
    assert states(setup_of(n_gpus=8, accumulate=2)) == pytest.approx(16 * total / 8)
    assert states(setup_of(n_gpus=16, replicate=2, accumulate=2)) == pytest.approx(16 * total / 8)
    assert states(setup_of(n_gpus=8, accumulate=2, offload_states=True)) == 0
    assert host_gib(setup_of(n_gpus=8, offload_states=True)) == pytest.approx(16 * total / GIB)
    assert host_gib(setup_of(n_gpus=16, async_save=True)) == pytest.approx(6 * total / GIB)


def test_gradients_count_where_they_are_at_the_peak():
    short, long = setup_of("18b", n_gpus=8, seq_len=1024), setup_of("18b", n_gpus=64, batch_size=4)
    total = parameters(short).total
    assert memory(short)["gradients (fp32)"] == pytest.approx(4 * total / 8)  # the end of the backward
    assert memory(long)["gradients (fp32)"] < 0.1 * 4 * total / 64  # its beginning, with all activations


def meta_decoder(setup):
    with torch.device("meta"):
        return Decoder(setup.config, type(setup.residual)(**setup.residual.options))


def test_layer_that_is_gathered_is_the_largest_of_the_model():
    setup = setup_of()
    layers = meta_decoder(setup).layers
    largest = max(sum(p.numel() for p in layer.parameters()) for layer in layers)
    assert parameters(setup).layer == pytest.approx(largest, rel=1e-4)  # norms are left out
    spread = parameters(setup_of(n_gpus=8, expert_parallel=8)).layer
    assert spread < largest / 6


def saved_bytes(module, *inputs):
    """What autograd keeps of a forward, parameters left out."""
    own, kept = {p.untyped_storage().data_ptr() for p in module.parameters()}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(*inputs)
    return sum(n_bytes for n_bytes, _ in kept.values())


class FusedNorm(torch.autograd.Function):
    """Keeps what the GPU's RMSNorm keeps: the input and a number per row; the CPU's keeps fp32 copies."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, x[..., 0].float())
        return x * weight


@pytest.mark.parametrize("kind", ["attention", "dense", "moe"])
def test_saved_bytes_are_what_autograd_saves(kind, monkeypatch):
    """In bf16 weights, as FSDP2 gathers them; the router in fp32."""
    monkeypatch.setattr(RMSNorm, "forward", lambda self, x: FusedNorm.apply(x, self.weight))
    config = small_config(d_model=128, n_heads=8, n_kv_heads=2, head_dim=16, d_ff=256, d_expert=64, n_experts=12)
    decoder = Decoder(config, Vanilla(), torch.bfloat16)
    decoder.initialize(0)
    decoder.layers.bfloat16()
    layer = decoder.layers[0 if kind == "dense" else 1]
    if kind == "moe":
        layer.mlp.router.float()
    x = torch.randn(2, 64, 128, dtype=torch.bfloat16, requires_grad=True)
    if kind == "attention":
        sequence = sequence_of(torch.zeros(2, 64, dtype=torch.long), None, config)
        seen, expected = saved_bytes(layer.attention, x, sequence), attention_bytes(config)
    else:
        seen, expected = saved_bytes(layer.mlp, x), mlp_bytes(config, 0 if kind == "dense" else 1)
    assert expected * 128 == pytest.approx(seen, rel=0.1)


@pytest.mark.parametrize(
    ("residual", "per_sublayer"),
    [(Vanilla, 0), (lambda: MSAR(4, schedule="per_read"), 1), (lambda: MSAR(4), 1 + 4), (MHC, 4)],
    ids=["what is read", "blocks", "blocks and retrieved streams", "lanes"],
)
def test_depth_state_keeps_one_tensor_per_write_or_its_lanes(residual, per_sublayer):
    setup = setup_of(residual=residual())
    kept, _ = state_bytes(setup)
    D, L = setup.config.d_model, setup.config.n_layers
    assert kept == pytest.approx(2 * D * (2 * L + 1) * per_sublayer, rel=0.05, abs=2 * D)
    between_layers, _ = state_bytes(replace(setup, checkpointing="full"))
    assert between_layers < 0.65 * 2 * D * (2 * L + 1) * max(per_sublayer, 1)


def test_ten_billion_fit_two_large_gpus_and_not_one():
    assert total_gib(setup_of(n_gpus=2, checkpointing="selective")) < 141
    assert total_gib(setup_of(n_gpus=1, checkpointing="full")) > 141


@pytest.mark.parametrize("n_gpus", [2, 4, 8])
def test_remedies_make_it_fit(n_gpus):
    setup = setup_of("18b", n_gpus=n_gpus, reshard_after_forward=False, batch_size=4)
    assert total_gib(setup) > 60
    for text, fitting in remedies(setup, 60.0):
        assert total_gib(fitting) <= 60
        assert "--" in text
        break
    else:
        pytest.fail("offloading alone makes it fit")


def test_reads_that_keep_statistics_only_are_a_remedy():
    setup = setup_of(n_gpus=8, checkpointing="selective", batch_size=4)
    (text, fitting), *_ = remedies(setup, total_gib(setup) - 5)
    assert text == "--model.residual.init_args.schedule=per_read"
    assert fitting.residual.options == setup.residual.options | {"schedule": "per_read"}


def test_enough_gpus_is_the_least_doubling():
    setup = setup_of("28b", n_gpus=4, checkpointing="full")
    n_gpus = enough_gpus(setup, 80.0)
    assert total_gib(replace(setup, n_gpus=n_gpus)) <= 80 < total_gib(replace(setup, n_gpus=n_gpus // 2))
    assert enough_gpus(setup, 4.0) is None


def test_a_step_takes_longer_with_recomputation_and_over_the_network():
    plain, _ = step_seconds(setup_of(), 0.4)
    recomputing, inside = step_seconds(setup_of(checkpointing="full"), 0.4)
    assert recomputing == pytest.approx(4 / 3 * plain)
    _, between = step_seconds(setup_of(n_gpus=16), 0.4)
    _, hybrid = step_seconds(setup_of(n_gpus=16, replicate=2), 0.4)
    assert inside < hybrid < between


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"n_gpus": 0}, "gpus must be at least 1"),
        ({"replicate": 3}, "replicate=3 must divide gpus=8"),
        ({"expert_parallel": 16}, "expert_parallel=16 must divide the 8 GPUs"),
    ],
    ids=["gpus", "replicate", "expert_parallel"],
)
def test_impossible_setups_are_refused_by_name(options, named):
    with pytest.raises(ValueError, match=named):
        setup_of(**options)


def test_printed_plan_says_whether_it_fits_and_what_helps(capsys):
    print_plan(setup_of("28b", n_gpus=8), 80.0, 0.4)
    text = capsys.readouterr().out
    assert "does not fit" in text
    assert "fits with --model.checkpointing=" in text
    print_plan(setup_of("28b", n_gpus=64, checkpointing="full"), 80.0, 0.4)
    assert "to spare on each GPU" in capsys.readouterr().out
