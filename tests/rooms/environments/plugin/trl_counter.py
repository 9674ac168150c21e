"""A class as TRL's `environment_factory` has it: public methods are tools."""

from __future__ import annotations

from typing import Any


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def reset(self, **kwargs: Any) -> str | None:
        self.count = 0
        self.wanted = int(kwargs["reference"])
        return f" The counter is at {self.count}."

    def add(self, number: int) -> str:
        """Adds to the counter.

        Args:
            number: What is added,
                a whole number.
        """
        self.count += number
        return f"The counter is at {self.count}."

    def _hidden(self) -> None:
        raise AssertionError("no tool")

    def get_reward(self) -> float:
        return 1.0 if self.count == self.wanted else 0.0


def no_class() -> None:
    raise AssertionError("it is not called")
