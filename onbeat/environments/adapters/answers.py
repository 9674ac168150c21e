"""A question of the data set: where the answer to it stands in a text, and whether it is the right one.

Numbers are read by the grammar of scorers (contracts/encoding/numbers.py): an environment and a reward agree on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from contracts.encoding import numbers
from onbeat.environments.author import BadTask, Message, Reply

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


READERS: dict[str, Callable[[str], str | None]] = {"tag": last_tagged, "number": last_number, "text": lambda text: text}
"""Parameter `answer` → what reads the answer from the last message."""


def are_equal(answer: str, reference: str) -> bool:
    """Whether they are the same text but for spaces at their ends, or the same number."""
    if answer.strip() == reference.strip():
        return True
    one, other = numbers.read_number(answer), numbers.read_number(reference)
    return one is not None and other is not None and one.is_near(other, tolerance=0.0)


class Question:
    """A session's question. The model's first message without a call is the answer: 1.0 where it is the reference."""

    def __init__(self, *, answer: str, system: str) -> None:
        """answer: the name of what reads it from the message. system: a first message. Raises ValueError."""
        if answer not in READERS:
            raise ValueError(f"answer is one of {', '.join(READERS)}, and not {answer}")
        self._read = READERS[answer]
        self._first = [Message(role="system", content=system)] if system else []
        self._reference = ""

    def messages(self, task: Mapping[str, Any]) -> list[Message]:
        """How the session begins. Raises BadTask."""
        if "question" not in task or "reference" not in task:
            raise BadTask("it has no question and reference: the job needs a data set of examples")
        self._reference = str(task["reference"])
        return [*self._first, Message(role="user", content=str(task["question"]))]

    def reply(self, message: Message, metrics: dict[str, float]) -> Reply:
        """The last reply."""
        answer = self._read(message.content)
        is_right = answer is not None and are_equal(answer, self._reference)
        return Reply(reward=float(is_right), done=True, metrics=metrics)
