"""A decoder out of a checkpoint file, without running any code of it."""

import pickle
from pathlib import Path

import torch

from lit_msar.model import Decoder
from lit_msar.model.spec import ModelSpec

SPEC_KEY = "lit_msar"
"""Where a checkpoint keeps the model's spec and the tokens seen."""


def load_decoder(path: str | Path, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Decoder:
    """The decoder of a training checkpoint, in evaluation mode.

    Args:
        path: checkpoint file that `fit` wrote.
        device: where it goes; the GPU if there is one.
        dtype: compute dtype; bf16 on a GPU, fp32 elsewhere.
    Raises:
        FileNotFoundError, ValueError: no such file, or not a checkpoint of this kit.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    checkpoint = read_checkpoint(path)
    config, residual = ModelSpec(**checkpoint[SPEC_KEY]["spec"]).make()
    with torch.device("meta"):
        decoder = Decoder(config, residual, dtype)
    prefix = "decoder."
    weights = {k.removeprefix(prefix): v for k, v in checkpoint["state_dict"].items() if k.startswith(prefix)}
    decoder.to_empty(device=device).load_state_dict(weights)
    return decoder.eval()


def read_checkpoint(path: str | Path) -> dict:
    """The contents of a checkpoint file, on the CPU, tensors and plain values only."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no checkpoint at {path}")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError) as error:
        raise ValueError(f"{path} is not a readable checkpoint: {str(error).splitlines()[0]}") from error
    if not isinstance(checkpoint, dict) or SPEC_KEY not in checkpoint:
        raise ValueError(f"{path} was not written by this kit: it does not say which model it holds")
    return checkpoint


def run_tokenizer(checkpoint: str | Path) -> Path:
    """The tokenizer file that `fit` left in the directory of the run that wrote a checkpoint.

    Raises:
        FileNotFoundError: there is no such checkpoint, or no tokenizer with it.
    """
    if not Path(checkpoint).exists():
        raise FileNotFoundError(f"no checkpoint at {checkpoint}")
    run = Path(checkpoint).resolve().parent.parent
    for name in ("tokenizer.model", "tokenizer.json"):
        if (run / name).exists():
            return run / name
    raise FileNotFoundError(f"no tokenizer.model or tokenizer.json in {run}; name one with --tokenizer")
