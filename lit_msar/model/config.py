"""Shape of the decoder, and what of it a user can set wrongly."""

from dataclasses import dataclass
from typing import Literal

from lit_msar.model.backends import Choice


@dataclass
class DecoderConfig:
    """A pre-norm MoE decoder (defaults: the 18B model's choices at a small size).

    Args:
        d_model: D, width of the residual stream; a multiple of 8.
        n_layers: L, Transformer layers of one attention and one MLP sublayer each.
        n_heads: query heads.
        n_kv_heads: key and value heads; divides n_heads.
        head_dim: channels per head; even.
        d_ff: width of the dense SwiGLU of the first layers.
        n_dense_layers: first layers with a dense MLP instead of a MoE.
        n_experts: routed experts per MoE layer; 0 makes every layer dense.
        top_k: routed experts per token.
        n_shared_experts: width of the shared expert, in units of d_expert; 0 for none.
        d_expert: width of one routed expert's SwiGLU; a multiple of 8.
        route_scale: factor on the renormalised routing weights.
        vocab_size: V, rows of the embedding and of the untied head.
        rope_theta: base of the rotary frequencies.
        norm_eps: eps of every RMSNorm.
        init_std: std of the normal start; output projections get init_std / sqrt(2 n_layers).
        aux_loss: whether MoE layers compute the sequence-wise balance loss.
        moe: `grouped_mm`, `loop` (the reference, one matrix product per expert), or `auto` (loop only where grouped_mm
            has no kernel: fp32 on a GPU, float64).
        attention: its kernel: `auto` (on a GPU cuDNN's or FlashAttention, whichever is faster there; on a CPU PyTorch's
            choice), or `cudnn`, `flash`, `efficient`, `math` alone. Packed documents go to FlashAttention by their
            boundaries under `auto` and `flash`; under the others, on a CPU and in fp32 a dense mask keeps them apart.
    """

    d_model: int = 256
    n_layers: int = 4
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 64
    d_ff: int = 1024
    n_dense_layers: int = 1
    n_experts: int = 32
    top_k: int = 4
    n_shared_experts: int = 1
    d_expert: int = 128
    route_scale: float = 1.0
    vocab_size: int = 4096
    rope_theta: float = 50_000.0
    norm_eps: float = 1e-5
    init_std: float = 0.02
    aux_loss: bool = False
    moe: Literal["auto", "grouped_mm", "loop"] = "auto"
    attention: Choice = "auto"

    def __post_init__(self) -> None:
        for name in ("d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads={self.n_heads} must be a multiple of n_kv_heads={self.n_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even, as rotary embedding turns pairs of channels")
        if not 0 <= self.n_dense_layers <= self.n_layers:
            raise ValueError(f"n_dense_layers={self.n_dense_layers} must lie between 0 and n_layers={self.n_layers}")
        if self.n_experts:
            self._check_experts()

    def _check_experts(self) -> None:
        if not 1 <= self.top_k <= self.n_experts:
            raise ValueError(f"top_k={self.top_k} must lie between 1 and n_experts={self.n_experts}")
        if self.n_shared_experts < 0:
            raise ValueError(f"n_shared_experts must not be negative, got {self.n_shared_experts}")
        for name in ("d_model", "d_expert"):
            if getattr(self, name) < 1 or getattr(self, name) % 8:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be a multiple of 8: grouped_mm needs rows of whole 16 bytes"
                )

    def is_moe(self, layer: int) -> bool:
        """Whether layer `layer` (from 0) has routed experts."""
        return self.n_experts > 0 and layer >= self.n_dense_layers

    @property
    def moe_layers(self) -> list[int]:
        """Indices of the layers with routed experts."""
        return [layer for layer in range(self.n_layers) if self.is_moe(layer)]

    @property
    def output_std(self) -> float:
        """Start of the output projections of attention and MLPs: their 2 L outputs sum to about one embedding."""
        return self.init_std / (2 * self.n_layers) ** 0.5
