"""How far a trainer has read the published batches of one open iteration, and what came before it was asked for.

A wait on the stream brings entries with it; the next claim takes them, so that a batch crosses the connection once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

NO_ENTRY = "0-0"
"""Before every stream entry."""
READ_AHEAD = 4
"""Batches that waits may bring before they are claimed: they are megabytes."""


class RolloutEntry(NamedTuple):
    """An entry of the rollouts stream."""

    payload: bytes | None
    """None of a batch with columns: it stands beside them."""
    digest: bytes
    batch_id: bytes


@dataclass
class RolloutCursor:
    """How far a trainer has read the rollouts of one slot."""

    last_entry: str = NO_ENTRY
    """The newest published batch that this trainer holds."""
    awaited_entry: str = NO_ENTRY
    read_ahead: dict[str, RolloutEntry] = field(default_factory=dict)
    """What a wait brought and no claim has taken yet, by its id."""

    def keep(self, entry: str, brought: RolloutEntry) -> None:
        """Notes what a wait has brought, and keeps it for the next claim where there is room."""
        self.awaited_entry = entry
        if len(self.read_ahead) < READ_AHEAD:
            self.read_ahead[entry] = brought
