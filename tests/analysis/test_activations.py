from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from conftest import small_config
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from lit_msar.analysis.activations import (
    alive_in_mlp,
    kept_by_attention,
    kept_by_mlp,
    mlp_parameters,
    shared_parameters,
)
from lit_msar.model import Decoder, DecoderConfig
from lit_msar.model.attention import sequence_of
from lit_msar.model.layers import RMSNorm
from lit_msar.model.recompute import recomputed
from lit_msar.residual import Vanilla

B, T = 2, 64
CONFIG = small_config(
    d_model=136,
    n_heads=8,
    n_kv_heads=2,
    head_dim=16,
    d_ff=264,
    d_expert=72,
    n_experts=18,
    top_k=8,
    n_shared_experts=3,
)


class FusedNorm(torch.autograd.Function):
    """Keeps what the GPU's RMSNorm keeps: the input and a number per row; the CPU's keeps fp32 copies."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, x[..., 0].float())
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def sublayer(kind: str, config: DecoderConfig = CONFIG) -> torch.nn.Module:
    """In bf16 weights, as FSDP2 gathers them; the router in fp32."""
    decoder = Decoder(config, Vanilla(), torch.bfloat16)
    decoder.initialize(0)
    decoder.layers.bfloat16()
    layer = decoder.layers[0 if kind == "dense" else 1]
    if kind in ("moe", "routed"):
        layer.mlp.router.float()
    return layer.attention if kind == "attention" else layer.mlp


def saved_bytes(function, given, *inputs) -> int:
    """Of the storages that a forward keeps and that hold a value per token or more, those of `given` left out."""
    given = {t.untyped_storage().data_ptr() for t in given}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given and storage.nbytes() // tensor.element_size() >= B * T:
            kept[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*inputs)
    return sum(n_bytes for n_bytes, _ in kept.values())


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", ["attention", "dense", "moe", "routed"])
def test_kept_bytes_are_what_autograd_and_the_partitioner_keep(kind, compiles, monkeypatch):
    """Compiled, the graph is cut as Inductor cuts it, into what runs forward and what runs backward."""
    config = replace(CONFIG, n_shared_experts=0) if kind == "routed" else CONFIG
    module = function = sublayer(kind, config)
    if compiles:
        torch.compiler.reset()
        # eight experts per token, as in the paper: with fewer the partitioner recomputes the sum of their scores
        function = torch.compile(module, backend="aot_eager_decomp_partition", dynamic=False)
    else:
        monkeypatch.setattr(RMSNorm, "forward", lambda self, x: FusedNorm.apply(x, self.weight))
    x = torch.randn(B, T, CONFIG.d_model, dtype=torch.bfloat16, requires_grad=True)
    given, inputs = list(module.parameters()), [x]
    if kind == "attention":
        sequence = sequence_of(torch.zeros(B, T, dtype=torch.long), None, CONFIG)
        given, inputs = [*given, sequence.cos, sequence.sin], [x, sequence]
        expected = kept_by_attention(CONFIG)
    else:
        expected = kept_by_mlp(config, 0 if kind == "dense" else 1, compiles)
    assert saved_bytes(function, given, *inputs) == B * T * sum(expected.values())


def is_scratch(allocated: list, freed: list) -> bool:
    """Whether a product gave memory back before it ended, both as the events around the two."""
    products = {id(node) for node in allocated if node.name in ("aten::mm", "aten::_grouped_mm")}
    return any(id(node) in products for node in freed)


def peak_bytes(function, smallest: int) -> int:
    """The most that lives at once of the tensors of at least `smallest` bytes that `function` makes.

    Scratch memory of the CPU's products is left out.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    events = []

    def walk(node, around):
        if node.tag == _EventType.Allocation:
            events.append((node.start_time_ns, node.extra_fields.ptr, node.extra_fields.alloc_size, around))
        for child in node.children:
            walk(child, [*around, node])

    for node in profiled.profiler.kineto_results.experimental_event_tree():
        walk(node, [])
    steps, open_steps = [], {}
    for _, address, n_bytes, around in sorted(events, key=lambda event: event[0]):
        if 0 < n_bytes < smallest:
            continue
        if n_bytes > 0:
            open_steps[address] = len(steps), around
        elif address not in open_steps:
            continue
        else:
            start, allocated = open_steps.pop(address)
            if is_scratch(allocated, around):
                steps[start] = n_bytes = 0
        steps.append(n_bytes)
    return max(accumulate(steps))


@pytest.mark.parametrize("n_rows", [2, 6], ids=["few tokens", "many tokens"])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_peak_of_a_backward_is_what_is_counted_alive(kind, n_rows, monkeypatch):
    """Of tensors as wide as a token, and of gradients: most of it with few tokens."""
    monkeypatch.setattr(RMSNorm, "forward", lambda self, x: FusedNorm.apply(x, self.weight))
    layer, module, width = 0 if kind == "dense" else 1, sublayer(kind), 2 * CONFIG.d_model
    x = torch.randn(n_rows, T, CONFIG.d_model, dtype=torch.bfloat16, requires_grad=True)
    y, _ = recomputed(module, x)
    gradient = torch.ones_like(y)
    smallest = min(n_rows * T * width, width * CONFIG.n_shared_experts * CONFIG.d_expert)
    seen = peak_bytes(lambda: y.backward(gradient), smallest)
    stays, moments = alive_in_mlp(CONFIG, layer, compiles=False, recomputes=True)
    assert stays.pop("read") == width  # the checkpoint has it
    wide = sum(n_bytes for n_bytes in stays.values() if n_bytes >= width)
    of_mlp, of_shared = 2 * mlp_parameters(CONFIG, layer), 2 * shared_parameters(CONFIG, layer)
    assert seen == max(
        n_rows * T * (wide + held.per_token) + of_mlp * held.gradient + of_shared * (held.gradient > 0)
        for held in moments
    )
