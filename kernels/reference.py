"""The definition of every residual operation in plain PyTorch; each GPU kernel is compared with it.

Depth attention (AttnRes, arXiv 2603.15031; MSAR) over N sources with m streams each:

    u_nj[t] = sum_i taps_j[i] * v_n[t - i]                 expand
    e_nj    = query_j . RMSNorm(u_nj)                      score
    r_j     = sum_n softmax_n(e_nj) u_nj                   retrieve
    h       = sum_j gate_j(r) r_j                          mix

Hyper-Connections are in `reference_hyper` and offered here too.

Half precision is raised to fp32 inside and lowered once at the end; fp32 and fp64 stay as they are, so that the same
function in float64 is the oracle of every test. Letters: B batch, T tokens, D d_model, N sources, m streams, n lanes,
K conv taps of all streams together.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.precision import accumulation_dtype, raised  # noqa: F401 (offered here)
from kernels.reference_hyper import (  # noqa: F401 (offered here)
    aggregate,
    hc_coefficients,
    hc_read,
    mhc_coefficients,
    mhc_contract,
    mhc_read,
    sinkhorn,
    update,
)

Gate = Literal["sigmoid", "softmax"]


def check_kernel_sizes(kernel_sizes: Sequence[int]) -> None:
    """Raise ValueError unless the widths are positive and the first stream is the source itself."""
    if not kernel_sizes or kernel_sizes[0] != 1:
        raise ValueError(f"kernel_sizes must start with 1 (the identity stream), got {list(kernel_sizes)}")
    if min(kernel_sizes) < 1:
        raise ValueError(f"kernel_sizes must be positive conv widths, got {list(kernel_sizes)}")


def tap_rows(kernel_sizes: Sequence[int]) -> list[slice | None]:
    """Rows of a stacked tap tensor [K, D] that belong to each stream; None for an identity stream (no taps)."""
    rows: list[slice | None] = []
    start = 0
    for size in kernel_sizes:
        rows.append(None if size == 1 else slice(start, start + size))
        start += 0 if size == 1 else size
    return rows


def n_taps(kernel_sizes: Sequence[int]) -> int:
    """K: learned taps per channel of one conv group, 24 for widths (1, 4, 8, 12)."""
    return sum(size for size in kernel_sizes if size > 1)


# ---------------------------------------------------------------------------------------------- depth attention


def expand(source: Tensor, taps: Tensor | None, kernel_sizes: Sequence[int], position: Tensor | None = None) -> Tensor:
    """m full-width views of a source by causal depthwise convolutions; zeros enter on the left (MSAR step 1).

    Args:
        source: [B, T, D].
        taps: [K, D], the streams' taps one under the other, row 0 of each on the current token; None if K is 0.
        kernel_sizes: conv width per stream; width 1 is the source itself.
        position: [B, T] integer place in the document; tap i is dropped where position < i.
    Returns:
        [B, T, m, D] in the accumulation dtype.
    """
    x = raised(source)
    T = x.shape[1]
    rows = tap_rows(kernel_sizes)
    if x.device.type == "cpu" and position is None and taps is not None:
        return _expand_by_conv(x, taps.to(x.dtype), kernel_sizes)
    streams: list[Tensor | None] = [x if row is None else None for row in rows]
    for i in range(max(kernel_sizes) if taps is not None else 0):
        shifted = F.pad(x, (0, 0, i, 0))[:, :T]
        if position is not None and i > 0:
            shifted = shifted * (position >= i).unsqueeze(-1)
        for j, row in enumerate(rows):
            if row is None or i >= kernel_sizes[j]:
                continue
            term = shifted * taps[row.start + i].to(x.dtype)
            streams[j] = term if i == 0 else streams[j] + term
    return torch.stack(streams, dim=2)  # [B, T, m, D]


def _expand_by_conv(x: Tensor, taps: Tensor, kernel_sizes: Sequence[int]) -> Tensor:
    """`expand` through one grouped conv1d: on a CPU 4.6x faster than shifted sums (T=128, D=64)."""
    k_max = max(kernel_sizes)
    rows = tap_rows(kernel_sizes)
    # [K_j, D] to [k_max, D] with the current token's tap last, as conv1d correlates
    padded = [F.pad(taps[row].flip(0), (0, 0, k_max - (row.stop - row.start), 0)) for row in rows if row is not None]
    weight = torch.stack(padded).permute(2, 0, 1).flatten(0, 1).unsqueeze(1)  # [D * convs, 1, k_max]
    y = F.conv1d(F.pad(x.transpose(1, 2), (k_max - 1, 0)), weight, groups=x.shape[-1])  # [B, D * convs, T]
    convolved = y.unflatten(1, (x.shape[-1], -1)).permute(2, 0, 3, 1)  # [convs, B, T, D]
    learned = iter(convolved)
    return torch.stack([x if row is None else next(learned) for row in rows], dim=2)


def score(streams: Tensor, query: Tensor, eps: float) -> Tensor:
    """Depth logits query_j . RMSNorm(u_j): no 1/sqrt(D), no gain (AttnRes Eq. 2; MSAR step 2).

    Args:
        streams: [B, T, m, D].
        query: [m, D].
    Returns:
        [B, T, m] in the accumulation dtype.
    """
    streams = raised(streams)
    rstd = torch.rsqrt(streams.square().mean(-1) + eps)
    return torch.einsum("btmd,md->btm", streams, query.to(streams.dtype)) * rstd


def retrieve(streams: Sequence[Tensor], logits: Sequence[Tensor]) -> Tensor:
    """Softmax over sources, one head per stream, applied to the raw values (MSAR step 3).

    Args:
        streams: N tensors [B, T, m, D].
        logits: N tensors [B, T, m].
    Returns:
        [B, T, m, D].
    """
    weights = torch.softmax(torch.stack(list(logits), dim=-1), dim=-1)  # [B, T, m, N]
    retrieved = weights[..., 0, None] * streams[0]
    for n in range(1, len(streams)):
        retrieved = retrieved + weights[..., n, None] * streams[n]
    return retrieved


def mix_gates(retrieved: Tensor, weight: Tensor, scale: Tensor, bias: Tensor, gate: Gate, eps: float) -> Tensor:
    """gate(scale * RMSNorm([r_1; ..; r_m]) W + bias), the norm over all m D values without gain (MSAR step 4).

    Args:
        retrieved: [B, T, m, D].
        weight: [m, m, D], W by (gate, stream, channel).
        scale: [1].
        bias: [m].
    Returns:
        [B, T, m], one gate per stream.
    """
    r = raised(retrieved)
    rstd = torch.rsqrt(r.square().mean((-2, -1)) + eps).unsqueeze(-1)
    logits = scale.to(r.dtype) * torch.einsum("btjd,kjd->btk", r, weight.to(r.dtype)) * rstd + bias.to(r.dtype)
    return torch.sigmoid(logits) if gate == "sigmoid" else torch.softmax(logits, dim=-1)


def attnres_read(sources: Sequence[Tensor], query: Tensor, key_gain: Tensor | None, eps: float) -> Tensor:
    """One softmax over depth, one head (AttnRes Eq. 2 to 4).

    Args:
        sources: N tensors [B, T, D], same dtype.
        query: [D]; zero gives the uniform mean.
        key_gain: [D] gain of the key norm, or None; it folds into the query.
    Returns:
        [B, T, D] in the sources' dtype.
    """
    if key_gain is not None:
        query = query * key_gain
    streams = [raised(source).unsqueeze(2) for source in sources]
    logits = [score(stream, query.unsqueeze(0), eps) for stream in streams]
    return retrieve(streams, logits).squeeze(2).to(sources[0].dtype)


def split_head_weights(
    sources: Sequence[Tensor], query: Tensor, key_gain: Tensor | None, n_heads: int, eps: float
) -> Tensor:
    """Depth softmax of H heads that share one source by channel slices; the key norm spans all D.

    Args:
        sources: N tensors [B, T, D].
        query: [D], cut into H slices of D / H.
        key_gain: [D] or None.
    Returns:
        [B, T, H, N] in the accumulation dtype.
    """
    query = query if key_gain is None else query * key_gain
    logits = []
    for source in sources:
        v = raised(source)
        key = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps) * query.to(v.dtype)
        logits.append(key.unflatten(-1, (n_heads, -1)).sum(-1))  # [B, T, H]
    return torch.softmax(torch.stack(logits, dim=-1), dim=-1)


def split_head_read(
    sources: Sequence[Tensor], query: Tensor, key_gain: Tensor | None, n_heads: int, eps: float
) -> Tensor:
    """AttnRes with H depth heads, each on its own slice of the channels (AttnRes, ablation "multihead").

    Args and dtypes as `split_head_weights`; returns [B, T, D] in the sources' dtype.
    """
    weights = split_head_weights(sources, query, key_gain, n_heads, eps)
    heads = torch.stack([raised(s).unflatten(-1, (n_heads, -1)) for s in sources], dim=-2)  # [B, T, H, N, D/H]
    return torch.einsum("bthn,bthnc->bthc", weights, heads).flatten(-2).to(sources[0].dtype)


def msar_retrieve(
    sources: Sequence[Tensor],
    taps: Sequence[Tensor | None],
    query: Tensor,
    kernel_sizes: Sequence[int],
    eps: float,
    position: Tensor | None = None,
) -> Tensor:
    """Expand, score and retrieve: steps 1 to 3 of an MSAR read.

    Args:
        sources: N tensors [B, T, D], same dtype.
        taps: N tensors [K, D] (the same one N times if the reader owns the convs).
        query: [m, D].
    Returns:
        [B, T, m, D] in the accumulation dtype.
    """
    streams = [expand(s, w, kernel_sizes, position) for s, w in zip(sources, taps, strict=True)]
    return retrieve(streams, [score(stream, query, eps) for stream in streams])


def msar_read(
    sources: Sequence[Tensor],
    taps: Sequence[Tensor | None],
    query: Tensor,
    mix_weight: Tensor | None,
    mix_scale: Tensor | None,
    mix_bias: Tensor | None,
    *,
    kernel_sizes: Sequence[int],
    gate: Gate = "sigmoid",
    eps: float = 1e-5,
    position: Tensor | None = None,
) -> Tensor:
    """One MSAR read: m heads along depth, one per stream, and a gated sum of what they retrieve.

    Args:
        sources: N tensors [B, T, D], same dtype.
        taps: N tensors [K, D]: the group of each source's producer, or the reader's own N times; None where K is 0.
        query: [m, D]; zero gives the uniform mean over sources.
        mix_weight: [m, m, D]; None gives the mean of the streams (with m = 1 the stream itself).
        mix_scale: [1].
        mix_bias: [m].
        position: [B, T] place in the document, for packed documents.
    Returns:
        [B, T, D] in the sources' dtype.
    """
    retrieved = msar_retrieve(sources, taps, query, kernel_sizes, eps, position)
    return mix_streams(retrieved, mix_weight, mix_scale, mix_bias, gate, eps).to(sources[0].dtype)


def mix_streams(
    retrieved: Tensor, weight: Tensor | None, scale: Tensor | None, bias: Tensor | None, gate: Gate, eps: float
) -> Tensor:
    """[B, T, m, D] to [B, T, D]: the gated sum of the streams, or their mean without `weight` (MSAR step 4)."""
    if weight is None:
        return retrieved.mean(2)
    gates = mix_gates(retrieved, weight, scale, bias, gate, eps)
    return torch.einsum("btm,btmd->btd", gates, raised(retrieved))


def expand_mix_read(
    source: Tensor,
    taps: Tensor,
    mix_weight: Tensor | None,
    mix_scale: Tensor | None,
    mix_bias: Tensor | None,
    *,
    kernel_sizes: Sequence[int],
    gate: Gate = "sigmoid",
    eps: float = 1e-5,
    position: Tensor | None = None,
) -> Tensor:
    """The streams of one source, mixed: an MSAR read without depth attention (control `VanillaConv`).

    Args as `msar_read`, with one source [B, T, D]; returns [B, T, D] in its dtype.
    """
    streams = expand(source, taps, kernel_sizes, position)
    return mix_streams(streams, mix_weight, mix_scale, mix_bias, gate, eps).to(source.dtype)
