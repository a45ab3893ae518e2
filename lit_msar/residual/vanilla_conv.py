"""Vanilla with MSAR's convolutions: how much of MSAR is local token mixing, how much depth attention? (control)"""

from types import ModuleType
from typing import Literal

from torch import Tensor

import kernels as kernel_choice
from kernels import Kernels, reference
from kernels.reference import Gate
from lit_msar.initialization import constant, normal
from lit_msar.residual.base import Cost, Residual, Site, State
from lit_msar.residual.msar import GATE_SCALE, WEIGHT_STD, conv_start, gate_bias_start


class VanillaConv(Residual):
    """`h = sum_j g_j u_j(x)`, `x <- x + F(h)`: every read mixes m convolved views of the sum; the sum stays as it is.

    The views u_j and the gates g are MSAR's, with the read's own taps. State: `(position?, x)`, x the sum [B, T, D].
    40 D + 5 parameters per read for kernel sizes (1, 4, 8, 12).

    Args:
        kernel_sizes: causal conv width per stream, in tokens; starts with 1, the sum itself; one must be wider.
        conv_init: `uniform` (Conv1d's own) or `delta` (tap 0 is 1, plus N(0, 0.02^2) on all taps).
        mix: `adaptive` (MSAR's gate) or `mean` of the streams.
        gate: `sigmoid` or `softmax` over the streams.
        eps: of the gate's norm.
        kernels: auto, triton, reference (plain PyTorch) or compiled (torch.compile of it).
    """

    no_decay = frozenset({"mix_scale", "mix_bias"})

    def __init__(
        self,
        kernel_sizes: tuple[int, ...] = (1, 4, 8, 12),
        conv_init: Literal["uniform", "delta"] = "uniform",
        mix: Literal["adaptive", "mean"] = "adaptive",
        gate: Gate = "sigmoid",
        eps: float = 1e-5,
        kernels: Kernels = "auto",
    ) -> None:
        super().__init__(
            kernel_sizes=list(kernel_sizes), conv_init=conv_init, mix=mix, gate=gate, eps=eps, kernels=kernels
        )
        reference.check_kernel_sizes(kernel_sizes)
        if not reference.n_taps(kernel_sizes):
            raise ValueError(f"kernel_sizes={list(kernel_sizes)} has no conv; add a width or use residual=Vanilla")
        kernel_choice.check(kernels)
        self.kernel_sizes = tuple(kernel_sizes)
        self.m = len(kernel_sizes)
        self.conv_init = conv_init
        self.has_mixer = mix == "adaptive"
        self.gate = gate
        self.eps = eps
        self.kernels = kernels

    def ops(self, x: Tensor) -> ModuleType:
        """The module of operations that runs tensors like `x`."""
        return kernel_choice.implementation(self.kernels, x.device)

    def build(self, d_model: int, n_layers: int) -> None:
        super().build(d_model, n_layers)
        m, n_reads = self.m, self.n_sublayers + 1
        taps_start = conv_start(self.conv_init, self.kernel_sizes)
        self.declare_list("taps", (reference.n_taps(self.kernel_sizes), d_model), [taps_start] * n_reads)
        if self.has_mixer:
            self.declare_list("mix_weight", (m, m, d_model), [normal(WEIGHT_STD)] * n_reads)
            self.declare_list("mix_scale", (1,), [constant(GATE_SCALE)] * n_reads)
            self.declare_list("mix_bias", (m,), [constant(gate_bias_start(self.gate, m))] * n_reads)

    def mixer(self, site: Site) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Mix weight [m, m, D], scale [1] and bias [m] of the read at `site`; None for mean mixing."""
        if not self.has_mixer:
            return None, None, None
        return self.mix_weight[site.index], self.mix_scale[site.index], self.mix_bias[site.index]

    def begin(self, x: Tensor, position: Tensor | None = None) -> State:
        return (x,) if position is None else (position, x)

    def read(self, state: State, site: Site) -> tuple[Tensor, State]:
        position, x = state if len(state) == 2 else (None, state[0])
        read = self.ops(x).expand_mix_read(
            x,
            self.taps[site.index],
            *self.mixer(site),
            kernel_sizes=self.kernel_sizes,
            gate=self.gate,
            eps=self.eps,
            position=position,
        )
        return read, state

    def write(self, state: State, site: Site, y: Tensor) -> State:
        return (*state[:-1], state[-1] + y)

    def inspect(self, state: State, site: Site) -> dict[str, Tensor]:
        if not self.has_mixer:
            return {}
        position, x = state if len(state) == 2 else (None, state[0])
        streams = reference.expand(x, self.taps[site.index], self.kernel_sizes, position)
        return {"gates": reference.mix_gates(streams, *self.mixer(site), self.gate, self.eps)}

    def cost(self, site: Site) -> Cost:
        m, D, K = self.m, self.d_model, reference.n_taps(self.kernel_sizes)
        parameters = K * D + (m * m * D + m + 1 if self.has_mixer else 0)
        multiply_adds = K * D + ((m + m * m + m) * D if self.has_mixer else m * D)
        if site.is_head:
            return Cost(parameters, multiply_adds, 2 * D)
        return Cost(parameters, multiply_adds + D, 5 * D)  # one in, one out; the write: two in, one out
