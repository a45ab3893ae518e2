import math

import pytest
import torch
from kernel_inputs import FP32_BOUND, HALF_FACTOR, normal, relative_error
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels import reference

pytest.importorskip("triton")

from kernels import hyper

EPS = 1e-5
# products with fp32 parameters run on bf16 parts that together are good to 2^-17 (2^-15 in the interpreter)
SPLIT_BOUND = 1e-4
KINDS = ("mhc", "mhc_with_eps", "hc", "static", "head")


def inputs_of(kind: str, B: int, T: int, n: int, D: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Lanes and everything a read of this kind takes; gates near 1, so that each of them counts."""
    R = n * n + 2 * n
    lanes = {"lanes": normal(B, T, n, D, dtype=dtype)}
    if kind == "head":
        return lanes | {"weight": normal(n, n * D, scale=0.1), "gates": 1 + normal(1, scale=0.2), "bias": normal(n)}
    if kind.startswith("mhc"):
        return lanes | {"weight": normal(R, n * D, scale=0.1), "gates": 1 + normal(3, scale=0.2), "bias": normal(R)}
    static = {"pre": normal(n), "post": normal(n), "res": normal(n, n)}
    if kind == "static":
        return lanes | static
    return lanes | {"weight": normal(n + 2, D, scale=0.1), "gates": 1 + normal(2, scale=0.2)} | static


def read(ops, kind: str, inputs: dict[str, Tensor], *projected: Tensor) -> tuple[Tensor, ...]:
    """h, and post and res but for the head."""
    lanes, shift = inputs["lanes"], 1e-3 if kind == "mhc_with_eps" else 0.0
    if kind in ("hc", "static"):
        parameters = [inputs.get(name) for name in ("weight", "gates", "pre", "post", "res")]
        return ops.hc_read(lanes, *parameters, EPS, *projected)
    parameters = [inputs[name] for name in ("weight", "gates", "bias")]
    if kind == "head":
        return (ops.mhc_contract(lanes, *parameters, EPS, shift, *projected),)
    return ops.mhc_read(lanes, *parameters, 20, EPS, shift, *projected)


def results(function, inputs: dict[str, Tensor], cotangents: list[Tensor], dtype=None) -> dict[str, Tensor]:
    """Outputs of `function(inputs)` and the gradients of every input, all of them cast to `dtype` if given."""
    cast = {name: x.to(dtype or x.dtype).clone().requires_grad_() for name, x in inputs.items()}
    outputs = function(cast)
    torch.autograd.backward(outputs, [g.to(o.dtype) for g, o in zip(cotangents, outputs, strict=True)])
    of_outputs = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    return of_outputs | {name: x.grad for name, x in cast.items()}


def compare(of_reference, of_kernels, inputs: dict[str, Tensor], cotangents: list[Tensor], half_bound=SPLIT_BOUND):
    """Every result within its bound of float64: fp32 1e-5, half precision by the plain formula's own error."""
    oracle = results(of_reference, inputs, cotangents, torch.float64)
    plain, fused = results(of_reference, inputs, cotangents), results(of_kernels, inputs, cotangents)
    in_half = inputs["lanes"].dtype in HALF_FACTOR
    for name, expected in oracle.items():
        assert fused[name].isfinite().all(), name
        error, of_plain = relative_error(fused[name], expected), relative_error(plain[name], expected)
        bound = max(half_bound if in_half else FP32_BOUND, 1.5 * of_plain)
        if fused[name].dtype in HALF_FACTOR:
            bound = HALF_FACTOR[fused[name].dtype] * of_plain
        assert error <= bound, f"{name}: {error:.1e} against {of_plain:.1e}"


def cotangents_of_read(kind: str, lanes: Tensor) -> list[Tensor]:
    B, T, n, D = lanes.shape
    dh = normal(B, T, D, dtype=lanes.dtype)
    return [dh] if kind == "head" else [dh, normal(B, T, n), normal(B, T, n, n)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 19, 4, 40), torch.float32),
        ((2, 5, 3, 72), torch.float32),
        ((1, 1, 2, 8), torch.float32),
        ((1, 3, 8, 24), torch.float32),
        ((1, 9, 4, 136), torch.bfloat16),
        ((1, 3, 5, 40), torch.bfloat16),
        ((1, 5, 4, 40), torch.float16),
    ],
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else str(value).removeprefix("torch."),
)
def test_read_matches_reference(kind, shape, dtype):
    inputs = inputs_of(kind, *shape, dtype)
    compare(
        lambda x: read(reference, kind, x),
        lambda x: read(hyper, kind, x),
        inputs,
        cotangents_of_read(kind, inputs["lanes"]),
    )


def written(ops, inputs: dict[str, Tensor]) -> tuple[Tensor]:
    return (ops.update(*(inputs[name] for name in ("lanes", "y", "post", "res"))),)


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_update_matches_reference(n, dtype):
    B, T, D = 1, 19 if n == 4 else 5, 264 if n == 4 else 24
    lanes = normal(B, T, n, D, dtype=dtype)
    inputs = {"lanes": lanes, "y": normal(B, T, D, dtype=dtype), "post": normal(B, T, n), "res": normal(B, T, n, n)}
    compare(lambda x: written(reference, x), lambda x: written(hyper, x), inputs, [normal(*lanes.shape, dtype=dtype)])


def sublayers(ops, kind: str, inputs: dict[str, Tensor], n_sublayers: int = 3, ahead: bool = True) -> tuple[Tensor]:
    """The lanes after a few sublayers tanh(h) s that share their parameters; HC and mHC end in no contraction."""
    projected = ()
    lanes = inputs["lanes"]
    for _ in range(n_sublayers):
        h, post, res = read(ops, kind, inputs | {"lanes": lanes}, *projected)
        y = torch.tanh(h) * inputs["scale"]
        if ops is hyper and ahead and "weight" in inputs:
            lanes, *projected = ops.update_and_project(lanes, y, post, res, inputs["weight"])
        else:
            lanes = ops.update(lanes, y, post, res)
    return (lanes,)


def chain(kind: str, dtype: torch.dtype, T: int = 5, n: int = 4, D: int = 24) -> tuple[dict[str, Tensor], list[Tensor]]:
    inputs = inputs_of(kind, 1, T, n, D, dtype)
    for name in ("pre", "post", "res"):
        if name in inputs:
            inputs[name] *= 0.5
    inputs["scale"] = normal(1, T, D, dtype=dtype)
    return inputs, [normal(1, T, n, D, dtype=dtype)]


@pytest.mark.parametrize("kind", ["mhc", "hc", "static"])
@pytest.mark.parametrize("ahead", [True, False], ids=["projected_ahead", "projected_by_the_read"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_chain_of_sublayers_matches_reference(kind, ahead, dtype):
    inputs, cotangents = chain(kind, dtype)
    compare(
        lambda x: sublayers(reference, kind, x),
        lambda x: sublayers(hyper, kind, x, ahead=ahead),
        inputs,
        cotangents,
        half_bound=0.03,  # lanes are rounded between sublayers, where the formula rounds too
    )


@pytest.mark.parametrize("kind", ["mhc", "hc"])
def test_a_write_projects_what_the_next_read_would(kind):
    inputs, _ = chain(kind, torch.bfloat16, T=19)
    h, post, res = read(hyper, kind, inputs)
    lanes, projected = hyper.update_and_project(inputs["lanes"], h, post, res, inputs["weight"])
    assert not projected.requires_grad
    for given, own in zip(
        read(hyper, kind, inputs | {"lanes": lanes}, projected),
        read(hyper, kind, inputs | {"lanes": lanes}),
        strict=True,
    ):
        torch.testing.assert_close(given, own, rtol=1e-6 if given.dtype == torch.float32 else 0.01, atol=1e-6)


def test_two_runs_are_bitwise_equal():
    inputs, cotangents = chain("mhc", torch.bfloat16, T=70, n=2, D=8)  # more than one partial sum of everything
    first, second = (results(lambda x: sublayers(hyper, "mhc", x, 1), inputs, cotangents) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_checkpointed_gradients_are_bitwise_those_without():
    inputs, cotangents = chain("mhc", torch.bfloat16)
    plain = results(lambda x: sublayers(hyper, "mhc", x), inputs, cotangents)
    saved = results(
        lambda x: (checkpoint(lambda y: sublayers(hyper, "mhc", y)[0], x, use_reentrant=False),), inputs, cotangents
    )
    assert all(torch.equal(plain[name], saved[name]) for name in plain)


def test_compile_around_a_read_and_a_write_gives_the_same():
    inputs, cotangents = chain("mhc", torch.float32)

    @torch.compile(backend="aot_eager")
    def compiled(x):
        return sublayers(hyper, "mhc", x)

    plain = results(lambda x: sublayers(hyper, "mhc", x), inputs, cotangents)
    again = results(compiled, inputs, cotangents)
    assert all(torch.equal(plain[name], again[name]) for name in plain)


# ------------------------------------------------------------------------------- gradients that a write hands over


def losses(ops, inputs: dict[str, Tensor], use) -> tuple[Tensor]:
    """A read and a write of mHC, and another use of the lanes beside them."""
    h, post, res = read(ops, "mhc", inputs)
    return (use(ops, inputs["lanes"], torch.tanh(h) * inputs["scale"], post, res),)


USES = {
    "the_write_alone": lambda ops, lanes, y, post, res: ops.update(lanes, y, post, res),
    "other_lanes_written": lambda ops, lanes, y, post, res: ops.update(lanes * 1.5, y, post, res),
    "lanes_read_beside": lambda ops, lanes, y, post, res: ops.update(lanes, y, post, res) + lanes.sin(),
    "written_twice": lambda ops, lanes, y, post, res: (
        ops.update(lanes, y, post, res) + ops.update(lanes, y.sin(), post, res)
    ),
    "coefficients_changed": lambda ops, lanes, y, post, res: ops.update(lanes, y, post * 2, res * 3),
    "never_written": lambda ops, lanes, y, post, res: lanes * y.unsqueeze(2),
}


@pytest.mark.parametrize("use", USES)
def test_lanes_get_their_whole_gradient_whatever_becomes_of_them(use):
    inputs, cotangents = chain("mhc", torch.float32)
    compare(lambda x: losses(reference, x, USES[use]), lambda x: losses(hyper, x, USES[use]), inputs, cotangents)


def test_a_backward_pass_that_stops_early_leaves_nothing_to_the_next():
    inputs, (cotangent,) = chain("mhc", torch.float32)
    lanes = inputs["lanes"].requires_grad_()
    h, post, res = read(hyper, "mhc", inputs)
    y = h.detach().requires_grad_()
    out = hyper.update(lanes, y, post, res)
    (alone,) = torch.autograd.grad(h.sum(), lanes, retain_graph=True)
    torch.autograd.grad(out, y, cotangent, retain_graph=True)  # the read has no part in this pass
    assert torch.equal(torch.autograd.grad(h.sum(), lanes, retain_graph=True)[0], alone)
    first, second = (torch.autograd.grad(out, lanes, cotangent, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_frozen_parameters_and_frozen_lanes():
    inputs, (cotangent,) = chain("mhc", torch.float32)
    whole = results(lambda x: sublayers(hyper, "mhc", x), inputs, [cotangent])
    for free in (["lanes"], ["weight", "gates", "bias"]):
        leaves = {name: x.clone().requires_grad_(name in free) for name, x in inputs.items()}
        sublayers(hyper, "mhc", leaves)[0].backward(cotangent)
        for name, x in leaves.items():
            assert (x.grad is not None) == (name in free)
            if name in free:
                torch.testing.assert_close(x.grad, whole[name], rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------- traps and extremes


def test_rows_of_res_come_last_and_columns_first():
    """Rows sum to 1 exactly; after few rounds at large logits the columns do not, and the order of steps shows."""
    n, T = 4, 64
    inputs = inputs_of("mhc", 1, T, n, 24, torch.float32)
    bias = torch.cat([torch.zeros_like(inputs["bias"][: 2 * n]), normal(n * n, scale=3)])
    parameters = inputs["lanes"], inputs["weight"], inputs["gates"] * 0, bias
    _, _, res = hyper.mhc_read(*parameters, 2, EPS)
    assert (res.sum(-1) - 1).abs().max() < 1e-6
    assert (res.sum(-2) - 1).abs().max() > 1e-3
    matrix = bias[2 * n :].view(n, n).double().exp()
    for _ in range(2):
        matrix = matrix / matrix.sum(0, keepdim=True)
        matrix = matrix / matrix.sum(1, keepdim=True)
    torch.testing.assert_close(res[0, 0].double(), matrix, rtol=1e-5, atol=1e-6)
    assert (matrix - matrix.T).abs().max() > 0.1  # a transposed storage would be seen


def test_res_is_by_lane_written_and_lane_read():
    """res with a single 1 copies the lane it names, and post writes to the lane it names."""
    lanes, y = normal(1, 3, 3, 8), normal(1, 3, 8)
    res, post = torch.zeros_like(lanes[..., :3]), torch.zeros_like(lanes[..., 0])
    res[..., 2, 0] = 1
    post[..., 1] = 1
    out = hyper.update(lanes, y, post, res)
    assert torch.equal(out[:, :, 2], lanes[:, :, 0])
    assert torch.equal(out[:, :, 1], y)
    assert out[:, :, 0].eq(0).all()


def test_lanes_that_start_equal_part_by_a_random_phi():
    """Equal lanes and symmetric coefficients would get equal gradients for ever."""
    n, D = 4, 24
    inputs = inputs_of("mhc", 1, 5, n, D, torch.float32)
    lanes = inputs["lanes"][:, :, :1].expand(-1, -1, n, -1)
    symmetric = torch.cat([torch.zeros_like(inputs["bias"][: 2 * n]), 4 * torch.eye(n, device=lanes.device).flatten()])
    spread = []
    for weight in (torch.zeros_like(inputs["weight"]), inputs["weight"]):
        leaf = lanes.clone().requires_grad_()
        h, post, res = hyper.mhc_read(leaf, weight, inputs["gates"], symmetric, 20, EPS)
        out = hyper.update(leaf, torch.tanh(h), post, res)
        (gradient,) = torch.autograd.grad(out.sin().sum(), leaf)
        spread.append(float((gradient - gradient.mean(2, keepdim=True)).norm() / gradient.norm()))
    assert spread[0] < 1e-6 < 1e-2 < spread[1]


def test_gradients_stay_finite_at_large_logits():
    inputs = inputs_of("mhc", 1, 9, 4, 24, torch.bfloat16)
    inputs["gates"] = inputs["gates"] * 30
    found = results(lambda x: read(hyper, "mhc", x), inputs, cotangents_of_read("mhc", inputs["lanes"]))
    assert all(x.isfinite().all() for x in found.values())
    assert found["weight"].any()


def test_matches_deepseek_v4_forward_and_backward():
    """Its own module and its layer's write, which keep res transposed, at its eps and its place."""
    deepseek = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    transformers = pytest.importorskip("transformers")
    n, D = 4, 32
    config = transformers.DeepseekV4Config(
        hidden_size=D, hc_mult=n, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=EPS
    )
    theirs = deepseek.DeepseekV4HyperConnection(config)
    inputs = inputs_of("mhc", 2, 5, n, D, torch.float32)
    transposed = torch.cat([torch.arange(2 * n), 2 * n + torch.arange(n * n).view(n, n).T.flatten()])
    with torch.no_grad():
        theirs.fn.copy_(0.2 * inputs["weight"])
        theirs.base.copy_(inputs["bias"])
        theirs.scale.copy_(inputs["gates"])
    theirs = theirs.to(inputs["lanes"].device)
    weight, bias, gates = theirs.fn[transposed], theirs.base[transposed], theirs.scale
    y, cotangent = normal(2, 5, D), normal(2, 5, n, D)
    found = []
    for run in ("theirs", "ours"):
        lanes = inputs["lanes"].clone().requires_grad_()
        if run == "theirs":
            post, comb, h = theirs(lanes)
            out = post.unsqueeze(-1) * y.unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), lanes)
        else:
            h, post, res = hyper.mhc_read(lanes, weight, gates, bias, 20, EPS, 1e-6)
            out = hyper.update(lanes, y, post, res)
        leaves = [lanes, theirs.fn, theirs.base, theirs.scale]
        gradients = torch.autograd.grad([h, out], leaves, [y, cotangent], retain_graph=True)
        found.append([h.detach(), out.detach(), *gradients])
    for expected, ours in zip(*found, strict=True):
        assert (ours - expected).norm() <= 2e-6 * expected.norm() + 1e-6 * math.sqrt(expected.numel())


# ------------------------------------------------------------------------------------------------- other inputs


def test_strided_lanes_are_read_by_value():
    inputs, cotangents = chain("mhc", torch.float32)
    inputs["lanes"] = normal(1, 5, 24).unsqueeze(2).expand(-1, -1, 4, -1)
    expected = results(lambda x: sublayers(reference, "mhc", x), inputs, cotangents)
    found = sublayers(hyper, "mhc", inputs | {"scale": inputs["scale"].transpose(1, 2).contiguous().transpose(1, 2)})
    torch.testing.assert_close(found[0], expected["output 0"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((1, 2, 4, 12), torch.float32, "D a multiple of 8"),
        ((1, 2, 9, 8), torch.float32, "1 to 8 lanes, got 9"),
        ((1, 2, 4, 8), torch.float64, "bf16, fp16 or fp32"),
    ],
)
def test_unsupported_lanes_are_named(shape, dtype, message):
    lanes = normal(*shape, dtype=dtype)
    n, D = shape[2:]
    with pytest.raises(ValueError, match=message):
        hyper.mhc_read(lanes, normal(n * n + 2 * n, n * D), normal(3), normal(n * n + 2 * n), 20, EPS)
    with pytest.raises(ValueError, match=message):
        hyper.update(lanes, lanes[:, :, 0], normal(*shape[:3]), normal(*shape[:3], n))


def test_wrong_companions_of_a_write_are_named():
    lanes, y = normal(1, 2, 4, 8), normal(1, 2, 8)
    post, res = normal(1, 2, 4), normal(1, 2, 4, 4)
    with pytest.raises(ValueError, match=r"y must be \[1, 2, 8\] in torch.float32 as the lanes"):
        hyper.update(lanes, y.half(), post, res)
    with pytest.raises(ValueError, match=r"post must be \[1, 2, 4\] in fp32"):
        hyper.update(lanes, y, res[..., 0, :2], res)
    with pytest.raises(ValueError, match=r"res must be .* in fp32, got .* in torch.bfloat16"):
        hyper.update(lanes, y, post, res.bfloat16())
    with pytest.raises(ValueError, match=r"weight must be \[columns, 8\] .each lane. or \[columns, 32\]"):
        hyper.update_and_project(lanes, y, post, res, normal(24, 16))


def test_parameters_of_another_width_are_named():
    lanes, n, D = normal(1, 2, 4, 8), 4, 8
    with pytest.raises(ValueError, match=r"phi must be \[24, 32\], got \[24, 8\]"):
        hyper.mhc_read(lanes, normal(24, D), normal(3), normal(24), 20, EPS)
    with pytest.raises(ValueError, match=r"bias must be \[4\], got \[24\]"):
        hyper.mhc_contract(lanes, normal(n, n * D), normal(1), normal(24), EPS)
    with pytest.raises(ValueError, match=r"res must be \[4, 4\], got \[16\]"):
        hyper.hc_read(lanes, normal(6, D), normal(2), normal(n), normal(n), normal(16), EPS)


def test_more_rounds_than_can_be_unrolled_are_refused():
    inputs = inputs_of("mhc", 1, 2, 4, 8, torch.float32)
    parameters = [inputs[name] for name in ("lanes", "weight", "gates", "bias")]
    with pytest.raises(ValueError, match="up to 64 Sinkhorn rounds, got n_rounds=65"):
        hyper.mhc_read(*parameters, 65, EPS)
