"""The arrows between packages, read from the import statements: nothing imports what lies above it.

kernels <- residual <- model <- inference <- analysis <- training <- cli, parity        data stands alone
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lit_msar import residual as strategies

ROOT = Path(__file__).parents[1]
PACKAGES = ("kernels", "lit_msar", "data")

LEAVES = {"lit_msar.initialization", "lit_msar.errors"}
BELOW_RESIDUAL = {"kernels", *LEAVES}
BELOW_MODEL = {"lit_msar.residual", *BELOW_RESIDUAL}
BELOW_INFERENCE = {"lit_msar.model", "data", *BELOW_MODEL}
BELOW_ANALYSIS = {"lit_msar.inference", *BELOW_INFERENCE}
BELOW_TRAINING = {"lit_msar.analysis", *BELOW_ANALYSIS}
BELOW_CLI = {"lit_msar.training", *BELOW_TRAINING}

ALLOWED: dict[str, set[str]] = {
    "kernels": set(),
    "data": set(),
    "lit_msar.initialization": set(),
    "lit_msar.errors": set(),
    "lit_msar.residual": BELOW_RESIDUAL,
    "lit_msar.model": BELOW_MODEL,
    "lit_msar.inference": BELOW_INFERENCE,
    "lit_msar.analysis": BELOW_ANALYSIS,
    "lit_msar.training": BELOW_TRAINING,
    "lit_msar.cli": BELOW_CLI,
    "lit_msar.parity": BELOW_CLI,
    "lit_msar.__main__": {"lit_msar.cli"},
    "lit_msar.__init__": set(),
}

# What the lower rooms may import from outside; the standard library is free everywhere.
EXTERNAL: dict[str, set[str]] = {
    "kernels": {"torch", "triton"},
    "lit_msar.initialization": {"torch"},
    "lit_msar.residual": {"torch"},
    "lit_msar.model": {"torch"},
    "data": {"numpy", "sentencepiece", "tokenizers", "zstandard", "fsspec", "rich"},
}


def files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def room(module: str) -> str:
    """`lit_msar.X` for whatever lies in it, or the top-level package."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "lit_msar" else parts[0]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imports(tree: ast.AST) -> Iterator[str]:
    """Modules named by import statements anywhere in the file, lazily imported ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if node.module == "lit_msar":
                yield from (f"lit_msar.{alias.name}" for alias in node.names)
            else:
                yield node.module


def wrong_imports(path: Path, source: str) -> list[str]:
    """What the file must not import."""
    own = room(module_name(path))
    wrong = []
    for module in imports(ast.parse(source)):
        target = room(module)
        if target.split(".")[0] in PACKAGES:
            if target != own and target not in ALLOWED[own]:
                wrong.append(module)
        elif target not in sys.stdlib_module_names and own in EXTERNAL and target not in EXTERNAL[own]:
            wrong.append(module)
        elif target in ("lightning", "lightning_fabric", "pytorch_lightning") and own not in (
            "lit_msar.training",
            "lit_msar.cli",
        ):
            wrong.append(module)
    return wrong


@pytest.mark.parametrize("path", files(), ids=module_name)
def test_imports_follow_the_arrows(path):
    assert room(module_name(path)) in ALLOWED, "a new room: give it its place in ALLOWED"
    assert wrong_imports(path, path.read_text()) == []


@pytest.mark.parametrize(
    ("path", "statement"),
    [
        ("kernels/x.py", "from lit_msar.residual import base"),
        ("kernels/x.py", "import numpy"),
        ("data/x.py", "import torch"),
        ("data/x.py", "def f():\n    from kernels import reference"),
        ("lit_msar/residual/x.py", "from lit_msar.model import Decoder"),
        ("lit_msar/residual/x.py", "from lit_msar import model"),
        ("lit_msar/model/x.py", "import lightning as L"),
        ("lit_msar/analysis/x.py", "from lightning.pytorch import Trainer"),
        ("lit_msar/inference/x.py", "from lit_msar.training.module import LanguageModel"),
        ("lit_msar/training/x.py", "import lit_msar.cli"),
    ],
)
def test_an_import_against_the_arrows_is_found(path, statement):
    assert len(wrong_imports(ROOT / path, statement)) == 1


@pytest.mark.parametrize("folder", ["lit_msar/model", "lit_msar/training"])
def test_model_and_training_name_no_strategy(folder):
    names = [name for name in strategies.__all__ if isinstance(getattr(strategies, name), type)]
    names = [
        name for name in names if issubclass(getattr(strategies, name), strategies.Residual) and name != "Residual"
    ]
    assert {"Vanilla", "MSAR", "MHC"} <= set(names)
    word = re.compile(rf"\b({'|'.join(names)})\b", re.IGNORECASE)
    for path in (ROOT / folder).glob("*.py"):
        assert not word.search(path.read_text()), path


def test_kernels_and_strategies_import_without_triton():
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import kernels, kernels.reference, kernels.compiled, lit_msar.residual\n"
        "assert not hasattr(kernels, '__version__')\n"  # transformers takes any package of that name for its own
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=120)
