"""Our scorers of reasoning-gym's tasks whose own ones evaluate text, or don't end on some of it.

They give the scores of the package, on what is read as data. Where they differ, the package rewards what the question
forbids: numbers that weren't given (puzzle24), `5!` or `sqrt(16)` (countdown), lists of NaN (number_sorting).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

from reward_service.scorers.reasoning_gym.arithmetic import Algebra, Integers, Malformed, Rationals, Value, value_of
from reward_service.scorers.reasoning_gym.literals import Items, read_list, read_string
from reward_service.scorers.reasoning_gym.polynomials import Polynomials, derivative
from reward_service.scorers.texts import BadReference

Entry = dict[str, Any]

DECIMAL = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?", re.ASCII)
WHOLE = re.compile(r"[0-9]{1,100}", re.ASCII)
COIN_TOLERANCE = 1e-4
TIMES = "\N{MULTIPLICATION SIGN}"
SORTING_TOLERANCE = 1.0
"""The package's own: numbers may have been rounded."""


def score(task: str, answer: str, entry: Entry) -> float:
    """A score in [0, 1] for any text. Raises BadReference for an entry that lacks what its task needs."""
    try:
        return SCORERS[task](answer, entry)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise BadReference(f"not an entry of {task}: {type(error).__name__}: {error}", field="task_entry") from error


def countdown(answer: str, entry: Entry) -> float:
    """1.0 for the target out of exactly the given numbers; 0.05 for another expression, 0.01 for none."""
    numbers, target = sorted(entry["metadata"]["numbers"]), entry["metadata"]["target"]
    if not isinstance(target, int):
        raise TypeError("its target is no whole number")
    return {None: 0.01, False: 0.05, True: 1.0}[_makes(target, numbers, answer)]


def puzzle24(answer: str, entry: Entry) -> float:
    """1.0 for 24 out of exactly the given numbers, else 0.01."""
    return 1.0 if _makes(24, sorted(entry["metadata"]["numbers"]), answer) else 0.01


def spiral_matrix(answer: str, entry: Entry) -> float:
    """1.0 for the numbers with spaces between them, 0.1 for a list of them."""
    right = entry["answer"].strip()
    if answer.strip() == right:
        return 1.0
    items = _texts(read_list(answer))
    return 0.1 if items is not None and " ".join(items) == right else 0.0


def binary_matrix(answer: str, entry: Entry) -> float:
    """1.0 for the rows as lines, 0.1 for a list of lists."""
    return _board(answer, {entry["answer"]}, listed=0.1)


def n_queens(answer: str, entry: Entry) -> float:
    """1.0 for a board that completes the puzzle, 0.5 for it as a list of lists."""
    return _board(answer, set(entry["metadata"]["valid_answers"]), listed=0.5)


def string_insertion(answer: str, entry: Entry) -> float:
    """1.0 for the text, 0.1 for a list of its characters, or for it in quotes."""
    right = entry["answer"]
    if answer == right:
        return 1.0
    letters = _texts(read_list(answer))
    text = "".join(letters) if letters is not None else read_string(answer)
    return 0.1 if text == right else 0.0


def number_sorting(answer: str, entry: Entry) -> float:
    """1.0 for a sorted list of the right length whose numbers are within 1 of the right ones."""
    right = _floats(read_list(entry["answer"]))
    if right is None:
        raise ValueError("its answer is no list of numbers")
    is_descending = entry["metadata"]["direction"] != "ascending"
    numbers = _floats(read_list(answer))
    if numbers is None or len(numbers) != len(right) or numbers != sorted(numbers, reverse=is_descending):
        return 0.0
    distances = [abs(number - wanted) for number, wanted in zip(numbers, right, strict=True)]
    return float(all(distance <= SORTING_TOLERANCE for distance in distances))


def bitwise_arithmetic(answer: str, entry: Entry) -> float:
    """1.0 for the value of the problem: hexadecimal, or as Python writes whole numbers."""
    right = _value_there(entry["metadata"]["problem"], Integers())
    try:
        return float(int(answer, 0) == right)
    except ValueError:
        return 0.0


def polynomial_multiplication(answer: str, entry: Entry) -> float:
    """1.0 for the product as a sum of terms; what is left to multiply is no answer."""
    right = _value_there(entry["answer"], Polynomials(expands=False))
    try:
        return float(value_of(answer, Polynomials(expands=False)) == right)
    except Malformed:
        return 0.0


def simple_integration(answer: str, entry: Entry) -> float:
    """1.0 where the derivative is the integrand, whatever constants were added."""
    variable = entry["metadata"]["variable"]
    integrand = _value_there(entry["metadata"]["integrand"], Polynomials(expands=True))
    try:
        return float(derivative(value_of(answer, Polynomials(expands=True)), variable) == integrand)
    except Malformed:
        return 0.0


def coin_flip(answer: str, entry: Entry) -> float:
    """1.0 within 1e-4, as a decimal or a fraction; else the share of the leading characters that agree."""
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


def prime_factorization(answer: str, entry: Entry) -> float:
    """1.0 for the prime factors with TIMES between them, 0.5 for others with the same product, else 0.01."""
    right = _factors(entry["answer"])
    if right is None:
        raise ValueError("its answer is no product")
    factors = _factors(answer)
    if factors is None:
        return 0.0
    if factors == right:
        return 1.0
    product = 1
    for factor in factors:  # a longer product can't be the right one, and would take quadratic time
        product *= factor
        if not 0 < product <= math.prod(right):
            return 0.01
    return 0.5 if product == math.prod(right) else 0.01


def _makes(target: int, numbers: list[int], answer: str) -> bool | None:
    """Whether an expression makes it out of exactly these numbers, sorted; None where the answer is no expression."""
    rationals = Rationals()
    try:
        value = value_of(answer, rationals)
    except Malformed:
        return None
    return value == target and sorted(rationals.written) == numbers


def _value_there(text: str, algebra: Algebra[Value]) -> Value:
    """The value of an expression of the entry."""
    try:
        return value_of(text, algebra)
    except Malformed as error:
        raise ValueError(str(error)) from error


def _factors(text: str) -> list[int] | None:
    parts = [part.strip() for part in text.split(TIMES) if part.strip()]
    return sorted(int(part) for part in parts) if all(WHOLE.fullmatch(part) for part in parts) else None


def _probability(text: str) -> float | None:
    above, bar, below = text.replace(",", "").strip().partition("/")
    if not DECIMAL.fullmatch(above.strip()) or (bar and not WHOLE.fullmatch(below.strip())):
        return None
    value = float(above) / (float(below) or math.nan) if bar else float(above)
    return value if math.isfinite(value) else None


def _board(answer: str, right: set[str], *, listed: float) -> float:
    if answer in right:
        return 1.0
    rows = [_texts(row) if isinstance(row, list) else None for row in read_list(answer) or []]
    lines = [" ".join(row) for row in rows if row is not None]
    return listed if rows and len(lines) == len(rows) and "\n".join(lines) in right else 0.0


def _texts(items: Items | None) -> list[str] | None:
    """A flat list; None for any other."""
    texts = [item for item in items or [] if isinstance(item, str)]
    return texts if items is not None and len(texts) == len(items) else None


def _floats(items: Items | None) -> list[float] | None:
    texts = _texts(items)
    if texts is None or not all(DECIMAL.fullmatch(text) for text in texts):
        return None
    numbers = [float(text) for text in texts]
    return numbers if all(math.isfinite(number) for number in numbers) else None


SCORERS: dict[str, Callable[[str, Entry], float]] = {
    scorer.__name__: scorer
    for scorer in (
        *(binary_matrix, bitwise_arithmetic, coin_flip, countdown, n_queens, number_sorting),
        *(polynomial_multiplication, prime_factorization, puzzle24, simple_integration, spiral_matrix),
        string_insertion,
    )
}
