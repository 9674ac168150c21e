"""What a data set is: two disjoint sequences of questions with their reference answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


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


class Dataset(Protocol):
    """Training pool and held-out examples; both keep their order, and share no question."""

    @property
    def train(self) -> Sequence[Example]: ...

    @property
    def evaluation(self) -> Sequence[Example]: ...


@dataclass(frozen=True)
class ExampleSets:
    """The `Dataset` that every loader returns: both sets in memory."""

    train: tuple[Example, ...]
    evaluation: tuple[Example, ...]
