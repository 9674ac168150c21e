"""The package's own scorers of reasoning-gym's tasks: those that evaluate nothing (known_tasks.py)."""

from __future__ import annotations

import contextlib
import functools
import io
import re
from collections.abc import Callable
from typing import Any

from reward_service.scorers.reasoning_gym.known_package import check_package
from reward_service.scorers.texts import BadReference

Entry = dict[str, Any]

MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""Exceptions that the package's parsers raise for an answer of another form. No MemoryError and no RecursionError:
these speak of the process, and are no score (I6)."""

TURNS = re.compile(r"(\D*)(\d+)")
STEPS = re.compile(r"([A-Z][+-])0*(\d+)")
LONGEST_STEP = 6
"""Cells of a side of the board: what is beyond moves nothing."""


def score(task: str, answer: str, entry: Entry) -> float:
    """Returns a score in [0, 1]; 0.0 where the scorer raises an error for the answer, and none for the entry's own."""
    scorer = _scorer(task)
    readable = GUARDS[task](answer) if task in GUARDS else answer
    if readable is None:
        return 0.0
    try:
        return _value(scorer, readable, entry)
    except MALFORMED as error:
        if not _is_sound(scorer, entry):
            raise BadReference(
                f"{task} raises for the entry's own answer too: {type(error).__name__}: {error}", field="task_entry"
            ) from error
        return 0.0


def _value(scorer: Callable[[str, Entry], float], answer: str, entry: Entry) -> float:
    with contextlib.redirect_stdout(io.StringIO()):  # some print what the model wrote
        return float(scorer(answer, entry))


def _is_sound(scorer: Callable[[str, Entry], float], entry: Entry) -> bool:
    """Returns True where the fault is the answer's: the entry's own is scored without an error."""
    try:
        _value(scorer, str(entry["answer"] or ""), entry)
    except MALFORMED:
        return False
    return True


def _finite(answer: str) -> str | None:
    """Refuses `nan`, which complex_arithmetic takes for the right answer to everything."""
    return None if "n" in answer.lower() else answer


def _few_turns(answer: str) -> str:
    """Takes turns modulo four, which are none: rubiks_cube writes out `R1000000000` move by move."""
    return " ".join(_few_turns_of(move) for move in answer.split())


def _few_turns_of(move: str) -> str:
    turn = TURNS.fullmatch(move)
    return f"{turn[1]}{int(turn[2][-2:]) % 4}" if turn is not None else move


def _few_steps(answer: str) -> str:
    """Bounds the steps: rush_hour walks `A+1000000000` step by step, against the wall."""
    return STEPS.sub(lambda step: f"{step[1]}{min(int(step[2][:3]), LONGEST_STEP)}", answer)


GUARDS: dict[str, Callable[[str], str | None]] = {
    "complex_arithmetic": _finite,
    "rubiks_cube": _few_turns,
    "rush_hour": _few_steps,
}
"""Task → the same answer in a form that its scorer can bear; None: no answer at all."""


@functools.lru_cache(maxsize=256)
def _scorer(task: str) -> Callable[[str, Entry], float]:
    check_package()
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(task)  # pyright: ignore[reportReturnType]  (annotated without arguments)
