"""The reference operations: definitions, shapes, dtypes, positions and edges."""

import numpy as np
import pytest
import torch

from kernels import reference

D, m, n = 6, 3, 4
SIZES = (1, 2, 5)
K = 7


def f64(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def mixer() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return f64(m, m, D), f64(1), f64(m)


def test_tap_rows_skip_identity_streams():
    assert reference.tap_rows((1, 4, 1, 8)) == [None, slice(0, 4), None, slice(4, 12)]
    assert reference.n_taps((1, 4, 1, 8)) == 12
    assert reference.n_taps((1, 1)) == 0


@pytest.mark.parametrize("T", [1, 3, 4, 9], ids=["T1", "T_below_K", "T_about_K", "T_above_K"])
def test_expand_is_a_causal_depthwise_convolution(T):
    source, taps = f64(2, T, D), f64(K, D)
    streams = reference.expand(source, taps, SIZES)
    assert streams.shape == (2, T, m, D)
    assert torch.equal(streams[:, :, 0], source)
    for j, rows in ((1, slice(0, 2)), (2, slice(2, 7))):
        weight = taps[rows].flip(0).T.unsqueeze(1)  # [D, 1, k], newest token last
        padded = torch.nn.functional.pad(source.transpose(1, 2), (weight.shape[-1] - 1, 0))
        expected = torch.nn.functional.conv1d(padded, weight, groups=D).transpose(1, 2)
        torch.testing.assert_close(streams[:, :, j], expected)


def test_expand_drops_taps_that_reach_before_the_document():
    first, second, taps = f64(1, 4, D), f64(1, 3, D), f64(K, D)
    position = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    packed = reference.expand(torch.cat([first, second], 1), taps, SIZES, position)
    apart = [reference.expand(document, taps, SIZES) for document in (first, second)]
    torch.testing.assert_close(packed, torch.cat(apart, 1))


def test_expand_without_taps_repeats_the_source():
    source = f64(2, 5, D)
    streams = reference.expand(source, None, (1, 1, 1))
    assert torch.equal(streams, source.unsqueeze(2).expand(-1, -1, 3, -1))


def test_score_is_the_dot_product_with_the_normalised_stream():
    streams, query = f64(2, 5, m, D), f64(m, D)
    expected = (torch.nn.functional.rms_norm(streams, (D,), eps=1e-5) * query).sum(-1)
    torch.testing.assert_close(reference.score(streams, query, 1e-5), expected)


def test_score_of_a_zero_source_is_zero():
    assert not reference.score(torch.zeros(1, 2, m, D), torch.randn(m, D), 1e-5).any()


def test_retrieve_is_a_convex_sum_of_the_raw_values():
    streams, logits = [f64(2, 5, m, D) for _ in range(4)], [f64(2, 5, m) for _ in range(4)]
    weights = torch.softmax(torch.stack(logits), 0)
    torch.testing.assert_close(
        reference.retrieve(streams, logits), torch.einsum("nbtm,nbtmd->btmd", weights, torch.stack(streams))
    )


def test_retrieve_from_one_source_is_that_source():
    stream = f64(2, 5, m, D)
    assert torch.equal(reference.retrieve([stream], [1e4 * f64(2, 5, m)]), stream)


def test_retrieve_survives_large_logits():
    streams, logits = [f64(2, 5, m, D) for _ in range(2)], [torch.full((2, 5, m), sign * 1e4) for sign in (1, -1)]
    assert torch.equal(reference.retrieve(streams, logits), streams[0])


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
def test_mix_gates_normalise_over_all_streams(gate):
    retrieved, (weight, scale, bias) = f64(2, 5, m, D), mixer()
    flat = torch.nn.functional.rms_norm(retrieved.flatten(-2), (m * D,), eps=1e-5)
    logits = scale * flat @ weight.flatten(1).T + bias
    expected = torch.sigmoid(logits) if gate == "sigmoid" else torch.softmax(logits, -1)
    torch.testing.assert_close(reference.mix_gates(retrieved, weight, scale, bias, gate, 1e-5), expected)


def test_mix_without_a_mixer_is_the_mean():
    retrieved = f64(2, 5, m, D)
    torch.testing.assert_close(reference.mix_streams(retrieved, None, None, None, "sigmoid", 1e-5), retrieved.mean(2))


def test_msar_read_is_its_four_steps():
    sources, taps, query = [f64(2, 5, D) for _ in range(3)], [f64(K, D) for _ in range(3)], f64(m, D)
    weight, scale, bias = mixer()
    streams = [reference.expand(s, w, SIZES) for s, w in zip(sources, taps, strict=True)]
    retrieved = reference.retrieve(streams, [reference.score(stream, query, 1e-5) for stream in streams])
    gates = reference.mix_gates(retrieved, weight, scale, bias, "sigmoid", 1e-5)
    torch.testing.assert_close(
        reference.msar_read(sources, taps, query, weight, scale, bias, kernel_sizes=SIZES),
        (gates.unsqueeze(-1) * retrieved).sum(2),
    )


def test_msar_read_refuses_a_source_without_its_taps():
    with pytest.raises(ValueError, match=r"shorter|longer"):
        reference.msar_read([f64(1, 2, D)] * 2, [f64(K, D)], f64(m, D), None, None, None, kernel_sizes=SIZES)


@pytest.mark.parametrize(
    ("sizes", "message"), [((2, 1), "must start with 1"), ((), "must start with 1"), ((1, -3), "must be positive")]
)
def test_bad_kernel_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        reference.check_kernel_sizes(sizes)


def sinkhorn_in_numpy(logits: np.ndarray, n_rounds: int, columns_first: bool = True) -> np.ndarray:
    matrix = np.exp(logits)
    for _ in range(n_rounds):
        for axis in (-2, -1) if columns_first else (-1, -2):
            matrix = matrix / matrix.sum(axis, keepdims=True)
    return matrix


@pytest.mark.parametrize("n_rounds", [1, 2, 20])
@pytest.mark.parametrize("std", [0.1, 1.0, 6.0])
def test_sinkhorn_normalises_columns_then_rows(std, n_rounds):
    logits = std * f64(50, n, n)
    result = reference.sinkhorn(logits, n_rounds)
    np.testing.assert_allclose(result.numpy(), sinkhorn_in_numpy(logits.numpy(), n_rounds), rtol=1e-11, atol=1e-14)
    torch.testing.assert_close(result.sum(-1), torch.ones(50, n, dtype=torch.float64), rtol=0, atol=1e-14)


def test_sinkhorn_in_the_other_order_is_another_matrix():
    logits = 3.0 * f64(200, n, n)
    reverse = sinkhorn_in_numpy(logits.numpy(), 20, columns_first=False)
    assert np.abs(reference.sinkhorn(logits, 20).numpy() - reverse).max() > 1e-2


def test_sinkhorn_of_a_shifted_matrix_is_the_same():
    """No overflow: exp(1000) is not finite."""
    logits = f64(5, n, n)
    torch.testing.assert_close(reference.sinkhorn(logits + 1000, 20), reference.sinkhorn(logits, 20))


@pytest.mark.parametrize("std", [6.0, 12.0])
def test_sinkhorn_gradients_are_finite_at_large_logits_in_fp32(std):
    logits = (std * torch.randn(500, n, n)).requires_grad_()
    (reference.sinkhorn(logits, 20) * torch.randn(500, n, n)).sum().backward()
    assert logits.grad.isfinite().all()


def test_sinkhorn_eps_keeps_any_logits_finite():
    logits = torch.tensor([[300.0, 300.0], [-300.0, -300.0]])
    assert not reference.sinkhorn(logits, 20).isfinite().all()
    assert reference.sinkhorn(logits, 20, 1e-6).isfinite().all()


def test_update_mixes_lanes_read_into_lanes_written():
    """Row i of res makes lane i: a cyclic matrix moves lane 1 to lane 0, not the other way."""
    lanes, y = f64(2, 5, n, D), f64(2, 5, D)
    res = torch.eye(n, dtype=torch.float64).roll(1, -1).expand(2, 5, n, n)  # res[i, i + 1] = 1
    post = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64).expand(2, 5, n)
    written = reference.update(lanes, y, post, res)
    torch.testing.assert_close(written[:, :, 0], lanes[:, :, 1] + y)
    torch.testing.assert_close(written[:, :, 1], lanes[:, :, 2])


def test_aggregate_weighs_lanes():
    lanes, pre = f64(2, 5, n, D), f64(2, 5, n)
    torch.testing.assert_close(reference.aggregate(lanes, pre), (pre.unsqueeze(-1) * lanes).sum(2))


def test_mhc_coefficients_lie_in_their_ranges():
    lanes, phi = f64(2, 5, n, D), f64(n * n + 2 * n, n * D)
    pre, post, res = reference.mhc_coefficients(lanes, phi, f64(3), f64(n * n + 2 * n), 20, 1e-5)
    assert pre.shape == post.shape == (2, 5, n)
    assert res.shape == (2, 5, n, n)
    assert ((pre > 0) & (pre < 1)).all()
    assert ((post > 0) & (post < 2)).all()
    assert (post > 1).any()
    assert (res > 0).all()


def arguments_of(name: str, dtype: torch.dtype):
    """Small random arguments of an operation; activations in `dtype`, parameters in fp32 (fp64 with fp64)."""
    parameter_dtype = reference.accumulation_dtype(dtype)
    p = lambda *shape: torch.randn(*shape, dtype=torch.float64).to(parameter_dtype)  # noqa: E731
    x = lambda *shape: torch.randn(*shape, dtype=torch.float64).to(dtype)  # noqa: E731
    sources, lanes = [x(2, 5, D) for _ in range(3)], x(2, 5, n, D)
    taps, gates = [p(K, D) for _ in range(3)], (p(m, m, D), p(1), p(m))
    options = {"kernel_sizes": SIZES}
    return {
        "attnres_read": ((sources, p(D), p(D), 1e-5), {}),
        "split_head_read": ((sources, p(D), p(D), 2, 1e-5), {}),
        "msar_read": ((sources, taps, p(m, D), *gates), options),
        "expand_mix_read": ((sources[0], taps[0], *gates), options),
        "hc_read": ((lanes, p(n + 2, D), p(2), p(n), p(n), p(n, n), 1e-5), {}),
        "mhc_read": ((lanes, p(n * n + 2 * n, n * D), p(3), p(n * n + 2 * n), 20, 1e-5), {}),
        "mhc_contract": ((lanes, p(n, n * D), p(1), p(n), 1e-5), {}),
        "update": ((lanes, x(2, 5, D), p(2, 5, n), p(2, 5, n, n)), {}),
    }[name]


OPERATIONS = [
    "attnres_read",
    "split_head_read",
    "msar_read",
    "expand_mix_read",
    "hc_read",
    "mhc_read",
    "mhc_contract",
    "update",
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_return_the_dtype_of_what_they_read(name, dtype):
    arguments, options = arguments_of(name, dtype)
    result = getattr(reference, name)(*arguments, **options)
    read, *coefficients = result if isinstance(result, tuple) else (result,)
    assert read.dtype == dtype
    assert read.shape == ((2, 5, n, D) if name == "update" else (2, 5, D))
    assert all(coefficient.dtype == reference.accumulation_dtype(dtype) for coefficient in coefficients)


@pytest.mark.parametrize("name", OPERATIONS)
def test_half_precision_is_lowered_once_at_the_end(name):
    """bf16 inputs give the rounded fp32 result: no step between runs in bf16."""

    def first(result):
        return result[0] if isinstance(result, tuple) else result

    def raise_all(value):
        if isinstance(value, list):
            return [raise_all(v) for v in value]
        return value.float() if isinstance(value, torch.Tensor) else value

    arguments, options = arguments_of(name, torch.bfloat16)
    exact = first(getattr(reference, name)(*map(raise_all, arguments), **options))
    assert torch.equal(first(getattr(reference, name)(*arguments, **options)), exact.bfloat16())


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_have_the_gradients_of_finite_differences(name):
    arguments, options = arguments_of(name, torch.float64)
    leaves = [a for argument in arguments for a in (argument if isinstance(argument, list) else [argument])]
    inputs = [leaf.requires_grad_() for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def run(*tensors):
        given = iter(tensors)
        replaced = [
            [next(given) for _ in a] if isinstance(a, list) else next(given) if isinstance(a, torch.Tensor) else a
            for a in arguments
        ]
        return getattr(reference, name)(*replaced, **options)

    assert torch.autograd.gradcheck(run, inputs)
