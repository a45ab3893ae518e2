import pytest
import torch
from kernel_inputs import DEVICE, Comparison, check_together, drawn, normal

from kernels import reference

pytest.importorskip("triton")

from kernels import msar_ahead, msar_block


def block_case(n_sources, n_reads, T, D=40, B=1, sizes=(1, 3, 5), dtype=torch.float32, query_scale=0.2) -> Comparison:
    m, K = len(sizes), reference.n_taps(sizes)
    inputs = {f"v{n}": normal(B, T, D, dtype=dtype) for n in range(n_sources)}
    for group in range(n_sources + n_reads - 1 if K else 0):
        inputs[f"taps{group}"] = normal(K, D, scale=0.3)
    for r in range(n_reads):
        inputs |= {f"query{r}": normal(m, D, scale=query_scale), f"weight{r}": normal(m, m, D, scale=0.05)}
        inputs |= {f"scale{r}": 1 + normal(1, scale=0.2), f"bias{r}": normal(m)}
    return Comparison(inputs, normal(B, T, D, dtype=dtype))


def opened(sources, taps, queries, options):
    """What `open_block` returns for sources of which the older were scored when a read before these saw them."""
    scored = [
        msar_ahead.score_source(v, group, [queries[0], *queries], **options)
        for v, group in zip(sources[:-1], taps[:-1], strict=True)
    ]
    sources = (*(source for _, source in scored), sources[-1])
    scores = [of_source for of_source, _ in scored]
    return msar_block.open_block(sources, taps, scores, [1] * len(scores), queries, len(queries), **options)


def block(by_block: bool, n_sources, n_reads, sizes=(1, 3, 5), gate="sigmoid", position=None):
    """The reads of a block with sublayers that return their input: every read feeds the partial sum of the next."""
    options = {"kernel_sizes": sizes, "position": position}

    def function(inputs):
        sources = [inputs[f"v{n}"] for n in range(n_sources)]
        taps = [inputs.get(f"taps{group}") for group in range(n_sources + n_reads - 1)]
        partial, total = None, 0
        if by_block:
            queries = [inputs[f"query{r}"] for r in range(n_reads)]
            waiting, sources, _ = opened(sources, taps[:n_sources], queries, options)
        for r in range(n_reads):
            parameters = [inputs[f"{name}{r}"] for name in ("query", "weight", "scale", "bias")]
            if by_block:
                of_partial = None if r == 0 else taps[n_sources + r - 1]
                mine = waiting[2 * r : 2 * r + 2]
                h, partial = msar_block.read_block(*mine, partial, of_partial, *parameters, gate=gate, **options)
            else:
                seen = sources if r == 0 else [*sources, partial]
                groups = taps[:n_sources] + ([] if r == 0 else [taps[n_sources + r - 1]])
                h = reference.msar_read(seen, groups, *parameters, gate=gate, **options)
            total = total + h
            partial = h if partial is None else partial + h
        return total + sources[0]  # a source that something else uses too

    return function


# wide enough for programs that hold whole tokens, with a tail of channels and without: in the interpreter they take
# minutes, and test_msar_mix has those kernels alone
WIDE_OPTIONS = {"n_sources": 2, "n_reads": 2, "dtype": torch.bfloat16}
WIDE = [
    WIDE_OPTIONS | {"T": 10, "D": 1048, "B": 2, "sizes": (1, 4), "packed": True},
    WIDE_OPTIONS | {"T": 61, "D": 1024, "n_reads": 3, "sizes": (1, 3, 5), "gate": "softmax"},
    WIDE_OPTIONS | {"T": 40, "D": 2112, "sizes": (1, 4, 8, 12)},
]


@pytest.mark.parametrize(
    "options",
    [
        {"n_sources": 2, "n_reads": 3, "T": 6},
        {"n_sources": 1, "n_reads": 1, "T": 5},
        {"n_sources": 2, "n_reads": 5, "T": 8, "D": 8, "sizes": (1, 3)},  # two walks, the second on top of the first
        {"n_sources": 2, "n_reads": 2, "T": 7, "B": 2, "packed": True, "gate": "softmax", "sizes": (1, 4)},
        {"n_sources": 2, "n_reads": 2, "T": 5, "sizes": (1, 1)},
        {"n_sources": 2, "n_reads": 2, "T": 24, "dtype": torch.bfloat16, "sizes": (1, 4)},
        {"n_sources": 1, "n_reads": 2, "T": 24, "dtype": torch.bfloat16, "sizes": (1, 4), "query_scale": 0.0},
        *(WIDE if DEVICE == "cuda" else []),
    ],
    ids=lambda options: "-".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in options.items()),
)
def test_reads_of_a_block_match_reference(options):
    packed, gate = options.pop("packed", False), options.pop("gate", "sigmoid")
    cases = drawn(block_case, **options)
    B, T, _ = cases[0].dh.shape
    arguments = {
        "n_sources": options["n_sources"],
        "n_reads": options["n_reads"],
        "sizes": options.get("sizes", (1, 3, 5)),
        "gate": gate,
        "position": (torch.arange(T, device=DEVICE) % 5).expand(B, T) if packed else None,
    }
    check_together(cases, block(False, **arguments), block(True, **arguments))


def test_two_runs_of_a_block_are_bitwise_equal():
    case = block_case(2, 2, 9, sizes=(1, 4))
    first, second = (case.run(block(True, 2, 2, sizes=(1, 4))) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_read_that_nothing_uses_leaves_the_others_gradients_alone():
    case = block_case(2, 2, 5, sizes=(1, 4))

    def first_read_only(inputs):
        sources, taps = [inputs["v0"], inputs["v1"]], [inputs["taps0"], inputs["taps1"]]
        queries = [inputs["query0"], inputs["query1"]]
        waiting, _, _ = opened(sources, taps, queries, {"kernel_sizes": (1, 4)})
        parameters = [inputs[f"{name}0"] for name in ("query", "weight", "scale", "bias")]
        return msar_block.read_block(*waiting[:2], None, None, *parameters, kernel_sizes=(1, 4))[0]

    used = {name: x for name, x in case.inputs.items() if not name.endswith("1") or name in ("v1", "taps1", "query1")}
    del used["taps2"]
    result = Comparison(used, case.dh).run(first_read_only)
    alone = Comparison({k: x for k, x in used.items() if k != "query1"}, case.dh).run(block(True, 2, 1, sizes=(1, 4)))
    assert result["query1"].eq(0).all()
    torch.testing.assert_close(result["query0"], alone["query0"], rtol=1e-4, atol=1e-6)


def test_limits_of_a_block_are_named():
    sources, taps = [normal(1, 2, 8, dtype=torch.float16)], [None]
    with pytest.raises(ValueError, match="bf16 or fp32 sources"):
        msar_block.open_block(sources, taps, [], [], [normal(1, 8)], 1, kernel_sizes=(1,))
    with pytest.raises(ValueError, match="1 to 16 reads a block, got 17"):
        msar_block.open_block([normal(1, 2, 8)], taps, [], [], [normal(1, 8)] * 17, 17, kernel_sizes=(1,))
