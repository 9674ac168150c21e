"""What a data set is: two disjoint sequences of questions with their reference answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from contracts.errors import InvalidInput
from contracts.spec_tables.root import SpecRoot

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Example:
    """One question, before any tokenizer saw it."""

    example_id: str
    """Stable name in the data set, e.g. "train/4711"."""
    question: str
    """The prompt text, or the user's turn where the data set is rendered by a chat template."""
    reference: str
    """The reference answer, for the reward."""
    task_entry: str = ""
    """JSON of the task's own entry, "" where the reference is enough."""
    origin: str = ""
    """File and line, "" where its id says enough."""
    field: str = "dataset"
    """Field of the spec that leads to it."""
    completion: str = ""
    """What loss = "sft" learns as the answer; "" where none is given."""


@dataclass(frozen=True)
class ExampleSets:
    """Training pool and held-out examples; both keep their order, and share no question."""

    train: tuple[Example, ...]
    evaluation: tuple[Example, ...]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a loader is asked for; with the data set's table in the spec it decides every example (I7)."""

    num_evaluation: int
    """Held-out examples: so many, or InvalidInput."""
    seed: int
    """The job's seed."""
    model_root: SpecRoot
    """Where files are found."""

    def check_held_out(self, available: int, problem: str) -> None:
        """Raises InvalidInput with the problem where fewer examples can be held out than are asked for."""
        if self.num_evaluation > available:
            raise InvalidInput(
                f"{self.num_evaluation} prompts are asked for, {problem}",
                field="evaluation.num_prompts",
                cure=f"use at most {available}",
            )


def disjoint(train: Sequence[Example], held_out: Sequence[Example], *, source: str, field: str) -> ExampleSets:
    """Returns both sets without the training examples whose prompt is also held out; white space makes no other prompt.

    source: what a message calls the training examples' origin. Raises InvalidInput where none is left to train.
    """
    if not train:
        raise InvalidInput(f"{source} holds no prompts", field=field, cure="add lines")
    asked = {_normalized(example.question) for example in held_out}
    fresh = tuple(example for example in train if _normalized(example.question) not in asked)
    if not fresh:
        raise InvalidInput(
            f"every prompt of {source} is also held out, none is left to train on",
            field=field,
            cure="remove the repeated prompts, or hold others out",
        )
    if len(fresh) < len(train):
        log.warning("%d lines of %s are also held out, and not trained", len(train) - len(fresh), source)
    return ExampleSets(train=fresh, evaluation=tuple(held_out))


def _normalized(question: str) -> str:
    return " ".join(question.split())
