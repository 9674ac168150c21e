"""Keeps what is held out of training."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from contracts.errors import InvalidInput
from onbeat.data.prompts.examples import Example, ExampleSets, Request

log = logging.getLogger(__name__)


def check_held_out(request: Request, available: int, problem: str) -> None:
    """Raises InvalidInput with the problem where fewer examples can be held out than are asked for."""
    if request.num_evaluation > available:
        raise InvalidInput(
            f"{request.num_evaluation} prompts are asked for, {problem}",
            field="evaluation.num_prompts",
            cure=f"use at most {available}",
        )


def disjoint(
    train: Sequence[Example], held_out: Sequence[Example], *, source: str, field: str, trains: bool = True
) -> ExampleSets:
    """Returns both sets without the training examples whose prompt is also held out; white space makes no other prompt.

    source: what a message calls the training examples' origin. Raises InvalidInput where none is left to train. trains:
    as of the request; without it no example is left.
    """
    if not trains:
        return ExampleSets(train=(), evaluation=tuple(held_out))
    if not train:
        raise InvalidInput(f"{source} holds no prompts", field=field, cure="add lines")
    # A task that an environment has of its own has no question, and its split keeps it apart.
    held_out_questions = {_normalized(example.question) for example in held_out if example.question}
    fresh = tuple(example for example in train if _normalized(example.question) not in held_out_questions)
    if not fresh:
        raise InvalidInput(
            f"every prompt of {source} is also held out, none is left to train on",
            field=field,
            cure="remove the repeated prompts, or hold others out",
        )
    if len(fresh) < len(train):
        dropped = "%d training rows of %s are dropped: their prompts are held out for the evaluation. %d rows are left"
        log.warning(dropped, len(train) - len(fresh), source, len(fresh))
    return ExampleSets(train=fresh, evaluation=tuple(held_out))


def _normalized(question: str) -> str:
    return " ".join(question.split())
