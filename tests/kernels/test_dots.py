import pytest
import torch
from kernel_inputs import DEVICE, normal, relative_error

from kernels import reference

pytest.importorskip("triton")

from kernels import dots

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# two parts of half precision are good to 2^-16, what becomes of the source's gradient is stored in fp16
VALUE_BOUND = {torch.bfloat16: 4e-5, torch.float16: 2e-6, torch.float32: 1e-6}
SOURCE_BOUND = {torch.bfloat16: 6e-4, torch.float16: 6e-4, torch.float32: 1e-6}


def case(dtype, B=2, T=9, D=40, R=3, sizes=(1, 3, 1, 5), query_scale=0.3, packed=False):
    K = reference.n_taps(sizes)
    position = (torch.arange(T, device=DEVICE) % 4).expand(B, T).to(torch.int32).contiguous() if packed else None
    taps = normal(K, D, scale=0.3) if K else None
    return normal(B, T, D, dtype=dtype), taps, normal(R, len(sizes), D, scale=query_scale), sizes, position


def in_float64(source, taps, queries, sizes, position) -> torch.Tensor:
    """q . u [R, P, m]."""
    streams = reference.expand(source, taps, sizes, position)
    return torch.einsum("btmd,rmd->rbtm", streams, queries).flatten(1, 2)


CASES = [
    {},
    {"packed": True},
    {"sizes": (1, 1)},
    {"sizes": (1, 4, 8, 12), "T": 5},
    {"R": 1, "T": 1, "B": 1},
    {"R": 20, "D": 8, "sizes": (1, 2)},
    {"query_scale": 1e-6},
    {"query_scale": 1e4},
]


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.bfloat16, options) for options in CASES] + [(dtype, CASES[1]) for dtype in DTYPES[1:]],
    ids=str,
)
def test_dots_and_their_gradients_match_float64(dtype, options):
    source, taps, queries, sizes, position = case(dtype, **options)
    double = [None if x is None else x.double().requires_grad_() for x in (source, taps, queries)]
    expected = in_float64(*double, sizes, position)
    rstd = normal(*expected.shape[1:]).abs() + 0.5
    logits = dots.logits(source, taps, queries, rstd, sizes, position)
    assert relative_error(logits, expected.detach() * rstd.double()) < VALUE_BOUND[dtype]
    dlogits = normal(*expected.shape, scale=1e-3)
    (expected * rstd.double()).backward(dlogits.double())
    bend, (dsource, unit), dqueries, dtaps = dots.backward(
        source, taps, queries, (logits, rstd), dlogits, sizes, position
    )
    of_norm = (dlogits * logits).double().sum(0) * rstd.double().square() / source.shape[-1]
    assert relative_error(bend, of_norm) < 1e-5
    of_source, of_taps, of_queries = (None if x is None else x.grad for x in double)
    assert relative_error(dsource.double() * unit.double(), of_source.flatten(0, 1)) < SOURCE_BOUND[dtype]
    assert relative_error(dqueries, of_queries) < VALUE_BOUND[dtype]
    if taps is not None:
        assert relative_error(dtaps, of_taps) < VALUE_BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_queries_have_gradients_and_give_none(dtype):
    source, taps, queries, sizes, position = case(dtype, query_scale=0.0)
    dlogits = normal(len(queries), source.shape[0] * source.shape[1], len(sizes))
    rstd = torch.ones_like(dlogits[0])
    scores = (torch.zeros_like(dlogits), rstd)
    _, (dsource, unit), dqueries, dtaps = dots.backward(source, taps, queries, scores, dlogits, sizes, position)
    double = queries.double().requires_grad_()
    in_float64(source.double(), taps.double(), double, sizes, position).backward(dlogits.double())
    assert relative_error(dqueries, double.grad) < VALUE_BOUND[dtype]
    assert dsource.eq(0).all()
    assert unit.isfinite().all()
    assert dtaps.eq(0).all()


def test_products_ignore_autocast():
    source, taps, queries, sizes, position = case(torch.float32)
    rstd = torch.ones(18, len(sizes), device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        under_autocast = dots.logits(source, taps, queries, rstd, sizes, position)
    assert torch.equal(under_autocast, dots.logits(source, taps, queries, rstd, sizes, position))
