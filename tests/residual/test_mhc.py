import math

import numpy as np
import pytest
import torch
from strategies import ToyModel, built, embedding

from kernels import reference
from lit_msar.residual import MHC, Vanilla


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def mhc_in_numpy(model: ToyModel, x: np.ndarray, n: int) -> np.ndarray:
    """mHC Eq. 7 to 9 as printed: M <- T_r(T_c(M)), 20 rounds from exp; x <- H_res x + H_post^T F(H_pre x); mean."""
    p = {name: value.detach().numpy() for name, value in model.residual.named_parameters()}
    lanes = np.stack([x] * n, axis=2)
    for k in range(model.residual.n_sublayers):
        vec = lanes.reshape(*lanes.shape[:2], -1)
        vec = vec / np.sqrt((vec * vec).mean(-1, keepdims=True) + 1e-5)
        alpha = np.repeat(p[f"alpha.{k}"], [n, n, n * n])
        H = alpha * (vec @ p[f"phi.{k}"].T) + p[f"bias.{k}"]
        pre, post, M = sigmoid(H[..., :n]), 2 * sigmoid(H[..., n : 2 * n]), np.exp(H[..., 2 * n :])
        M = M.reshape(*M.shape[:2], n, n)
        for _ in range(20):
            M = M / M.sum(-2, keepdims=True)
            M = M / M.sum(-1, keepdims=True)
        y = np.tanh((pre[:, :, None] @ lanes)[:, :, 0] @ model.weights[k].numpy())
        lanes = M @ lanes + post[..., None] * y[:, :, None]
    return lanes.mean(2)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_mhc_equals_a_transcription_of_its_formula(n):
    model, x = ToyModel(built(MHC(n_lanes=n), spread=1.0)), embedding()
    np.testing.assert_allclose(model(x).detach().numpy(), mhc_in_numpy(model, x.numpy(), n), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("logit_std", [0.1, 3.0], ids=["small_logits", "large_logits"])
def test_mhc_matches_deepseek_v4(logit_std):
    """The model's own module and its layer's write, which keep res transposed (lane read, lane written)."""
    deepseek = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    transformers = pytest.importorskip("transformers")
    n, D = 4, 32
    theirs = deepseek.DeepseekV4HyperConnection(
        transformers.DeepseekV4Config(hidden_size=D, hc_mult=n, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-5)
    )
    strategy = MHC(n_lanes=n, sinkhorn_eps=1e-6)
    strategy.build(D, 1)
    with torch.no_grad():
        theirs.fn.normal_(0, 0.02)
        theirs.base.normal_(0, logit_std)
        theirs.scale.uniform_(0.5, 1.5)
        transposed = torch.cat([torch.arange(2 * n), 2 * n + torch.arange(n * n).view(n, n).T.flatten()])
        strategy.phi[0].copy_(theirs.fn[transposed])
        strategy.bias[0].copy_(theirs.base[transposed])
        strategy.alpha[0].copy_(theirs.scale)
    lanes, y = torch.randn(2, 5, n, D), torch.randn(2, 5, D)
    site = ToyModel(strategy).sites[0]
    x, (same_lanes, post, res) = strategy.read((lanes,), site)
    their_post, their_comb, their_x = theirs(lanes)
    for ours, expected in ((x, their_x), (post, their_post), (res, their_comb.transpose(-1, -2))):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)
    assert same_lanes is lanes
    written = their_post.unsqueeze(-1) * y.unsqueeze(-2) + torch.matmul(their_comb.transpose(-1, -2), lanes)
    torch.testing.assert_close(strategy.write((lanes, post, res), site, y)[0], written, rtol=0, atol=2e-6)


def test_learned_contraction_matches_deepseek_v4():
    deepseek = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    transformers = pytest.importorskip("transformers")
    n, D = 4, 32
    theirs = deepseek.DeepseekV4HyperHead(
        transformers.DeepseekV4Config(hidden_size=D, hc_mult=n, hc_eps=1e-6, rms_norm_eps=1e-5)
    )
    strategy = MHC(n_lanes=n, sinkhorn_eps=1e-6, contract="learned")
    strategy.build(D, 1)
    with torch.no_grad():
        for ours, expected in zip(
            (strategy.head_weight, strategy.head_bias, strategy.head_scale),
            (theirs.hc_fn, theirs.hc_base, theirs.hc_scale),
            strict=True,
        ):
            ours.copy_(expected.normal_(0, 0.5))
    lanes = torch.randn(2, 5, n, D)
    torch.testing.assert_close(strategy.finish((lanes,)), theirs(lanes), rtol=0, atol=2e-6)


def test_zero_phi_is_the_plain_residual():
    """pre = 1/n, post = 1 and rows of res that sum to 1 keep all lanes equal to Vanilla's sum."""
    model, x = ToyModel(built(MHC(), spread=0.0)), embedding()
    with torch.no_grad():
        for phi, bias in zip(model.residual.phi, model.residual.bias, strict=True):
            phi.zero_()
            bias[:4] = -math.log(3)  # anew in float64: the start is rounded to fp32
    torch.testing.assert_close(model(x), ToyModel(built(Vanilla()))(x), rtol=1e-12, atol=1e-12)
    (lanes,) = model.run(model.residual.begin(x), 0, 6)
    torch.testing.assert_close(lanes, lanes[:, :, :1].expand_as(lanes), rtol=1e-12, atol=1e-12)


def lane_spread_after_training(model: ToyModel) -> float:
    """Std of the lanes about their mean after five steps of Adam, as a share of the lanes' own std."""
    x = embedding()
    optimizer = torch.optim.Adam(model.residual.parameters(), lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        (model(x) - x.roll(1, -1)).square().mean().backward()
        optimizer.step()
    (lanes,) = model.run(model.residual.begin(x), 0, 6)
    return ((lanes - lanes.mean(2, keepdim=True)).std() / lanes.std()).item()


@pytest.mark.parametrize("start", ["near_identity", "megatron"])
def test_lanes_part_after_a_few_steps_of_training(start):
    assert lane_spread_after_training(ToyModel(built(MHC(start=start), spread=0.0))) > 1e-4


def test_lanes_never_part_from_a_symmetric_start():
    """Why phi does not start at zero: equal lanes with symmetric coefficients get equal gradients for ever."""
    model = ToyModel(built(MHC(), spread=0.0))
    with torch.no_grad():
        for phi in model.residual.phi:
            phi.zero_()
    assert lane_spread_after_training(model) < 1e-12


def test_starts_are_the_stated_ones():
    ours, megatron = (built(MHC(start=start), d_model=64, spread=0.0) for start in ("near_identity", "megatron"))
    x = embedding(D=64)
    site = ToyModel(ours).sites[0]
    seen = ours.inspect(ours.begin(x), site)
    torch.testing.assert_close(seen["pre"], torch.full_like(seen["pre"], 0.25), rtol=0.01, atol=0)
    torch.testing.assert_close(seen["post"], torch.ones_like(seen["post"]), rtol=0.01, atol=0)
    diagonal = seen["res"].diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(diagonal, torch.full_like(diagonal, 0.948), rtol=0.002, atol=0)
    assert ours.phi[0].std().item() == pytest.approx(0.02, rel=0.03)
    seen = megatron.inspect(megatron.begin(x), site)
    torch.testing.assert_close(seen["pre"], torch.full_like(seen["pre"], 0.5), rtol=0.02, atol=0)
    torch.testing.assert_close(seen["res"], torch.full_like(seen["res"], 0.25), rtol=0.05, atol=0)
    assert megatron.phi[0].abs().max().item() == pytest.approx(math.sqrt(6 / (24 + 4 * 64)), rel=0.01)
    assert all(alpha.tolist() == pytest.approx([0.01] * 3) for alpha in ours.alpha)


def test_contractions_of_the_same_lanes():
    lanes = torch.randn(2, 5, 4, 8, dtype=torch.float64)
    mean, total = (built(MHC(contract=contract)).finish((lanes,)) for contract in ("mean", "sum"))
    torch.testing.assert_close(mean, lanes.mean(2))
    torch.testing.assert_close(total, lanes.sum(2))
    learned = built(MHC(contract="learned"), spread=0.0).finish((lanes,))
    torch.testing.assert_close(learned, mean, rtol=0.1, atol=0.02)  # gates start near 1/n


@pytest.mark.parametrize(("contract", "at_the_head"), [("mean", 0), ("learned", 4 * 4 * 24 + 5)])
def test_mhc_adds_96_widths_and_27_values_per_sublayer(contract, at_the_head):
    strategy = built(MHC(contract=contract), d_model=24, n_layers=5)
    assert sum(p.numel() for p in strategy.parameters()) == 10 * (96 * 24 + 27) + at_the_head


def test_gradients_stay_finite_at_large_logits():
    model = ToyModel(built(MHC(), spread=6.0))
    model(embedding()).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.residual.parameters())


def test_fewer_rounds_leave_the_columns_less_even():
    logits = torch.randn(200, 4, 4, dtype=torch.float64)
    errors = [(reference.sinkhorn(logits, n).sum(-2) - 1).abs().max().item() for n in (1, 5, 20)]
    assert errors[0] > 10 * errors[1] > 100 * errors[2]


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match=r"n_lanes must be at least 2 \(one lane is residual=Vanilla\), got 1"):
        MHC(n_lanes=1)
    with pytest.raises(ValueError, match="sinkhorn_rounds must be at least 1, got 0"):
        MHC(sinkhorn_rounds=0)
    with pytest.raises(ValueError, match="kernels must be one of auto"):
        MHC(kernels="cuda")
