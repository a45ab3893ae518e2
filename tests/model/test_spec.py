from lit_msar.model import DecoderConfig
from lit_msar.model.spec import ModelSpec, explain_difference
from lit_msar.residual import MSAR, AttnRes


def test_spec_makes_the_same_model_again():
    spec = ModelSpec.of(DecoderConfig(d_model=64), MSAR(kernel_sizes=(1, 3), mix="mean"))
    config, residual = spec.make()
    assert config.d_model == 64
    assert isinstance(residual, MSAR)
    assert residual.options == MSAR(kernel_sizes=(1, 3), mix="mean").options
    assert explain_difference(spec, ModelSpec.of(config, residual)) == ""


def test_differences_are_named_and_free_options_are_none():
    base = ModelSpec.of(DecoderConfig(), AttnRes(block_size=2))
    assert (
        explain_difference(base, ModelSpec.of(DecoderConfig(moe="loop"), AttnRes(block_size=2, kernels="reference")))
        == ""
    )
    assert "block_size: 2 in the checkpoint, 4 in the config" in explain_difference(
        base, ModelSpec.of(DecoderConfig(), AttnRes(block_size=4))
    )
    assert "d_ff" in explain_difference(base, ModelSpec.of(DecoderConfig(d_ff=8), AttnRes(block_size=2)))
