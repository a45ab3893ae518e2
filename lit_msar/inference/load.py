"""Weights out of a checkpoint in any of the kit's forms, without running any code of it.

Forms: the single file of an unsharded run; the directory of a sharded run (PyTorch's distributed format); safetensors
that `consolidate` wrote, one file or a directory with an index. A tensor is read when it is asked for, and of a sharded
parameter the rank's own part alone.
"""

import json
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lit_msar.initialization import local_part, local_slices
from lit_msar.model import Decoder
from lit_msar.model.spec import ModelSpec

SPEC_KEY = "lit_msar"
"""Where a checkpoint keeps the model's spec and the tokens seen; safetensors: the spec, as JSON."""
REST_FILE = "rest.pt"
"""In a sharded run's directory: all that is not a parameter or its optimizer state."""
INDEX_FILE = "model.safetensors.index.json"
PREFIX = "decoder."
"""Of the decoder's names in a training checkpoint."""


def load_decoder(path: str | Path, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Decoder:
    """The decoder of a checkpoint, in evaluation mode.

    Args:
        path: what `fit` or `consolidate` wrote.
        device: where it goes; the GPU if there is one.
        dtype: compute dtype; bf16 on a GPU, fp32 elsewhere.
    Raises:
        FileNotFoundError, ValueError: no such file, or not a checkpoint of this kit.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    weights = open_weights(path)
    config, residual = weights.spec.make()
    with torch.device("meta"):
        decoder = Decoder(config, residual, dtype)
    decoder.to_empty(device=device)
    load_weights(decoder, weights)
    return decoder.eval()


def load_weights(decoder: Decoder, weights: "Weights") -> None:
    """Fill a decoder, sharded or not, in place.

    Raises:
        ValueError: names or shapes differ.
    """
    tensors = decoder.state_dict()
    for name in sorted(tensors.keys() ^ weights.shapes.keys()):
        raise ValueError(f"{weights.path}: {name} is in {'the model' if name in tensors else 'the checkpoint'} alone")
    for name, tensor in tensors.items():
        if tensor.shape != weights.shapes[name]:
            raise ValueError(
                f"{weights.path}: {name} is {list(weights.shapes[name])} there and {list(tensor.shape)} in the model"
            )
    weights.fill(tensors)


# ------------------------------------------------------------------------------------------ the three forms


class Weights:
    """Parameters and buffers of a decoder on disk.

    Attributes:
        path: of the checkpoint.
        spec: the model they belong to.
        shapes: by name.
    """

    def __init__(self, path: Path, spec: dict[str, Any], shapes: Mapping[str, torch.Size]) -> None:
        self.path, self.spec, self.shapes = path, ModelSpec(**spec), dict(shapes)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the named tensors into `tensors`, in place; of a DTensor the local part is read and filled."""
        raise NotImplementedError


class FileWeights(Weights):
    """A single training checkpoint, mapped into memory."""

    def __init__(self, path: Path) -> None:
        checkpoint = read_checkpoint(path)
        state = checkpoint["state_dict"].items()
        self._tensors = {name.removeprefix(PREFIX): tensor for name, tensor in state if name.startswith(PREFIX)}
        super().__init__(path, checkpoint[SPEC_KEY]["spec"], {name: t.shape for name, t in self._tensors.items()})

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            local_part(tensor).copy_(self._tensors[name][local_slices(tensor)])


class ShardedWeights(Weights):
    """The directory of a sharded run."""

    prefix = f"model.{PREFIX}"

    def __init__(self, path: Path) -> None:
        rest = read_rest(path)
        self._reader = dcp.FileSystemReader(path)
        held = self._reader.read_metadata().state_dict_metadata.items()
        shapes = {
            name.removeprefix(self.prefix): entry.size
            for name, entry in held
            if name.startswith(self.prefix) and isinstance(entry, TensorStorageMetadata)
        }
        super().__init__(path, rest[SPEC_KEY]["spec"], shapes)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        named = {f"{self.prefix}{name}": tensor.detach() for name, tensor in tensors.items()}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # so it is, on purpose
                dcp.load(named, storage_reader=self._reader, no_dist=True)
        except (CheckpointException, OSError) as error:
            raise ValueError(f"{self.path} is damaged: {str(error).splitlines()[-1]}") from error


class ConsolidatedWeights(Weights):
    """safetensors, one file or several."""

    def __init__(self, path: Path) -> None:
        files = _safetensors_files(path)
        self._files: dict[str, Path] = {}
        shapes, spec = {}, None
        for file in files:
            with _opened(file) as opened:
                spec = spec or (opened.metadata() or {}).get(SPEC_KEY)
                for name in opened.keys():
                    self._files[name] = file
                    shapes[name] = torch.Size(opened.get_slice(name).get_shape())
        if spec is None:
            raise ValueError(f"{path} was not written by this kit: it does not say which model it holds")
        super().__init__(path, json.loads(spec), shapes)

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        for file in sorted({self._files[name] for name in tensors}):
            with _opened(file) as opened:
                for name, tensor in tensors.items():
                    if self._files[name] == file and local_part(tensor).numel():
                        local_part(tensor).copy_(opened.get_slice(name)[local_slices(tensor)])


def _opened(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a readable safetensors file: {error}") from error


def _safetensors_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    index = json.loads((path / INDEX_FILE).read_text())
    return [path / name for name in sorted(set(index["weight_map"].values()))]


def open_weights(path: str | Path) -> Weights:
    """The weights at `path`, in whichever form they are.

    Raises:
        FileNotFoundError, ValueError: no such path, or nothing of this kit.
    """
    path = Path(path)
    if (path.suffix == ".safetensors" and path.is_file()) or (path / INDEX_FILE).is_file():
        return ConsolidatedWeights(path)
    return ShardedWeights(path) if path.is_dir() else FileWeights(path)


# ------------------------------------------------------------------------------------------ training checkpoints


def is_sharded(path: str | Path) -> bool:
    """Whether `path` is the directory of a sharded run."""
    return (Path(path) / ".metadata").is_file()


def read_rest(path: str | Path) -> dict[str, Any]:
    """What a training checkpoint holds besides sharded tensors; a single file's are mapped, not read.

    Raises:
        FileNotFoundError, ValueError: as `read_checkpoint`.
    """
    path = Path(path)
    if path.is_dir() and not (is_sharded(path) and (path / REST_FILE).is_file()):
        raise ValueError(f"{path} is not a checkpoint: it lacks {REST_FILE} or .metadata")
    return read_checkpoint(path / REST_FILE if path.is_dir() else path)


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The contents of a checkpoint file, on the CPU, tensors and plain values only.

    Raises:
        FileNotFoundError, ValueError: no such file, or not a checkpoint of this kit.
    """
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
    """The tokenizer file of the run that wrote a checkpoint: beside consolidated weights, or in the run's directory.

    Raises:
        FileNotFoundError: there is no such checkpoint, or no tokenizer with it.
    """
    if not Path(checkpoint).exists():
        raise FileNotFoundError(f"no checkpoint at {checkpoint}")
    path = Path(checkpoint).resolve()
    for directory in (path, path.parent, path.parent.parent):
        for name in ("tokenizer.model", "tokenizer.json"):
            if (directory / name).is_file():
                return directory / name
    raise FileNotFoundError(
        f"no tokenizer.model or tokenizer.json in {path.parent.parent} or with the weights; name one with --tokenizer"
    )
