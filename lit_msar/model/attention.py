"""The attention sublayer: PreNorm, grouped-query attention with QK-norm and rotary embedding."""

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

from lit_msar.model.backends import BACKENDS, can_run, packed_attention, preference, takes_boundaries, with_mask
from lit_msar.model.config import DecoderConfig
from lit_msar.model.layers import Linear, RMSNorm, rope_angles, rotate


class Sequence(NamedTuple):
    """What attention needs to know of the token axis; made once per forward, shared by all layers."""

    cos: Tensor
    """[T, 1, head_dim / 2], or [B, T, 1, head_dim / 2] for packed documents."""
    sin: Tensor
    mask: Tensor | None
    """[B, 1, T, T], true where a query may look; None without one."""
    boundaries: Tensor | None = None
    """[n + 1] int32 instead of a mask, see `packed_attention`; with neither attention is plainly causal."""
    backends: tuple[str, ...] = ()
    """Names of the backends to try, in order; () leaves it to PyTorch."""


def sequence_of(
    tokens: Tensor,
    position: Tensor | None,
    config: DecoderConfig,
    boundaries: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Sequence:
    """Angles, and what keeps documents apart in a batch.

    Args:
        tokens: [B, T]; only the shape and device are used.
        position: [B, T] place of each token in its document, 0 at every document's start; None for one stretch of text.
        boundaries: of the documents that `position` shows; used where a kernel takes them.
        dtype: of the attention.
    """
    T = tokens.shape[1]
    index = torch.arange(T, device=tokens.device)
    angles = rope_angles(index if position is None else position, config.head_dim, config.rope_theta).unsqueeze(-2)
    if boundaries is not None and takes_boundaries(config.attention, dtype, tokens.device):
        torch._dynamo.maybe_mark_dynamic(boundaries, 0)  # more documents compile nothing anew
        return Sequence(angles.cos(), angles.sin(), None, boundaries)
    mask, backends = None, preference(config.attention, tokens.device)
    if position is not None:
        backends = with_mask(backends)
        document = (position == 0).cumsum(1)  # [B, T]
        same = document.unsqueeze(2) == document.unsqueeze(1)  # [B, T, T]
        mask = (same & (index.unsqueeze(1) >= index)).unsqueeze(1)
    return Sequence(angles.cos(), angles.sin(), mask, backends=backends)


class Attention(nn.Module):
    """Causal grouped-query attention over [B, T, D], its PreNorm included."""

    def __init__(self, config: DecoderConfig, output_std: float) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        n_qkv = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.qkv = Linear(config.d_model, n_qkv, config.init_std)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.out = Linear(config.n_heads * config.head_dim, config.d_model, output_std)

    def forward(self, x: Tensor, sequence: Sequence) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, self.head_dim))  # [B, T, H + 2 H_kv, head_dim]
        q, k, v = heads.split([self.n_heads, self.n_kv_heads, self.n_kv_heads], dim=2)
        q = rotate(self.q_norm(q), sequence.cos, sequence.sin)
        k = rotate(self.k_norm(k), sequence.cos, sequence.sin)
        if sequence.boundaries is not None:
            return self.out(packed_attention(q, k, v, sequence.boundaries).flatten(2))
        order = [BACKENDS[name] for name in sequence.backends]
        with sdpa_kernel(order, set_priority=True) if order else nullcontext():
            y = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                attn_mask=sequence.mask,
                is_causal=sequence.mask is None,
                enable_gqa=True,
            )
        return self.out(y.transpose(1, 2).flatten(2))


def usable_backend(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> str:
    """The backend that plain causal attention of a decoder will take.

    Raises:
        ValueError: the one that was asked for cannot compute it.
    """
    shape = (config.n_heads, config.n_kv_heads, config.head_dim, dtype, device)
    found = next((name for name in preference(config.attention, device) or ("flash",) if can_run(name, *shape)), None)
    if found is None:
        raise ValueError(
            f"decoder.attention={config.attention} cannot compute {config.n_heads} heads over {config.n_kv_heads} of "
            f"{config.head_dim} channels in {str(dtype).removeprefix('torch.')} on {device.type}: use auto"
        )
    return found
