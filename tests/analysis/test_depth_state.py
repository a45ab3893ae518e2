import pytest
import torch

from lit_msar.analysis.depth_state import held_by_depth
from lit_msar.initialization import initialize
from lit_msar.residual import MHC, MSAR, AttnRes, Vanilla, sites


@pytest.mark.parametrize(
    "residual", [Vanilla, lambda: MSAR(4, schedule="per_read"), MHC], ids=["sum", "blocks", "lanes"]
)
def test_full_checkpointing_keeps_less(residual):
    plain, full = (held_by_depth(residual(), 64, 15, between_segments=between).kept[-1] for between in (False, True))
    assert full < 0.65 * max(plain, 2 * 64 * 31)


@pytest.mark.parametrize(
    ("residual", "per_sublayer"),
    [(Vanilla, 0), (lambda: MSAR(4, schedule="per_read"), 1), (lambda: MSAR(4), 1 + 4), (MHC, 4 + 1)],
    ids=["what is read", "blocks", "blocks and retrieved streams", "lanes and outputs"],
)
def test_depth_state_keeps_what_writes_make_and_reads_keep(residual, per_sublayer):
    D, L = 2080, 15
    kept = held_by_depth(residual(), D, L, between_segments=False).kept[-1]
    assert kept == pytest.approx(2 * D * (2 * L + 1) * per_sublayer, rel=0.05, abs=4 * D)


class Pass(torch.autograd.Function):
    """A sublayer that keeps nothing."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N_LAYERS, N_TOKENS, WIDTH = 2, 13, 64
ON_KERNELS = {
    "mHC": lambda kernels: MHC(n_lanes=2, sinkhorn_rounds=1, kernels=kernels),
    "AttnRes": lambda kernels: AttnRes(2, kernels=kernels),
    "MSAR, per read": lambda kernels: MSAR(2, (1, 2), schedule="per_read", kernels=kernels),
    "MSAR, per block": lambda kernels: MSAR(2, (1, 2), schedule="per_block", kernels=kernels),
}


def n_wide(tensors) -> int:
    """Two-byte widths of tokens in the storages of tensors that hold whole ones; parameters are no tokens."""
    storages = {t.untyped_storage().data_ptr(): t for t in tensors if t.numel() % (N_TOKENS * WIDTH) == 0}
    return sum(t.untyped_storage().nbytes() for t in storages.values()) // (2 * N_TOKENS * WIDTH)


@pytest.mark.parametrize("name", ON_KERNELS)
def test_depth_state_keeps_what_the_kernels_keep(name):
    """What is saved for the backward, with the last state and the head's read, which live until the loss."""
    pytest.importorskip("triton")
    strategy, saved = ON_KERNELS[name]("triton"), []
    strategy.build(WIDTH, N_LAYERS)
    initialize(strategy.to(DEVICE), 0)

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        state = strategy.begin(torch.randn(1, N_TOKENS, WIDTH, device=DEVICE).bfloat16().requires_grad_())
        for site in sites(N_LAYERS)[:-1]:
            x, state = strategy.read(state, site)
            state = strategy.write(state, site, Pass.apply(x))
        saved += [*state, strategy.finish(state)]
    for kernels in ("auto", "triton"):
        counted = held_by_depth(ON_KERNELS[name](kernels), WIDTH, N_LAYERS, between_segments=False).kept[-1]
        assert n_wide(saved) == int(counted) // (2 * WIDTH)


@pytest.mark.parametrize("name", ["MSAR, per read", "MSAR, per block"])
def test_what_waits_in_the_state_is_what_reads_to_come_need(name):
    pytest.importorskip("triton")
    strategy, n_waiting = ON_KERNELS[name]("triton"), []
    strategy.build(WIDTH, N_LAYERS)
    initialize(strategy.to(DEVICE), 0)
    with torch.no_grad():
        state = strategy.begin(torch.randn(1, N_TOKENS, WIDTH, device=DEVICE).bfloat16())
        *inner, head = sites(N_LAYERS)
        for site, following in zip(inner, [*inner[1:], head], strict=True):
            x, state = strategy.read(state, site)
            state = strategy.write(state, site, x.clone())
            n_waiting.append(n_wide(state) - strategy.n_sources(following))
    assert n_waiting == [strategy.waiting(site) // WIDTH for site in inner]
    assert any(n_waiting) == (name == "MSAR, per block")


def test_full_checkpointing_keeps_what_waits_between_layers():
    """Blocks of two layers: after the first, two reads are to come, and after the last the head's."""
    D, m, L = 64, 4, 4
    per_read, per_block = (
        held_by_depth(MSAR(4, schedule=schedule), D, L, between_segments=True) for schedule in ("per_read", "per_block")
    )
    n_waiting = [3 if layer == 2 else 2 for layer in (0, 2)] + [1]
    retrieved_for_head = 1
    assert per_block.kept[-1] - per_read.kept[-1] == 2 * m * D * (sum(n_waiting) + retrieved_for_head)
