"""Our scorers of the tasks of reasoning-gym where the package's own ones reward what the question forbids.

coin_flip        the package gives 1.0 to `0` where the answer is 0.3125: it divides by the shorter text's length
countdown        it takes `5!` and `sqrt(16)`, and evaluates the answer
number_sorting   it takes lists of NaN
puzzle24         it takes numbers that weren't given, and evaluates the answer

Elsewhere they give the scores of the package, on what is read as data and never evaluated.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

from reward_service.scorers.reasoning_gym.arithmetic import Malformed, Rationals, value_of
from reward_service.scorers.reasoning_gym.literals import Items, read_list
from reward_service.scorers.texts import BadReference

Entry = dict[str, Any]

DECIMAL = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?", re.ASCII)
WHOLE = re.compile(r"[0-9]{1,100}", re.ASCII)
COIN_TOLERANCE = 1e-4
SORTING_TOLERANCE = 1.0
"""The package's own: numbers may have been rounded."""


def score(task: str, answer: str, entry: Entry) -> float:
    """Returns a score in [0, 1] for any text. Raises BadReference for an entry that lacks what its task needs."""
    try:
        return SCORERS[task](answer, entry)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise BadReference(f"not an entry of {task}: {type(error).__name__}: {error}", field="task_entry") from error


def countdown(answer: str, entry: Entry) -> float:
    """Returns 1.0 for the target out of exactly the given numbers; 0.05 for another expression, 0.01 for none."""
    numbers, target = sorted(entry["metadata"]["numbers"]), entry["metadata"]["target"]
    if not isinstance(target, int):
        raise TypeError("its target is no whole number")
    return {None: 0.01, False: 0.05, True: 1.0}[_makes(target, numbers, answer)]


def puzzle24(answer: str, entry: Entry) -> float:
    """Returns 1.0 for 24 out of exactly the given numbers, else 0.01."""
    if _makes(24, sorted(entry["metadata"]["numbers"]), answer):
        return 1.0
    return 0.01


def number_sorting(answer: str, entry: Entry) -> float:
    """Returns 1.0 for a sorted list of the right length whose numbers are within 1 of the right ones."""
    right = _floats(read_list(entry["answer"]))
    if right is None:
        raise ValueError("its answer is no list of numbers")
    is_descending = entry["metadata"]["direction"] != "ascending"
    numbers = _floats(read_list(answer))
    if numbers is None or len(numbers) != len(right) or numbers != sorted(numbers, reverse=is_descending):
        return 0.0
    distances = [abs(number - wanted) for number, wanted in zip(numbers, right, strict=True)]
    return float(all(distance <= SORTING_TOLERANCE for distance in distances))


def coin_flip(answer: str, entry: Entry) -> float:
    """Returns 1.0 within 1e-4, as a decimal or a fraction; else the share of the leading characters that agree."""
    right = _probability(entry["answer"])
    if right is None:
        raise ValueError("its answer is no number")
    value = _probability(answer)
    if value is None:
        return 0.0
    if abs(value - right) <= COIN_TOLERANCE:
        return 1.0
    written, wanted = f"{value:.10g}", f"{right:.10g}"
    pairs = zip(written, wanted, strict=False)
    num_equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return num_equal / max(len(written), len(wanted))


def _makes(target: int, numbers: list[int], answer: str) -> bool | None:
    """Checks that an expression makes the target of exactly these numbers, sorted; None where it is no expression."""
    rationals = Rationals()
    try:
        value = value_of(answer, rationals)
    except Malformed:
        return None
    return value == target and sorted(rationals.written) == numbers


def _probability(text: str) -> float | None:
    above, bar, below = text.replace(",", "").strip().partition("/")
    if not DECIMAL.fullmatch(above.strip()) or (bar and not WHOLE.fullmatch(below.strip())):
        return None
    value = float(above) / (float(below) or math.nan) if bar else float(above)
    return value if math.isfinite(value) else None


def _texts(items: Items | None) -> list[str] | None:
    """Returns a flat list; None for any other."""
    texts = [item for item in items or [] if isinstance(item, str)]
    return texts if items is not None and len(texts) == len(items) else None


def _floats(items: Items | None) -> list[float] | None:
    texts = _texts(items)
    if texts is None or not all(DECIMAL.fullmatch(text) for text in texts):
        return None
    numbers = [float(text) for text in texts]
    return numbers if all(math.isfinite(number) for number in numbers) else None


SCORERS: dict[str, Callable[[str, Entry], float]] = {
    "coin_flip": coin_flip,
    "countdown": countdown,
    "number_sorting": number_sorting,
    "puzzle24": puzzle24,
}
