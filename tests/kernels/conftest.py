"""What surrounds every kernel test."""

import numpy as np
import pytest
import torch
from torch import Tensor


@pytest.fixture(autouse=True, scope="session")
def _rounding_as_a_gpu_does():
    """Triton's interpreter cuts fp32 off where it stores bf16, and that of 3.7 rounds an fp16 product before it adds; a
    GPU rounds to nearest even, and a multiply-add once."""
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        yield
        return
    from triton.runtime import interpreter

    convert, multiply_add = interpreter._convert_float, interpreter.InterpreterBuilder.create_fma

    def rounded(values, source, target, mode):
        if source == triton.language.float32 and target == triton.language.bfloat16:
            fp32 = torch.from_numpy(np.array(values).view(np.float32))
            return fp32.bfloat16().view(torch.int16).numpy().view(np.uint16)
        return convert(values, source, target, mode)

    def rounded_once(builder, x, y, z):
        if z.data.dtype != np.float16:
            return multiply_add(builder, x, y, z)
        exact = np.multiply(x.data, y.data, dtype=np.float64) + z.data
        return interpreter.TensorHandle(exact.astype(np.float16), z.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", rounded)
        patch.setattr(interpreter.InterpreterBuilder, "create_fma", rounded_once)
        yield


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch):
    """Fresh memory is NaN, so that a value nobody wrote is seen."""
    for owner, name in ((torch, "empty_like"), (Tensor, "new_empty")):
        original = getattr(owner, name)

        def poisoned(*args, _original=original, **options):
            x = _original(*args, **options)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        monkeypatch.setattr(owner, name, poisoned)
