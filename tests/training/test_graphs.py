"""Steps replayed from CUDA graphs train as others do."""

import pytest
import torch
from training.conftest import data_of, module_of, trainer_of
from training.test_guard import Snapshots, assert_equal, gpu_module

from lit_msar.residual import MHC, MSAR, AttnRes, Vanilla
from lit_msar.training import graphs
from lit_msar.training.bench import Bench
from lit_msar.training.graphs import MAX_FORMS, WARM_UP, GraphedStep


@pytest.fixture
def _pretended(monkeypatch):
    """Graphs without a GPU: a replay runs the step again and writes to the same tensors, gradients among them."""

    def capture(run):
        before = [parameter.grad.clone() for parameter in parameters]
        held = [parameter.grad for parameter in parameters]
        outputs = tuple(torch.full_like(x, -1) for x in run())
        for parameter, gradient in zip(parameters, before, strict=True):  # capturing computes nothing
            parameter.grad.copy_(gradient)

        def replay():
            now = [parameter.grad for parameter in parameters]
            for parameter, gradient in zip(parameters, held, strict=True):  # a graph knows no others
                parameter.grad = gradient
            for kept, new in zip(outputs, run(), strict=True):
                kept.copy_(new)
            for parameter, gradient in zip(parameters, now, strict=True):
                parameter.grad = gradient

        return replay, outputs

    parameters = []

    def warm_up(self, inputs):
        parameters[:] = self._parameters
        for _ in range(WARM_UP):
            self._step(inputs)

    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(GraphedStep, "_warm_up", warm_up)
    monkeypatch.setattr("lit_msar.training.module.check_graphs", lambda device, world_size: None)


VALIDATING = {"limit_val_batches": 1, "val_check_interval": 2, "check_val_every_n_epoch": None}


def trained(root, prepared, cuda_graphs, accumulate=1, **options):
    seen = Snapshots()
    module = module_of(cuda_graphs=cuda_graphs)
    trainer = trainer_of(root, 4, [seen], accumulate_grad_batches=accumulate, **VALIDATING)
    trainer.fit(module, data_of(prepared, **options))
    return seen.steps, module


@pytest.mark.usefixtures("_pretended")
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    "options", [{}, {"packing": "document", "reset_at_document": True}], ids=["chunks", "documents"]
)
def test_replayed_steps_change_no_bit(tmp_path, prepared, accumulate, options):
    replayed, module = trained(tmp_path, prepared, True, accumulate, **options)
    plain, other = trained(tmp_path, prepared, False, accumulate, **options)
    assert_equal(replayed, plain)
    assert module.tokens_seen == other.tokens_seen
    assert_equal(module.last_window.router, other.last_window.router)
    assert_equal(module.train_loss.compute(), other.train_loss.compute())


def square(parameter):
    def step(batch):
        loss = (parameter * batch["x"]).square().sum()
        loss.backward()
        return (loss.detach(),)

    return step


@pytest.mark.usefixtures("_pretended")
def test_gradients_add_up_over_forms_and_outputs_stay():
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    graphed = GraphedStep([parameter], square(parameter))
    (first,) = graphed({"x": torch.tensor([1.0, 1.0])})
    (second,) = graphed({"x": torch.tensor([2.0, 0.0])})
    (third,) = graphed({"x": torch.ones(3, 2)})  # another form, captured between two micro-steps
    assert [first.item(), second.item(), third.item()] == [5.0, 4.0, 15.0]
    torch.testing.assert_close(parameter.grad, torch.tensor([2.0 + 8.0 + 6.0, 4.0 + 0.0 + 12.0]))


@pytest.mark.usefixtures("_pretended")
def test_forms_beyond_the_limit_run_as_they_are(monkeypatch):
    captured = []
    capture = graphs.capture
    monkeypatch.setattr(graphs, "capture", lambda run: captured.append(1) or capture(run))
    parameter = torch.nn.Parameter(torch.ones(1))
    graphed = GraphedStep([parameter], square(parameter))
    for n in [*range(1, MAX_FORMS + 3), 1, MAX_FORMS + 2]:
        if parameter.grad is not None:
            parameter.grad.zero_()
        (loss,) = graphed({"x": torch.ones(n, 1)})
        assert loss.item() == n
        assert parameter.grad.item() == 2 * n
    assert len(captured) == MAX_FORMS


@pytest.mark.usefixtures("_pretended")
def test_a_replaced_gradient_is_an_error():
    parameter = torch.nn.Parameter(torch.ones(1))
    graphed = GraphedStep([parameter], square(parameter))
    graphed({"x": torch.ones(1)})
    parameter.grad = None
    with pytest.raises(RuntimeError, match="zero gradients in place"):
        graphed({"x": torch.ones(1)})


def test_a_run_that_cannot_replay_says_why(tmp_path, prepared):
    with pytest.raises(
        ValueError, match=r"model\.cuda_graphs needs one CUDA device, this run is on cpu: set it to false"
    ):
        trained(tmp_path, prepared, True)
    with pytest.raises(ValueError, match="this run is on 2 processes"):
        graphs.check_graphs(torch.device("cuda"), 2)


def test_bench_times_no_graph():
    module = module_of(cuda_graphs=True)
    with pytest.raises(ValueError, match="leave out"):
        Bench(module.config, module, {"Vanilla": Vanilla()}, 1, 8, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("residual", [Vanilla, MHC, AttnRes, MSAR])
@pytest.mark.parametrize("options", [{}, {"compile": True}, {"checkpointing": "selective"}], ids=repr)
def test_replayed_steps_on_a_gpu_equal_others(tmp_path, prepared, residual, options, monkeypatch):
    # each run compiles, and kernels chosen by their times may add in another order
    monkeypatch.setattr("torch._inductor.config.deterministic", True)
    steps = {}
    for cuda_graphs in (False, True):
        seen = Snapshots()
        module = gpu_module(residual=residual(), cuda_graphs=cuda_graphs, **options)
        gpu = {"accelerator": "gpu", "devices": 1, "accumulate_grad_batches": 2}
        trainer = trainer_of(tmp_path, 4, [seen], **gpu, **VALIDATING)
        trainer.fit(module, data_of(prepared, workers=2))
        steps[cuda_graphs] = seen.steps
    assert_equal(steps[True], steps[False])
