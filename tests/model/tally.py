"""What the server must have counted of a walk's moves: its counters, and the number of its dead batches."""

from __future__ import annotations

from collections import Counter

from tests.integration.fence_checks import Held
from tests.model.move import Move
from tests.model.server import Server

BY_NAME = {"claims from": ("reclaimed",), "fails its item": ("failed",), "gives back its item": ("released",)}
"""How the name of a move of stage 0 begins → what counts it."""
NOT_REFUSED = ("accepted", "full", "no_room")
UNCOUNTED = ("stage_", "hedges_won", "lost")
"""How the names of counters begin that are not compared: those of stages, of copies that came first (test_hedging.py),
and of leases whose holders were not heard of again (test_lost_leases.py)."""


class Tally:
    """The counters of one job."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()
        self._on_disk: Counter[str] = Counter()

    def writes_reach_the_disk(self) -> None:
        self._on_disk = Counter(self.counted)

    def last_writes_are_lost(self) -> None:
        self.counted = Counter(self._on_disk)

    def note(self, move: Move, before: Server, after: Server, num_bytes: int = 0) -> None:
        """num_bytes: of the batch that it publishes."""
        if move.name == "the job is removed":
            self.counted.clear()
        for name, counters in BY_NAME.items():
            # A claim that is answered `unproved` changes nothing, whatever was asked for.
            if move.name.startswith(name) and not any(move.place[2:3]) and after != before:
                self.counted.update(counters)
        self.counted["dead"] += move.name.endswith((": buried", "fails its item: dead", "by the same words: dead"))
        self.counted["rewinds"] += move.name.startswith("rewind") and after.last != before.last
        if move.name.startswith("publishes"):
            self.note_publication(move.name.rpartition(": ")[2], before, is_new=after != before)
            self.counted["accepted_bytes"] += num_bytes if after != before else 0
        elif move.name.startswith(("reconciles", "dispatches")):
            self.counted["redispatched"] += self._num_again(before, after)

    def note_publication(self, outcome: str, server: Server, *, is_new: bool) -> None:
        """Without a trainer, as of a job that was removed, nothing is counted."""
        self.counted["accepted"] += is_new
        if not is_new and outcome not in NOT_REFUSED and server.epoch:
            self.counted[f"rejected:{outcome}"] += 1

    def _num_again(self, before: Server, after: Server) -> int:
        """How many prompts were on the stream once, and are again."""
        slots = zip(before.slots, after.slots, strict=True)
        pairs = (pair for one, other in slots for pair in zip(one.batches, other.batches, strict=True))
        return sum(bool(batch and not batch.prompts and again and again.prompts) for batch, again in pairs)

    def check(self, held: Held, name: str) -> None:
        found = {key: number for key, number in held.counters.items() if not key.startswith(UNCOUNTED)}
        assert found == {key: number for key, number in self.counted.items() if number}, name
        assert len(held.dead) == self.counted["dead"], name
