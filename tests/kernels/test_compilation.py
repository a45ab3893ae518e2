"""Every kernel compiled for a GPU that need not be there: the interpreter accepts more than the compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).parent / "compile_kernels.py"


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "count"), [("many", 52), ("one_token", 52), ("even", 23)])
def test_every_kernel_compiles_for_sm_90(shape, count):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = SCRIPT.parents[2]
    result = subprocess.run(
        [sys.executable, SCRIPT, shape], cwd=root, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert len(result.stdout.split()) == count, result.stdout
