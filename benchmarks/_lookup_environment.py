"""The task of `onbeat bench trl-tools`: a number that only a tool knows, and a sum with it.

`Lookup` is a class as TRL's `environment_factory` takes it; our environment of kind `trl` takes the same.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator
from typing import Any

ROWS = "rows.jsonl"
SMALLEST_CODE, LARGEST_CODE = 10, 39
LARGEST_ADDEND = 5


class Lookup:
    """A table of one code; its public method is the tool."""

    reward = 0.0
    """A call earns nothing: the answer does, and a scorer reads it."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}

    def reset(self, *, key: str, code: int, **_row: Any) -> None:
        """Begins a row of the data set."""
        self._codes = {key: code}

    # Without a type of what it returns, which TRL would write into the prompt, and we don't: so the prompts are equal.
    def lookup(self, key: str):
        """
        Returns the code of a key.

        Args:
            key: The key.
        """
        return str(self._codes.get(key, "unknown"))


def rows(seed: int) -> Iterator[dict[str, str]]:
    """Yields rows for ever: the question, what the tool knows (JSON), and the answer. The same questions come again,
    with other codes."""
    draw = random.Random(seed)
    while True:
        key = draw.choice(string.ascii_lowercase)
        code, addend = draw.randint(SMALLEST_CODE, LARGEST_CODE), draw.randint(1, LARGEST_ADDEND)
        yield {
            "prompt": f"{key} + {addend}",
            "reference": str(code + addend),
            "task_entry": json.dumps({"key": key, "code": code}),
        }
