"""Attention Residuals (arXiv 2603.15031): a learned softmax over earlier outputs instead of their sum."""

from torch import Tensor

import kernels as kernel_choice
from kernels import Kernels, reference
from lit_msar.initialization import constant
from lit_msar.residual.base import Cost, Site, State
from lit_msar.residual.depth import DepthAttention, joined, split_position


class AttnRes(DepthAttention):
    """`h_l = sum_i softmax_i(q_l . RMSNorm(v_i)) v_i` over the sources v_i (Eq. 2 to 6); the values are not normalised.

    The pseudo-query starts at zero, so the first step reads the uniform mean. State: see `DepthAttention`.

    Args:
        block_size: S, sublayers per depth block; 1 is the full form, null means 2 ceil(2 n_layers / 16).
        key_gain: learned gain of the key norm, one [D] per read (Kimi's form); it folds into the query.
        n_depth_heads: heads on slices of the channels, each with its own softmax; 1 in the paper, 16 in its ablation.
        eps: of the key norm.
        kernels: auto, triton, reference (plain PyTorch) or compiled (torch.compile of it).
    """

    no_decay = frozenset({"query", "key_gain"})

    def __init__(
        self,
        block_size: int | None = None,
        key_gain: bool = True,
        n_depth_heads: int = 1,
        eps: float = 1e-5,
        kernels: Kernels = "auto",
    ) -> None:
        super().__init__(block_size, eps, kernels, key_gain=key_gain, n_depth_heads=n_depth_heads)
        if n_depth_heads < 1:
            raise ValueError(f"n_depth_heads must be at least 1, got {n_depth_heads}")
        if kernels == "triton" and n_depth_heads > 1:
            raise ValueError(
                f"kernels=triton reads with one head over all channels, got n_depth_heads={n_depth_heads}; "
                "use kernels=auto or reference"
            )
        self.has_key_gain = key_gain
        self.n_depth_heads = n_depth_heads

    def build(self, d_model: int, n_layers: int) -> None:
        super().build(d_model, n_layers)
        if d_model % self.n_depth_heads:
            raise ValueError(f"n_depth_heads={self.n_depth_heads} must divide d_model={d_model}")
        n_reads = self.n_sublayers + 1
        self.declare_list("query", (d_model,), [constant(0.0)] * n_reads)
        if self.has_key_gain:
            self.declare_list("key_gain", (d_model,), [constant(1.0)] * n_reads)

    def _gain(self, site: Site) -> Tensor | None:
        return self.key_gain[site.index] if self.has_key_gain else None

    def read(self, state: State, site: Site) -> tuple[Tensor, State]:
        position, sources = split_position(state)
        query, gain = self.query[site.index], self._gain(site)
        if self.n_depth_heads > 1:
            ops = kernel_choice.implementation(self.kernels, sources[0].device)  # no kernels for several heads
            return ops.split_head_read(sources, query, gain, self.n_depth_heads, self.eps), state
        x, sources = self.run_read("attnres_read", sources, query, gain, self.eps)
        return x, joined(position, sources)

    def inspect(self, state: State, site: Site) -> dict[str, Tensor]:
        _, sources = split_position(state)
        query, gain = self.query[site.index], self._gain(site)
        return {"weights": reference.split_head_weights(sources, query, gain, self.n_depth_heads, self.eps)}

    def cost(self, site: Site) -> Cost:
        n, D = self.n_sources(site), self.d_model
        return Cost(
            parameters=(1 + self.has_key_gain) * D,
            multiply_adds=3 * n * D + (0 if site.is_head else D),  # squares, dots, weighted sum; the write's addition
            elements=(n + 1) * D + self.write_elements(site),
        )
