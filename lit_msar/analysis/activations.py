"""What sublayers keep for the backward, and what is alive while an MLP is differentiated: tensor by tensor.

Bytes per token, in bf16 where nothing else is said; parameters and their bf16 copies are left out. The tests compare
what is kept with what autograd, and the partitioner of torch.compile, do keep.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from lit_msar.model import DecoderConfig


@dataclass(frozen=True)
class Held:
    """Alive at some moment of an MLP's backward, beside what stays of its input and of its routing."""

    per_token: float
    """Bytes."""
    gradient: float
    """Share of the MLP's weights that have theirs, the shared expert's left out: they are the first."""


def kept_by_attention(config: DecoderConfig) -> dict[str, int]:
    """By what it is; the same compiled or not, as the partitioner recomputes no product and no attention."""
    n_q, n_kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    return {
        "read": 2 * config.d_model,
        "norm": 2 * config.d_model,
        "q k v": 2 * (n_q + 2 * n_kv),
        "q and k, normed and turned": 2 * (n_q + n_kv),
        "output": 2 * n_q,
        "log-sum-exp": 4 * config.n_heads,
        "1 / rms of all norms": 4 * (1 + config.n_heads + config.n_kv_heads),
    }


def kept_by_mlp(config: DecoderConfig, layer: int, compiles: bool) -> dict[str, int]:
    """By what it is. Compiled, what products give and take is kept; silu and the router's sigmoid run again."""
    D, k, shared_width = config.d_model, config.top_k, config.n_shared_experts * config.d_expert
    around = {"read": 2 * D, "1 / rms": 4}
    if not config.is_moe(layer):
        return around | {"norm": 2 * D} | _swiglu(config.d_ff, compiles)
    if shared_width:  # routed experts take rows of their own
        around |= {"norm": 2 * D}
    around |= {
        "fp32 norm of the router": 4 * D,
        "scores": 4 * config.n_experts,
        "ids, order and inverse": 3 * 8 * k,
        "routing weights and their sum": 4 * k + 4,
    }
    if not compiles:
        around |= {"sum of the scores": 4, "sorted weights": 2 * k, "SwiGLU before its weight": 2 * k * config.d_expert}
    hidden = {f"experts' {name}": k * n_bytes for name, n_bytes in _swiglu(config.d_expert, compiles).items()}
    shared = {f"shared expert's {name}": n_bytes for name, n_bytes in _swiglu(shared_width, compiles).items()}
    return around | {"rows": 2 * k * D} | hidden | shared


def _swiglu(width: int, compiles: bool) -> dict[str, int]:
    return {"gate and up": 4 * width, "SwiGLU": 2 * width} | ({} if compiles else {"silu": 2 * width})


def alive_in_mlp(
    config: DecoderConfig, layer: int, compiles: bool, recomputes: bool
) -> tuple[dict[str, int], list[Held]]:
    """What stays through the backward of an MLP, by what it is, and the moments at which most is alive beside it.

    Args:
        recomputes: whether the backward begins with the forward.
    """
    kept = kept_by_mlp(config, layer, compiles)
    going = ("rows", "experts'", "SwiGLU", "gate", "silu")
    rows, of_swiglu = kept.get("rows", 0), sum(n for name, n in kept.items() if name.startswith(going[1:]))
    # the shared expert comes last and goes first: then its gradient of the norm is there in place of the norm
    stays = {name: n for name, n in kept.items() if not name.startswith((*going, "shared"))}
    D, F = config.d_model, config.d_ff
    if config.is_moe(layer):
        D, F = config.top_k * config.d_model, config.top_k * config.d_expert
    moments = list(_of_compiled(D, F, rows) if compiles else _of_eager(D, F, rows, of_swiglu))
    if recomputes:
        # not compiled, each token's rows are gathered before they are added to y
        outputs = rows * (1 if compiles else 2) + (2 * config.d_model if rows else 0)
        moments = [Held(rows + of_swiglu + outputs, 0.0), *moments]
    return stays, moments


def _of_compiled(D: int, F: int, rows: int) -> Iterator[Held]:
    """Each tensor goes at its last use; `rows` is 0 for a dense MLP, whose rows are its norm."""
    down, gate_up = 1 / 3, 2 / 3
    output = 2 * D if rows else 0  # its gradient; a dense MLP's is that of y
    yield Held(rows + (4 + 2) * F + output, down)  # gate and up, SwiGLU or its gradient
    yield Held(rows + (4 + 2 + 4) * F, down)  # gate and up, gradients of SwiGLU and of gate and up
    yield Held(4 * F + 2 * D, down + gate_up)  # gradients of gate and up and of the rows


def _of_eager(D: int, F: int, rows: int, of_swiglu: int) -> Iterator[Held]:
    """Each tensor goes with the node that kept it."""
    down, gate_up = 1 / 3, 2 / 3
    output = 2 * D if rows else 0
    yield Held(rows + of_swiglu + output + 2 * F, down)  # and the gradient of what the last product took
    if rows:
        yield Held(rows + of_swiglu + 2 * 2 * F, down)  # gradients of SwiGLU and, before they are summed, of its weight
    yield Held(rows + (4 + 2 + 3 * 2) * F, down)  # gate and up, silu; gradients of SwiGLU, of silu and of up
    yield Held(rows + 4 * F + 2 * D, down + gate_up)
    yield Held(2 * D + rows, down + gate_up)  # the rows' gradient, gathered by token


def mlp_parameters(config: DecoderConfig, layer: int) -> int:
    """Of a layer's SwiGLU: the dense one, or its routed experts."""
    if not config.is_moe(layer):
        return 3 * config.d_model * config.d_ff
    return config.n_experts * 3 * config.d_model * config.d_expert


def shared_parameters(config: DecoderConfig, layer: int) -> int:
    """Of a layer's shared expert."""
    return config.is_moe(layer) * config.n_shared_experts * 3 * config.d_model * config.d_expert
