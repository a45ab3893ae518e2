"""A whole pass through depth, timed beside single reads: every read and write of 28 layers of identities.

Work done once for several reads (scores, retrievals of a block, writes) is in it, so it compares schedules fairly. Time
and floors are those of the whole pass: all 57 reads, a write's three elements a token and channel not counted.
"""

import torch
from torch import Tensor

from kernels import bench, bench_rows
from kernels.bench_rows import Row, Subject
from lit_msar import residual
from lit_msar.initialization import initialize

N_LAYERS, BLOCK_SIZE = 28, 8
HEAD_SOURCES = 8  # of the last read: the embedding and seven blocks
OPS = {
    "depth_attnres": ("AttnRes", {}),
    "depth_msar": ("MSAR", {"schedule": "per_read"}),
    "depth_msar_block": ("MSAR", {"schedule": "per_block"}),
}
KERNELS = {"triton": "triton", "torch.compile": "compiled", "eager": "reference"}


class DepthPass:
    """One strategy with its parameters on `device`, and the pass as a function of the embedding."""

    def __init__(self, op: str, implementation: str, d_model: int, n_layers: int, device: str) -> None:
        name, options = OPS[op]
        cls = getattr(residual, name)
        self.strategy = cls(block_size=BLOCK_SIZE, kernels=KERNELS[implementation], **options)
        self.strategy.build(d_model, n_layers)
        self.strategy.to(device)
        initialize(self.strategy, seed=0)
        self.sites = residual.sites(n_layers)[:-1]

    def __call__(self, x: Tensor) -> Tensor:
        state = self.strategy.begin(x)
        for site in self.sites:
            h, state = self.strategy.read(state, site)
            state = self.strategy.write(state, site, h)
        return self.strategy.finish(state)

    def n_sources(self) -> list[int]:
        """N of every read, the head's included."""
        last = type(self.sites[-1])(len(self.sites), len(self.sites))
        return [self.strategy.n_sources(site) for site in (*self.sites, last)]


def prepare(row: Row) -> Subject:
    """One pass, ready to be timed; n is that of its last read."""
    depth = DepthPass(row.op, row.implementation, row.d_model, N_LAYERS, "cuda")
    x = torch.randn(1, row.tokens, row.d_model, device="cuda").bfloat16().requires_grad_()
    dh = torch.randn_like(x.detach())
    leaves, counts = [x, *depth.strategy.parameters()], depth.n_sources()

    def forward() -> Tensor:
        with torch.no_grad():
            return depth(x)

    def forward_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(depth(x), leaves, dh, allow_unused=True)

    def floor(which: str, bandwidth: float) -> tuple[float, float]:
        single = "attnres" if row.op == "depth_attnres" else "msar"
        floors = [bench.floors(single, n, row.d_model, row.tokens, which, bandwidth) for n in counts]
        return tuple(sum(floor) for floor in zip(*floors, strict=True))

    measured = {"extra_mib": f"{bench_rows.extra_mib(lambda: depth(x)):.1f}"}
    return Subject({"forward": forward, "forward_backward": forward_backward}, floor, 1, measured)
