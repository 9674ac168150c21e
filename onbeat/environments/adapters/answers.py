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
    """Returns the text between the last `<answer>` and `</answer>`; None without such a pair."""
    end = text.rfind(CLOSED)
    start = text.rfind(OPENED, 0, end) if end >= 0 else -1
    return text[start + len(OPENED) : end].strip() if start >= 0 else None


def last_number(text: str) -> str | None:
    """Returns the last number of a text, as a decimal; None where there is none."""
    number = numbers.last_number(text)
    if number is None:
        return None
    unit = "%" if number.is_percent else ""
    return f"{number.value:f}{unit}"


READERS: dict[str, Callable[[str], str | None]] = {"tag": last_tagged, "number": last_number, "text": lambda text: text}
"""Parameter `answer` → the function that reads the answer from the last message."""


def are_equal(answer: str, reference: str) -> bool:
    """Returns whether both are the same text but for spaces at their ends, or the same number."""
    if answer.strip() == reference.strip():
        return True
    answered = numbers.read_number(answer)
    expected = numbers.read_number(reference)
    return answered is not None and expected is not None and answered.is_near(expected, tolerance=0.0)


class Question:
    """A session's question. The model's first message without a call is the answer: 1.0 where it is the reference."""

    def __init__(self, *, answer: str, system: str) -> None:
        """Checks the parameters.

        Args:
            answer: Name of the reader in `READERS` that finds the answer in the model's message.
            system: Text of a first message of the system; "" makes none.

        Raises:
            ValueError: There is no reader of this name.
        """
        if answer not in READERS:
            raise ValueError(f"answer is one of {', '.join(READERS)}, and not {answer}")
        self._read = READERS[answer]
        self._first = [Message(role="system", content=system)] if system else []
        self._reference = ""

    def messages(self, task: Mapping[str, Any]) -> list[Message]:
        """Returns the messages that begin the session. Raises BadTask."""
        if "question" not in task or "reference" not in task:
            raise BadTask("it has no question and reference: the job needs a data set of examples")
        self._reference = str(task["reference"])
        return [*self._first, Message(role="user", content=str(task["question"]))]

    def reply(self, message: Message, metrics: dict[str, float]) -> Reply:
        """Returns the last reply, whose reward is 1.0 for the right answer and 0.0 for any other."""
        answer = self._read(message.content)
        is_right = answer is not None and are_equal(answer, self._reference)
        return Reply(reward=float(is_right), done=True, metrics=metrics)
