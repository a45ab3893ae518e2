import collections
import math

import pytest
import torch
from conftest import small_config, small_decoder
from torch.utils._python_dispatch import TorchDispatchMode

from lit_msar.model import Decoder
from lit_msar.residual import MSAR, Vanilla


def batch(T=13, vocab=97):
    stream = torch.randint(vocab, (2, T + 1))
    return stream[:, :-1], stream[:, 1:]


def test_start_from_the_meta_device_equals_a_direct_start():
    direct = small_decoder(MSAR(), seed=3)
    with torch.device("meta"):
        model = Decoder(small_config(), MSAR())
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu").initialize(3)
    for name, tensor in direct.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
        assert tensor.isfinite().all(), name


def test_initialisation_is_the_stated_one():
    model = small_decoder(d_model=256, n_heads=8, head_dim=32, d_ff=512, vocab_size=2000)
    output_std = 0.02 / math.sqrt(2 * 3)
    expected = {
        "embedding.weight": 0.02,
        "head.weight": 0.02,
        "layers.0.attention.qkv.weight": 0.02,
        "layers.0.attention.out.weight": output_std,
        "layers.0.mlp.mlp.gate_up.weight": 0.02,
        "layers.0.mlp.mlp.down.weight": output_std,
        "layers.1.mlp.router.weight": 0.02,
        "layers.1.mlp.experts.gate_up": 0.02,
        "layers.1.mlp.experts.down": output_std,
        "layers.1.mlp.shared.down.weight": output_std,
    }
    state = model.state_dict()
    for name, std in expected.items():
        assert state[name].std().item() == pytest.approx(std, rel=0.05), name
        assert abs(state[name].mean().item()) < 0.1 * std, name
    norms = [name for name in state if "norm" in name]
    assert len(norms) == 3 * 4 + 1
    assert all((state[name] == 1).all() for name in norms)


def test_a_parameter_starts_the_same_in_every_model():
    vanilla, msar = small_decoder(Vanilla()).state_dict(), small_decoder(MSAR(), n_layers=3).state_dict()
    shared = [name for name in vanilla if not name.startswith("residual")]
    assert all(torch.equal(vanilla[name], msar[name]) for name in shared)


def test_initial_loss_is_near_the_logarithm_of_the_vocabulary():
    d_model, vocab = 256, 4096
    model = small_decoder(MSAR(), d_model=d_model, vocab_size=vocab, n_heads=8, head_dim=32)
    tokens, targets = batch(T=256, vocab=vocab)
    loss = model(tokens, targets).losses.each.mean().item()
    assert loss == pytest.approx(math.log(vocab) + 0.0002 * d_model, rel=0.02)


@pytest.mark.parametrize("residual", [Vanilla, MSAR])
def test_checkpointing_changes_no_gradient_and_counts_load_once(residual):
    tokens, targets = batch()
    results = []
    for checkpointing in ("none", "selective", "full"):
        model = small_decoder(residual(), checkpointing=checkpointing)
        out = model(tokens, targets)
        out.losses.total.backward()
        assert out.router.load.sum(1).tolist() == [2 * 13 * 2] * 2
        results.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in results[0].items():
        assert torch.equal(grad, results[1][name]), name
        assert torch.equal(grad, results[2][name]), name


class Products(TorchDispatchMode):
    """Counts the calls of operations."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket._qualified_op_name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("checkpointing", "attention", "experts"), [("none", 1, 1), ("selective", 1, 2), ("full", 2, 2)]
)
def test_checkpointing_recomputes_what_it_says(checkpointing, attention, experts):
    """Forward products per layer over a whole step: attention and experts once, or again; routing always once."""
    model = small_decoder(checkpointing=checkpointing)
    tokens, targets = batch()
    with Products() as seen:
        model(tokens, targets).losses.total.backward()
    n_moe = len(model.config.moe_layers)
    assert seen.counts["_scaled_dot_product_flash_attention_for_cpu"] == attention * model.config.n_layers
    of_backward = 2 * 2 * n_moe  # gradients of rows and weights, for each of two products
    assert seen.counts["_grouped_mm"] == 2 * experts * n_moe + of_backward
    assert seen.counts["topk"] == n_moe


def test_losses_are_the_cross_entropy_of_the_logits():
    model = small_decoder()
    tokens, targets = batch()
    logits = model(tokens).logits
    losses = model(tokens, targets).losses.each
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    torch.testing.assert_close(losses.flatten(), expected)


def test_a_later_token_changes_no_earlier_logit():
    model = small_decoder(MSAR(), dtype=torch.float64)
    tokens, _ = batch()
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 97
    a, b = model(tokens).logits, model(changed).logits
    # not bitwise: the experts' products sum in another order when other tokens join them
    torch.testing.assert_close(a[:, :7], b[:, :7], rtol=0, atol=1e-13)
    assert ((a - b).abs()[:, 7:] > 1e-6).any(-1).all()


def test_packed_documents_equal_documents_alone():
    model = small_decoder(MSAR(), dtype=torch.float64)
    tokens, _ = batch(T=20)
    position = torch.cat([torch.arange(8), torch.arange(12)]).expand(2, 20)
    packed = model(tokens, position=position).logits
    alone = torch.cat([model(tokens[:, :8]).logits, model(tokens[:, 8:]).logits], dim=1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-6)  # RoPE angles are fp32


def test_weight_decay_spares_norms_and_what_the_strategy_names():
    model = small_decoder(MSAR())
    spared = model.no_decay_names()
    assert {"head.norm.weight", "layers.0.attention.q_norm.weight", "residual.query.0"} <= spared
    assert not {"head.weight", "embedding.weight", "residual.taps.0", "residual.mix_weight.0"} & spared
    assert spared <= {name for name, _ in model.named_parameters()}


def test_dense_model_has_no_router_statistics():
    assert small_decoder(n_experts=0)(batch()[0]).router is None


def test_two_runs_are_bitwise_equal():
    tokens, targets = batch()
    grads = []
    for _ in range(2):
        model = small_decoder(MSAR())
        model(tokens, targets).losses.total.backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_compute_dtype_is_kept_through_depth():
    model = Decoder(small_config(), MSAR(), torch.bfloat16)
    model.initialize(0)
    tokens, targets = batch()
    assert model(tokens).logits.dtype == torch.bfloat16
    losses = model(tokens, targets).losses
    assert losses.each.dtype == torch.float32
    losses.total.backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.slow
def test_compiled_sublayers_give_the_same_losses_and_gradients():
    tokens, targets = batch()
    results = []
    for compiles in (False, True):
        model = small_decoder(MSAR())
        if compiles:
            model.compile_parts()
        losses = model(tokens, targets).losses
        losses.total.backward()
        results.append([losses.each, *(p.grad for p in model.parameters())])
    for plain, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)
