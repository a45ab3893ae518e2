import math

import pytest
import torch
from strategies import ToyModel, built, embedding

from kernels import reference
from lit_msar.residual import MSAR, Vanilla, VanillaConv


def set_to_copies(strategy) -> None:
    """Taps that copy the token, gates 1/m whatever the data."""
    with torch.no_grad():
        for taps, weight, bias in zip(strategy.taps, strategy.mix_weight, strategy.mix_bias, strict=True):
            weight.zero_()
            bias.fill_(-math.log(3))  # anew in float64: the start is rounded to fp32
            taps.zero_()
            taps[[0, 4, 12]] = 1


def test_delta_taps_and_even_gates_are_vanilla():
    model, x = ToyModel(built(VanillaConv(), spread=0.0)), embedding()
    set_to_copies(model.residual)
    torch.testing.assert_close(model(x), ToyModel(built(Vanilla()))(x), rtol=1e-12, atol=1e-12)


def test_the_sum_itself_is_untouched():
    model, x = ToyModel(built(VanillaConv())), embedding()
    strategy, state = model.residual, model.residual.begin(x)
    for site in model.sites[:-1]:
        h, between = strategy.read(state, site)
        y = model.sublayer(site.index, h)
        (total,) = strategy.write(between, site, y)
        assert torch.equal(total, state[0] + y)
        state = (total,)


def test_a_read_is_the_msar_read_of_the_sum_as_the_only_source():
    conv = built(VanillaConv())
    msar = built(MSAR(conv_owner="reader"))
    site = ToyModel(conv).sites[3]
    with torch.no_grad():
        for name in ("taps", "mix_weight", "mix_scale", "mix_bias"):
            getattr(msar, name)[3].copy_(getattr(conv, name)[3])
    x = embedding()
    expected = reference.msar_read(
        [x], [msar.taps[3]], msar.query[3], *msar.mixer(site), kernel_sizes=msar.kernel_sizes
    )
    torch.testing.assert_close(conv.read((x,), site)[0], expected)
    torch.testing.assert_close(conv.inspect((x,), site)["gates"], msar.inspect((x, x, x), site)["gates"])


def test_vanilla_conv_adds_40_widths_and_5_values_per_read():
    strategy = built(VanillaConv(), d_model=24, n_layers=5)
    assert sum(p.numel() for p in strategy.parameters()) == 11 * (40 * 24 + 5)


def test_kernel_sizes_without_a_conv_are_refused():
    with pytest.raises(ValueError, match=r"kernel_sizes=\[1, 1\] has no conv; add a width or use residual=Vanilla"):
        VanillaConv(kernel_sizes=(1, 1))
    with pytest.raises(ValueError, match="kernel_sizes must start with 1"):
        VanillaConv(kernel_sizes=(4,))
