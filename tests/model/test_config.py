import pytest

from lit_msar.model import DecoderConfig


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n_heads": 6, "n_kv_heads": 4}, "n_heads=6 must be a multiple of n_kv_heads=4"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"d_model": 100}, "d_model=100 must be a multiple of 8"),
        ({"d_expert": 12}, "d_expert=12 must be a multiple of 8"),
        ({"top_k": 99}, "top_k=99 must lie between 1 and n_experts"),
        ({"n_dense_layers": 9}, "n_dense_layers=9 must lie between 0 and n_layers"),
        ({"vocab_size": 0}, "vocab_size must be at least 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_shape_is_refused_by_name(changes, named):
    with pytest.raises(ValueError, match=named):
        DecoderConfig(**changes)


def test_dense_model_may_have_any_expert_width():
    assert DecoderConfig(n_experts=0, d_expert=3, d_model=100).moe_layers == []
