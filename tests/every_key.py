"""All keys of a job, for tests that look at what a call has left as it was."""

from __future__ import annotations

from broker.keys import JobKeys


def every_key(keys: JobKeys) -> list[str]:
    """Those that are there once, then those of each slot."""
    once = [name for name in vars(keys).values() if isinstance(name, str)]
    return [*once, *(name for slot in keys.slots for name in slot)]


def fence_keys(keys: JobKeys) -> list[str]:
    """What the transitions of the fence move: all but the spec, and what is written beside it."""
    once = [keys.fence, keys.weights, keys.counters, keys.dead, keys.audit, keys.job, keys.events, keys.progress]
    once += [keys.claimers, keys.probes, keys.proofs]
    return [*once, *(name for slot in keys.slots for name in slot)]
