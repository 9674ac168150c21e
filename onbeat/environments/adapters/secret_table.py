"""The demo of tools: the sum of two numbers of a table that only the environment has.

    prompt       f+q=      two letters; the table gives each letter a number from 0 to 49, another one for every seed
    model        ?fq       the call: what are f and q?
    environment  17 4=     their numbers
    model        12        the answer, the digits of 21 from the last to the first; it ends the trajectory

Without the call an answer is a guess. A call that can't be read is answered with `!=`, as often as there are turns.
"""

from __future__ import annotations

import functools
import json
import random
import string
from typing import Any

from onbeat.environments.author import BadTask, Environment, InitialObservation, Message, Reply

LETTERS = string.ascii_lowercase
LARGEST = 49
NUM_HELD_OUT = 150
"""Pairs of letters, of 650, that no training task has."""
SPLIT_SEED = 20_261_122
"""Not the job's seed: the committed warm start was trained on this very split."""


class SecretTable(Environment):
    """A session with a table of its own.

    With `shuffled` its answers are of another table: the control, in which nothing can be learned.
    """

    def __init__(self, *, shuffled: bool = False) -> None:
        self._shuffled = shuffled
        self._shown_table: dict[str, int] = {}
        self._answer = ""
        self._num_calls = 0

    def reset(self, task: dict[str, Any], seed: int) -> InitialObservation:
        """task: {"split": "train" or "evaluation", "index": its number}."""
        first, second = pair_of(task)
        table = make_table(seed)
        self._shown_table = make_table(seed + 1) if self._shuffled else table
        self._answer = str(table[first] + table[second])[::-1]
        return InitialObservation(f"{first}+{second}=")

    def step(self, message: Message, turn: int) -> Reply:
        if not message.content.startswith("?"):
            is_right = message.content == self._answer
            return Reply(reward=float(is_right), done=True, metrics=self._metrics(is_answered=True))
        self._num_calls += 1
        numbers = [self._shown_table.get(letter) for letter in message.content[1:]]
        known = [str(number) for number in numbers if number is not None]
        answer = " ".join(known) if len(known) == len(numbers) == 2 else "!"
        return Reply(f"{answer}=", metrics=self._metrics(is_answered=False))

    def _metrics(self, *, is_answered: bool) -> dict[str, float]:
        return {"calls": float(self._num_calls), "answered": float(is_answered)}


def make_table(seed: int) -> dict[str, int]:
    """Gives each letter a number."""
    draw = random.Random(seed)
    return {letter: draw.randint(0, LARGEST) for letter in LETTERS}


def pair_of(task: dict[str, Any]) -> tuple[str, str]:
    """Returns the letters of a task: those of its number, in a fixed order of all pairs, round and round."""
    split, index = task.get("split"), task.get("index")
    if split not in ("train", "evaluation") or not isinstance(index, int):
        raise BadTask(f"a task of this environment is a split and an index, got {json.dumps(task)[:100]}")
    pool = _pairs()[:NUM_HELD_OUT] if split == "evaluation" else _pairs()[NUM_HELD_OUT:]
    return pool[index % len(pool)]


@functools.cache
def _pairs() -> tuple[tuple[str, str], ...]:
    pairs = [(first, second) for first in LETTERS for second in LETTERS if first != second]
    random.Random(SPLIT_SEED).shuffle(pairs)
    return tuple(pairs)
