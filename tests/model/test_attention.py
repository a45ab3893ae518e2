import torch
from conftest import small_config

from lit_msar.initialization import initialize
from lit_msar.model.attention import Attention, sequence_of


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
