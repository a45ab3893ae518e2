"""The mix against float64, apart from the reads that use it: every number of streams, both scratch dtypes."""

import pytest
import torch
from kernel_inputs import DEVICE, HALF_PARAMETER_BOUND, relative_error

from kernels import reference

pytest.importorskip("triton")

from kernels import msar_mix, msar_steps
from kernels.msar_inputs import Sources, Spec

EPS = 1e-5
# h, dr and the mixer's gradients: fp16 streams are given as they are stored, so that their rounding is in both
BOUND = {torch.float32: (1e-5, 1e-5, 1e-5), torch.float16: (5e-3, 1e-3, HALF_PARAMETER_BOUND)}

# of which programs hold whole tokens: with channels beyond a power of two, and without
WHOLE = [1024, 1048]


class Case:
    """Streams as a retrieval stores them, a mixer, and dh."""

    def __init__(self, P=13, m=3, D=40, scratch=torch.float32, gate="sigmoid", seed=0):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape, scale=1.0):
            return scale * torch.randn(*shape, generator=generator)

        self.spec = Spec((1,) * m, gate, EPS)
        self.dtype = torch.bfloat16 if scratch == torch.float16 else scratch
        # streams of very different sizes, as their scales are for
        scale = normal(P, m).exp()
        stored = normal(P, m, D) if scratch == torch.float32 else normal(P, m, D).clamp(-8, 8)
        self.stored, self.scale = stored.to(scratch).to(DEVICE), scale.to(DEVICE)
        mixer = normal(m, m, D, scale=D**-0.5), 1 + normal(1, scale=0.2), normal(m)
        self.mixer = tuple(x.to(DEVICE) for x in mixer)
        self.dh = normal(P, D).to(self.dtype).to(DEVICE)

    def oracle(self) -> dict:
        """h and all gradients in float64."""
        r = self.stored.double() / self.scale.double()[..., None]
        weight, scale, bias = (x.double() for x in self.mixer)
        # a scale and a bias per token
        inputs = (r, weight, scale.expand(len(r), 1), bias.expand(len(r), len(bias)))
        r, *mixer = (x.clone().requires_grad_() for x in inputs)
        h = reference.mix_streams(r[None], *mixer, gate=self.spec.gate, eps=EPS)[0]
        h.backward(self.dh.double())
        affine = torch.cat((mixer[1].grad, mixer[2].grad), 1)
        out = {"h": h.detach(), "dr": r.grad, "dweight": mixer[0].grad, "daffine": affine}
        return out | {"means": (r.grad * r).sum(-1).detach(), "sizes": r.grad.norm(dim=-1) * r.norm(dim=-1).detach()}

    def run(self, in_place=False) -> dict:
        """The same from the kernels."""
        stored = self.stored.clone()
        h, statistics = msar_mix.mix(self.spec, stored, self.scale, self.mixer, self.dtype)
        got = msar_mix.mix_backward(self.spec, stored, self.scale, self.dh, self.mixer, statistics, in_place=in_place)
        assert (got.dr.data_ptr() == stored.data_ptr()) == in_place
        out = {"h": h, "dr": got.dr.double() * got.unit.double()[..., None]}
        dweight, dscale, dbias = got.mixer
        out |= {"dweight": dweight, "daffine": torch.cat((dscale, dbias))}
        return out if got.means is None else out | {"means": got.means}

    def check(self, **options):
        expected, got = self.oracle(), self.run(**options)
        for name, x in got.items():
            assert x.isfinite().all(), name
            error = relative_error(x, expected[name])
            if name == "daffine":  # tokens' parts of it may cancel: the error is that of a sum of so many
                error = float((x - expected[name].sum(0)).norm() / expected[name].norm())
            if name == "means":  # so may a token's products
                error = float((x - expected[name]).norm() / expected["sizes"].norm())
            bound = BOUND[self.stored.dtype][("h", "dr").index(name) if name in ("h", "dr") else 2]
            assert error <= bound, (name, error)


@pytest.mark.parametrize("scratch", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("m", range(2, 9))
def test_mix_of_any_number_of_streams_matches_float64(m, scratch):
    Case(m=m, scratch=scratch, gate="softmax" if m % 2 else "sigmoid").check()


@pytest.mark.parametrize("D", [8, 24, 64, 72, 200, 1000, *WHOLE])
def test_mix_of_any_width_matches_float64(D):
    Case(D=D, P=5, scratch=torch.float16).check()


@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
def test_mix_of_whole_tokens_matches_float64(m, gate):
    Case(D=WHOLE[-1], P=6, m=m, scratch=torch.float16, gate=gate).check()


@pytest.mark.parametrize("P", [1, 31, 33, 100])
def test_mix_of_any_number_of_tokens_matches_float64(P):
    Case(P=P, m=2, D=16, scratch=torch.float16).check()


@pytest.mark.parametrize("D", [40, WHOLE[-1]])
def test_gradients_may_overwrite_the_streams(D):
    case = Case(D=D, scratch=torch.float16)
    apart, in_place = case.run(), case.run(in_place=True)
    assert all(torch.equal(x, apart[name]) for name, x in in_place.items())


@pytest.mark.parametrize("tokens", [2, 3])
def test_programs_that_hold_several_tokens_match_float64(tokens, monkeypatch):
    monkeypatch.setattr(msar_mix, "MIX_TOKENS", tokens)
    Case(P=7, D=72).check()


def test_dweight_keeps_its_precision_where_slopes_differ_by_orders_of_magnitude():
    case = Case(P=64, m=4, D=32, scratch=torch.float16)
    case.dh[::2] *= 1e-6
    case.dh[1::8] *= 1e4
    case.check()


@pytest.mark.parametrize("D", [40, WHOLE[-1]])
def test_the_unit_of_slopes_is_that_of_the_largest_token(D):
    case = Case(D=D, P=31, m=2, scratch=torch.float16)
    case.dh[30] *= 1e6  # 2^20 larger than what the others allow for, beyond fp16
    case.check()


@pytest.mark.parametrize("D", [40, WHOLE[-1]])
def test_tiny_gradients_stay_finite_and_in_proportion(D):
    case = Case(D=D, scratch=torch.float16)
    case.dh *= 2.0**-100  # a power of two, and no factor falls out of fp32
    small = case.run()
    case.dh *= 2.0**100
    large = case.run()
    for name in ("dr", "dweight", "daffine"):
        torch.testing.assert_close(small[name].double() * 2.0**100, large[name].double(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("D", [40, WHOLE[-1]])
def test_tokens_without_gradient_get_zeros(D):
    case = Case(D=D, P=9, scratch=torch.float16)
    case.dh[3] = 0
    assert case.run()["dr"][3].eq(0).all()


def test_mix_without_a_mixer_is_the_mean():
    case = Case(P=5, m=4, D=72, scratch=torch.float16)
    h, statistics = msar_mix.mix(case.spec, case.stored, case.scale, None, torch.float32)
    expected = (case.stored.double() / case.scale.double()[..., None]).mean(1)
    assert statistics is None
    assert relative_error(h, expected) <= 1e-6


@pytest.mark.parametrize("D", [40, WHOLE[-1]])
def test_two_runs_of_the_mix_are_bitwise_equal(D):
    case = Case(D=D, P=34, m=4, scratch=torch.float16)
    first, second = case.run(), case.run()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_measured_tiles_are_those_of_a_launch():
    for D, tail in ((2112, 256), (2560, 512)):
        assert msar_mix.row_tiles(4, D) == {"TILE": 1024, "TAIL": tail, "LANES": 256, "num_warps": 8}
    assert msar_mix.factors_tile(4) == msar_mix.Tile(1, 256, num_warps=1, stages=3)
    assert msar_mix.gradient_tile(4, torch.float16) == msar_mix.Tile(32, 64, num_warps=4, stages=3, resident=3)


@pytest.mark.parametrize("m", [2, 4, 8])
@pytest.mark.parametrize("D", [8, 1000, 2048, 2112, 2560, 8192])
def test_row_tiles_cover_the_channels_once(m, D):
    tiles = msar_mix.row_tiles(m, D)
    n_full = D // tiles["TILE"]
    assert n_full >= 1
    assert 0 <= D - n_full * tiles["TILE"] <= tiles["TAIL"]
    assert tiles["TILE"] % tiles["LANES"] == tiles["TAIL"] % tiles["LANES"] == 0


@pytest.mark.parametrize("D", [8, 512, 1016, 1024, 1056, 1064, 2040, 2048, 2080, 2112, 2120, 4096])
@pytest.mark.parametrize("m", [1, 4, 5])
def test_whole_tokens_are_held_where_their_channels_fit(m, D):
    fits = m <= 4 and (1024 <= D <= 1056 or 2048 <= D <= 2112)
    tiles = msar_mix.whole_tiles(torch.float16, m, D)
    assert (tiles is not None) == fits
    assert msar_mix.whole_tiles(torch.float32, m, D) is None
    if tiles:
        tail = D - tiles["TILE"]
        assert tiles["TILE"] == 8 * tiles["LANES"]
        assert 0 <= tail <= tiles["LANES"] // 4
        assert tiles["HAS_TAIL"] == (tail > 0)


def test_longer_streams_are_added_and_mixed_apart():
    assert msar_mix.mixes_onto(Spec((1, 16), "sigmoid", EPS), torch.float16, 1024)
    assert not msar_mix.mixes_onto(Spec((1, 17), "sigmoid", EPS), torch.float16, 1024)


@pytest.mark.parametrize(
    ("B", "T", "D", "sizes", "gate", "packed"),
    [
        (1, 10, 1024, (1, 4, 8, 12), "sigmoid", False),
        (2, 7, 1048, (1, 4, 8), "softmax", True),  # a tail of channels
        (1, 6, 1056, (1, 1), "sigmoid", False),  # and no taps
    ],
)
def test_adding_and_mixing_in_one_kernel_gives_what_two_give(B, T, D, sizes, gate, packed):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=generator)).to(DEVICE)

    P, m, K = B * T, len(sizes), reference.n_taps(sizes)
    spec = Spec(sizes, gate, EPS)
    position = (torch.arange(T, device=DEVICE) % 4).expand(B, T).contiguous() if packed else None
    taps = [normal(K, D, scale=0.2)] if K else []  # a table of addresses keeps nothing alive
    source = Sources([normal(B, T, D).bfloat16()], taps, position)
    _, rstd = msar_steps.score(spec, source, normal(m, D, scale=0.02))
    scale, kept = normal(P, m).abs() + 0.5, normal(P, m).sigmoid()
    base = normal(P, m, D).clamp(-8, 8).half()
    mixer = normal(m, m, D, scale=D**-0.5), 1 + normal(1, scale=0.2), normal(m)
    factors = msar_steps.onto_factors(source, (1 - kept)[None, None] * rstd, rstd, scale)
    r = msar_steps.retrieve_onto(spec, source, factors, base, kept)
    h, statistics = msar_mix.mix(spec, r, scale, mixer, torch.bfloat16)
    assert msar_mix.mixes_onto(spec, r.dtype, D)
    got = msar_mix.mix_onto(spec, source, factors, base, kept, scale, mixer, torch.bfloat16)
    for name, x, expected, bound in zip(
        ("r", "h", "statistics"), got, (r, h, statistics), (1e-3, 4e-3, 1e-3), strict=True
    ):
        assert x.isfinite().all(), name
        assert relative_error(x, expected.double()) <= bound, name
