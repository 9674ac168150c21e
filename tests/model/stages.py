"""The scripts of broker/scripts that stage workers call, as pure functions; see fence.py.

An item of a batch is leased, computed and put whole. What it is computed from is its source; its stage worker brings
the source back with the value, so that columns of one copy of a batch are never taken for those of another.
"""

from __future__ import annotations

from typing import Any

from tests.model.server import ACTIVE, DEAD, DONE, FREE, LEASED, PUBLISHED, Off, Rollout, Rows, Server, pin_of, pinned

Stages = tuple[tuple[int, tuple[int, ...]], ...]
"""(items of a batch, the stages whose outputs it reads) of each stage."""
Item = tuple[Any, ...]
Items = tuple[tuple[Item, ...], ...]
Source = tuple[Any, ...]
Value = tuple[Any, ...]
ItemClaim = tuple[Any, ...]
"""(iteration, batch, stage, item, attempt, source, number)"""
GIVEN_BACK = 16
"""More than an item is given back."""


def published_rows(stages: Stages, payload: Rollout) -> Rows:
    """A batch that waits for its columns: the items of stages that read base columns alone are free."""
    items = tuple(tuple((FREE, 0, 0) if not after else () for _ in range(number)) for number, after in stages)
    return Rows(payload, sum(number for number, _ in stages), items)


def num_waiting(server: Server) -> int:
    """Batches whose columns are not complete."""
    return sum(bool(rows and rows.left) for slot in server.slots for rows in slot.rows)


def source_of(server: Server, stages: Stages, iteration: int, batch: int, stage: int, item: int) -> Source:
    """What this item would be computed from now; () while an input is not there."""
    rows, ledger = server.slot_of(iteration).rows[batch], server.slot_of(iteration).batches[batch][0]
    if not rows or ledger[:1] != (PUBLISHED,):
        return ()
    values = []
    for before in stages[stage][1]:
        for one in covering(stages, before, stage, item):
            made = rows.items[before][one]
            if made[:1] != (DONE,):
                return ()
            values.append(made[1])
    return (ledger[1], *values)


def covering(stages: Stages, of: int, stage: int, item: int) -> range:
    """The items of the stage `of` that have a row of this item."""
    num_rows = max(number for number, _ in stages)
    size, other = num_rows // stages[stage][0], num_rows // stages[of][0]
    return range(item * size // other, ((item + 1) * size - 1) // other + 1)


def claim_rows(
    server: Server,
    stages: Stages,
    place: tuple[int, int, int, int],
    worker: int,
    *,
    opening: int,
    max_attempts: int,
    off: Off,
) -> tuple[str, Server, ItemClaim]:
    """claim_rows of an item that is free, or whose lease is over: which of them is left open.

    opening: names the opening of its iteration, of a server that came back as well; it makes numbers of claims differ.
    """
    iteration, batch, stage, item = place
    rows = server.slot_of(iteration).rows[batch]
    assert rows
    stands = rows.items[stage][item]
    attempt, number = stands[1] + 1, GIVEN_BACK * opening + stands[-1] % GIVEN_BACK
    if attempt > max_attempts:
        return "buried", bury(server, iteration, batch, off), ()
    leased = _with_item(server, iteration, batch, stage, item, (LEASED, attempt, worker, number))
    source = source_of(server, stages, iteration, batch, stage, item)
    return "claimed", leased, (*place, attempt, source, number)


def claim_again(server: Server, stages: Stages, unheard: ItemClaim, worker: int, off: Off) -> ItemClaim:
    """claim_rows of a stage worker that has not heard of its newest claim: that one, where it stands; or ()."""
    iteration, batch, stage, item, attempt, _, number = unheard
    rows = server.slot_of(iteration).rows[batch] if server.open_at(iteration) else ()
    held = rows.items[stage][item] if rows else ()
    stands = held == (LEASED, attempt, worker, number) or ("claim_rows.stands" in off and held[:1] == (LEASED,))
    if not stands or "claim_rows.again" in off:
        return ()
    return (*unheard[:5], source_of(server, stages, iteration, batch, stage, item), number)


def put_rows(
    server: Server, stages: Stages, claim: ItemClaim, value: Value, *, rollout_id: int, off: Off
) -> tuple[str, Server]:
    """It asks for no lease: what the item is made of decides, and the first put wins."""
    iteration, batch, stage, item, _, source, _ = claim
    if server.job != ACTIVE and "put.ended" not in off:
        return "settled", server
    if not server.open_at(iteration):
        return "settled", server
    slot = server.slot_of(iteration)
    rows, ledger = slot.rows[batch], slot.batches[batch][0]
    if not rows or (ledger[:1] != (PUBLISHED,) and "put.published" not in off):
        return "settled", server
    if ledger[1] != source[0] and "put.copy" not in off:
        return "settled", server
    before = rows.items[stage][item]
    if before[:1] == (DONE,) and "put.first" not in off:
        return ("again" if before[1] == value else "divergent"), server
    if not before and "put.ready" not in off:
        return "not_ready", server
    now = source_of(server, stages, iteration, batch, stage, item)
    if (not now or now[1:] != source[1:]) and "put.inputs" not in off:
        return "not_ready", server
    server = _with_item(server, iteration, batch, stage, item, (DONE, value))
    return "accepted", _completed(_freed(server, stages, iteration, batch), iteration, batch, rollout_id, off)


def _freed(server: Server, stages: Stages, iteration: int, batch: int) -> Server:
    """Items whose last input came are free."""
    rows = server.slot_of(iteration).rows[batch]
    assert rows
    for stage, of_stage in enumerate(rows.items):
        for item, one in enumerate(of_stage):
            if not one and source_of(server, stages, iteration, batch, stage, item):
                server = _with_item(server, iteration, batch, stage, item, (FREE, 0, 0))
    return server


def _completed(server: Server, iteration: int, batch: int, rollout_id: int, off: Off) -> Server:
    """One item less is left; the last one names the batch to the trainer, who reads it where its columns are."""
    slot = server.slot_of(iteration)
    rows = slot.rows[batch]
    assert rows
    left = rows.left - 1
    if left and "put.last" not in off:
        return server.with_rows(iteration, batch, rows._replace(left=left))
    slot = slot._replace(rollouts=(*slot.rollouts, (rollout_id, *rows.payload)))
    payload = () if "put.keeps" in off else rows.payload
    return server.with_slot(iteration, slot).with_rows(iteration, batch, rows._replace(payload=payload, left=left))


def renew_rows(server: Server, claim: ItemClaim, worker: int, off: Off) -> tuple[str, Server]:
    """Changes nothing that is asked about here, unless it gives the lease to a stage worker that has lost it."""
    iteration, batch, stage, item, attempt, _, number = claim
    rows = server.slot_of(iteration).rows[batch]
    is_in_work = bool(rows) and rows.items[stage][item][:1] in ((FREE,), (LEASED,))
    if server.job != ACTIVE or not server.open_at(iteration) or not rows or not is_in_work:
        return "settled", server
    if rows.items[stage][item] == (LEASED, attempt, worker, number):
        return "held", server
    if "renew_rows.claim" in off and rows.items[stage][item][:1] == (LEASED,):
        return "held", _with_item(server, iteration, batch, stage, item, (LEASED, attempt, worker, number))
    return "lost", server


def fail_rows(
    server: Server, claim: ItemClaim, worker: int, max_attempts: int, off: Off, *, is_released: bool = False
) -> tuple[str, Server]:
    """Only the lease's holder may fail its item; past the attempts its batch is dead (I6).

    is_released: the item comes back as if it had not been claimed.
    """
    iteration, batch, stage, item, attempt, _, number = claim
    rows = server.slot_of(iteration).rows[batch]
    if not server.open_at(iteration) or not rows:
        return "settled", server
    held = rows.items[stage][item]
    if held[:1] != (LEASED,):
        return "settled", server
    if held[1:] != (attempt, worker, number) and "fail_rows.claim" not in off:
        return "settled", server
    is_free = is_released and "release_rows.free" not in off
    if attempt >= max_attempts and not is_free:
        return "dead", bury(server, iteration, batch, off)
    given_back = _with_item(
        server, iteration, batch, stage, item, (FREE, attempt - is_free, held[3] % GIVEN_BACK + is_free)
    )
    return "released" if is_released else "retried", given_back


def bury(server: Server, iteration: int, batch: int, off: Off) -> Server:
    """A batch that waits for columns is dead, and all that was made of it goes."""
    ledger = server.slot_of(iteration).batches[batch][0]
    server = server.with_batch(iteration, batch, (pinned((DEAD,), pin_of(ledger)), ()))
    return server if "bury.rows" in off else server.with_rows(iteration, batch, ())


def read_columns(server: Server, iteration: int, batch: int, content: int, off: Off) -> tuple[str, Items]:
    """What the trainer reads for a batch of this content: every value of every item, or why it can't."""
    slot = server.slot_of(iteration)
    rows, ledger = slot.rows[batch], slot.batches[batch][0]
    if ledger[:2] != (PUBLISHED, content) and "columns.digest" not in off:
        return "other", ()
    values = tuple(
        tuple(one[1] if one[:1] == (DONE,) else () for one in stage) for stage in (rows and rows.items) or ()
    )
    is_whole = bool(values) and all(value for stage in values for value in stage)
    if not is_whole and "columns.whole" not in off:
        return "missing", ()
    return "read", values


def _with_item(server: Server, iteration: int, batch: int, stage: int, item: int, new: Item) -> Server:
    rows = server.slot_of(iteration).rows[batch]
    assert rows
    of_stage = (*rows.items[stage][:item], new, *rows.items[stage][item + 1 :])
    items = (*rows.items[:stage], of_stage, *rows.items[stage + 1 :])
    return server.with_rows(iteration, batch, rows._replace(items=items))
