"""Linear, RMSNorm, rotary embedding and SwiGLU: fp32 parameters that follow the dtype of what they are given."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_msar.initialization import Initialized, constant, normal


class Linear(Initialized):
    """`x W^T` without bias; the fp32 weight is cast to the input's dtype at use."""

    def __init__(self, n_in: int, n_out: int, std: float) -> None:
        super().__init__()
        self.declare("weight", (n_out, n_in), normal(std))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(Initialized):
    """`x / rms(x) * weight` over the last axis, in fp32 inside, returned in the input's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.declare("weight", (width,), constant(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps).to(x.dtype)


class SwiGLU(nn.Module):
    """`(silu(x W_gate) * x W_up) W_down`, gate and up projection in one product."""

    def __init__(self, d_model: int, width: int, std: float, output_std: float) -> None:
        super().__init__()
        self.gate_up = Linear(d_model, 2 * width, std)
        self.down = Linear(width, d_model, output_std)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_up(x)))


def swiglu(gate_up: Tensor) -> Tensor:
    """[.., 2 F] to [.., F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rope_angles(position: Tensor, head_dim: int, theta: float) -> Tensor:
    """Rotary angles [.., T, head_dim / 2] in fp32 of integer positions [.., T]."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, device=position.device, dtype=torch.float32) / head_dim)
    return position.unsqueeze(-1).float() * frequency


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channel pairs (i, i + head_dim / 2) of x [B, T, H, head_dim] by angles given as cos and sin."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)
