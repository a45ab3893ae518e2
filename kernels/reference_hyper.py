"""The definition of Hyper-Connections in plain PyTorch (HC, arXiv 2409.19606; mHC, arXiv 2512.24880), over n lanes x:

    h = pre x                     aggregate
    x <- res x + post^T y         update

`reference` offers these operations beside depth attention's; precision and letters as there.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.precision import accumulation_dtype, raised


def aggregate(lanes: Tensor, pre: Tensor) -> Tensor:
    """The sublayer's input `pre x`: lanes [B, T, n, D] weighted by [B, T, n], in the accumulation dtype."""
    return torch.einsum("btn,btnd->btd", pre, raised(lanes))


def update(lanes: Tensor, y: Tensor, post: Tensor, res: Tensor) -> Tensor:
    """The lanes after a sublayer: `res x + post^T y` (mHC, equation of Section 3).

    Args:
        lanes: [B, T, n, D].
        y: [B, T, D], what the sublayer gave.
        post: [B, T, n].
        res: [B, T, n, n] by (lane written, lane read): row i makes lane i.
    Returns:
        [B, T, n, D] in the lanes' dtype.
    """
    mixed = torch.einsum("btij,btjd->btid", res, raised(lanes)) + post.unsqueeze(-1) * raised(y).unsqueeze(2)
    return mixed.to(lanes.dtype)


def hc_coefficients(
    lanes: Tensor, weight: Tensor | None, scale: Tensor | None, pre: Tensor, post: Tensor, res: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`scale tanh(W RMSNorm(x_j)) + static` for every lane j (HC Eq. 10 to 13); the norm is per lane, without gain.

    Args:
        lanes: [B, T, n, D].
        weight: [n + 2, D]: the rows of pre, of post and of the n lanes written; None leaves the static part alone.
        scale: [2]: of pre and res, and of post.
        pre, post: [n], and res: [n, n] by (lane written, lane read): the static part.
    Returns:
        pre [B, T, n], post [B, T, n] and res [B, T, n, n] in the accumulation dtype.
    """
    B, T = lanes.shape[:2]
    dtype = accumulation_dtype(lanes.dtype)
    pre, post, res = (static.to(dtype).expand(B, T, *static.shape) for static in (pre, post, res))
    if weight is None:
        return pre, post, res
    x = raised(lanes)
    rstd = torch.rsqrt(x.square().mean(-1) + eps).unsqueeze(2)  # [B, T, 1, n]
    dynamic = torch.tanh(torch.einsum("pd,btjd->btpj", weight.to(dtype), x) * rstd)  # [B, T, n + 2, n]
    of_alpha, of_beta = scale.to(dtype).unbind()
    return pre + of_alpha * dynamic[:, :, 0], post + of_beta * dynamic[:, :, 1], res + of_alpha * dynamic[:, :, 2:]


def hc_read(
    lanes: Tensor, weight: Tensor | None, scale: Tensor | None, pre: Tensor, post: Tensor, res: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The input of a sublayer and what its write needs. Args as `hc_coefficients`.

    Returns:
        [B, T, D] in the lanes' dtype, post [B, T, n] and res [B, T, n, n] in the accumulation dtype.
    """
    pre, post, res = hc_coefficients(lanes, weight, scale, pre, post, res, eps)
    return aggregate(lanes, pre).to(lanes.dtype), post, res


def sinkhorn(logits: Tensor, n_rounds: int, eps: float = 0.0) -> Tensor:
    """exp(logits) made doubly stochastic: each round divides by column sums, then by row sums (mHC Eq. 9).

    The rows come last, so with eps = 0 they sum to 1 exactly and the columns nearly. `eps` is added where DeepSeek-V4
    adds it: to the first column-normalised matrix and to every later sum. Finite while every logit is within 87 (fp32)
    of its column's largest, or eps > 0.

    Args:
        logits: [..., n, n] by (lane written, lane read).
    Returns:
        The same shape and dtype.
    """
    matrix = torch.softmax(logits, dim=-2) + eps  # exp and the first column step, without overflow
    matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
    for _ in range(n_rounds - 1):
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
    return matrix


def lane_logits(lanes: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight RMSNorm(vec(x)), one norm over all n D values, divided after the product (mHC Eq. 14 to 16).

    Args:
        lanes: [B, T, n, D].
        weight: [P, n D].
    Returns:
        [B, T, P] in the accumulation dtype.
    """
    flat = raised(lanes).flatten(-2)  # [B, T, n D]
    return F.linear(flat, weight.to(flat.dtype)) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)


def mhc_coefficients(
    lanes: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, n_rounds: int, eps: float, sinkhorn_eps: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """sigmoid, 2 sigmoid and Sinkhorn of `alpha (phi RMSNorm(vec(x))) + bias` (mHC Eq. 7 to 9).

    Args:
        lanes: [B, T, n, D].
        phi: [n n + 2 n, n D], rows of pre, post and res, res by (lane written, lane read).
        alpha: [3], of pre, post and res.
        bias: [n n + 2 n].
        n_rounds: of Sinkhorn.
        sinkhorn_eps: see `sinkhorn`; also added to pre, as DeepSeek-V4 does.
    Returns:
        pre [B, T, n], post [B, T, n] and res [B, T, n, n] in the accumulation dtype.
    """
    n = lanes.shape[2]
    logits = lane_logits(lanes, phi, eps)
    sizes = [n, n, n * n]
    gates = torch.cat([a.expand(size) for a, size in zip(alpha.to(logits.dtype).unbind(), sizes, strict=True)])
    pre, post, res = (gates * logits + bias.to(logits.dtype)).split(sizes, dim=-1)
    res = sinkhorn(res.unflatten(-1, (n, n)), n_rounds, sinkhorn_eps)
    return torch.sigmoid(pre) + sinkhorn_eps, 2 * torch.sigmoid(post), res


def mhc_read(
    lanes: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, n_rounds: int, eps: float, sinkhorn_eps: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """The input of a sublayer and what its write needs. Args as `mhc_coefficients`.

    Returns:
        [B, T, D] in the lanes' dtype, post [B, T, n] and res [B, T, n, n] in the accumulation dtype.
    """
    pre, post, res = mhc_coefficients(lanes, phi, alpha, bias, n_rounds, eps, sinkhorn_eps)
    return aggregate(lanes, pre).to(lanes.dtype), post, res


def mhc_contract(
    lanes: Tensor, weight: Tensor, scale: Tensor, bias: Tensor, eps: float, sinkhorn_eps: float = 0.0
) -> Tensor:
    """DeepSeek-V4's learned contraction: the lanes weighted by sigmoid(scale (weight RMSNorm(vec(x))) + bias).

    Args:
        lanes: [B, T, n, D].
        weight: [n, n D].
        scale: [1].
        bias: [n].
    Returns:
        [B, T, D] in the lanes' dtype.
    """
    logits = lane_logits(lanes, weight, eps)
    pre = torch.sigmoid(scale.to(logits.dtype) * logits + bias.to(logits.dtype)) + sinkhorn_eps
    return aggregate(lanes, pre).to(lanes.dtype)
