import pytest
import torch
from kernel_inputs import HALF_PARAMETER_BOUND, Comparison, normal, relative_error

from kernels import reference

pytest.importorskip("triton")

from kernels import msar_inputs, msar_read, msar_steps, narrow

SIZES = (1, 4, 12)
T, D = 16, 64


def plain() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Two sources [1, T, D] and their taps of mixed sign."""
    return [normal(1, T, D) for _ in range(2)], [normal(16, D, scale=0.3) for _ in range(2)]


def outlier_token():
    sources, taps = plain()
    sources[0][:, 5] *= 1e4
    return sources, taps


def tiny_sources():
    sources, taps = plain()
    return [1e-6 * v for v in sources], taps


def mixed_magnitudes():
    sources, taps = plain()
    return [1e-3 * sources[0], 1e3 * sources[1]], taps


def large_taps():
    sources, taps = plain()
    return sources, [group * 50 / group[:4].abs().sum(0).amax() for group in taps]


def huge_taps():
    sources, taps = plain()
    return sources, [1000.0 * group for group in taps]


def one_source():
    sources, taps = plain()
    return sources[:1], taps[:1]


INPUTS = (plain, outlier_token, tiny_sources, mixed_magnitudes, large_taps, huge_taps, one_source)


def scored(make):
    spec = msar_inputs.Spec(SIZES, "sigmoid", 1e-5)
    tensors, taps = make()
    sources = msar_inputs.Sources([v.bfloat16() for v in tensors], taps, None)
    of_reads = [msar_steps.score(spec, sources, normal(len(SIZES), D, scale=0.3)) for _ in range(2)]
    logits, rstd = torch.stack([logits for logits, _ in of_reads]), of_reads[0][1]
    return spec, sources, taps, logits, rstd


def streams_of(sources, taps) -> torch.Tensor:
    """[N, P, m, D] in float64."""
    groups = zip(sources.tensors, taps, strict=True)
    return torch.stack([reference.expand(v.double(), group.double(), SIZES)[0] for v, group in groups])


def row_errors(x: torch.Tensor, oracle: torch.Tensor) -> torch.Tensor:
    return (x.double() - oracle).norm(dim=-1) / oracle.norm(dim=-1)


@pytest.mark.parametrize("make", INPUTS, ids=lambda make: make.__name__)
def test_every_retrieved_row_is_closer_than_bf16(make):
    spec, sources, taps, logits, rstd = scored(make)
    weights, _, scale = msar_steps.softmax_over_sources(logits, rstd)
    expected = torch.einsum("rnpm,npmd->rpmd", weights.double(), streams_of(sources, taps)) * scale.double()[..., None]
    assert sources.compute == torch.float16
    retrieved = torch.stack(msar_steps.retrieve(spec, sources, weights, rstd, scale))
    # rounding to bf16 alone makes errors of 1.6e-3
    assert row_errors(retrieved, expected).max() < 1e-3
    (alone,) = msar_steps.retrieve(spec, sources, weights[:1], rstd, scale)
    assert torch.equal(alone, retrieved[0])


@pytest.mark.parametrize("make", INPUTS, ids=lambda make: make.__name__)
def test_sources_scales_are_powers_of_two_that_use_the_range_without_leaving_it(make):
    _, sources, taps, _, rstd = scored(make)
    fit, _ = sources.fits(rstd)
    assert torch.frexp(fit).mantissa.eq(0.5).all()
    for n, (v, group) in enumerate(zip(sources.tensors, taps, strict=True)):
        partial_sums = v.float().abs().max() * fit[n] * (group.abs().sum(0).amax() + len(SIZES))
        assert partial_sums < 65504
        if make is not tiny_sources:  # whose rms is that of eps
            assert partial_sums > 8


def test_many_sources_and_other_dtypes_are_computed_in_fp32():
    taps = [normal(16, 8)]
    assert msar_inputs.Sources([normal(1, 2, 8).bfloat16()] * 33, taps, None).compute == torch.float32
    assert msar_inputs.Sources([normal(1, 2, 8).half()], taps, None).compute == torch.float32
    assert msar_inputs.Sources([normal(1, 2, 8)], taps, None).compute == torch.float32


def read(function):
    """One read, in two streams, of the sources and taps among the inputs."""

    def of_inputs(inputs):
        sources = [x for name, x in inputs.items() if name.startswith("v")]
        taps = [x for name, x in inputs.items() if name.startswith("taps")]
        mixer = (inputs["weight"], inputs["scale"], inputs["bias"])
        return function(sources, taps, inputs["query"], *mixer, kernel_sizes=(1, 4))

    return of_inputs


@pytest.mark.parametrize("make", INPUTS, ids=lambda make: make.__name__)
def test_gradients_in_fp16_are_as_good_as_in_fp32(make, monkeypatch):
    tensors, taps = make()
    inputs = {f"v{n}": v.bfloat16() for n, v in enumerate(tensors)} | {f"taps{n}": x[:4] for n, x in enumerate(taps)}
    inputs |= {"query": normal(2, D, scale=0.3), "weight": normal(2, 2, D, scale=0.1)}
    inputs |= {"scale": 1 + normal(1, scale=0.2), "bias": normal(2)}
    case = Comparison(inputs, normal(1, T, D, dtype=torch.bfloat16))
    oracle = case.run(read(reference.msar_read), torch.float64)
    fp16 = case.run(read(msar_read.msar_read))
    monkeypatch.setattr(narrow, "MAX_SOURCES", 0)
    fp32 = case.run(read(msar_read.msar_read))
    del oracle["scale"]  # a single number, a sum that cancels
    for name, expected in oracle.items():
        if expected.ndim == 3 and name != "weight":
            # every token on its own, since large ones hide the others; where streams cancel, their errors show
            assert row_errors(fp16[name], expected).max() < 3 * row_errors(fp32[name], expected).max(), name
            assert relative_error(fp16[name], expected) < 1.2 * relative_error(fp32[name], expected), name
        else:
            assert relative_error(fp16[name], expected) < HALF_PARAMETER_BOUND, name
