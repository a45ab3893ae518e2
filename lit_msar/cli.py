"""The command line: a table of commands, each loaded when it is called."""

import inspect
import os
import sys
from collections.abc import Callable

from lit_msar.errors import CommandParser, StopTraining, one_line

# Commands import what they need themselves: `prepare` should not wait for lightning.


def generate(
    checkpoint: str,
    prompt: str,
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
    tokenizer: str | None = None,
) -> None:
    """Continue a prompt and print the text.

    Args:
        checkpoint: checkpoint file of a run.
        prompt: text to continue.
        max_new_tokens: tokens to add at most; an end-of-document token ends it earlier.
        temperature: of the softmax; 0 takes the likeliest token.
        top_p: probability mass that is sampled from, in (0, 1].
        seed: of the sampling.
        tokenizer: tokenizer file or prepared data directory; by default the one in the run's directory.
    """
    import torch

    from data.tokenizer import load_tokenizer
    from lit_msar.inference.decode import check_sampling
    from lit_msar.inference.decode import generate as continue_tokens
    from lit_msar.inference.load import load_decoder, run_tokenizer

    check_sampling(max_new_tokens, temperature, top_p)
    text_tokenizer = load_tokenizer(tokenizer or run_tokenizer(checkpoint))
    model = load_decoder(checkpoint)
    ids = text_tokenizer.encode(prompt) or [text_tokenizer.eod_id]
    tokens = torch.tensor([ids], device=next(model.parameters()).device)
    tokens = continue_tokens(model, tokens, max_new_tokens, temperature, top_p, seed, stop_id=text_tokenizer.eod_id)
    continuation = [i for i in tokens[0].tolist() if i != text_tokenizer.eod_id]
    print(text_tokenizer.decode(continuation))


def _train(argv: list[str]) -> None:
    from lit_msar.training.command import TrainCLI

    TrainCLI(argv)


def _cost(argv: list[str]) -> None:
    from lit_msar.analysis.cost import print_cost
    from lit_msar.training.command import ConfigCLI

    cli = ConfigCLI(argv)
    print_cost(cli.model.config, cli.datamodule.seq_len, cli.model.residual)


def _run_function(name: str, function: Callable, argv: list[str], positional: tuple[str, ...] = ()) -> None:
    parser = CommandParser(prog=f"python -m lit_msar {name}", description=(function.__doc__ or "").split("\n")[0])
    parser.add_function_arguments(function, as_positional=bool(positional))
    for action in parser._actions:
        parameter = inspect.signature(function).parameters.get(action.dest)
        if parameter is not None and parameter.annotation in (bool, "bool"):
            action.nargs, action.const = "?", True  # `--verify` alone means true
    config = parser.instantiate(parser.parse_args(argv))
    function(**config.as_dict())


def _prepare(argv: list[str]) -> None:
    from data.prepare import prepare

    _run_function("prepare", prepare, argv)


def _bench(argv: list[str]) -> None:
    from lit_msar.training.bench import bench
    from lit_msar.training.command import ConfigCLI

    cli = ConfigCLI(argv, bench, skip=("module", "batch_size", "seq_len"))
    bench(cli.model, cli.datamodule.batch_size, cli.datamodule.seq_len, **cli.options)


def _report(argv: list[str]) -> None:
    from lit_msar.analysis.report import report

    _run_function("report", report, argv)


def _plan(argv: list[str]) -> None:
    from lit_msar.training.command import ConfigCLI, plan

    config = ConfigCLI(argv, plan, skip=("config",))
    plan(config, **config.options)


def _consolidate(argv: list[str]) -> None:
    from lit_msar.inference.consolidate import consolidate

    _run_function("consolidate", consolidate, argv)


def _data_info(argv: list[str]) -> None:
    from data.info import data_info

    _run_function("data-info", data_info, argv, positional=("path",))


LIGHTNING_COMMANDS = {
    "fit": "train a model",
    "validate": "losses of a checkpoint on the validation split",
    "test": "the same as validate, logged as test: prepared data have no third split",
    "predict": "log-likelihood of every sequence, to OUT/predictions.jsonl",
}
COMMANDS: dict[str, tuple[Callable[[list[str]], None], str]] = {
    "prepare": (_prepare, "turn text into token shards"),
    "data-info": (_data_info, "tables of a prepared directory"),
    "generate": (lambda argv: _run_function("generate", generate, argv), "continue a prompt"),
    "cost": (_cost, "parameters, FLOPs and bytes of every strategy at a size"),
    "bench": (_bench, "time a training step by part and strategy"),
    "plan": (_plan, "whether a run fits its GPUs, and what makes it fit"),
    "consolidate": (_consolidate, "weights of a checkpoint as safetensors"),
    "report": (_report, "compare finished runs"),
}


def overview() -> str:
    """The list of commands."""
    lines = ["usage: python -m lit_msar COMMAND [options]   (COMMAND --help lists its options)", ""]
    lines += [f"  {name:<12}{text}" for name, text in LIGHTNING_COMMANDS.items()]
    lines += [f"  {name:<12}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Run one command; 0 if it ended well, 2 if the user can set it right, another if training had to stop."""
    command = argv[0] if argv else ""
    if command in ("", "-h", "--help"):
        print(overview())
        return 0 if command else 2
    try:
        if command in LIGHTNING_COMMANDS:
            _train(argv)
        elif command in COMMANDS:
            COMMANDS[command][0](argv[1:])
        else:
            known = ", ".join([*LIGHTNING_COMMANDS, *COMMANDS])
            raise ValueError(f"no command {command!r}; there are {known}")
    except (ValueError, OSError) as error:
        return _fail(error, 2)
    except StopTraining as error:
        return _fail(error, error.exit_code)
    return 0


def _fail(error: Exception, code: int) -> int:
    if os.environ.get("LIT_MSAR_DEBUG"):
        raise error
    print(f"error: {one_line(error)}", file=sys.stderr)
    return code
