"""Strategies by name: every subclass of `Residual` that is imported, from wherever it comes."""

import ast

from lit_msar.residual.base import Residual


def strategies() -> dict[str, type[Residual]]:
    """Every subclass that implements the whole protocol, by class name."""
    found, queue = {}, [Residual]
    while queue:
        cls = queue.pop()
        queue.extend(cls.__subclasses__())
        if cls.cost is not Residual.cost:
            found[cls.__name__] = cls
    return found


def strategy_names() -> list[str]:
    """Class names of all strategies that are imported, sorted."""
    return sorted(strategies())


def parse_strategies(text: str) -> dict[str, Residual]:
    """Strategies, not built, by what the text calls them.

    Args:
        text: class names with literal options, as `Vanilla, MSAR(block_size=2, mix="mean")`.
    Raises:
        ValueError: no such strategy, or not of this form.
    """
    try:
        parsed = ast.parse(f"({text.strip().rstrip(',')},)", mode="eval").body
        calls = [node if isinstance(node, ast.Call) else ast.Call(node, [], []) for node in parsed.elts]
        if any(call.args for call in calls):
            raise ValueError("options are given by name")
        named = [(call.func.id, {k.arg: ast.literal_eval(k.value) for k in call.keywords}) for call in calls]
        labels = [ast.unparse(node) for node in parsed.elts]
    except (SyntaxError, AttributeError, ValueError) as error:
        raise ValueError(f'strategies are given as "Vanilla, MSAR(block_size=2)", got {text!r}') from error
    known = strategies()
    for name, _ in named:
        if name not in known:
            raise ValueError(f"no residual strategy {name!r}; the strategies are {', '.join(strategy_names())}")
    try:
        return {label: known[name](**options) for label, (name, options) in zip(labels, named, strict=True)}
    except TypeError as error:
        raise ValueError(str(error).replace(".__init__()", "")) from error
