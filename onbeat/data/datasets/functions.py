"""Data sets of installed packages: a user's function of the group `onbeat.datasets`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from contracts.environments.messages import Message
from contracts.errors import InvalidInput
from contracts.spec.datasets import PluginDataset
from onbeat.base.process.entry_points import load_entry_point
from onbeat.data.datasets.held_out import check_held_out, disjoint
from onbeat.data.prompts.examples import Example, ExampleSets, Request

GROUP = "onbeat.datasets"
FIELD = "dataset.entry_point"


def load_plugin(spec: PluginDataset, request: Request) -> ExampleSets:
    """Calls the function and checks what it returns. Raises InvalidInput that names the field of the spec."""
    load = load_entry_point(GROUP, spec.entry_point, field=FIELD)
    try:
        train, evaluation = load(params=dict(spec.params), num_evaluation=request.num_evaluation, seed=request.seed)
        train, evaluation = list(_checked(train)), list(_checked(evaluation))
    # Foreign code may raise anything, or ask to exit, and each of it has the same answer.
    except (Exception, SystemExit) as error:
        raise _refusal(spec, f"failed: {type(error).__name__}: {error}") from error
    ids = [example.example_id for example in (*train, *evaluation)]
    if len(set(ids)) < len(ids):
        raise _refusal(spec, "gives two examples the same example_id")
    source = f"the data set `{spec.entry_point}`"
    check_held_out(request, len(evaluation), f"{source} holds {len(evaluation)} out")
    held_out = evaluation[: request.num_evaluation]
    return disjoint(train, held_out, source=source, field=FIELD, trains=request.trains)


def _checked(examples: Iterable[Any]) -> Iterator[Example]:
    """Yields them; raises TypeError for what is none, and UnicodeEncodeError for text that can't be sent."""
    for example in examples:
        if not isinstance(example, Example):
            raise TypeError(f"{type(example).__name__} is no onbeat.data.prompts.examples.Example")
        for name in ("example_id", "question", "reference", "task_entry", "origin", "completion", "metadata"):
            text = getattr(example, name)
            if not isinstance(text, str):
                raise TypeError(f"{name} is a {type(text).__name__}, not a string")
            text.encode()
        if not all(isinstance(message, Message) for message in example.messages):
            raise TypeError("messages has what is no contracts.environments.messages.Message")
        yield example


def _refusal(spec: PluginDataset, problem: str) -> InvalidInput:
    return InvalidInput(
        f"the data set `{spec.entry_point}` {problem}",
        field=FIELD,
        cure="docs/extend.md says what its function must return",
    )
