"""Times one sublayer's read and write of mHC on a GPU, beside other implementations and the byte floor.

    python -m kernels.bench_hyper [--output results/kernels/hyper.csv]

The floor counts every lane once: forward (3 n + 2) D elements per token, backward 6 n + 1, over the bandwidth of a copy
measured in the same run. Each time is the median of CUDA-graph replays, so launches from Python are left out; each row
also has the relative error of what it computed, against the plain formula in float64 on part of the tokens.
"""

import argparse
import csv
import importlib
import importlib.util
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from kernels import compiled, hyper, reference

EPS, SINKHORN_EPS, N_ROUNDS = 1e-5, 1e-6, 20
WIDTHS = (2048, 2112, 2560)
CHECKED_TOKENS = 256

# (lanes, y, parameters) to (h, lanes after the write)
Sublayer = Callable[[Tensor, Tensor, dict[str, Tensor]], tuple[Tensor, Tensor]]


def inputs(n: int, D: int, tokens: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """bf16 lanes and y, fp32 parameters large enough to matter, all with gradients."""
    generator = torch.Generator("cuda").manual_seed(D)
    R = n * n + 2 * n

    def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        return (scale * torch.randn(*shape, device="cuda", generator=generator)).to(dtype).requires_grad_()

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


def implementations(lanes: Tensor, y: Tensor, parameters: dict[str, Tensor]) -> dict[str, tuple[Sublayer, dict]]:
    """Name to function and the parameters it takes, of all that can be imported."""
    n, D = lanes.shape[2:]
    found: dict[str, tuple[Sublayer, dict]] = {
        "triton, projected ahead": (Ahead(lanes, y, parameters), parameters),
        "triton, read and write apart": (apart, parameters),
    }
    if importlib.util.find_spec("liger_kernel"):
        transposed = parameters["phi"].detach().T.contiguous().bfloat16().requires_grad_()
        found["liger-kernel"] = (liger, {**parameters, "phi_bf16": transposed})
    found["torch.compile"] = (through_compile, parameters)
    if importlib.util.find_spec("transformers"):
        module = Transformers(n, D, parameters)
        found["transformers (eager)"] = (module, dict(module.module.named_parameters()))
    found["plain formula (eager)"] = (plain, parameters)
    return found


# ----------------------------------------------------------------------------------------------------- measuring


def time_of(function: Callable[[], object], groups: int = 9, replays: int = 5) -> float:
    """Milliseconds per call: the median over groups of graph replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    graph.replay()
    times = []
    for _ in range(groups):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / replays)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes per second of a large copy, reads and writes counted."""
    x = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda")
    y = torch.empty_like(x)
    times = []
    for _ in range(10):  # not as a graph, where a copy goes to the slower copy engine
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        y.copy_(x)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * x.numel() * x.element_size() / (statistics.median(times) / 1e3)


def errors_of(run: Sublayer, lanes: Tensor, y: Tensor, parameters: dict[str, Tensor]) -> dict[str, float]:
    """Relative error of the outputs and of the gradients of lanes and phi, against the formula in float64."""
    part, part_y = (x.detach()[:, :CHECKED_TOKENS].clone().requires_grad_() for x in (lanes, y))
    cotangents = [torch.randn_like(part_y), torch.randn_like(part)]

    def all_of(function: Sublayer, lanes: Tensor, y: Tensor, given: dict[str, Tensor]) -> list[Tensor | None]:
        outputs = function(lanes, y, given)
        wanted = [cotangent.to(output.dtype) for cotangent, output in zip(cotangents, outputs, strict=True)]
        gradients = torch.autograd.grad(outputs, [lanes, given["phi"]], wanted, allow_unused=True)
        return [x if x is None else x.detach().double() for x in (*outputs, *gradients)]

    exact = {name: parameters[name].detach().double().requires_grad_() for name in ("phi", "alpha", "bias")}
    oracle = all_of(plain, part.detach().double().requires_grad_(), part_y.detach().double(), exact)
    found = all_of(run, part, part_y, parameters)
    names = ("error_h", "error_lanes", "error_dlanes", "error_dphi")
    return {
        # who holds phi in another form shows no gradient of it
        name: float("nan") if ours is None else float((ours - expected).norm() / expected.norm())
        for name, ours, expected in zip(names, found, oracle, strict=True)
    }


def rows_of(D: int, n: int, tokens: int, bandwidth: float, only: Iterable[str] = ()) -> Iterable[dict]:
    """One row per implementation."""
    lanes, y, parameters = inputs(n, D, tokens)
    cotangents = [torch.randn_like(y), torch.randn_like(lanes)]
    bytes_per_width = D * tokens * lanes.element_size()
    floors = {"forward": (3 * n + 2) * bytes_per_width, "both": (9 * n + 3) * bytes_per_width}
    for name, (run, given) in implementations(lanes, y, parameters).items():
        if only and not any(word in name for word in only):
            continue
        leaves = [lanes, y, *(x for x in given.values() if not (name == "liger-kernel" and x is parameters["phi"]))]

        def forward(run=run, given=given) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                return run(lanes, y, given)

        def both(run=run, given=given, leaves=leaves) -> tuple[Tensor, ...]:
            return torch.autograd.grad(run(lanes, y, given), leaves, cotangents)

        row = {"op": "mhc sublayer", "implementation": name, "n": n, "D": D, "tokens": tokens, "dtype": "bfloat16"}
        times = {"forward": time_of(forward), "both": time_of(both)}
        for what, milliseconds in times.items():
            floor = 1e3 * floors[what] / bandwidth
            row |= {f"{what}_ms": f"{milliseconds:.4f}", f"{what}_over_floor": f"{milliseconds / floor:.2f}"}
            row[f"{what}_floor_ms"] = f"{floor:.4f}"
        # transformers names its parameters otherwise, and holds the same values
        errors = errors_of(run, lanes, y, {**parameters, **given})
        yield row | {key: f"{error:.1e}" for key, error in errors.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench_hyper", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="CSV file to write as well")
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS), help="D (default: %(default)s)")
    parser.add_argument("--lanes", type=int, default=4, help="n (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens (default: %(default)s)")
    parser.add_argument("--only", nargs="*", default=[], help="implementations whose name has one of these words")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("kernels.bench_hyper times GPU kernels, and there is no CUDA device", file=sys.stderr)
        return 2
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth / 1e12:.2f} TB/s")
    rows = []
    for D in options.widths:
        for row in rows_of(D, options.lanes, options.tokens, bandwidth, options.only):
            rows.append(row | {"machine": torch.cuda.get_device_name(), "torch": torch.__version__})
            print("  ".join(f"{key}={value}" for key, value in row.items() if key not in ("op", "dtype", "tokens")))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        with options.output.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
