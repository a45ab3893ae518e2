import pytest
import torch
from conftest import small_config, small_decoder

from lit_msar.training.peer import glm4moe, peer_step_seconds

pytest.importorskip("transformers")


def test_peer_has_the_same_parameters_as_the_decoder():
    config = small_config(d_model=64, n_heads=4, n_kv_heads=2, head_dim=16)
    ours = small_decoder(d_model=64, n_heads=4, n_kv_heads=2, head_dim=16)
    theirs = glm4moe(config, torch.device("meta"))
    count = sum(p.numel() for p in theirs.parameters())
    assert count == sum(p.numel() for p in ours.parameters())
    wide = {name for name, p in theirs.named_parameters() if p.dtype != torch.bfloat16}
    assert all("mlp.gate.weight" in name for name in wide), "nothing but routers may be wider than bf16"


def test_peer_takes_whole_training_steps():
    tokens = torch.randint(97, (2, 9))
    seconds, peak = peer_step_seconds(small_config(), tokens, warmup=1, steps=2, dtype=torch.float32)
    assert seconds > 0
    assert peak is None
