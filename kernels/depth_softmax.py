# ruff: noqa: RUF005  (Triton compiles `+` of tuples, not unpacking)
"""Triton kernels on small tensors, a value per read, source, token and stream: softmax over depth and its backward."""

import triton
import triton.language as tl

BLOCK = 128


@triton.jit(do_not_specialize=["N"])
def weights_kernel(p_logits, p_rstd, p_weights, p_lse, p_scale, N, count, BLOCK: tl.constexpr):
    """Softmax over the N sources of each read.

    Args:
        p_logits: [R, N, count]; p_rstd: [N, count].
        p_weights: [R, N, count], p_lse: [R, count], written.
        p_scale: [count], written: the sources' smallest rstd, which scales what is retrieved.
    """
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o < count
    p_read = p_logits + tl.program_id(1).to(tl.int64) * N * count
    peak = tl.load(p_read + o, mask=inside, other=0.0)
    smallest = tl.load(p_rstd + o, mask=inside, other=1.0)
    for n in range(1, N):
        peak = tl.maximum(peak, tl.load(p_read + n * count + o, mask=inside, other=0.0))
        smallest = tl.minimum(smallest, tl.load(p_rstd + n * count + o, mask=inside, other=1.0))
    total = tl.zeros([BLOCK], tl.float32)
    for n in range(N):
        total += tl.exp(tl.load(p_read + n * count + o, mask=inside, other=0.0) - peak)
    if tl.program_id(1) == 0:
        tl.store(p_scale + o, smallest, mask=inside)
    tl.store(p_lse + tl.program_id(1).to(tl.int64) * count + o, peak + tl.log(total), mask=inside)
    p_out = p_weights + tl.program_id(1).to(tl.int64) * N * count
    for n in range(N):
        b_e = tl.load(p_read + n * count + o, mask=inside, other=0.0)
        tl.store(p_out + n * count + o, tl.exp(b_e - peak) / total, mask=inside)


@triton.jit
def merge_kernel(p_logit, p_rstd, p_lse, p_scale, p_weight, p_base_weight, p_merged_scale, count, BLOCK: tl.constexpr):
    """The weight of one more source beside others of which log-sum-exp and the retrieved sum are known; all [count].

    The sum is stored times p_scale, the new one will be times p_merged_scale, and p_base_weight says how much of the
    stored sum that takes.
    """
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o < count
    b_logit = tl.load(p_logit + o, mask=inside, other=0.0)
    b_weight = 1.0 / (1.0 + tl.exp(tl.load(p_lse + o, mask=inside, other=0.0) - b_logit))
    b_scale = tl.load(p_scale + o, mask=inside, other=1.0)
    tl.store(p_weight + o, b_weight, mask=inside)
    b_merged = tl.minimum(b_scale, tl.load(p_rstd + o, mask=inside, other=1.0))
    tl.store(p_base_weight + o, (1.0 - b_weight) * (b_merged / b_scale), mask=inside)
    tl.store(p_merged_scale + o, b_merged, mask=inside)


@triton.jit
def handed_kernel(p_mean, p_unit, p_weight, p_handed, count, BLOCK: tl.constexpr):
    """What phase 1, whose sources have 1 - weight of a read, gets of it [2, count]: that much of the mean of the
    gradients of the read's weights, and of the unit of dr."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o < count
    b_kept = 1.0 - tl.load(p_weight + o, mask=inside, other=0.0)
    tl.store(p_handed + o, tl.load(p_mean + o, mask=inside, other=0.0) * b_kept, mask=inside)
    tl.store(p_handed + count + o, tl.load(p_unit + o, mask=inside, other=0.0) * b_kept, mask=inside)


@triton.jit(do_not_specialize=["N"])
def slopes_kernel(
    p_dweights, p_unit, p_mean, p_weights, p_logits, p_rstd, p_scaled_weights, p_slope, p_bend, N, count, constant, D,
    READS: tl.constexpr, UNITS: tl.constexpr, MEANS: tl.constexpr, BEND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Backward of softmax and key norm.

        da_rn = unit_r dweights_rn                  mean_r = sum_i a_ri da_ri
        slope_rn = a_rn (da_rn - mean_r) rstd_n     bend_n = sum_r slope_rn rstd_n e_rn / D

    Args:
        p_dweights, p_weights, p_logits: [R, N, count]; p_rstd: [N, count].
        p_unit: [R, count], what a stored value of dr counts; without UNITS it is `constant`.
        p_mean: [R, count], given with MEANS for reads that have other sources too; where it is NaN it is summed here.
        p_scaled_weights: unit_r a_rn, and p_slope: [R, N, count], p_bend: [N, count], written; the last, for which
            logits are given, with BEND only.
    """
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o < count
    units = ()
    means = ()
    alone = ()  # whether a read has one source: its gradient is exactly zero, also where products are fused with sums
    for r in tl.static_range(READS):
        b_unit = tl.zeros([BLOCK], tl.float32) + constant
        if UNITS:
            b_unit = tl.load(p_unit + r * count + o, mask=inside, other=0.0)
        b_mean = tl.zeros([BLOCK], tl.float32)
        for n in range(N):
            b_da = tl.load(p_dweights + (r * N + n) * count + o, mask=inside, other=0.0) * b_unit
            b_mean += b_da * tl.load(p_weights + (r * N + n) * count + o, mask=inside, other=0.0)
        b_alone = o < tl.where(N == 1, count, 0)
        if MEANS:
            b_given = tl.load(p_mean + r * count + o, mask=inside, other=0.0)
            b_mean = tl.where(b_given == b_given, b_given, b_mean)
            b_alone = b_alone & (b_given != b_given)
        units = units + (b_unit,)
        means = means + (b_mean,)
        alone = alone + (b_alone,)
    for n in range(N):
        b_rstd = tl.load(p_rstd + n * count + o, mask=inside, other=0.0)
        b_bend = tl.zeros([BLOCK], tl.float32)
        for r in tl.static_range(READS):
            at = (r * N + n) * count + o
            b_a = tl.load(p_weights + at, mask=inside, other=0.0)
            b_slope = b_a * (tl.load(p_dweights + at, mask=inside, other=0.0) * units[r] - means[r]) * b_rstd
            b_slope = tl.where(alone[r], 0.0, b_slope)
            tl.store(p_scaled_weights + at, b_a * units[r], mask=inside)
            tl.store(p_slope + at, b_slope, mask=inside)
            if BEND:
                b_bend += b_slope * tl.load(p_logits + at, mask=inside, other=0.0)
        if BEND:
            tl.store(p_bend + n * count + o, b_bend * b_rstd / D, mask=inside)
