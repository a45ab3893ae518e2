import inspect

import pytest
import torch
from conftest import small_config
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from lit_msar.initialization import initialize
from lit_msar.model import attention as attention_module
from lit_msar.model import backends
from lit_msar.model.attention import Attention, Sequence, sequence_of, usable_backend
from lit_msar.model.backends import preference, with_mask


def attention(**changes):
    config = small_config(**changes)
    module = Attention(config, config.output_std)
    initialize(module, 0)
    return module.double(), config


def plain_attention(module, x, position, document):
    """The formula, query by query, with explicit loops over heads."""
    h = module.norm(x)
    B, T, _ = x.shape
    H, K, d = module.n_heads, module.n_kv_heads, module.head_dim
    heads = module.qkv(h).view(B, T, H + 2 * K, d)
    frequency = 50_000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle = position[..., None].double() * frequency

    def turned(z, weight):
        z = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + 1e-5) * weight
        a, b = z[..., : d // 2], z[..., d // 2 :]
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    out = torch.zeros(B, T, H, d, dtype=x.dtype)
    allowed = torch.ones(T, T).tril().bool() & (document[:, :, None] == document[:, None, :])
    for head in range(H):
        q = turned(heads[:, :, head], module.q_norm.weight)
        k = turned(heads[:, :, H + head // (H // K)], module.k_norm.weight)
        v = heads[:, :, H + K + head // (H // K)]
        logits = (q @ k.transpose(1, 2) / d**0.5).masked_fill(~allowed, -torch.inf)
        out[:, :, head] = logits.softmax(-1) @ v
    return module.out(out.flatten(2))


def test_attention_matches_the_formula():
    module, config = attention()
    x = torch.randn(2, 11, config.d_model, dtype=torch.float64)
    position = torch.arange(11).expand(2, 11)
    y = module(x, sequence_of(x[..., 0], None, config))
    expected = plain_attention(module, x, position, torch.zeros(2, 11))
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-7)  # angles are fp32


def test_packed_attention_matches_the_formula():
    module, config = attention()
    x = torch.randn(2, 11, config.d_model, dtype=torch.float64)
    position = torch.cat([torch.arange(4), torch.arange(7)]).expand(2, 11)
    document = torch.cat([torch.zeros(4), torch.ones(7)]).expand(2, 11)
    y = module(x, sequence_of(x[..., 0], position, config))
    torch.testing.assert_close(y, plain_attention(module, x, position, document), rtol=0, atol=1e-7)


def test_sample_that_starts_inside_a_document_keeps_its_rope_positions_relative():
    module, config = attention()
    x = torch.randn(1, 6, config.d_model, dtype=torch.float64)
    shifted = module(x, sequence_of(x[..., 0], torch.arange(100, 106)[None], config))
    torch.testing.assert_close(shifted, module(x, sequence_of(x[..., 0], None, config)), rtol=0, atol=1e-5)


def packed_batch():
    """Positions [2, 24] of documents of several lengths, and their boundaries with room for more."""
    lengths = [[5, 1, 11, 7], [24]]
    position = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    boundaries = torch.tensor([0, 5, 6, 17, 24, 48, 48, 48, 48], dtype=torch.int32)
    return position, boundaries


def one_by_one(q, k, v, ends_q, ends_k, max_q, max_k, *, is_causal=False, window_size=(-1, -1), enable_gqa=False):
    """What varlen_attn computes, a document at a time; q [M, H, head_dim]."""
    assert ends_q is ends_k
    assert is_causal or window_size == (-1, 0)
    assert max_q == max_k >= ends_q.diff().max()
    parts = zip(*(x.tensor_split(ends_q[1:-1].tolist()) for x in (q, k, v)), strict=True)
    return torch.cat(
        [
            scaled_dot_product_attention(
                *(x.transpose(0, 1) for x in part), is_causal=True, enable_gqa=enable_gqa
            ).transpose(0, 1)
            for part in parts
            if len(part[0])
        ]
    )


@pytest.mark.parametrize(
    "options",
    [{"is_causal"}, {"window_size"}, {"window_size", "enable_gqa"}],
    ids=lambda names: "-".join(sorted(names)),
)
def test_documents_by_boundaries_equal_a_dense_mask(monkeypatch, options):
    monkeypatch.setattr(backends, "varlen_attn", one_by_one)
    monkeypatch.setattr(backends, "_VARLEN_OPTIONS", options)
    monkeypatch.setattr(attention_module, "takes_boundaries", lambda *_: True)
    module, config = attention()
    position, boundaries = packed_batch()
    x = torch.randn(2, 24, config.d_model, dtype=torch.float64)
    by_boundaries = sequence_of(x[..., 0], position, config, boundaries)
    assert by_boundaries.mask is None
    expected = module(x, sequence_of(x[..., 0], position, config))
    torch.testing.assert_close(module(x, by_boundaries), expected, rtol=0, atol=1e-12)


def test_boundaries_of_any_number_compile_to_one_graph(monkeypatch):
    """Traced on a CPU; the kernel itself runs on a GPU only."""
    monkeypatch.setattr(attention_module, "takes_boundaries", lambda *_: True)
    module, config = attention()
    position, boundaries = packed_batch()
    x = torch.randn(2, 24, config.d_model, dtype=torch.float64)
    graphs = []

    def keep(graph, _):
        graphs.append(str(graph.graph))
        return lambda *_: (x,)

    torch.compiler.reset()
    compiled = torch.compile(module, backend=keep, fullgraph=True)
    for n_more in (0, 8, 40):
        longer = torch.cat([boundaries, boundaries.new_full((n_more,), 48)])
        compiled(x, sequence_of(x[..., 0], position, config, longer))
    assert len(graphs) == 1
    assert "_varlen_attn" in graphs[0]


def test_boundaries_wait_for_a_kernel_that_takes_them():
    _, config = attention()
    position, boundaries = packed_batch()
    sequence = sequence_of(position, position, config, boundaries, torch.bfloat16)
    assert sequence.boundaries is None, "no such kernel on a CPU"
    assert sequence.mask is not None


def test_varlen_attn_takes_what_it_is_given():
    """Its signature changed between versions of torch."""
    parameters = inspect.signature(varlen_attn).parameters
    assert [*parameters][:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert {"window_size", "is_causal"} & set(parameters)


def test_preference_is_the_fastest_of_the_device(monkeypatch):
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    for capability, first in (((9, 0), "cudnn"), ((10, 0), "cudnn"), ((8, 0), "flash")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert preference("auto", gpu)[0] == first
        assert set(preference("auto", gpu)) == backends.BACKENDS.keys()
    assert preference("auto", cpu) == with_mask(()) == ()
    assert preference("flash", cpu) == ("flash",)
    assert with_mask(("flash",))[1:] == ("efficient", "math")


@pytest.mark.parametrize("choice", ["auto", "flash", "math"])
def test_choices_agree_also_compiled_in_one_graph(choice):
    module, config = attention(attention=choice)
    x = torch.randn(2, 11, config.d_model, dtype=torch.float64)
    position = torch.cat([torch.arange(4), torch.arange(7)]).expand(2, 11)
    torch.compiler.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for p in (None, position):
        sequence = sequence_of(x[..., 0], p, config)
        plain = module(x, Sequence(sequence.cos, sequence.sin, sequence.mask))
        torch.testing.assert_close(module(x, sequence), plain, rtol=0, atol=1e-12)
        torch.testing.assert_close(compiled(x, sequence), plain, rtol=0, atol=1e-12)


def test_backend_that_cannot_run_is_refused_by_name():
    cpu = torch.device("cpu")
    assert usable_backend(small_config(), torch.float32, cpu) == "flash"
    assert usable_backend(small_config(attention="math"), torch.float32, cpu) == "math"
    with pytest.raises(ValueError, match=r"decoder\.attention=cudnn cannot compute 4 heads over 2 .* on cpu: use auto"):
        usable_backend(small_config(attention="cudnn"), torch.float32, cpu)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_documents_by_boundaries_equal_a_dense_mask_on_a_gpu(compiled):
    config = small_config(d_model=64, head_dim=32)
    module = Attention(config, config.output_std)
    initialize(module, 0)
    module.cuda()
    position, boundaries = (x.cuda() for x in packed_batch())
    x = torch.randn(2, 24, 64, device="cuda")
    gradients = []
    run = torch.compile(module, fullgraph=True) if compiled else module
    for dtype, ends in ((torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, boundaries)):
        leaf = x.clone().to(dtype).requires_grad_()
        sequence = sequence_of(position, position, config, ends, dtype)
        assert (sequence.boundaries is None) == (ends is None)
        y = run(leaf, sequence)
        (y.float() * x).sum().backward()
        gradients.append((y.detach().float(), leaf.grad.float()))
    for exact, masked, bounded in zip(*gradients, strict=True):
        assert (bounded - exact).norm() <= 1.5 * (masked - exact).norm() + 1e-4 * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("choice", ["auto", "cudnn", "flash", "efficient", "math"])
def test_backends_agree_on_a_gpu(choice):
    gpu = torch.device("cuda")
    # not every torch has grouped queries in the efficient kernel
    config = small_config(d_model=64, head_dim=32, attention=choice, n_kv_heads=4 if choice == "efficient" else 2)
    assert usable_backend(config, torch.bfloat16, gpu) == preference(choice, gpu)[0]
    module = Attention(config, config.output_std)
    initialize(module, 0)
    module.cuda()
    x = torch.randn(2, 128, 64, device="cuda", dtype=torch.bfloat16)
    sequence = sequence_of(x[..., 0], None, config)
    y = module(x, sequence)
    expected = module(x.float(), Sequence(sequence.cos, sequence.sin, None))
    assert (y.float() - expected).norm() < 0.02 * expected.norm()
    assert torch.isfinite(torch.autograd.grad(y.float().sum(), module.qkv.weight)[0]).all()
