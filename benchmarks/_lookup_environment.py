"""The task of `python -m benchmarks trl --cases tools`: a number that only a tool knows.

`Lookup` is a class as TRL's `environment_factory` takes it; our environment of kind `trl` takes the same.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator
from typing import Any

ROWS = "rows.jsonl"
LOOKED_UP = 0.5
"""The call's part of a reward of 1; the rest is for the answer."""
SMALLEST_CODE, LARGEST_CODE = 10, 99


class Lookup:
    """A table of one code; its public method is the tool."""

    reward = 0.0
    """LOOKED_UP once the tool was called; the answer is a scorer's matter."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}

    def reset(self, *, key: str, code: int, **_row: Any) -> None:
        """Begins a row of the data set."""
        self._codes = {key: code}
        self.reward = 0.0

    # Without a type of what it returns, which TRL would write into the prompt, and we don't: so the prompts are equal.
    def lookup(self, key: str):
        """
        Returns the code of a key.

        Args:
            key: The key.
        """
        self.reward = LOOKED_UP
        return str(self._codes.get(key, "unknown"))


def rows(seed: int) -> Iterator[dict[str, str]]:
    """Yields rows for ever: the question, what the tool knows (JSON), and the answer. The same questions come again,
    with other codes, so that who doesn't ask the tool is right once in ninety times."""
    draw = random.Random(seed)
    while True:
        key = draw.choice(string.ascii_lowercase)
        code = draw.randint(SMALLEST_CODE, LARGEST_CODE)
        yield {
            "prompt": f"The code of {key}?",
            "reference": str(code),
            "task_entry": json.dumps({"key": key, "code": code}),
        }
