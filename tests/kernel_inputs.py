"""Inputs of the kernel tests, and the comparison every kernel has to pass."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF_FACTOR = {torch.float16: 1.5, torch.bfloat16: 1.5}
FP32_BOUND = 1e-5
DRAWS = 16 if DEVICE == "cuda" else 2  # of a case in bf16, see `check_together`; few interpreted
# gradients of fp32 parameters: the kernels keep the retrieved streams in fp16 between two launches
HALF_PARAMETER_BOUND = 2e-3


def relative_error(x: Tensor, oracle: Tensor) -> float:
    """||x - oracle|| / ||oracle||, or the plain norm where the oracle is zero."""
    norm = oracle.norm()
    return float((x.double() - oracle).norm() / (norm if norm > 0 else 1))


def with_gates_joined(results: dict[str, Tensor]) -> dict[str, Tensor]:
    """Scale and bias of a gate's logits as one vector, of the one affine map that they are.

    The gradient of a scale alone is one number, a sum over tokens and streams of either sign: its relative error says
    how far they happen to cancel.
    """
    joined = {}
    for name, x in results.items():
        bias = name.replace("scale", "bias")
        if name.startswith("scale") and bias in results:
            joined[f"{name} and {bias}"] = torch.cat((x, results[bias]))
        elif not (name.startswith("bias") and name.replace("bias", "scale") in results):
            joined[name] = x
    return joined


class Comparison:
    """One function in float64, in the reference and in the kernels, with the gradients of every input."""

    def __init__(self, inputs: dict[str, Tensor], dh: Tensor) -> None:
        self.inputs, self.dh = inputs, dh

    def run(self, function, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Output `h` and gradients of `function(inputs)`, all inputs cast to `dtype` if given."""
        cast = {name: x.to(dtype or x.dtype).clone().requires_grad_() for name, x in self.inputs.items()}
        h = function(cast)
        h.backward(self.dh.to(h.dtype))
        return {"h": h.detach()} | {name: x.grad for name, x in cast.items()}

    def check(self, reference, kernel) -> None:
        """Every result within the acceptance bound of its precision."""
        check_together([self], reference, kernel)


def drawn(make: Callable[..., Comparison], **options) -> list[Comparison]:
    """The case that `make` makes of options, in bf16 in several draws."""
    return [make(**options) for _ in range(DRAWS if options.get("dtype") == torch.bfloat16 else 1)]


def check_together(cases: list[Comparison], reference, kernel) -> None:
    """Every error within the bound of its precision; of several draws the root mean square of a kind's errors.

    Where one read's output, rounded to half precision, is part of what the next one reads, both errors of a single draw
    are chance: what was rounded up in one implementation was rounded down in the other. So is the error of a gate's
    scale and bias over nine tokens, a few sums that cancel.
    """
    errors: dict[str, list[tuple[float, float]]] = {}
    dtypes = {}
    for case in cases:
        oracle, plain, fused = (
            with_gates_joined(x) for x in (case.run(reference, torch.float64), case.run(reference), case.run(kernel))
        )
        for name, expected in oracle.items():
            assert fused[name].isfinite().all(), name
            both = (relative_error(fused[name], expected), relative_error(plain[name], expected))
            kind = name if len(cases) == 1 else name.translate(str.maketrans("", "", "0123456789"))
            dtypes[kind] = fused[name].dtype
            errors.setdefault(kind, []).append(both)
    for name, of_draws in errors.items():
        error, of_plain = (math.sqrt(sum(x * x for x in draws) / len(draws)) for draws in zip(*of_draws, strict=True))
        if dtypes[name] in HALF_FACTOR:
            bound = HALF_FACTOR[dtypes[name]] * of_plain
        elif cases[0].dh.dtype in HALF_FACTOR:
            bound = max(HALF_PARAMETER_BOUND, HALF_FACTOR[cases[0].dh.dtype] * of_plain)
        else:
            bound = max(FP32_BOUND, 1.5 * of_plain)
        assert error <= bound, f"{name}: {error:.1e}, reference {of_plain:.1e}"


def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (scale * torch.randn(*shape, device=DEVICE)).to(dtype)
