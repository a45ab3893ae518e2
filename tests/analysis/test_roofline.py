import pytest
import torch
from conftest import small_config

from lit_msar.analysis.cost import training_flops_per_token
from lit_msar.analysis.roofline import Roofs, Work, measure_roofs, roofline_figure, step_work
from lit_msar.residual import MSAR, Vanilla


@pytest.mark.parametrize("residual", [Vanilla, MSAR])
def test_parts_add_up_to_the_steps_flops(residual):
    config = small_config()
    work = step_work(config, residual(), batch_size=2, seq_len=16)
    model_flops = sum(part.flops for name, part in work.items() if name != "optimizer")
    assert model_flops == pytest.approx(32 * training_flops_per_token(config, residual(), 16))


def test_inactive_experts_cost_bytes_but_no_flops():
    few, many = (step_work(small_config(n_experts=n), Vanilla(), 1, 8)["mlp"] for n in (4, 8))
    router_flops = 6 * 8 * (8 - 4) * 32 * 2  # the wider router of two layers
    assert many.flops - few.flops == router_flops
    assert many.bytes > 1.5 * few.bytes


def test_figure_has_a_point_per_part_and_the_roof():
    work = {"A": {"attention": Work(1e9, 1e6), "mlp": Work(2e9, 1e6), "loss": Work(1e8, 1e6)}}
    work["A"] |= {"residual": Work(1e6, 1e6), "optimizer": Work(1e6, 1e7)}
    seconds = {"A": {"attention": 1e-3, "mlp": 1e-3, "loss": 1e-3, "residual": 1e-3, "optimizer": 1e-3}}
    axis = roofline_figure(seconds, work, Roofs(1e13, 1e12)).axes[0]
    labelled = {line.get_label(): line.get_xydata()[0] for line in axis.lines}
    assert labelled["A: attention"] == pytest.approx([1e3, 1e12])
    assert len(labelled) == 6


def test_roofs_are_measured():
    roofs = measure_roofs(torch.device("cpu"))
    assert roofs.flops > 1e9
    assert roofs.bytes > 1e8
