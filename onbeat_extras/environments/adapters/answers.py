"""Where an answer stands in a text, and whether it is the right one.

Numbers are read by the grammar of scorers (contracts/encoding/numbers.py): an environment and a reward agree on them.
"""

from __future__ import annotations

from collections.abc import Callable

from contracts.encoding import numbers

OPENED, CLOSED = "<answer>", "</answer>"


def last_tagged(text: str) -> str | None:
    """What stands in the last `<answer>…</answer>`; None where nothing does."""
    end = text.rfind(CLOSED)
    start = text.rfind(OPENED, 0, end) if end >= 0 else -1
    return text[start + len(OPENED) : end].strip() if start >= 0 else None


def last_number(text: str) -> str | None:
    """The last number of a text, as a decimal; None where there is none."""
    found = numbers.last_number(text)
    return f"{found.value:f}{'%' if found.is_percent else ''}" if found else None


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
    one, other = numbers.read_number(answer), numbers.read_number(reference)
    return one is not None and other is not None and one.is_near(other, tolerance=0.0)
