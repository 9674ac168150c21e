"""Where an answer stands in a text, and whether it is the right one."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
OPENED, CLOSED = "<answer>", "</answer>"
MAX_NUMBER_CHARS = 100


def last_tagged(text: str) -> str | None:
    """What stands in the last `<answer>…</answer>`; None where nothing does."""
    end = text.rfind(CLOSED)
    start = text.rfind(OPENED, 0, end) if end >= 0 else -1
    return text[start + len(OPENED) : end].strip() if start >= 0 else None


def last_number(text: str) -> str | None:
    """The last number of a text; None where there is none."""
    found = NUMBER.findall(text)
    return found[-1] if found else None


READERS: dict[str, Callable[[str], str | None]] = {
    "tag": last_tagged,
    "number": last_number,
    "text": lambda text: text,
}
"""Parameter `answer` → what reads the answer from the last message."""


def are_equal(answer: str, reference: str) -> bool:
    """Whether they are the same text but for spaces at their ends, or the same number."""
    if answer.strip() == reference.strip():
        return True
    one, other = _number(answer), _number(reference)
    return one is not None and one == other


def _number(text: str) -> Fraction | None:
    stripped = text.strip().replace(",", "")
    if len(stripped) > MAX_NUMBER_CHARS or not NUMBER.fullmatch(stripped):
        return None
    try:
        return Fraction(stripped)
    except (ValueError, ZeroDivisionError):
        return None
