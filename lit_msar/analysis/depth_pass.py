"""A whole pass through depth, timed beside single reads: every read and write of 28 layers of identities.

Work done once for several reads (scores, retrievals of a block, writes) is in it, so it compares schedules fairly. Time
and floors are those of the whole pass: all 57 reads, a write's three elements a token and channel not counted.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kernels import bench
from lit_msar import residual
from lit_msar.initialization import initialize

N_LAYERS, BLOCK_SIZE = 28, 8
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


def measure(op: str, implementation: str, d_model: int, tokens: int, bandwidth: float) -> Iterator[dict]:
    """The rows of one pass; `n_sources` is that of its last read."""
    depth = DepthPass(op, implementation, d_model, N_LAYERS, "cuda")
    x = torch.randn(1, tokens, d_model, device="cuda").bfloat16().requires_grad_()
    dh = torch.randn_like(x.detach())
    leaves = [x, *depth.strategy.parameters()]
    kept = bench.extra_mib(lambda x: depth(x), x)

    def forward() -> Tensor:
        with torch.no_grad():
            return depth(x)

    def forward_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(depth(x), leaves, dh, allow_unused=True)

    counts = depth.n_sources()
    calls: dict[str, Callable] = {"forward": forward, "forward_backward": forward_backward}
    single = "attnres" if op == "depth_attnres" else "msar"
    for which, call in calls.items():
        floors = [bench.floors(single, n, d_model, tokens, which, bandwidth) for n in counts]
        total = tuple(sum(floor) for floor in zip(*floors, strict=True))
        row = bench.described(op, implementation, counts[-1], d_model, tokens)
        yield row | bench.timed(which, call, 1, total) | {"error": "", "extra_mib": f"{kept:.1f}"}
