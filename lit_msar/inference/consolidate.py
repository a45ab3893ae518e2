"""Weights of any checkpoint as safetensors, one tensor in memory at a time.

The format: 8 bytes little-endian length of a JSON header, the header, then the tensors' bytes in its order.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from lit_msar.inference.load import INDEX_FILE, SPEC_KEY, Weights, open_weights, run_tokenizer

DTYPES = {"float32": (torch.float32, "F32"), "bfloat16": (torch.bfloat16, "BF16")}
UNFINISHED = ".unfinished"


def consolidate(
    checkpoint: str, output: str, dtype: Literal["float32", "bfloat16"] = "float32", max_file_gb: float = 5.0
) -> None:
    """Write the weights of a checkpoint, sharded or not, as safetensors.

    Args:
        checkpoint: directory or file that a run wrote.
        output: a file if it ends in .safetensors; otherwise a directory of several files and an index. The run's
            tokenizer is copied beside.
        dtype: of the tensors; float32 is exact, the router's balance bias stays float32.
        max_file_gb: size of one file in a directory (GB).
    """
    if max_file_gb <= 0:
        raise ValueError(f"max_file_gb must be positive, got {max_file_gb}")
    weights, target = open_weights(checkpoint), Path(output)
    if target.exists():
        raise FileExistsError(f"output {target} exists already: choose another, or delete it")
    with _progress() as progress:
        task = progress.add_task(target.name, total=sum(_bytes(weights, name, dtype) for name in weights.shapes))
        if target.suffix == ".safetensors":
            target.parent.mkdir(parents=True, exist_ok=True)
            unfinished = target.with_name(target.name + UNFINISHED)
            for n_bytes in _write(weights, sorted(weights.shapes), dtype, unfinished):
                progress.advance(task, n_bytes)
            directory = target.parent
        else:
            unfinished = directory = target.with_name(target.name + UNFINISHED)
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            for n_bytes in _write_files(weights, dtype, unfinished, int(max_file_gb * 1e9)):
                progress.advance(task, n_bytes)
        _copy_tokenizer(checkpoint, directory)
        os.replace(unfinished, target)


def _write_files(weights: Weights, dtype: str, directory: Path, max_bytes: int) -> Iterator[int]:
    groups = _groups(weights, dtype, max_bytes)
    placed = {}
    for i, names in enumerate(groups, 1):
        file = f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        placed |= dict.fromkeys(names, file)
        yield from _write(weights, names, dtype, directory / file)
    total = sum(_bytes(weights, name, dtype) for name in weights.shapes)
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n")


def _groups(weights: Weights, dtype: str, max_bytes: int) -> list[list[str]]:
    """Names by file: as many as fit, at least one each."""
    groups, filled = [[]], 0
    for name in sorted(weights.shapes):
        n_bytes = _bytes(weights, name, dtype)
        if groups[-1] and filled + n_bytes > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += n_bytes
    return groups


def _write(weights: Weights, names: list[str], dtype: str, path: Path) -> Iterator[int]:
    """Write one file, and yield the bytes of each tensor when it is written."""
    header, start = {"__metadata__": {SPEC_KEY: json.dumps(asdict(weights.spec)), "format": "pt"}}, 0
    for name in names:
        end = start + _bytes(weights, name, dtype)
        code = DTYPES[_dtype(name, dtype)][1]
        header[name] = {"dtype": code, "shape": list(weights.shapes[name]), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            tensor = torch.empty(weights.shapes[name])
            weights.fill({name: tensor})
            values = tensor.to(DTYPES[_dtype(name, dtype)][0]).contiguous().flatten()
            file.write(values.view(torch.uint8).numpy())
            yield _bytes(weights, name, dtype)
        file.flush()
        os.fsync(file.fileno())


def _dtype(name: str, dtype: str) -> str:
    """A bias of 1e-3 steps vanishes in bf16 beside a bias of 1."""
    return "float32" if name.endswith("balance_bias") else dtype


def _bytes(weights: Weights, name: str, dtype: str) -> int:
    return weights.shapes[name].numel() * DTYPES[_dtype(name, dtype)][0].itemsize


def _copy_tokenizer(checkpoint: str, directory: Path) -> None:
    try:
        tokenizer = run_tokenizer(checkpoint)
    except FileNotFoundError:
        return  # weights of a run whose directory was taken apart; `generate` asks for one by name
    if not (directory / tokenizer.name).exists():
        shutil.copyfile(tokenizer, directory / tokenizer.name)


def _progress() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    return Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=Console(file=sys.stderr))
