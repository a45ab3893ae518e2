"""Training with the kernels beside training with the reference: `python -m lit_msar.parity --data DIR`.

Every strategy is trained from one start on the same text several times: on the reference, on the reference with its
sums in another order, and (on a GPU) on the Triton kernels. How far apart the first two drift is what rounding alone
does; the kernels pass if their losses stay within `BOUND` of the reference's at every step, or within `FACTOR` times
that, both in the largest difference, which is one step's, and in the mean over the steps.

Runs are processes, several at a time. Each writes a row per step, and one that is complete is not run again.
"""

import argparse
import csv
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import yaml
from torch import Tensor

from data.shards import check_sizes, load_manifest
from data.split import IGNORE, TokenSplit
from kernels import reference
from lit_msar import residual
from lit_msar.errors import one_line
from lit_msar.model import Decoder, DecoderConfig
from lit_msar.residual import Residual
from lit_msar.training.optim import OptimizerConfig, adamw, clipped_step, wsd_factor

BOUND, FACTOR = 5e-3, 1.5
BALANCE_RATE = 1e-3
FIELDS = ("strategy", "run", "step", "loss", "reference_loss", "difference")
# strategy -> its runs on the kernels, by name, with their options; those that take longest come first
STRATEGIES: dict[str, dict[str, dict]] = {
    "MSAR": {"triton": {"schedule": "per_read"}, "triton per_block": {"schedule": "per_block"}},
    "AttnRes": {"triton": {}},
    "MHC": {"triton": {}},
    "HC": {"triton": {}},
}
BASELINES = ("reference", "reordered")


# ----------------------------------------------------------------------------------------- sums in another order


def _backward(x: Tensor | None) -> Tensor | None:
    """The channels in opposite order."""
    return None if x is None else x.flip(-1)


def _attnres_read(sources, query, key_gain, eps) -> Tensor:
    turned = [_backward(source) for source in reversed(sources)]
    return _backward(reference.attnres_read(turned, _backward(query), _backward(key_gain), eps))


def _msar_read(sources, taps, query, mix_weight, mix_scale, mix_bias, **options) -> Tensor:
    turned, turned_taps = ([_backward(x) for x in reversed(given)] for given in (sources, taps))
    h = reference.msar_read(
        turned, turned_taps, _backward(query), _backward(mix_weight), mix_scale, mix_bias, **options
    )
    return _backward(h)


def _hc_read(lanes, weight, *rest) -> tuple[Tensor, Tensor, Tensor]:
    h, post, res = reference.hc_read(_backward(lanes), _backward(weight), *rest)
    return _backward(h), post, res


def _mhc_read(lanes, phi, *rest) -> tuple[Tensor, Tensor, Tensor]:
    by_lane = _backward(phi.unflatten(-1, lanes.shape[2:])).flatten(-2)
    h, post, res = reference.mhc_read(_backward(lanes), by_lane, *rest)
    return _backward(h), post, res


def _update(lanes, y, post, res) -> Tensor:
    return reference.update(lanes.flip(2), y, post.flip(-1), res.flip(-2, -1)).flip(2)


# the reference on channels, sources and lanes in opposite order: the same values but for the rounding of sums
REORDERED = SimpleNamespace(
    attnres_read=_attnres_read, msar_read=_msar_read, hc_read=_hc_read, mhc_read=_mhc_read, update=_update
)


def strategy_of(name: str, run: str) -> Residual:
    """A strategy as a run uses it, not built yet."""
    cls = getattr(residual, name)
    if run not in BASELINES:
        return cls(kernels="triton", **STRATEGIES[name][run])
    made = cls(kernels="reference")
    if run == "reordered":
        made.ops = lambda _: REORDERED
    return made


# ------------------------------------------------------------------------------------------------------- one run


@dataclass
class Options:
    """What all runs share.

    Args:
        size: file with `model.decoder` and `model.optimizer`, as configs/size has them.
        data: prepared directory.
        warmup: optimizer steps until the peak learning rate.
    """

    size: Path
    data: Path
    output: Path
    steps: int = 200
    warmup: int = 500
    batch_size: int = 2
    seq_len: int = 1024
    seed: int = 0

    def shape(self) -> tuple[DecoderConfig, OptimizerConfig]:
        with self.size.open() as file:
            model = yaml.safe_load(file)["model"]
        return DecoderConfig(**model["decoder"]), OptimizerConfig(**model["optimizer"] | {"warmup_steps": self.warmup})


def batches(options: Options) -> Iterator[dict[str, Tensor]]:
    """The first samples of the training text, set after set in turn; the same for every run."""
    manifest = load_manifest(options.data)
    check_sizes(options.data, manifest)
    split = TokenSplit(options.data, manifest, "train", options.seq_len)
    n_sets, B = len(split.sizes), options.batch_size
    if (n := sum(split.sizes)) < options.steps * B:
        raise ValueError(
            f"data={options.data} has {n} samples of {options.seq_len} tokens, fewer than steps x batch_size"
        )
    picks = [(s, sample) for sample in range(max(split.sizes)) for s in range(n_sets) if sample < split.sizes[s]]
    for step in range(options.steps):
        sets, samples = np.array(picks[step * B : (step + 1) * B]).T
        yield {name: torch.from_numpy(x) for name, x in split.batch(sets, samples).items()}


def train(name: str, run: str, options: Options, device: torch.device) -> Iterator[float]:
    """Loss per token of every step."""
    config, optimizer_config = options.shape()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device("meta"):
        decoder = Decoder(config, strategy_of(name, run), dtype, "none")
    decoder.to_empty(device=device).initialize(options.seed)
    optimizer = adamw(decoder, decoder.no_decay_names(), optimizer_config)
    # long enough that no step of these belongs to the decay
    schedule = wsd_factor(optimizer_config, 10 * (options.steps + options.warmup))
    for step, batch in enumerate(batches(options)):
        tokens, targets = batch["tokens"].to(device), batch["targets"].to(device)
        _, losses, router = decoder(tokens, targets)
        loss = losses.total / (targets != IGNORE).sum()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = optimizer_config.lr * schedule(step)
        clipped_step(optimizer)
        if router is not None:
            decoder.update_balance(router.load, BALANCE_RATE)
        yield loss.item()


def losses_path(output: Path, name: str, run: str) -> Path:
    return output / "runs" / f"{name}.{run.replace(' ', '_')}.csv"


def read_losses(path: Path) -> list[float]:
    """Of a run's steps so far; none if it has not begun."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def write_run(name: str, run: str, options: Options) -> None:
    """Train, and write a row per step as it is done."""
    path = losses_path(options.output, name, run)
    path.parent.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "loss"])
        for step, loss in enumerate(train(name, run, options, device)):
            writer.writerow([step, repr(loss)])
            file.flush()


# ------------------------------------------------------------------------------------------------------ all runs


def wanted_runs(names: list[str], with_triton: bool) -> list[tuple[str, str]]:
    """Strategies with their runs, the slow reference of all strategies first."""
    baselines = [(name, run) for name in names for run in BASELINES]
    return baselines + [(name, run) for name in names for run in STRATEGIES[name] if with_triton]


def run_all(runs: list[tuple[str, str]], options: Options, jobs: int, arguments: list[str]) -> None:
    """Each run that is not complete, in a process of its own with these arguments, `jobs` at a time."""
    waiting = [r for r in runs if len(read_losses(losses_path(options.output, *r))) < options.steps]
    command = [sys.executable, "-m", "lit_msar.parity", *arguments]
    running: list[tuple[tuple[str, str], subprocess.Popen]] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            run = waiting.pop(0)
            running.append((run, subprocess.Popen([*command, "--run", *run])))
        (name, run), process = running.pop(0)
        try:
            code = process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            running.append(((name, run), process))
            continue
        print(f"{name} {run}: {'done' if code == 0 else f'ended with exit code {code}'}", flush=True)


def compare(runs: list[tuple[str, str]], options: Options) -> bool:
    """Write parity.csv, print the largest differences, and say whether all runs are complete and within the bound."""
    rows, apart = [], {}
    for name, run in runs:
        expected = read_losses(losses_path(options.output, name, "reference"))
        found = read_losses(losses_path(options.output, name, run))
        differences = [abs(a - b) for a, b in zip(found, expected, strict=False)]
        rows += zip(
            [name] * len(found), [run] * len(found), range(len(found)), found, expected, differences, strict=False
        )
        complete = len(differences) == options.steps
        apart[name, run] = (max(differences, key=_or_infinite), sum(differences) / options.steps) if complete else None
    with (options.output / "parity.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(FIELDS)
        writer.writerows(rows)
    passed = True
    for (name, run), found in apart.items():
        if run == "reference":
            continue
        if found is None:
            print(f"{name:<10}{run:<18}incomplete")
            passed = False
            continue
        by_rounding = apart[name, "reordered"] or (0.0, 0.0)
        bounds = [max(BOUND, FACTOR * d) if math.isfinite(d) else BOUND for d in by_rounding]
        within = all(d <= bound for d, bound in zip(found, bounds, strict=True))  # false of a loss that is not finite
        passed &= run == "reordered" or within
        said = f"|loss - reference| in {options.steps} steps: largest {found[0]:.2e}, mean {found[1]:.2e}"
        if run != "reordered":
            said += f"  bounds {bounds[0]:.1e}, {bounds[1]:.1e}: {'within' if within else 'BEYOND'}"
        print(f"{name:<10}{run:<18}{said}")
    return passed


def _or_infinite(difference: float) -> float:
    """Of losses of which one is not finite, as far apart as can be."""
    return difference if math.isfinite(difference) else math.inf


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lit_msar.parity", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="prepared directory")
    parser.add_argument("--output", type=Path, required=True, help="folder of parity.csv and a CSV file per run")
    parser.add_argument("--size", default="proxy-m", help="name in configs/size, or a file (default proxy-m)")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES), help="which")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default 200)")
    parser.add_argument("--warmup", type=int, default=500, help="steps of warm-up (default 500)")
    parser.add_argument("--batch_size", type=int, default=2, help="sequences of a step (default 2)")
    parser.add_argument("--seq_len", type=int, default=1024, help="tokens of a sequence (default 1024)")
    parser.add_argument("--jobs", type=int, default=6 if torch.cuda.is_available() else 1, help="runs at a time")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)  # one run, in this process
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parser.parse_args(arguments)
    named = Path("configs/size") / f"{args.size}.yaml"
    size = named if named.exists() else Path(args.size)
    options = Options(size, args.data, args.output, args.steps, args.warmup, args.batch_size, args.seq_len)
    if args.run:
        write_run(*args.run, options)
        return 0
    try:  # errors of the options and of the data show here, once, and not in every run
        options.shape()
        next(batches(options))
    except (ValueError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    runs = wanted_runs(args.strategies, torch.cuda.is_available())
    run_all(runs, options, args.jobs, arguments)
    return 0 if compare(runs, options) else 1


if __name__ == "__main__":
    sys.exit(main())
