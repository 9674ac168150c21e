"""The arguments that a reward's function is called with: names of ours, and columns of the data set.

    def right(completion, reference): ...                 one completion
    def right(completions, solution, **kwargs): ...       lists of whole groups, as TRL calls it; `solution` is a column

A function that names `completions` is called once for whole groups. Both kinds get the columns that they name, out of
`dataset.metadata_columns`, which the gateway fills from the function's signature.
"""

from __future__ import annotations

import ast

ARGUMENTS = ("prompt", "completion", "reference", "task_entry", "metadata", "finish_reason", "completion_ids")
"""Names of one completion's parts."""
PLURALS = {"task_entry": "task_entries", "metadata": "metadata", "completion_ids": "completion_ids"}
GROUP_ARGUMENTS = {PLURALS.get(name, f"{name}s"): name for name in ARGUMENTS}
"""Argument of a function that scores whole groups → the part of each completion that its list has."""
GROUP_SIZE = "group_size"
COMPLETIONS = "completions"
"""A function that names it is called for whole groups."""
OF_TRL = ("trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that TRL gives a reward and Onbeat doesn't: they are of TRL's trainer."""


def known_arguments(*, sees_groups: bool) -> tuple[str, ...]:
    """Returns the names that aren't columns. In lists the singular of a name means the same, as a column's does."""
    if not sees_groups:
        return ARGUMENTS
    return tuple(dict.fromkeys((*GROUP_ARGUMENTS, *ARGUMENTS, GROUP_SIZE)))


def columns_among(arguments: tuple[str, ...], sees_groups: bool) -> tuple[str, ...]:
    """Returns the arguments of a function that name columns of the data set."""
    known = known_arguments(sees_groups=sees_groups)
    return tuple(name for name in arguments if name not in known)


def reads_reference(arguments: tuple[str, ...]) -> bool:
    """Returns True where a function of these arguments is called with the reference."""
    return "reference" in arguments or "references" in arguments


def arguments_of(source: str, function: str) -> tuple[str, ...] | None:
    """Reads the arguments that a function needs from a file's text, without running it.

    Args:
        source: Text that is valid Python.
        function: A name that the text defines.

    Returns:
        The names without a default; None where no `def` of the module's level has the name, or a decorator may change
        the arguments.
    """
    for node in reversed(ast.parse(source).body):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            break
    else:
        return None
    if node.decorator_list:
        return None
    positional = [*node.args.posonlyargs, *node.args.args]
    needed = positional[: len(positional) - len(node.args.defaults)]
    needed += [
        argument
        for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        if default is None
    ]
    return tuple(argument.arg for argument in needed)
