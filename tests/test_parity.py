import csv
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from data.prepare import prepare
from kernels import reference
from lit_msar import parity

SHAPE = {"d_model": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "head_dim": 16, "d_ff": 64, "vocab_size": 320}
STEPS = 3


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> parity.Options:
    """A few hundred random words, and the shape of a small model."""
    root = tmp_path_factory.mktemp("parity")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(50)]
    with (root / "text.jsonl").open("w") as file:
        for _ in range(40):
            file.write(json.dumps({"text": " ".join(rng.choices(words, k=40))}) + "\n")
    prepare(
        str(root / "out"), input=str(root / "text.jsonl"), train_tokenizer=320, workers=1, split="val=0.1", verify=False
    )
    moe = {"n_experts": 4, "top_k": 2, "d_expert": 16}
    (root / "size.yaml").write_text(yaml.safe_dump({"model": {"decoder": SHAPE | moe, "optimizer": {"lr": 1e-3}}}))
    return parity.Options(root / "size.yaml", root / "out", root / "losses", STEPS, warmup=5, batch_size=2, seq_len=16)


def inputs_of(operation: str) -> tuple[list, dict]:
    sources = [torch.randn(1, 5, 24) for _ in range(5)]
    lanes, n = torch.randn(1, 5, 3, 24), 3
    sizes = (1, 4)
    return {
        "attnres_read": ([sources, torch.randn(24), torch.randn(24), 1e-5], {}),
        "msar_read": (
            [
                sources,
                [torch.randn(4, 24) for _ in sources],
                *(torch.randn(2, 24), torch.randn(2, 2, 24), torch.ones(1), torch.zeros(2)),
            ],
            {"kernel_sizes": sizes, "eps": 1e-5},
        ),
        "hc_read": (
            [lanes, torch.randn(5, 24), torch.ones(2), *(torch.randn(n), torch.randn(n)), torch.eye(n), 1e-5],
            {},
        ),
        "mhc_read": (
            [lanes, torch.randn(n * n + 2 * n, n * 24), torch.ones(3), torch.zeros(n * n + 2 * n), 3, 1e-5],
            {},
        ),
        "update": ([lanes, torch.randn(1, 5, 24), torch.randn(1, 5, n), torch.randn(1, 5, n, n)], {}),
    }[operation]


@pytest.mark.parametrize("operation", vars(parity.REORDERED))
def test_reordered_operations_differ_by_rounding_alone(operation):
    positional, named = inputs_of(operation)
    plain = getattr(reference, operation)(*positional, **named)
    turned = getattr(parity.REORDERED, operation)(*positional, **named)
    torch.testing.assert_close(turned, plain, rtol=1e-4, atol=1e-5)
    pairs = [(turned, plain)] if isinstance(plain, torch.Tensor) else zip(turned, plain, strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs)


def test_every_strategy_trains_alike_on_the_reordered_reference(options):
    for name in parity.STRATEGIES:
        losses = {run: list(parity.train(name, run, options, torch.device("cpu"))) for run in parity.BASELINES}
        assert len(set(losses["reference"])) == STEPS
        assert losses["reordered"] == pytest.approx(losses["reference"], abs=1e-4)


def test_batches_are_other_text_at_each_step(options):
    first, second = list(parity.batches(options))[:2]
    assert first["tokens"].shape == (2, 16)
    assert not torch.equal(first["tokens"], second["tokens"])
    with pytest.raises(ValueError, match="fewer than steps x batch_size"):
        next(parity.batches(parity.Options(options.size, options.data, options.output, steps=10_000, seq_len=16)))


def write_losses(output: Path, runs: dict[str, list[float]]) -> None:
    for run, losses in runs.items():
        path = parity.losses_path(output, "HC", run)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("step,loss\n" + "".join(f"{step},{loss}\n" for step, loss in enumerate(losses)))


@pytest.mark.parametrize(
    ("of_kernels", "passed", "words"),
    [
        ([2.0, 1.004, 1.0], True, "within"),
        ([2.0, 1.5, 1.0], False, "BEYOND"),
        ([2.0, float("nan"), 1.0], False, "BEYOND"),
        ([2.0, 1.0], False, "incomplete"),
    ],
    ids=["near", "far", "nan", "unfinished"],
)
def test_kernels_pass_if_they_stay_near_at_every_step(of_kernels, passed, words, tmp_path, capsys):
    write_losses(tmp_path, {"reference": [2, 1, 1], "reordered": [2, 1, 1.1], "triton": of_kernels})
    options = parity.Options(Path(), Path(), tmp_path, steps=3)
    assert parity.compare(parity.wanted_runs(["HC"], with_triton=True), options) is passed
    assert words in capsys.readouterr().out.splitlines()[-1]
    rows = list(csv.DictReader((tmp_path / "parity.csv").open()))
    assert len(rows) == 6 + len(of_kernels)
    assert float(rows[5]["difference"]) == pytest.approx(0.1)


def test_twice_the_drift_of_rounding_is_beyond_the_bound(tmp_path):
    write_losses(tmp_path, {"reference": [2.0], "reordered": [2.1], "triton": [2.2]})
    options = parity.Options(Path(), Path(), tmp_path, steps=1)
    runs = parity.wanted_runs(["HC"], with_triton=True)
    assert not parity.compare(runs, options)
    write_losses(tmp_path, {"triton": [1.86]})
    assert parity.compare(runs, options)


def test_kernels_that_are_off_at_every_step_fail_beside_one_spike_of_rounding(tmp_path):
    write_losses(tmp_path, {"reference": [2.0] * 4, "reordered": [2.0, 2.0, 2.0, 3.0], "triton": [2.5] * 4})
    options = parity.Options(Path(), Path(), tmp_path, steps=4)
    runs = parity.wanted_runs(["HC"], with_triton=True)
    assert not parity.compare(runs, options)
    write_losses(tmp_path, {"triton": [2.0, 2.0, 2.3, 3.1]})
    assert parity.compare(runs, options)


def test_a_reordered_run_that_is_not_finite_allows_nothing(tmp_path):
    nan = float("nan")
    write_losses(tmp_path, {"reference": [2.0, 1.0], "reordered": [2.0, nan], "triton": [2.0, nan]})
    options = parity.Options(Path(), Path(), tmp_path, steps=2)
    runs = parity.wanted_runs(["HC"], with_triton=True)
    assert not parity.compare(runs, options)
    write_losses(tmp_path, {"triton": [2.0, 1.1]})
    assert not parity.compare(runs, options)
    write_losses(tmp_path, {"triton": [2.0, 1.001]})
    assert parity.compare(runs, options)


def test_a_complete_run_is_not_run_again(options, monkeypatch, tmp_path, capsys):
    started = []

    class Done:
        def __init__(self, command):
            started.append(command[-2:])

        def wait(self, timeout):
            return 0

    monkeypatch.setattr(parity.subprocess, "Popen", Done)
    monkeypatch.setattr(parity.torch.cuda, "is_available", lambda: False)  # which would add runs on the kernels
    write_losses(tmp_path, {"reference": [2.0, 1.0], "reordered": [2.0]})
    arguments = ["--data", str(options.data), "--size", str(options.size), "--output", str(tmp_path), "--steps", "2"]
    assert parity.main([*arguments, "--strategies", "HC"]) == 1
    assert started == [["HC", "reordered"]]


@pytest.mark.parametrize("wrong", [["--data", "no/such/data"], ["--size", "no-such-size"], ["--steps", "100000"]])
def test_wrong_options_end_with_one_line_that_names_them(options, tmp_path, capsys, wrong):
    given = ["--data", str(options.data), "--output", str(tmp_path), "--size", str(options.size)]
    assert parity.main([*given, *wrong]) == 2
    message = capsys.readouterr().err.strip()
    assert message.startswith("error:")
    assert "\n" not in message
    assert not list(tmp_path.iterdir())


def test_a_truncated_shard_is_named_before_any_run(options, tmp_path, capsys):
    shard = shutil.copytree(options.data, tmp_path / "data") / "train/text/shard-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])  # no step reads that far
    arguments = ["--data", str(tmp_path / "data"), "--output", str(tmp_path / "losses"), "--size", str(options.size)]
    assert parity.main([*arguments, "--steps", "2", "--seq_len", "16"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {shard}: truncated, it ends at byte")
    assert not (tmp_path / "losses").exists()
