"""What the server holds of a job, as the model has it: everything is a tuple, so that states can be hashed.

digest of weights     16 · version + variant; another variant is another content of the same version
rollout               (id, batch, iteration, digest, content, is complete, whom it was delivered to: an epoch or 0)
record                (COMMIT or REWIND, iteration, epoch), as the audit stream holds it

Leased work stands in one table. A place in it is (iteration, batch, stage, item): stage 0 makes the batch's rollouts,
and has one item; those after it are the job's own.

item                  () while its inputs are not there | (FREE, attempts, times it was given back) |
                      (LEASED, attempts, holder, number of the claim) | (DONE, value) | (DEAD,), of stage 0
number of a claim     16 · its opening (`opening_of`) + times its item was given back
claim                 (*place, attempt, source, number)
source                (digest of the weights that sample a batch,) | (content of the batch, values of the items that an
                      item of a later stage is made of)
value                 (content, generator, attempt, rollout without its id) | (source, its maker's variant)
"""

from __future__ import annotations

from typing import Any, NamedTuple

COMMIT, REWIND = 1, 2
ACTIVE, ENDED, SUCCEEDED, REMOVED = 0, 1, 2, 3
FREE, LEASED, DONE, DEAD = 1, 2, 3, 4
VARIANTS = 16
ANY = 0
"""No kind of engine."""
NONE = -1
"""No digest, no version, no content."""

Off = frozenset[str]
Item = tuple[Any, ...]
Items = tuple[tuple[Item, ...], ...]
Place = tuple[int, int, int, int]
Claim = tuple[Any, ...]
Rollout = tuple[int, ...]
Record = tuple[int, ...]


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


class Batch(NamedTuple):
    """A batch of an open iteration, from its dispatch on."""

    pin: int = NONE
    """The version that alone may sample it; NONE where the iteration's range says which may."""
    left: int = 0
    """Items without their columns."""
    items: Items = (((FREE, 0, 0),),)
    """[1 + its stages once it is published, items of the stage]"""

    @property
    def prompts(self) -> Item:
        """The item of stage 0; () of one that the ledger expects, and that is nowhere."""
        return self.items[0][0]

    @property
    def is_dead(self) -> bool:
        return self.prompts == (DEAD,)

    @property
    def made(self) -> tuple[Any, ...]:
        """The value of stage 0; () of what isn't published."""
        return self.prompts[1] if self.prompts[:1] == (DONE,) else ()


class Slot(NamedTuple):
    """Iteration t lives in slot t mod K + 1."""

    batches: tuple[Batch | tuple[()], ...]
    """() for one that was not dispatched yet."""
    rollouts: tuple[Rollout, ...]


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
    proofs: tuple[tuple[int, ...], ...] = ()
    """[generators, versions] The digest of the version that the generator's engine has shown, NONE for none.

    () in a job whose versions need no proof.
    """

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

    def with_batch(self, iteration: int, index: int, batch: Batch | tuple[()]) -> Server:
        slot = self.slot_of(iteration)
        batches = (*slot.batches[:index], batch, *slot.batches[index + 1 :])
        return self.with_slot(iteration, slot._replace(batches=batches))

    def item_at(self, place: Place) -> Item:
        """() of what isn't there."""
        iteration, index, stage, item = place
        batch = self.slot_of(iteration).batches[index] if self.open_at(iteration) else ()
        return batch.items[stage][item] if batch and stage < len(batch.items) else ()

    def with_item(self, place: Place, new: Item) -> Server:
        iteration, index, stage, item = place
        batch = self.slot_of(iteration).batches[index]
        assert batch
        of_stage = (*batch.items[stage][:item], new, *batch.items[stage][item + 1 :])
        items = (*batch.items[:stage], of_stage, *batch.items[stage + 1 :])
        return self.with_batch(iteration, index, batch._replace(items=items))

    @property
    def blank(self) -> Slot:
        return Slot(((),) * len(self.slots[0].batches), ())


def nothing(num_batches: int, num_versions: int, *, num_open: int = 1, num_provers: int = 0) -> Server:
    """num_provers: generators whose engines have to show each version."""
    none = (NONE,) * num_versions
    slots = (Slot(((),) * num_batches, ()),) * num_open
    return Server(0, -1, (), none, none, slots, (0, *none[1:]), (), proofs=(none,) * num_provers)


def known(versions: tuple[int, ...], oldest: int, newest: int) -> tuple[int, ...]:
    """The digests of this range that are there."""
    return tuple(digest for digest in versions[oldest : newest + 1] if digest != NONE)
