"""A metric as the gateway's exposition declares it."""

from __future__ import annotations

from typing import NamedTuple

GAUGE, COUNTER = "gauge", "counter"


class Family(NamedTuple):
    """A metric: its name, without the `_total` that a counter gets, its kind, what it says, its labels."""

    name: str
    kind: str
    meaning: str
    labels: tuple[str, ...] = ()
