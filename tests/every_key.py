"""All keys of a job, for tests that look at what a call has left as it was."""

from __future__ import annotations

from broker.keys import JobKeys


def every_key(keys: JobKeys) -> list[str]:
    """Those that are there once, then those of each slot."""
    once = [name for name in vars(keys).values() if isinstance(name, str)]
    return [*once, *(name for slot in keys.slots for name in slot)]
