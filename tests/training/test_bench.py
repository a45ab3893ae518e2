import csv
import itertools

import pytest
import torch
from training.conftest import module_of

from lit_msar.residual import MSAR, Vanilla
from lit_msar.residual.registry import parse_strategies
from lit_msar.training import bench as bench_module
from lit_msar.training.bench import PARTS, Bench, bench


def bench_of(strategies="Vanilla, MSAR(block_size=2)", update=True, **options):
    module = module_of(**options)
    return Bench(module.config, module, parse_strategies(strategies), 2, 16, torch.device("cpu"), update)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_every_interval_belongs_to_the_part_that_encloses_it(monkeypatch, checkpointing):
    """With a clock that ticks once per mark, a part's time counts its intervals: forward, backward, recomputation."""
    run = bench_of(checkpointing=checkpointing)
    monkeypatch.setattr(bench_module.time, "perf_counter", itertools.count().__next__)
    for _ in range(2):
        run.step(run.contestants[1])
    first, parts = run.clock.read()
    assert first == parts
    n_layers = run.config.n_layers
    passes = 2 if checkpointing == "none" else 3
    assert parts["attention"] == passes * n_layers
    assert parts["embedding"] == parts["loss"] == 2
    if checkpointing == "none":
        assert parts["mlp"] == passes * n_layers
    else:  # a layer is recomputed inside the backward of its MLP, whose time it cuts in pieces
        assert parts["mlp"] > passes * n_layers
    assert parts["optimizer"] == 1
    assert set(parts) == set(PARTS)


def test_stamps_change_no_gradient():
    timed, plain = bench_of("MSAR(block_size=2)"), module_of(MSAR(block_size=2))
    plain.configure_model()
    for decoder in (timed.decoder, plain.decoder):
        decoder(timed.inputs, timed.targets).losses.total.backward()
    for ours, expected in zip(timed.decoder.parameters(), plain.decoder.parameters(), strict=True):
        assert torch.equal(ours.grad, expected.grad)


def test_strategies_share_one_backbone_and_learn(tmp_path):
    run = bench_of()
    first, last = (contestant.residual for contestant in run.contestants)
    assert isinstance(first, Vanilla)
    assert isinstance(last, MSAR)
    rows = run.run(warmup=1, steps=3, rounds=2)
    assert [row.strategy for row in rows] == ["Vanilla", "MSAR(block_size=2)"]
    for row in rows:
        assert row.loss < 5.7
        assert row.tokens_per_second == pytest.approx(32 / row.step)
        assert sum(row.parts.values()) == pytest.approx(row.step, rel=0.5)


def test_without_an_update_a_step_leaves_weights_and_no_gradients(monkeypatch):
    run = bench_of(update=False)
    trained = [*run.decoder.parameters(), *run.contestants[1].residual.parameters()]
    before = [p.detach().clone() for p in trained]
    has_gradients = []
    backward = torch.Tensor.backward

    def watched(loss):
        backward(loss)
        has_gradients.append(all(p.grad is not None for p in run.decoder.parameters()))

    monkeypatch.setattr(torch.Tensor, "backward", watched)
    rows = run.run(warmup=0, steps=1, rounds=1)
    assert [set(row.parts) for row in rows] == [set(PARTS) - {"optimizer"}] * 2
    assert has_gradients == [True] * 2
    assert all(p.grad is None for p in trained)
    assert all(torch.equal(p, old) for p, old in zip(trained, before, strict=True))


def test_command_writes_rows_and_traces(tmp_path):
    bench(module_of(), 1, 8, "Vanilla", steps=1, warmup=0, rounds=1, output=str(tmp_path), trace=True)
    rows = list(csv.DictReader((tmp_path / "bench.csv").open()))
    assert [row["strategy"] for row in rows] == ["Vanilla"]
    assert float(rows[0]["step_seconds"]) > 0
    assert (tmp_path / "trace-Vanilla.json.gz").stat().st_size > 1000
    assert (tmp_path / "roofline.png").stat().st_size > 1000


def test_peer_gets_a_row_of_its_own(tmp_path):
    pytest.importorskip("transformers")
    bench(module_of(), 1, 8, "Vanilla", steps=1, warmup=0, rounds=1, output=str(tmp_path), peer=True)
    row = list(csv.DictReader((tmp_path / "bench.csv").open()))[-1]
    assert row["strategy"].startswith("transformers Glm4Moe")
    assert float(row["tokens_per_second"]) == pytest.approx(8 / float(row["step_seconds"]))
    assert row["attention_seconds"] == ""


def test_growth_measures_every_shape_and_prints_one_table(tmp_path, capsys):
    options = {"steps": 1, "warmup": 0, "rounds": 1, "output": str(tmp_path)}
    rows = bench(module_of(), 1, 8, "Vanilla, AttnRes", lengths=[8, 16], **options)
    assert [(row.strategy, row.seq_len) for row in rows] == [(s, T) for T in (8, 16) for s in ("Vanilla", "AttnRes")]
    assert all(row.tokens_per_second == pytest.approx(row.seq_len / row.step) for row in rows)
    assert "By seq_len" in capsys.readouterr().out
    rows = bench(module_of(), 1, 8, "Vanilla, AttnRes", depths=[1, 2], **options)
    assert [row.n_layers for row in rows] == [1, 1, 2, 2]
    assert [row["n_layers"] for row in csv.DictReader((tmp_path / "bench.csv").open())] == ["1", "1", "2", "2"]


def test_rows_are_on_disk_after_every_round(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(bench_module, "write_csv", lambda rows, path, about: written.append(len(rows)))
    bench(module_of(), 1, 8, "Vanilla, AttnRes", steps=1, warmup=0, rounds=3, output=str(tmp_path))
    assert written == [2, 2, 2, 2]


WRONG = [{"steps": 0}, {"rounds": 0}, {"warmup": -1}, {"trace": True}, {"lengths": []}, {"depths": [2, 2]}]
WRONG += [{"lengths": [8], "peer": True}, {"lengths": [8], "depths": [1]}, {"update": False, "peer": True}]


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_wrong_options_are_refused_by_name(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        bench(module_of(), 1, 8, **options)
