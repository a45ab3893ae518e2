"""Sharded runs give what one process gives: gradients, losses, weights, whatever the ranks and meshes."""

import json

import pytest
import torch
from training.sharded_runs import (
    FOUR_RANKS,
    RESIDUALS,
    RESUMES,
    SAVES,
    STEP_TWO,
    TOKENS,
    TWO_RANKS,
    Idle,
    fit,
    run_everything,
)

from lit_msar.inference.consolidate import consolidate
from lit_msar.inference.load import load_decoder
from lit_msar.training.checkpoint import Checkpoint
from lit_msar.training.strategy import FullyShard

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def unsharded(root, prepared):
    """The same runs in this process, without sharding."""
    runs = {}
    for name in RESIDUALS:
        runs[name], _, _ = fit(root / name, prepared, name)
    runs["aux_loss"], _, _ = fit(root / "aux_loss", prepared, "msar", {"aux_loss_coef": 0.1}, max_steps=4)
    runs["accumulated"], _, _ = fit(root / "accumulated", prepared, max_steps=4, accumulate_grad_batches=2)
    runs["idle_experts"], _, _ = fit(
        root / "idle_experts", prepared, "msar", {"balance_rate": 0.0}, max_steps=4, callbacks=[Idle()]
    )
    runs["hybrid_accumulated"] = runs["accumulated"]
    return runs


@pytest.fixture(scope="module")
def sharded(root, prepared, straight):
    """What rank r saw of a scenario."""
    run_everything(root, prepared)
    return lambda scenario, rank=0: torch.load(root / f"{scenario}.{rank}.pt", weights_only=True)


SCENARIOS = TWO_RANKS | FOUR_RANKS


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_sharded_runs_agree_with_one_process(scenario, sharded, unsharded):
    seen, expected = sharded(scenario), unsharded.get(scenario) or unsharded[SCENARIOS[scenario][0]]
    assert seen["losses"] == pytest.approx(expected["losses"][: len(seen["losses"])], abs=1e-4)
    # AdamW forgives a wrong scale; the gradients themselves do not
    assert seen["norms"][:3] == pytest.approx(expected["norms"][:3], rel=2e-5)
    assert seen["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        error = (seen["gradients"][name] - gradient).norm()
        assert error <= 2e-5 * gradient.norm() + 1e-9, name


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_start_is_that_of_one_process_bit_for_bit(scenario, sharded, unsharded):
    start = sharded(scenario)["start"]
    expected = unsharded[SCENARIOS[scenario][0]]["start"]
    assert start.keys() == expected.keys()
    assert all(torch.equal(start[name], value) for name, value in expected.items())


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_routers_are_identical_on_all_ranks(scenario, sharded):
    n_ranks = 2 if scenario in TWO_RANKS else 4
    first = sharded(scenario)
    assert first["balance_bias"].any()
    for rank in range(1, n_ranks):
        other = sharded(scenario, rank)
        assert torch.equal(other["balance_bias"], first["balance_bias"])
        assert all(torch.equal(other["weights"][name], value) for name, value in first["weights"].items())
        assert other["losses"] == first["losses"]


HELD = {"msar": 1 / 2, "expert_parallel": 1 / 2, "hybrid": 1 / 2, "hybrid_expert_parallel": 1 / 2} | {
    "sharded_and_expert_parallel": 1 / 4
}


@pytest.mark.parametrize(("scenario", "share"), HELD.items(), ids=HELD)
def test_ranks_hold_their_share(scenario, share, sharded):
    seen = sharded(scenario)
    total = sum(value.numel() for name, value in seen["weights"].items() if "balance_bias" not in name)
    assert seen["held"] <= share * total * 1.05


# ------------------------------------------------------------------------------------------ checkpoints


@pytest.fixture(scope="module")
def straight(root, prepared):
    """Five steps without a break in one process, and the single file of step 2."""
    seen, _, _ = fit(root / "file", prepared, max_steps=5, callbacks=[Checkpoint(every_n_steps=2, keep_last=-1)])
    return seen


@pytest.mark.parametrize("scenario", ["same", "from_async"])
def test_resume_on_as_many_ranks_is_exact(scenario, sharded):
    whole, resumed = sharded("plain"), sharded(f"resumed_{scenario}")
    assert resumed["losses"] == whole["losses"][2:]
    assert all(torch.equal(resumed["weights"][name], value) for name, value in whole["weights"].items())


@pytest.mark.parametrize("scenario", [*RESUMES, "on_one_rank", "on_one_rank_from_expert_parallel"])
def test_resume_on_other_ranks_continues_the_run(scenario, sharded, straight):
    """Any number of ranks, from a directory or a file, with expert parallelism or without."""
    resumed = sharded(f"resumed_{scenario}")
    # a moment that went to the wrong parameter, or was lost, would show in the second digit of these losses
    assert resumed["losses"] == pytest.approx(straight["losses"][2:], abs=1e-5)
    assert resumed["norms"] == pytest.approx(straight["norms"][2:], rel=1e-4)


@pytest.mark.parametrize("directory", ["plain", "async", "expert_parallel_saved", "one_rank"])
def test_directories_hold_the_same_step(directory, root, sharded, straight):
    """Two ranks' weights of step 2, saved at once, asynchronously or spread, are those of one process."""
    expected = load_decoder(root / "file" / STEP_TWO, torch.device("cpu")).state_dict()
    decoder = load_decoder(root / directory / STEP_TWO, torch.device("cpu"))
    for name, value in decoder.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=2e-5, msg=name)


def test_asynchronous_save_holds_the_values_of_its_step(root, sharded):
    saved = [load_decoder(root / name / STEP_TWO, torch.device("cpu")).state_dict() for name in ("plain", "async")]
    assert all(torch.equal(saved[1][name], value) for name, value in saved[0].items())


@pytest.mark.parametrize("directory", [*SAVES, "one_rank"])
def test_consolidated_logits_equal_sharded_logits(directory, root, sharded, tmp_path):
    consolidate(str(root / directory / "checkpoints" / "last.ckpt"), str(tmp_path / "out.safetensors"))
    with torch.no_grad():
        logits = load_decoder(tmp_path / "out.safetensors", torch.device("cpu"))(TOKENS).logits
    assert torch.allclose(logits, sharded(directory)["logits"], rtol=1e-6, atol=1e-6)


def test_manifest_says_what_made_the_checkpoint(root, sharded):
    manifest = json.loads((root / "plain" / STEP_TWO / "manifest.json").read_text())
    assert (manifest["step"], manifest["ranks"], manifest["tokens"]) == (2, 2, 2 * 4 * 16)
    assert manifest["data"]["position"] == 8
    assert manifest["model"]["residual"] == "MSAR"
    assert manifest["versions"]["torch"] == torch.__version__
    assert "rest.pt" in manifest["files"]


def test_options_out_of_range_are_refused_by_name():
    with pytest.raises(ValueError, match="prefetch must not be negative, got -1"):
        FullyShard(prefetch=-1)
