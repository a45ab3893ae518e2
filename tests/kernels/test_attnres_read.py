import pytest
import torch
from kernel_inputs import Comparison, normal, relative_error

from kernels import reference

pytest.importorskip("triton")

from kernels import attnres_read as fused

EPS = 1e-5


def attnres_case(n_sources, T, D, B=1, dtype=torch.float32, gain=True, query_scale=0.3) -> Comparison:
    inputs = {f"v{n}": normal(B, T, D, dtype=dtype) for n in range(n_sources)}
    inputs["query"] = normal(D, scale=query_scale)
    if gain:
        inputs["gain"] = 1 + normal(D, scale=0.2)
    return Comparison(inputs, normal(B, T, D, dtype=dtype))


def call(read):
    def function(inputs):
        sources = [x for name, x in inputs.items() if name.startswith("v")]
        return read(sources, inputs["query"], inputs.get("gain"), EPS)

    return function


@pytest.mark.parametrize(
    "case",
    [
        {"n_sources": 1, "T": 3, "D": 64},
        {"n_sources": 3, "T": 5, "D": 40, "B": 2},
        {"n_sources": 9, "T": 18, "D": 72, "gain": False},
        {"n_sources": 17, "T": 3, "D": 72},
        {"n_sources": 3, "T": 19, "D": 136, "dtype": torch.bfloat16},
        {"n_sources": 2, "T": 4, "D": 40, "dtype": torch.float16},
        # several tiles, two warps forward and eight backward; the query small enough that all weights count
        {"n_sources": 2, "T": 3, "D": 2600, "query_scale": 0.02},
        {"n_sources": 2, "T": 3, "D": 2600, "query_scale": 0.02, "dtype": torch.bfloat16},
    ],
    ids=lambda case: "-".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in case.items()),
)
def test_attnres_read_matches_reference(case):
    attnres_case(**case).check(call(reference.attnres_read), call(fused.attnres_read))


@pytest.mark.parametrize("n_sources", [5, 17])
def test_zero_query_gives_the_mean_of_the_sources(n_sources):
    sources = [normal(1, 3, 40) for _ in range(n_sources)]
    h = fused.attnres_read(sources, torch.zeros_like(sources[0][0, 0]), None, EPS)
    torch.testing.assert_close(h, torch.stack(sources).mean(0), rtol=1e-6, atol=1e-6)


def test_one_source_gives_the_query_no_gradient():
    case = attnres_case(1, 5, 40)
    result = case.run(call(fused.attnres_read))
    assert torch.equal(result["h"], case.inputs["v0"])
    assert result["query"].eq(0).all()


def test_two_runs_are_bitwise_equal():
    case = attnres_case(3, 18, 40)
    first, second = case.run(call(fused.attnres_read)), case.run(call(fused.attnres_read))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_strided_and_aliased_sources_are_read_by_value():
    wide = normal(2, 5, 80)
    strided, query = wide[..., 8:48], normal(40, scale=0.3)
    h = fused.attnres_read([strided, strided, strided.flip(1)], query, None, EPS)
    expected = reference.attnres_read([strided, strided, strided.flip(1)], query, None, EPS)
    torch.testing.assert_close(h, expected, rtol=1e-5, atol=1e-5)


def three_reads(read, inputs):
    """Reads of growing depth; every source is used by all later reads."""
    sources, out = [inputs["v0"]], []
    for index in range(3):
        h, sources = read(sources, inputs[f"query{index}"])
        out.append(h)
        sources = [*sources, torch.tanh(h) * inputs["scale"]]
    return torch.stack(out).sum(0) + sources[-1]


def test_gradients_gather_through_a_chain_of_reads_as_autograd_adds_them():
    inputs = {"v0": normal(1, 5, 40), "scale": normal(40)} | {f"query{i}": normal(40, scale=0.3) for i in range(3)}
    case = Comparison(inputs, normal(1, 5, 40))
    case.check(
        lambda x: three_reads(lambda sources, q: (reference.attnres_read(sources, q, None, EPS), sources), x),
        lambda x: three_reads(lambda sources, q: fused.attnres_read_through(sources, q, None, EPS), x),
    )


def test_a_compiled_function_around_a_read_runs_it_as_it_is():
    case = attnres_case(2, 3, 40)
    surrounding = torch.compile(lambda x: torch.tanh(call(fused.attnres_read)(x)) * 2, backend="eager")
    torch.testing.assert_close(surrounding(case.inputs), torch.tanh(call(fused.attnres_read)(case.inputs)) * 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_low_precision_parameters_get_gradients_of_their_dtype(dtype):
    case = attnres_case(3, 4, 40, dtype=dtype)
    case.inputs |= {name: case.inputs[name].bfloat16() for name in ("query", "gain")}
    result, oracle = case.run(call(fused.attnres_read)), case.run(call(reference.attnres_read), torch.float64)
    for name in ("query", "gain"):
        assert result[name].dtype == torch.bfloat16
        assert relative_error(result[name], oracle[name]) <= 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("D", [8, 64, 1000, 2048, 2080, 2112, 2560, 4096, 8192, 32768])
def test_row_layouts_fit_a_program(D, dtype):
    for layout, channels in ((fused.forward_layout, 72), (fused.backward_layout, 20)):
        options = layout(D, dtype)
        row = -(-D // options["TILE"]) * options["TILE"]
        assert row < 2 * D
        assert options["STAGES"] == 1 or (options["STAGES"] - 1) * row * dtype.itemsize <= 96 << 10
        assert options["num_warps"] == 32 or D <= 32 * channels * options["num_warps"]


def test_the_measured_layouts_are_those_of_a_launch():
    assert fused.forward_layout(2112, torch.bfloat16) == {"D": 2112, "TILE": 256, "STAGES": 4, "num_warps": 1}
    assert fused.backward_layout(2112, torch.bfloat16) == {"D": 2112, "TILE": 512, "STAGES": 4, "num_warps": 4}


def test_backward_programs_are_resident_at_once_and_no_more_than_tokens():
    cpu = torch.device("cpu")  # counts as one processor
    assert fused.resident_programs(1000, 4, cpu) == 4
    assert fused.resident_programs(3, 4, cpu) == 3
    assert fused.resident_programs(1000, 32, cpu) == 1


@pytest.mark.gpu
def test_a_captured_read_replays_with_new_sources():
    case = attnres_case(9, 256, 2112, dtype=torch.bfloat16)
    read = call(fused.attnres_read)
    read(case.inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        h = read(case.inputs)
    case.inputs["v3"].normal_()
    graph.replay()
    assert torch.equal(h, read(case.inputs))


@pytest.mark.parametrize("name", ["query", "key_gain"])
def test_parameters_of_another_width_are_named(name):
    given = {"query": normal(16), "key_gain": normal(16)} | {name: normal(8)}
    with pytest.raises(ValueError, match=rf"{name} must be \[16\], got \[8\]"):
        fused.attnres_read([normal(1, 2, 16)], given["query"], given["key_gain"], EPS)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([normal(1, 2, 12)], "D a multiple of 8"),
        ([normal(1, 2, 8, dtype=torch.float64)], "bf16, fp16 or fp32"),
        ([normal(1, 2, 8)] * 129, "1 to 128 sources, got 129"),
        ([normal(1, 2, 8), normal(1, 3, 8)], "all sources of a read must be alike"),
    ],
)
def test_unsupported_sources_are_named(sources, message):
    with pytest.raises(ValueError, match=message):
        fused.attnres_read(sources, normal(sources[0].shape[-1]), None, EPS)
