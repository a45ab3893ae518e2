"""Times one sublayer's read and write of mHC on a GPU, beside other implementations and the byte floor.

    python -m kernels.bench_hyper [--output results/kernels/hyper.csv]

The floor counts every lane once: forward (3 n + 2) D elements per token, backward 6 n + 1, over the bandwidth of a copy
measured in the same run. Rows are those of `kernels.bench_rows`, with op mhc and n lanes; a run that is started again
measures what is missing.
"""

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kernels import bench_rows, compiled, hyper, reference
from kernels.bench_rows import Row, Subject

OP, N_LANES, TOKENS = "mhc", 4, 8192
EPS, SINKHORN_EPS, N_ROUNDS = 1e-5, 1e-6, 20
WIDTHS = (2048, 2112, 2560)
CHECKED_TOKENS = 256

# (lanes, y, parameters) to (h, lanes after the write)
Sublayer = Callable[[Tensor, Tensor, dict[str, Tensor]], tuple[Tensor, Tensor]]


def inputs(n: int, D: int, tokens: int, device: str = "cuda") -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """bf16 lanes and y, fp32 parameters large enough to matter, all with gradients."""
    generator = torch.Generator(device).manual_seed(D)
    R = n * n + 2 * n

    def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        return (scale * torch.randn(*shape, device=device, generator=generator)).to(dtype).requires_grad_()

    parameters = {
        "phi": normal(R, n * D, scale=0.02),
        "alpha": normal(3, scale=0.5),
        "bias": normal(R),
    }
    return normal(1, tokens, n, D, dtype=torch.bfloat16), normal(1, tokens, D, dtype=torch.bfloat16), parameters


# ------------------------------------------------------------------------------------------------ implementations


def formula(ops, lanes: Tensor, y: Tensor, parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    h, post, res = ops.mhc_read(lanes, *parameters.values(), N_ROUNDS, EPS, SINKHORN_EPS)
    return h, ops.update(lanes, y, post, res)


def plain(lanes: Tensor, y: Tensor, parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return formula(reference, lanes, y, parameters)


def through_compile(lanes: Tensor, y: Tensor, parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return formula(compiled, lanes, y, parameters)


def apart(lanes: Tensor, y: Tensor, parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return formula(hyper, lanes, y, parameters)


class Ahead:
    """A sublayer in the middle of a model: its read begins with what the write before it projected."""

    def __init__(self, lanes: Tensor, y: Tensor, parameters: dict[str, Tensor]) -> None:
        n = lanes.shape[2]
        post, res = (torch.zeros(*lanes.shape[:2], *shape, device=lanes.device) for shape in ((n,), (n, n)))
        res += torch.eye(n, device=lanes.device)
        with torch.no_grad():
            self.projected = hyper.update_and_project(lanes, y, post, res, parameters["phi"])[1]

    def __call__(self, lanes: Tensor, y: Tensor, parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        h, post, res = hyper.mhc_read(
            lanes, *parameters.values(), N_ROUNDS, EPS, SINKHORN_EPS, self.projected[:, : lanes.shape[1]]
        )
        return h, hyper.update_and_project(lanes, y, post, res, parameters["phi"])[0]


def liger(lanes: Tensor, y: Tensor, parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """liger-kernel, which wants phi in half precision and transposed: cast outside the timed part, as it stores it."""
    ops = importlib.import_module("liger_kernel.transformers.functional")
    alpha = parameters["alpha"].unbind()
    pre, post, res = ops.liger_mhc_coeffs(
        lanes, parameters["phi_bf16"], parameters["bias"], *alpha,
        tmax=N_ROUNDS, rms_eps=EPS, pre_eps=SINKHORN_EPS, sinkhorn_eps=SINKHORN_EPS,
    )  # fmt: skip
    return ops.liger_mhc_pre(lanes, pre), ops.liger_mhc_post_res(lanes, y, post, res)


class Transformers:
    """The eager module of transformers' DeepSeek-V4 and its layer's write; it keeps res transposed."""

    def __init__(self, n: int, D: int, parameters: dict[str, Tensor]) -> None:
        transformers = importlib.import_module("transformers")
        deepseek = importlib.import_module("transformers.models.deepseek_v4.modeling_deepseek_v4")
        config = transformers.DeepseekV4Config(
            hidden_size=D, hc_mult=n, hc_sinkhorn_iters=N_ROUNDS, hc_eps=SINKHORN_EPS, rms_norm_eps=EPS
        )
        self.module = deepseek.DeepseekV4HyperConnection(config).cuda()
        order = torch.cat([torch.arange(2 * n), 2 * n + torch.arange(n * n).view(n, n).T.flatten()])
        with torch.no_grad():
            self.module.fn.copy_(parameters["phi"][order])
            self.module.base.copy_(parameters["bias"][order])
            self.module.scale.copy_(parameters["alpha"])

    def __call__(self, lanes: Tensor, y: Tensor, parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        post, comb, h = self.module(lanes)
        dtype = lanes.dtype
        written = post.to(dtype).unsqueeze(-1) * y.unsqueeze(-2)
        return h, written + torch.matmul(comb.to(dtype).transpose(-1, -2), lanes)


def made_liger(lanes: Tensor, y: Tensor, parameters: dict[str, Tensor]) -> tuple[Sublayer, dict[str, Tensor]]:
    transposed = parameters["phi"].detach().T.contiguous().bfloat16().requires_grad_()
    return liger, {"phi_bf16": transposed, "alpha": parameters["alpha"], "bias": parameters["bias"]}


def made_transformers(lanes: Tensor, y: Tensor, parameters: dict[str, Tensor]) -> tuple[Sublayer, dict[str, Tensor]]:
    made = Transformers(*lanes.shape[2:], parameters)
    return made, dict(made.module.named_parameters())


# name -> the package it needs, and what makes the sublayer and the parameters it takes from inputs
IMPLEMENTATIONS: dict[str, tuple[str, Callable[..., tuple[Sublayer, dict[str, Tensor]]]]] = {
    "triton": ("triton", lambda lanes, y, given: (Ahead(lanes, y, given), given)),
    "triton, read and write apart": ("triton", lambda lanes, y, given: (apart, given)),
    "torch.compile": ("torch", lambda lanes, y, given: (through_compile, given)),
    "liger-kernel": ("liger_kernel", made_liger),
    "transformers (eager)": ("transformers", made_transformers),
    "eager": ("torch", lambda lanes, y, given: (plain, given)),
}


def available() -> list[str]:
    """Names of the implementations whose package is installed here."""
    return [name for name, (package, _) in IMPLEMENTATIONS.items() if importlib.util.find_spec(package)]


# ----------------------------------------------------------------------------------------------------- measuring


def errors(
    run: Sublayer, lanes: Tensor, y: Tensor, given: dict[str, Tensor], parameters: dict[str, Tensor]
) -> tuple[float, float]:
    """Worst relative error of h and lanes, and of the gradients of lanes and phi, against the formula in float64.

    Of the first tokens, at the shape that is timed; later tokens have no gradient. An implementation that holds phi in
    another form has no gradient of it to compare.
    """
    cotangents = [torch.randn_like(y), torch.randn_like(lanes)]
    for cotangent in cotangents:
        cotangent[:, CHECKED_TOKENS:] = 0

    def all_of(function: Sublayer, lanes: Tensor, y: Tensor, given: dict[str, Tensor]) -> list[list[Tensor]]:
        """Outputs, and gradients of lanes and phi."""
        outputs = function(lanes, y, given)
        wanted = [
            cotangent[:, : y.shape[1]].to(output.dtype) for cotangent, output in zip(cotangents, outputs, strict=True)
        ]
        leaves = [lanes, *([given["phi"]] if "phi" in given else [])]
        return [list(outputs), list(torch.autograd.grad(outputs, leaves, wanted))]

    first, first_y = (x.detach()[:, :CHECKED_TOKENS].double().requires_grad_() for x in (lanes, y))
    exact = {name: parameter.detach().double().requires_grad_() for name, parameter in parameters.items()}
    of_outputs, of_gradients = (
        bench_rows.worst(
            [
                bench_rows.relative_error(ours[:, :CHECKED_TOKENS] if ours.ndim > 2 else ours, true)
                for ours, true in zip(mine, theirs, strict=False)
            ]
        )
        for mine, theirs in zip(all_of(run, lanes, y, given), all_of(plain, first, first_y, exact), strict=True)
    )
    return of_outputs, of_gradients


def prepare(row: Row) -> Subject:
    """One implementation and shape, checked and ready to be timed."""
    n = row.n
    lanes, y, parameters = inputs(n, row.d_model, row.tokens)
    run, given = IMPLEMENTATIONS[row.implementation][1](lanes, y, parameters)
    cotangents = [torch.randn_like(y), torch.randn_like(lanes)]
    leaves = [lanes, y, *given.values()]
    measured = bench_rows.checked(*errors(run, lanes, y, given, parameters))
    measured["extra_mib"] = f"{bench_rows.extra_mib(lambda: run(lanes, y, given)):.1f}"

    def forward() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return run(lanes, y, given)

    def forward_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(run(lanes, y, given), leaves, cotangents)

    def floor(which: str, bandwidth: float) -> tuple[float, None]:
        widths = {"forward": 3 * n + 2, "forward_backward": 9 * n + 3}[which]
        return 1e3 * widths * row.d_model * row.tokens * lanes.element_size() / bandwidth, None

    return Subject({"forward": forward, "forward_backward": forward_backward}, floor, 1, measured)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench_hyper", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results/kernels/hyper.csv"), help="CSV file of the rows")
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS), help="D (default: %(default)s)")
    parser.add_argument("--lanes", type=int, default=N_LANES, help="n (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens (default: %(default)s)")
    parser.add_argument("--only", nargs="*", default=[], help="implementations whose name has one of these words")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("kernels.bench_hyper times GPU kernels, and there is no CUDA device", file=sys.stderr)
        return 2
    bandwidth = bench_rows.copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth / 1e12:.2f} TB/s")
    done = bench_rows.done(options.output)
    for D in options.widths:
        for name in available():
            row = Row(OP, name, options.lanes, D, options.tokens)
            if row.key in done or (options.only and not any(word in name for word in options.only)):
                continue
            for measured in bench_rows.attempt(row, prepare, bandwidth):
                bench_rows.append(options.output, measured)
                bench_rows.print_row(measured)
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
