import math

import numpy as np
import pytest
import torch
from strategies import ToyModel, built, embedding

from lit_msar.residual import HC, Vanilla


def hc_in_numpy(model: ToyModel, x: np.ndarray, n: int) -> np.ndarray:
    """HC Eq. 1 to 5 and 10 to 13 in the paper's letters, H [.., n, D] and A_r by (lane read, lane written)."""
    p = {name: value.detach().numpy() for name, value in model.residual.named_parameters()}
    H = np.stack([x] * n, axis=2)
    for k in range(model.residual.n_sublayers):
        H_bar = H / np.sqrt((H * H).mean(-1, keepdims=True) + 1e-5)
        W_m, W_beta, W_r = p[f"weight.{k}"][0], p[f"weight.{k}"][1], p[f"weight.{k}"][2:].T
        s_alpha, s_beta = p[f"scale.{k}"]
        A_m = s_alpha * np.tanh(H_bar @ W_m) + p[f"pre.{k}"]
        B = s_beta * np.tanh(H_bar @ W_beta) + p[f"post.{k}"]
        A_r = s_alpha * np.tanh(H_bar @ W_r) + p[f"res.{k}"].T
        h = np.einsum("btn,btnd->btd", A_m, H)
        y = np.tanh(h @ model.weights[k].numpy())
        H = np.swapaxes(A_r, -1, -2) @ H + B[..., None] * y[:, :, None]
    return H.sum(2)


@pytest.mark.parametrize("n", [1, 3, 4])
def test_dynamic_hc_equals_a_transcription_of_its_formula(n):
    model, x = ToyModel(built(HC(n_lanes=n))), embedding()
    np.testing.assert_allclose(model(x).detach().numpy(), hc_in_numpy(model, x.numpy(), n), rtol=1e-11, atol=1e-11)


def test_static_hc_is_dynamic_hc_with_zero_weights():
    dynamic, static = ToyModel(built(HC())), ToyModel(built(HC(dynamic=False)))
    with torch.no_grad():
        for weight in dynamic.residual.weight:
            weight.zero_()
    static.residual.load_state_dict(
        {name: value for name, value in dynamic.residual.state_dict().items() if name in static.residual.state_dict()}
    )
    x = embedding()
    torch.testing.assert_close(static(x), dynamic(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dynamic", [True, False])
def test_start_reads_what_vanilla_reads_and_sums_to_n_times_its_sum(dynamic):
    x = embedding()
    hc = ToyModel(built(HC(dynamic=dynamic), spread=0.0))
    vanilla = ToyModel(built(Vanilla()))
    hc_state, vanilla_state = hc.residual.begin(x), vanilla.residual.begin(x)
    for site in hc.sites[:-1]:
        hc_read, _ = hc.residual.read(hc_state, site)
        vanilla_read, _ = vanilla.residual.read(vanilla_state, site)
        torch.testing.assert_close(hc_read, vanilla_read, rtol=1e-12, atol=1e-12)
        hc_state = hc.run(hc_state, site.index, site.index + 1)
        vanilla_state = vanilla.run(vanilla_state, site.index, site.index + 1)
    torch.testing.assert_close(hc(x), 4 * vanilla(x), rtol=1e-12, atol=1e-12)


def test_start_reads_lane_l_mod_n_and_writes_all_lanes_alike():
    strategy = built(HC(n_lanes=4), n_layers=3, spread=0.0)
    assert [pre.argmax().item() for pre in strategy.pre] == [0, 1, 2, 3, 0, 1]
    assert all(pre.sum() == 1 and pre.max() == 1 for pre in strategy.pre)
    assert all((post == 1).all() for post in strategy.post)
    assert all(torch.equal(res, torch.eye(4, dtype=res.dtype)) for res in strategy.res)
    assert not any(weight.any() for weight in strategy.weight)
    assert all(scale.tolist() == pytest.approx([0.01, 0.01]) for scale in strategy.scale)


def test_lanes_part_after_a_few_steps_of_training():
    model, x = ToyModel(built(HC(), spread=0.0)), embedding()
    optimizer = torch.optim.SGD(model.residual.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
    (lanes,) = model.run(model.residual.begin(x), 0, 6)
    assert (lanes - lanes.mean(2, keepdim=True)).abs().mean(dim=(0, 1, 3)).min() > 1e-4


def test_parameters_are_those_of_the_papers_1b_model():
    with torch.device("meta"):
        strategy = HC(n_lanes=4)
        strategy.build(2048, 16)
    assert sum(p.numel() for p in strategy.parameters()) == 394_048  # HC, OLMo-1B-DHCx4


def test_output_projections_start_smaller_by_the_root_of_the_lanes():
    assert HC(n_lanes=4).output_std_factor() == 0.5
    assert HC(n_lanes=2).output_std_factor() == pytest.approx(1 / math.sqrt(2))
    assert Vanilla().output_std_factor() == 1


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="n_lanes must be at least 1, got 0"):
        HC(n_lanes=0)
    with pytest.raises(ValueError, match="kernels must be one of auto"):
        HC(kernels="cuda")
