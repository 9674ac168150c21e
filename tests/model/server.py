"""What the server holds of a job, as the model has it: everything is a tuple, so that states can be hashed.

number of a claim     16 · its opening (`opening_of`) + times its item was given back
digest of weights     16 · version + variant; another variant is another content of the same version
entry                 (id, first attempt, deliveries, owner) of a batch on the prompts stream; () if it isn't
ledger                () | (EXPECTED, entry id) | (PUBLISHED, content, generator, attempt) | (DEAD,), each with
                      the version behind it that is pinned, where there is one
rollout               (id, batch, iteration, digest, content, is complete, whom it was delivered to: an epoch or 0)
claim                 (iteration, batch, digest, entry id, attempt): with the owner they are the claim's number
record                (COMMIT or REWIND, iteration, epoch), as the audit stream holds it
item                  () while its inputs are not there | (FREE, attempts, times it was given back) |
                      (LEASED, attempts, stage worker, number of the claim) |
                      (DONE, value)
source                (content of the batch, values of the items that it is made of)
value                 (source, its maker's variant)
"""

from __future__ import annotations

from typing import Any, NamedTuple

EXPECTED, PUBLISHED, DEAD = 1, 2, 3
COMMIT, REWIND = 1, 2
ACTIVE, ENDED, SUCCEEDED, REMOVED = 0, 1, 2, 3
FREE, LEASED, DONE = 1, 2, 3
VARIANTS = 16
ANY = 0
"""No kind of engine."""
NOBODY = -1
NONE = -1
"""No digest, no version, no content."""

Off = frozenset[str]
Entry = tuple[int, ...]
Ledger = tuple[int, ...]
Rollout = tuple[int, ...]
Claim = tuple[int, ...]
Record = tuple[int, ...]
Batch = tuple[Ledger, Entry]
ABSENT: Batch = ((), ())
LENGTHS = {EXPECTED: 2, PUBLISHED: 4, DEAD: 1}
"""The length of a ledger record without a pin."""


class Open(NamedTuple):
    """An open iteration: its batches may be sampled by the versions from the oldest to the newest."""

    iteration: int
    oldest: int
    newest: int
    opened: int
    """The epoch that opened it."""


class Opening(NamedTuple):
    """An iteration to open."""

    iteration: int
    oldest: int
    newest: int
    sent: tuple[tuple[int, int], ...]
    """(batch, the version that is pinned or NONE) of those that go out with it; the others follow."""


class Rows(NamedTuple):
    """What stages make of a published batch; it stays until its iteration is over."""

    payload: Rollout
    """Without its id. The entry of the stream, of a batch with all of its columns, names this very one."""
    left: int
    """Items without their columns."""
    items: tuple[tuple[tuple[Any, ...], ...], ...]
    """[stages, items of the stage]"""


class Slot(NamedTuple):
    """Iteration t lives in slot t mod K + 1."""

    batches: tuple[Batch, ...]
    rollouts: tuple[Rollout, ...]
    rows: tuple[Rows | tuple[()], ...] = ()
    """[batches] () for a batch that no stage has anything of; () of a job without stages."""


class Server(NamedTuple):
    """All that the server holds of a job and that a script asks about."""

    epoch: int
    committed: int
    window: tuple[Open, ...]
    """The open iterations, oldest first."""
    versions: tuple[int, ...]
    """[versions] The digest that the window's batches of this version have, NONE for one that may not sample them."""
    weights: tuple[int, ...]
    """[versions] The digest that was announced, NONE for none."""
    slots: tuple[Slot, ...]
    chain: tuple[int, ...]
    """[versions] The digest that the standing records of the audit chain give it, NONE for one that is not made yet."""
    last: Record
    """The newest audit record."""
    job: int = ACTIVE
    """ENDED: failed or cancelled, and may be resumed or removed."""
    engine: int = ANY
    """The kind of engine that samples a deterministic job; ANY before its first claim, or where its generators name
    none."""

    @property
    def newest(self) -> int:
        """The newest open iteration, else the last committed one."""
        return self.window[-1].iteration if self.window else self.committed

    def open_at(self, iteration: int) -> Open | None:
        index = iteration - self.committed - 1
        return self.window[index] if 0 <= index < len(self.window) else None

    def slot_of(self, iteration: int) -> Slot:
        return self.slots[iteration % len(self.slots)]

    def in_slot_of(self, iteration: int) -> Open | None:
        """What is open in the slot where this iteration would be."""
        return next((one for one in self.window if (one.iteration - iteration) % len(self.slots) == 0), None)

    def with_slot(self, iteration: int, slot: Slot) -> Server:
        index = iteration % len(self.slots)
        return self._replace(slots=(*self.slots[:index], slot, *self.slots[index + 1 :]))

    def with_batch(self, iteration: int, index: int, batch: Batch) -> Server:
        slot = self.slot_of(iteration)
        batches = (*slot.batches[:index], batch, *slot.batches[index + 1 :])
        return self.with_slot(iteration, slot._replace(batches=batches))

    def with_rows(self, iteration: int, batch: int, rows: Rows | tuple[()]) -> Server:
        slot = self.slot_of(iteration)
        return self.with_slot(iteration, slot._replace(rows=(*slot.rows[:batch], rows, *slot.rows[batch + 1 :])))

    @property
    def blank(self) -> Slot:
        slot = self.slots[0]
        return Slot((ABSENT,) * len(slot.batches), (), ((),) * len(slot.rows))


def nothing(num_batches: int, num_versions: int, *, num_open: int = 1, has_stages: bool = False) -> Server:
    slots = (Slot((ABSENT,) * num_batches, (), ((),) * num_batches if has_stages else ()),) * num_open
    none = (NONE,) * num_versions
    return Server(0, -1, (), none, none, slots, (0, *none[1:]), ())


def pin_of(ledger: Ledger) -> int:
    return ledger[-1] if ledger and len(ledger) > LENGTHS[ledger[0]] else NONE


def pinned(ledger: Ledger, version: int) -> Ledger:
    return ledger if version == NONE else (*ledger, version)


def known(versions: tuple[int, ...], oldest: int, newest: int) -> tuple[int, ...]:
    """The digests of this range that are there."""
    return tuple(digest for digest in versions[oldest : newest + 1] if digest != NONE)
