import itertools
import json

import lightning as L
import pytest
import torch
from conftest import small_config
from training.conftest import Poison, data_of, module_of, trainer_of

from lit_msar.residual import AttnRes, Vanilla
from lit_msar.training.checkpoint import Checkpoint
from lit_msar.training.guard import NonFiniteError
from lit_msar.training.optim import OptimizerConfig


class Recorder(L.Callback):
    """Keeps weights, losses and loads after every optimizer step."""

    def __init__(self):
        self.weights, self.losses, self.loads = [], [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if module.last_window is None:
            return
        window, module.last_window = module.last_window, None
        self.losses.append((window.nats / window.tokens).item())
        self.loads.append(window.router.load)
        self.weights.append({name: p.detach().clone() for name, p in module.decoder.named_parameters()})


def fit(root, prepared, max_steps=3, module=None, data=None, recorder=None, **trainer_options):
    recorder = recorder or Recorder()
    module = module or module_of()
    trainer = trainer_of(root, max_steps, [recorder], **trainer_options)
    trainer.fit(module, data or data_of(prepared))
    return recorder, module, trainer


def mask(data, keep):
    """Mask all but the first keep[i] targets of the i-th micro-batch of each four-sequence batch."""
    plain = data.on_before_batch_transfer

    def masked(batch, dataloader_idx):
        batch = plain(batch, dataloader_idx)
        keep_rows = keep[: len(batch["targets"])] if len(batch["targets"]) == 4 else keep[masked.calls % 4 :][:1]
        masked.calls += 1
        for row, n in enumerate(keep_rows):
            batch["targets"][row, n:] = -100
        return batch

    masked.calls = 0
    data.on_before_batch_transfer = masked
    return data


def test_accumulation_weighs_by_tokens_like_one_large_batch(tmp_path, prepared):
    """Micro-batches of 1, 16, 0 and 9 valid tokens: the same weights as one batch that holds all of them."""
    keep = [1, 16, 0, 9]
    together, _, _ = fit(tmp_path, prepared, data=mask(data_of(prepared, batch_size=4), keep))
    apart, _, _ = fit(tmp_path, prepared, data=mask(data_of(prepared, batch_size=1), keep), accumulate_grad_batches=4)
    assert apart.losses == pytest.approx(together.losses, rel=1e-5)
    for name, weight in together.weights[-1].items():
        torch.testing.assert_close(apart.weights[-1][name], weight, rtol=1e-3, atol=2e-5, msg=name)


def test_fully_masked_window_changes_nothing_but_decay(tmp_path, prepared):
    recorder, module, _ = fit(
        tmp_path,
        prepared,
        max_steps=1,
        module=module_of(optimizer=OptimizerConfig(weight_decay=0.0)),
        data=mask(data_of(prepared), [0, 0, 0, 0]),
    )
    start = module_of()
    start.configure_model()
    assert module.grad_norm == 0
    for name, p in start.decoder.named_parameters():
        assert torch.equal(recorder.weights[0][name], p), name


def test_gradients_are_gone_before_the_next_forward(tmp_path, prepared):
    held = []

    class Look(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            held.append(sum(p.grad is not None for p in module.decoder.parameters()))

    trainer_of(tmp_path, 2, [Look()], accumulate_grad_batches=2).fit(module_of(), data_of(prepared))
    assert held[0] == held[2] == 0
    assert held[1] == held[3] > 0


def test_two_runs_with_one_seed_are_bitwise_equal(tmp_path, prepared):
    a, b = (fit(tmp_path, prepared)[0] for _ in range(2))
    assert a.losses == b.losses
    assert all(torch.equal(a.weights[-1][name], b.weights[-1][name]) for name in a.weights[-1])
    other, _, _ = fit(tmp_path, prepared, module=module_of(seed=1))
    assert other.losses != a.losses


def test_one_batch_is_learned_by_heart(tmp_path, prepared):
    recorder, _, _ = fit(
        tmp_path,
        prepared,
        max_steps=120,
        module=module_of(optimizer=OptimizerConfig(lr=1e-2, warmup_steps=5, weight_decay=0.0)),
        data=data_of(prepared, batch_size=2),
        overfit_batches=1,
    )
    assert recorder.losses[0] > 5
    assert recorder.losses[-1] < 0.1


def test_non_finite_loss_stops_before_the_weights_change(tmp_path, prepared):
    module, recorder = module_of(), Recorder()
    trainer = trainer_of(tmp_path, 5, [Poison(2), recorder])
    with pytest.raises(NonFiniteError, match=r"step 3 \(samples 8 to 11\): loss nan"):
        trainer.fit(module, data_of(prepared))
    assert len(recorder.weights) == 2
    assert torch.equal(recorder.weights[-1]["embedding.weight"], module.decoder.embedding.weight)


def test_clipping_bounds_the_update_and_reports_the_unclipped_norm(tmp_path, prepared):
    norms = []

    class Norm(L.Callback):
        def on_train_start(self, trainer, module):
            trainer.optimizers[0].register_step_post_hook(lambda *_: norms.append(norm_of(module)))

    def norm_of(module):
        return torch.nn.utils.get_total_norm([p.grad for p in module.decoder.parameters() if p.grad is not None]).item()

    _, free, _ = fit(tmp_path, prepared, max_steps=1, gradient_clip_val=None)
    clipped = module_of()
    trainer_of(tmp_path, 1, [Norm()], gradient_clip_val=1e-3).fit(clipped, data_of(prepared))
    assert free.grad_norm == pytest.approx(clipped.grad_norm, rel=1e-6)
    assert norms == [pytest.approx(1e-3, rel=1e-3)]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_balance_bias_moves_once_per_optimizer_step(tmp_path, prepared, accumulate):
    history = []

    class Bias(L.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            history.append(module.decoder.routers()[0].balance_bias.clone())

    module = module_of(balance_rate=0.5)
    trainer_of(tmp_path, 2, [Bias()], accumulate_grad_batches=accumulate).fit(module, data_of(prepared))
    moves = [not torch.equal(a, b) for a, b in itertools.pairwise(history)]
    assert moves == ([True] if accumulate == 1 else [True, False, True])
    assert module.decoder.routers()[0].balance_bias.abs().max() <= 2 * 0.5 * 2


def test_validation_moves_no_balance_bias_and_counts_all_sets(tmp_path, prepared):
    module = module_of(balance_rate=0.5)
    trainer = trainer_of(tmp_path, 1, limit_val_batches=1.0)
    trainer.validate(module, data_of(prepared), verbose=False)
    assert not module.decoder.routers()[0].balance_bias.any()
    metrics = {k: v.item() for k, v in trainer.callback_metrics.items()}
    assert metrics["val/loss"] == pytest.approx(5.77, abs=0.15)
    assert {"val_loss/Prose", "val_loss/Code", "val/bits_per_byte"} <= metrics.keys()


def test_aux_loss_reaches_the_router_and_not_the_reported_loss(tmp_path, prepared):
    plain, _, _ = fit(tmp_path, prepared, max_steps=1)
    aux, _, _ = fit(tmp_path, prepared, max_steps=1, module=module_of(aux_loss_coef=10.0))
    assert aux.losses == plain.losses
    router = "layers.1.mlp.router.weight"
    assert not torch.equal(aux.weights[0][router], plain.weights[0][router])


def test_predict_gives_log_likelihoods_that_sum_to_the_validation_loss(tmp_path, prepared):
    module = module_of()
    trainer = trainer_of(tmp_path, 1, limit_val_batches=1.0)
    trainer.validate(module, data_of(prepared), verbose=False)
    val_loss = trainer.callback_metrics["val/loss"].item()
    rows = trainer.predict(module, data_of(prepared))
    tokens = sum(row["tokens"].sum() for row in rows)
    loss = -sum(row["log_likelihood"].double().sum() for row in rows) / tokens
    assert loss.item() == pytest.approx(val_loss, rel=1e-6)


def test_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path, prepared):
    module = module_of(decoder=small_config(vocab_size=256))
    with pytest.raises(ValueError, match="the tokenizer has 320 ids but the model 256"):
        trainer_of(tmp_path, 1).fit(module, data_of(prepared))


def checkpointed(tmp_path, prepared, max_steps=4, **options):
    module = module_of(**options)
    trainer = trainer_of(tmp_path, max_steps, [Checkpoint(every_n_steps=2)], enable_checkpointing=True)
    trainer.fit(module, data_of(prepared))
    return tmp_path / "checkpoints" / "step=2.ckpt"


def test_resume_gives_the_uninterrupted_run_bit_for_bit(tmp_path, prepared):
    whole, _, _ = fit(tmp_path / "whole", prepared, max_steps=4)
    path = checkpointed(tmp_path / "cut", prepared)
    module, recorder = module_of(), Recorder()
    trainer = trainer_of(tmp_path / "again", 4, [recorder])
    trainer.fit(module, data_of(prepared), ckpt_path=path, weights_only=True)
    assert recorder.losses == whole.losses[2:]
    assert all(torch.equal(recorder.weights[-1][name], p) for name, p in whole.weights[-1].items())
    assert module.tokens_seen == 4 * 4 * 16


def test_resume_takes_learning_rate_and_decay_from_the_config(tmp_path, prepared):
    path = checkpointed(tmp_path, prepared)
    module = module_of(optimizer=OptimizerConfig(lr=5e-3, warmup_steps=2, weight_decay=0.3, decay_fraction=0.0))
    trainer = trainer_of(tmp_path / "again", 3)
    trainer.fit(module, data_of(prepared), ckpt_path=path, weights_only=True)
    assert module.used_lr == pytest.approx(5e-3)
    assert [g["weight_decay"] for g in trainer.optimizers[0].param_groups] == [0.3, 0.0]
    path = checkpointed(tmp_path / "none", prepared, optimizer=OptimizerConfig(weight_decay=0.0))
    trainer = trainer_of(tmp_path / "some", 3)
    trainer.fit(module_of(optimizer=module.optimizer_config), data_of(prepared), ckpt_path=path, weights_only=True)
    assert [g["weight_decay"] for g in trainer.optimizers[0].param_groups] == [0.3, 0.0]


def test_checkpoint_of_another_model_is_refused_by_the_difference(tmp_path, prepared):
    path = checkpointed(tmp_path, prepared)
    for residual, named in ((Vanilla(), "residual: MSAR in the checkpoint, Vanilla"), (None, "n_layers: 3 in the")):
        module = module_of(residual) if residual else module_of(decoder=small_config(vocab_size=320, n_layers=2))
        with pytest.raises(ValueError, match=named):
            trainer_of(tmp_path / "other", 5).fit(module, data_of(prepared), ckpt_path=path, weights_only=True)


def test_checkpoint_without_spec_is_refused(tmp_path, prepared):
    path = checkpointed(tmp_path, prepared)
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["lit_msar"]
    torch.save(checkpoint, path)
    with pytest.raises(ValueError, match="was not written by this kit"):
        trainer_of(tmp_path / "other", 5).fit(module_of(), data_of(prepared), ckpt_path=path, weights_only=True)


def test_spec_is_plain_json():
    spec = module_of(AttnRes()).spec
    assert json.loads(json.dumps(vars(spec))) == vars(spec)
