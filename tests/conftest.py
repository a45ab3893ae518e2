"""Shared builders of small models and batches."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # the kernels run in Triton's interpreter where there is no GPU; it is chosen when triton is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

from lit_msar.model import Decoder, DecoderConfig
from lit_msar.residual import Residual, Vanilla


def small_config(**changes) -> DecoderConfig:
    """Three layers, the first dense, wide enough for every option."""
    shape = {
        "d_model": 32,
        "n_layers": 3,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 8,
        "d_ff": 64,
        "n_experts": 6,
        "top_k": 2,
        "d_expert": 16,
        "vocab_size": 97,
    }
    return DecoderConfig(**(shape | changes))


def small_decoder(residual: Residual | None = None, seed: int = 0, dtype=torch.float32, **changes) -> Decoder:
    """An initialised decoder of `small_config`; parameters and activations in `dtype`."""
    checkpointing = changes.pop("checkpointing", "none")
    model = Decoder(small_config(**changes), residual or Vanilla(), dtype, checkpointing)
    model.initialize(seed)
    return model.to(dtype)


def python_path(folder: str) -> str:
    """PYTHONPATH of a child that finds `folder` first, and what this process was given."""
    return os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))


# Small tensors: threads cost more than they give, and the machine may be shared.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _one_seed_per_test():
    torch.manual_seed(1234)


def pytest_collection_modifyitems(config, items):
    """Without a CUDA device, tests marked gpu are deselected rather than skipped: they are not part of that run."""
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
