"""The kernels compiled for GPUs that need not be there: the interpreter accepts more than the compiler."""

import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import kernels

pytest.importorskip("triton")

SCRIPT = Path(__file__).parent / "compile_kernels.py"
BEFORE_HOPPER = ("attnres", "lanes", "msar by whole tokens")


def every_kernel() -> set[str]:
    """Functions that are launched, by module."""
    modules = [importlib.import_module(f"kernels.{module.name}") for module in pkgutil.iter_modules(kernels.__path__)]
    return {f"{m.__name__}.{name}" for m in modules for name in vars(m) if name.endswith("_kernel")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "cases"),
    [(90, (*BEFORE_HOPPER, "other lanes", "msar")), (80, BEFORE_HOPPER[1:]), (89, BEFORE_HOPPER[:2])],
    ids=["sm_90", "sm_80", "sm_89"],
)
def test_what_the_strategies_launch_compiles(capability, cases):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, SCRIPT, str(capability), *cases],
        cwd=SCRIPT.parents[2], env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    compiled = set(result.stdout.split())
    if capability == 90:
        assert compiled == every_kernel()
    else:
        assert compiled
