import pytest
import torch
from kernel_inputs import DEVICE, Comparison, check_together, drawn, normal

from kernels import reference

pytest.importorskip("triton")

from kernels import msar_ahead, msar_read, msar_steps


def ahead_case(
    n_sources, n_reads, T, D=40, B=1, sizes=(1, 3, 5), dtype=torch.float32, mean=False, query_scale=0.2
) -> Comparison:
    m, K = len(sizes), reference.n_taps(sizes)
    inputs = {f"v{n}": normal(B, T, D, dtype=dtype) for n in range(n_sources)}
    for group in range(n_sources + n_reads - 1 if K else 0):
        inputs[f"taps{group}"] = normal(K, D, scale=0.3)
    for r in range(n_reads):
        inputs[f"query{r}"] = normal(m, D, scale=query_scale)
        if not mean:
            inputs |= {f"weight{r}": normal(m, m, D, scale=0.05), f"bias{r}": normal(m)}
            inputs[f"scale{r}"] = 1 + normal(1, scale=0.2)
    return Comparison(inputs, normal(B, T, D, dtype=dtype))


def reads(ahead: bool, n_sources, n_reads, sizes=(1, 3, 5), gate="sigmoid", position=None):
    """The reads of a block with sublayers that return their input, completed sources scored ahead or by the reference.

    Every source's scores begin with a read that came before these, as an older source's do.
    """
    options = {"kernel_sizes": sizes, "position": position}

    def function(inputs):
        sources = [inputs[f"v{n}"] for n in range(n_sources)]
        taps = [inputs.get(f"taps{group}") for group in range(n_sources + n_reads - 1)]
        partial, total, scores = [], 0, []
        if ahead:
            queries = [inputs[f"query{r}"] for r in (0, *range(n_reads))]
            scored = [
                msar_ahead.score_source(v, group, queries, **options)
                for v, group in zip(sources, taps[:n_sources], strict=True)
            ]
            scores, sources = zip(*scored, strict=True)
        for r in range(n_reads):
            parameters = [inputs.get(f"{name}{r}") for name in ("query", "weight", "scale", "bias")]
            groups = taps[:n_sources] + ([] if r == 0 else [taps[n_sources + r - 1]])
            seen = [*sources, *partial]
            if ahead:
                ahead_of_read = {"scores": scores, "rows": [r + 1] * n_sources}
                h, through = msar_read.msar_read_through(
                    seen, groups, *parameters, gate=gate, **ahead_of_read, **options
                )
                sources, partial, scores = through[:n_sources], through[n_sources : len(seen)], through[len(seen) :]
            else:
                h = reference.msar_read(seen, groups, *parameters, gate=gate, **options)
            total = total + h
            partial = [partial[0] + h if partial else h]
        return total + sources[0]  # a source that something else uses too

    return function


@pytest.mark.parametrize(
    "options",
    [
        {"n_sources": 2, "n_reads": 3, "T": 6},
        {"n_sources": 1, "n_reads": 1, "T": 5},
        {"n_sources": 1, "n_reads": 2, "T": 14, "sizes": (1, 4, 8, 12), "mean": True},
        {"n_sources": 2, "n_reads": 2, "T": 7, "B": 2, "packed": True, "gate": "softmax", "sizes": (1, 4)},
        {"n_sources": 2, "n_reads": 2, "T": 5, "sizes": (1, 1)},
        {"n_sources": 2, "n_reads": 2, "T": 24, "dtype": torch.bfloat16, "sizes": (1, 4)},
        {"n_sources": 2, "n_reads": 2, "T": 24, "dtype": torch.float16, "sizes": (1, 4)},
    ],
    ids=lambda options: "-".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in options.items()),
)
def test_reads_scored_ahead_match_reference(options):
    packed, gate = options.pop("packed", False), options.pop("gate", "sigmoid")
    cases = drawn(ahead_case, **options)
    B, T, _ = cases[0].dh.shape
    arguments = {
        "n_sources": options["n_sources"],
        "n_reads": options["n_reads"],
        "sizes": options.get("sizes", (1, 3, 5)),
        "gate": gate,
        "position": (torch.arange(T, device=DEVICE) % 5).expand(B, T) if packed else None,
    }
    check_together(cases, reads(False, **arguments), reads(True, **arguments))


@pytest.mark.parametrize("packed", [False, True])
def test_segments_of_time_join_where_taps_reach_across(packed, monkeypatch):
    monkeypatch.setattr(msar_steps, "SEGMENT", 4)
    case = ahead_case(2, 2, 11, D=8, sizes=(1, 3, 6))
    position = (torch.arange(11, device=DEVICE) % 7)[None] if packed else None
    arguments = {"n_sources": 2, "n_reads": 2, "sizes": (1, 3, 6), "position": position}
    case.check(reads(False, **arguments), reads(True, **arguments))


@pytest.mark.parametrize("n_sources", [1, 2, 5, 9])
@pytest.mark.parametrize(("B", "T"), [(2, 8192), (1, 2048), (1, 100), (8, 64), (3, 1000)])
def test_segments_cover_a_sequence_in_no_more_waves_of_work_than_fixed_ones(B, T, n_sources):
    programs, past, at_once = 33 * n_sources, 11, 12 * 132
    length = msar_steps.segment_length((B, T), programs, past, at_once)

    def work(length):
        return -(-B * -(-T // length) * programs // at_once) * (length + past)

    assert length % 16 == 0
    assert 0 < length <= 2 * msar_steps.SEGMENT
    assert work(length) <= work(min(msar_steps.SEGMENT, -(-T // 16) * 16))


def test_one_source_gives_the_queries_no_gradient():
    result = ahead_case(1, 1, 7, sizes=(1, 4)).run(reads(True, 1, 1, sizes=(1, 4)))
    assert result["query0"].eq(0).all()


def test_two_runs_scored_ahead_are_bitwise_equal():
    case = ahead_case(2, 2, 9, sizes=(1, 4))
    first, second = (case.run(reads(True, 2, 2, sizes=(1, 4))) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_scores_that_nothing_uses_leave_the_sources_gradients_alone():
    case = ahead_case(2, 1, 5, sizes=(1, 4))

    def sources_only(inputs):
        sources, taps = [inputs["v0"], inputs["v1"]], [inputs["taps0"], inputs["taps1"]]
        first, second = (
            msar_ahead.score_source(v, group, [inputs["query0"]], kernel_sizes=(1, 4))[1]
            for v, group in zip(sources, taps, strict=True)
        )
        return first + 2 * second

    used = {name: case.inputs[name] for name in ("v0", "v1", "taps0", "taps1", "query0")}
    result = Comparison(used, case.dh).run(sources_only)
    assert result["query0"] is None
    assert torch.equal(result["v1"], 2 * case.dh)
