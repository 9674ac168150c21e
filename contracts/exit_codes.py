"""What a generator's exit code tells its launcher."""

from __future__ import annotations

DIED_AT_WORK = 4
"""It had claimed work before it died: perhaps of a batch, which the fence takes out of circulation in the end."""


def is_of_work(exit_code: int) -> bool:
    """Whether a generator may have died of what it worked on: a kernel without memory ends a process by a signal."""
    return exit_code == DIED_AT_WORK or exit_code < 0
