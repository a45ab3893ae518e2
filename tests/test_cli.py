"""The command line as a user meets it: what it prints, leaves on disk and returns."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training.conftest import prepared  # noqa: F401 (a fixture)

from lit_msar.cli import COMMANDS, LIGHTNING_COMMANDS, main
from lit_msar.training.module import LanguageModel

CONFIGS = Path(__file__).parents[1] / "configs"
SMALL = [
    "--config", f"{CONFIGS}/base.yaml", "--config", f"{CONFIGS}/size/tiny.yaml",
    "--model.decoder.d_model=16", "--model.decoder.n_layers=2", "--model.decoder.head_dim=4",
    "--model.decoder.d_expert=8", "--model.decoder.d_ff=16", "--model.decoder.vocab_size=320",
    "--data.seq_len=16", "--data.batch_size=2", "--data.workers=0",
    "--trainer.limit_val_batches=2", "--trainer.accelerator=cpu", "--monitor.sample_tokens=4",
]  # fmt: skip


def fit_arguments(prepared, out, *more):  # noqa: F811
    return ["fit", *SMALL, "--data.path", str(prepared), "--trainer.default_root_dir", str(out), *more]


def run(argv):
    """Exit code of a command, whether it returns or exits."""
    try:
        return main(argv)
    except SystemExit as stop:
        return stop.code


def test_overview_lists_every_command(capsys):
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in [*LIGHTNING_COMMANDS, *COMMANDS])


@pytest.mark.parametrize("command", [*LIGHTNING_COMMANDS, *COMMANDS])
def test_every_command_has_help(command, capsys):
    assert run([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "usage: python -m lit_msar" in text
    assert "default" in text


def test_fit_resume_validate_generate_and_report(prepared, tmp_path, capsys):  # noqa: F811
    out = tmp_path / "runs" / "msar"
    more = ["--model.residual=MSAR", "--model.residual.kernel_sizes=[1,3]", "--trainer.log_every_n_steps=1"]
    assert run(fit_arguments(prepared, out, *more, "--trainer.max_steps=3")) == 0
    assert run(fit_arguments(prepared, out, *more, "--trainer.max_steps=5", "--ckpt_path=last")) == 0
    row = json.loads((out / "result.json").read_text())
    assert row["steps"] == 5
    assert row["tokens"] == 5 * 2 * 16
    assert row["model"]["options"]["kernel_sizes"] == [1, 3]
    assert len(list(out.glob("events.out*"))) == 2, "a resumed run goes on in its own directory"
    last = str(out / "checkpoints" / "last.ckpt")
    validate = ["validate", *SMALL, *more, "--data.path", str(prepared), "--ckpt_path", last]
    assert run([*validate, "--trainer.default_root_dir", str(tmp_path / "val")]) == 0
    assert "val/bits_per_byte" in capsys.readouterr().out
    assert run(["generate", "--checkpoint", last, "--prompt", "the quick", "--max_new_tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("the quick")
    assert run(["report", "--runs", str(tmp_path / "runs")]) == 0
    assert "MSAR" in capsys.readouterr().out


def curve(out, tag):
    """Step and value of each point that a run's event files hold."""
    events = EventAccumulator(str(out))
    events.Reload()
    return [(point.step, point.value) for point in events.Scalars(tag)]


def test_an_evaluation_that_was_cut_short_is_made_up_for(prepared, tmp_path, monkeypatch):  # noqa: F811
    every = ["--trainer.val_check_interval=2", "--checkpoint.every_n_steps=2", "--ckpt_path=last"]
    assert run(fit_arguments(prepared, tmp_path / "whole", *every, "--trainer.max_steps=6")) == 0
    evaluate = LanguageModel.validation_step
    arguments = fit_arguments(prepared, tmp_path / "cut", *every, "--trainer.max_steps=6")
    for step in (4, 6):  # in the middle, and at the end

        def failing(self, batch, batch_index, step=step):
            if self.trainer.global_step == step:
                raise ArithmeticError("out of memory")
            evaluate(self, batch, batch_index)

        monkeypatch.setattr(LanguageModel, "validation_step", failing)
        with pytest.raises(ArithmeticError):
            run(arguments)
        assert (tmp_path / "cut" / "checkpoints" / "last.ckpt").resolve().name == f"step={step}.ckpt"
    assert not (tmp_path / "cut" / "result.json").exists()
    monkeypatch.undo()
    assert run(arguments) == 0
    assert [step for step, _ in curve(tmp_path / "whole", "val/loss")] == [2, 4, 6]
    assert curve(tmp_path / "cut", "val/loss") == curve(tmp_path / "whole", "val/loss")
    rows = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "cut")]
    assert rows[0]["metrics"] == rows[1]["metrics"]
    assert "val/loss" in rows[0]["metrics"]


def test_predict_writes_what_validate_sums_up(prepared, tmp_path, capsys):  # noqa: F811
    whole = ["--trainer.val_check_interval=1", "--trainer.limit_val_batches=1.0"]
    arguments = fit_arguments(prepared, tmp_path, "--trainer.max_steps=1", *whole)
    assert run(arguments) == 0
    assert run(["predict", *arguments[1:], "--ckpt_path=last"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert {row["set"] for row in rows} == {"Prose", "Code"}
    loss = -sum(row["log_likelihood"] for row in rows) / sum(row["tokens"] for row in rows)
    assert loss == pytest.approx(json.loads((tmp_path / "result.json").read_text())["metrics"]["val/loss"], rel=1e-6)
    assert not list(tmp_path.glob("*.unfinished"))


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_an_evaluation_of_no_weights_is_refused(prepared, tmp_path, capsys, command):  # noqa: F811
    assert run([command, *fit_arguments(prepared, tmp_path)[1:]]) == 2
    assert capsys.readouterr().err == (
        f"error: {command} needs weights: --ckpt_path PATH (or last), or --model.init_from PATH\n"
    )


def test_a_finished_run_keeps_its_result(prepared, tmp_path):  # noqa: F811
    arguments = fit_arguments(prepared, tmp_path, "--trainer.max_steps=2", "--ckpt_path=last")
    assert run(arguments) == 0
    result = (tmp_path / "result.json").read_bytes()
    assert run(arguments) == 0
    assert (tmp_path / "result.json").read_bytes() == result


def test_evaluations_leave_a_run_as_it_is(prepared, tmp_path):  # noqa: F811
    arguments = fit_arguments(prepared, tmp_path, "--trainer.max_steps=2", "--trainer.val_check_interval=2")
    assert run(arguments) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert run(["validate", *arguments[1:], "--ckpt_path=last", "--trainer.limit_val_batches=1"]) == 0
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_an_evaluation_that_is_asked_to_stop_says_so(prepared, tmp_path, monkeypatch, capsys):  # noqa: F811
    arguments = fit_arguments(prepared, tmp_path, "--trainer.max_steps=1")
    assert run(arguments) == 0
    monkeypatch.setattr(
        LanguageModel, "validation_step", lambda self, batch, batch_index: os.kill(os.getpid(), signal.SIGTERM)
    )
    assert run(["validate", *arguments[1:], "--ckpt_path=last"]) == 128 + signal.SIGTERM
    assert capsys.readouterr().err.endswith("error: validate was stopped by signal 15; nothing was saved\n")


def test_saved_config_makes_the_same_run_again(prepared, tmp_path):  # noqa: F811
    assert run(fit_arguments(prepared, tmp_path / "a", "--trainer.max_steps=2", "--model.residual=MHC")) == 0
    again = ["fit", "--config", str(tmp_path / "a" / "config.yaml"), "--trainer.default_root_dir", str(tmp_path / "b")]
    assert run(again) == 0
    rows = [json.loads((tmp_path / name / "result.json").read_text()) for name in "ab"]
    assert rows[0]["metrics"] == rows[1]["metrics"]


def test_overlay_may_name_options_of_the_strategy_alone(prepared, tmp_path):  # noqa: F811
    overlay = tmp_path / "mean.yaml"
    overlay.write_text(yaml.safe_dump({"model": {"residual": {"init_args": {"mix": "mean"}}}}))
    argv = fit_arguments(prepared, tmp_path / "out", "--trainer.max_steps=1")
    argv[1:1] = ["--config", f"{CONFIGS}/residual/msar.yaml"]
    argv += ["--config", f"{CONFIGS}/residual/msar.yaml", "--config", str(overlay)]
    assert run(argv) == 0
    row = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (row["residual"], row["model"]["options"]["mix"]) == ("MSAR", "mean")


WRONG = {
    "precision": (
        ["fit", *SMALL, "--data.path", "{prepared}", "--trainer.precision=bf16-true"],
        "trainer.precision must be 32-true, got bf16-true",
    ),
    "unknown-command": (["train"], "no command 'train'; there are fit"),
    "unknown-option": (["fit", "--model.decoder.n_head=3"], "n_head"),
    "missing-config": (["fit", "--config", "nowhere.yaml"], "nowhere.yaml"),
    "unknown-strategy": (["fit", *SMALL, "--model.residual=Highway"], "the strategies are AttnRes"),
    "bad-kernel-sizes": (
        ["fit", *SMALL, "--model.residual=MSAR", "--model.residual.kernel_sizes=[4,1]"],
        "kernel_sizes must start with 1 (the identity stream), got [4, 1]",
    ),
    "heads": (["fit", *SMALL, "--model.decoder.n_heads=3"], "n_heads=3 must be a multiple of n_kv_heads=2"),
    "odd-width": (["fit", *SMALL, "--model.decoder.d_expert=12"], "d_expert=12 must be a multiple of 8"),
    "float-steps": (["fit", *SMALL, "--trainer.max_steps=1e3"], "trainer.max_steps"),
    "missing-data": (["fit", *SMALL, "--data.path", "nowhere"], "nowhere"),
    "no-max-steps": (["fit", *SMALL, "--trainer.max_steps=-1", "--data.path", "{prepared}"], "max_steps must be set"),
    "long-sequence": (["fit", *SMALL, "--data.path", "{prepared}", "--data.seq_len=10000000"], "seq_len"),
    "small-vocabulary": (
        ["fit", *SMALL, "--data.path", "{prepared}", "--model.decoder.vocab_size=100"],
        "the tokenizer has 320 ids but the model 100",
    ),
    "missing-checkpoint": (["generate", "--checkpoint", "no.ckpt", "--prompt", "x"], "no.ckpt"),
    "bad-top-p": (["generate", "--checkpoint", "no.ckpt", "--prompt", "x", "--top_p", "2"], "top_p must lie in (0, 1]"),
    "missing-input": (["prepare", "--input", "no.jsonl", "--output", "out"], "no.jsonl"),
    "nothing-to-prepare": (["prepare", "--output", "out"], "--input"),
    "no-runs": (["report", "--runs", "nowhere"], "no finished run"),
    "missing-ckpt-path": (["fit", *SMALL, "--data.path", "{prepared}", "--ckpt_path", "no.ckpt"], "no.ckpt"),
    "nothing-to-validate": (
        ["validate", *SMALL, "--data.path", "{prepared}", "--ckpt_path", "last", "--trainer.default_root_dir", "run"],
        "no complete checkpoint in run/checkpoints",
    ),
    "unsharded-plan": (["plan", *SMALL, "--gpus", "2"], "add --config configs/strategy/fsdp.yaml"),
    "no-gpu": (["plan", *SMALL, "--gpus", "0"], "gpus must be at least 1, got 0"),
    "bad-expert-parallel": (
        ["plan", *SMALL, "--config", f"{CONFIGS}/strategy/fsdp.yaml", "--trainer.strategy.expert_parallel=3"],
        "expert_parallel=3 must divide the 8 GPUs",
    ),
    "nothing-to-consolidate": (["consolidate", "--checkpoint", "no.ckpt", "--output", "out"], "no.ckpt"),
    "nothing-to-start-from": (
        ["fit", *SMALL, "--data.path", "{prepared}", "--model.init_from", "no.safetensors"],
        "no checkpoint at no.safetensors",
    ),
    "missing-directory": (["data-info", "nowhere"], "nowhere"),
}  # fmt: skip


@pytest.mark.parametrize(("argv", "named"), WRONG.values(), ids=WRONG)
def test_wrong_input_ends_with_one_line_and_code_2(argv, named, prepared, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    argv = [prepared.as_posix() if a == "{prepared}" else a for a in argv]
    if argv[0] == "fit":
        argv += ["--trainer.default_root_dir", "run"]
    assert run(argv) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1
    assert lines[-1] == errors[0]
    assert named in errors[0]
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert not any(name.endswith((".ckpt", ".bin", ".json")) for name in left), "nothing half-written"


def test_data_info_names_a_truncated_shard_in_the_words_of_fit(prepared, tmp_path, capsys):  # noqa: F811
    data = shutil.copytree(prepared, tmp_path / "data")
    shard = data / "train/code/shard-00000.bin"
    size = shard.stat().st_size
    os.truncate(shard, size - 2)
    said = []
    for argv in (["data-info", str(data)], fit_arguments(data, tmp_path / "out", "--trainer.max_steps=1")):
        capsys.readouterr()
        assert run(argv) == 2
        said += [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said[0].startswith(f"error: {shard}: truncated, it ends at byte {size - 2} instead of {size}; ")
    assert said == [said[0]] * 2


@pytest.mark.parametrize(
    "flag", [["--skip_bad_lines"], ["--skip_bad_lines", "true"], ["--skip_bad_lines=true"]], ids=str
)
def test_a_flag_needs_no_value(flag, tmp_path, capsys):
    lines = [json.dumps({"text": f"a line of text, number {i}"}) for i in range(40)]
    (tmp_path / "bad.jsonl").write_text("\n".join([*lines, "{broken", '{"no": "text"}']) + "\n")
    argv = ["prepare", "--input", str(tmp_path / "bad.jsonl"), "--output", str(tmp_path / "out"), "--workers", "1"]
    argv += ["--train_tokenizer", "300"]
    assert run(argv) == 2
    assert "bad.jsonl" in capsys.readouterr().err
    assert run([*argv, *flag]) == 0
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["counts"]["documents"] == 40


def test_second_run_into_one_directory_is_refused(prepared, tmp_path, capsys):  # noqa: F811
    assert run(fit_arguments(prepared, tmp_path, "--trainer.max_steps=1")) == 0
    assert run(fit_arguments(prepared, tmp_path, "--trainer.max_steps=1")) == 2
    assert "continue that run with --ckpt_path last" in capsys.readouterr().err


def test_checkpoint_of_another_model_is_refused(prepared, tmp_path, capsys):  # noqa: F811
    assert run(fit_arguments(prepared, tmp_path / "a", "--trainer.max_steps=1")) == 0
    last = tmp_path / "a" / "checkpoints" / "last.ckpt"
    more = ["--trainer.max_steps=2", "--model.residual=MSAR", "--ckpt_path", str(last)]
    assert run(fit_arguments(prepared, tmp_path / "b", *more)) == 2
    assert "residual: Vanilla in the checkpoint, MSAR in the config" in capsys.readouterr().err


def test_module_entry_point_returns_the_exit_code():
    result = subprocess.run([sys.executable, "-m", "lit_msar", "nonsense"], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr


def test_commands_without_training_do_not_wait_for_lightning():
    code = "import sys, lit_msar.cli; sys.exit('lightning' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_strategy_overlays_are_read_and_planned(capsys):
    for path in sorted((CONFIGS / "strategy").glob("*.yaml")):
        n_gpus = "1" if path.stem in ("cpu", "gpu") else "16"
        assert run(["plan", *SMALL, "--config", str(path), "--gpus", n_gpus]) == 0, path
        mesh = "2 x 8" if path.stem == "fsdp_multi" else n_gpus
        assert f"ranks: {n_gpus}; mesh (replicate x shard): {mesh}\n" in capsys.readouterr().out


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_plan_is_of_the_run_that_the_config_describes(compiles):
    from lit_msar.training.command import ConfigCLI, plan, setup_of

    options = ["--config", f"{CONFIGS}/strategy/fsdp.yaml", "--model.checkpointing=selective"]
    cli = ConfigCLI([*SMALL, *options, f"--model.compile={compiles}"], plan, skip=("config",))
    setup = setup_of(cli, n_gpus=2, gpus_per_node=8)
    assert (setup.compiles, setup.checkpointing, setup.sharded) == (compiles, "selective", True)
