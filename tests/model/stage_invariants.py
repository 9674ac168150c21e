"""I1, I3, I5 and I6 of a batch that passes stages: what a state, or a step, may not be. Each says what broke, or ""."""

from __future__ import annotations

from typing import Any

from tests.model.server import DONE, LEASED, PUBLISHED, Open, Rows, Server
from tests.model.stages import Items, source_of
from tests.model.state import Bounds, State

OF_ITEM = 7
"""The length of what a stage worker holds."""


def holds_item(state: State, place: tuple[int, int, int, int]) -> bool:
    """Whether the holder of this item's lease is at work on it."""
    iteration, batch, stage, item = place
    rows = state.server.slot_of(iteration).rows[batch]
    held: tuple[Any, ...] = rows.items[stage][item] if rows else ()
    if held[:1] != (LEASED,):
        return False
    claim = state.workers[held[2]]
    return works_on(claim) and (*claim[:5], claim[6]) == (*place, held[1], held[3])


def works_on(claim: tuple[Any, ...]) -> bool:
    """Whether a stage worker holds it, and has heard so."""
    return len(claim) == OF_ITEM


def stands(state: State, claim: tuple[Any, ...], who: int) -> bool:
    """Whether the item is leased under this very claim."""
    iteration, batch, stage, item, attempt, _, number = claim[:7]
    rows = state.server.slot_of(iteration).rows[batch] if state.server.open_at(iteration) else ()
    return bool(rows) and rows.items[stage][item] == (LEASED, attempt, who, number)


def left_unheard_item(state: State, who: int) -> str:
    """I5: who has an item that it never heard of is given that one, and no other, while it stands."""
    claim = state.workers[who]
    is_left = bool(claim) and not works_on(claim) and stands(state, claim, who)
    return "I5: a lease is left that its holder never heard of" if is_left else ""


def attempts_of_item(server: Server, claim: tuple[Any, ...]) -> int:
    """How many attempts of an item count by now; -1 of one whose batch is dead."""
    iteration, batch, stage, item = claim[:4]
    rows = server.slot_of(iteration).rows[batch]
    return rows.items[stage][item][1] if rows else -1


def robbed_item(state: State, who: int, claim: tuple[Any, ...]) -> str:
    """I5: an item's lease belongs to its holder while that one is at work."""
    place = claim[:4]
    rows = state.server.slot_of(place[0]).rows[place[1]]
    held: tuple[Any, ...] = rows.items[place[2]][place[3]] if rows else ()
    is_anothers = held[:1] == (LEASED,) and held[1:] != (claim[4], who, claim[6])
    return "I5: a live lease is taken from its holder" if is_anothers and holds_item(state, place) else ""


def broken_by_put(state: State, after: Server, claim: tuple[Any, ...]) -> str:
    """I3: what an item was made of, once put, stays."""
    iteration, batch = claim[:2]
    before = state.server.slot_of(iteration).rows[batch]
    rows = after.slot_of(iteration).rows[batch]
    for of_stage, now in zip(before.items if before else (), rows.items if rows else (), strict=False):
        for one, new in zip(of_stage, now, strict=True):
            if one[:1] == (DONE,) and new != one:
                return "I3: a column that was put is another one now"
    return ""


def broken_columns(bounds: Bounds, batch: int, content: int, columns: Items) -> str:
    """I1, I3: a batch is trained with all of its columns, each made of this copy and of the inputs beside it."""
    stages = bounds.stages_of(batch)
    if not stages:
        return ""
    if not columns or not all(value for of_stage in columns for value in of_stage):
        return "I1: a batch is trained without its columns"
    if any(value[0][0] != content for of_stage in columns for value in of_stage):
        return "I3: a batch is trained with columns of another copy"
    for stage, (_, after) in enumerate(stages):
        made = {value for before in after for value in columns[before]}
        if any(set(value[0][1:]) - made for value in columns[stage]):
            return "I3: a batch is trained with columns of other inputs"
    return ""


def broken_rows(server: Server, bounds: Bounds, opened: Open) -> str:
    """What no state may be, of the batches of an open iteration."""
    slot = server.slot_of(opened.iteration)
    on_stream = {one[1]: one for one in slot.rollouts}
    for batch, rows in enumerate(slot.rows):
        ledger = slot.batches[batch][0]
        if rows and ledger[:1] != (PUBLISHED,):
            return "I6: something is left of a batch that is dead"
        if not rows:
            if ledger[:1] == (PUBLISHED,) and bounds.stages_of(batch):
                return "I1: a batch without its columns is given to the trainer"
            continue
        if broken := _broken_items(server, bounds, opened.iteration, batch, rows):
            return broken
        is_whole = all(one[:1] == (DONE,) for of_stage in rows.items for one in of_stage)
        if batch in on_stream and not is_whole:
            return "I1: a batch without its columns is given to the trainer"
        if is_whole and batch not in on_stream:
            return "I5: a batch with all of its columns is nowhere"
        if not rows.payload or (batch in on_stream and on_stream[batch][1:6] != rows.payload[:5]):
            return "I5: a batch that stages were given is gone"
    return ""


def _broken_items(server: Server, bounds: Bounds, iteration: int, batch: int, rows: Rows) -> str:
    left = 0
    for stage, of_stage in enumerate(rows.items):
        for item, one in enumerate(of_stage):
            source = source_of(server, bounds.stages, iteration, batch, stage, item)
            left += one[:1] != (DONE,)
            if one[:1] == (DONE,) and one[1][0] != source:
                return "I3: a column stands that was made of other inputs"
            if source and not one:
                return "I5: an item whose inputs are there is nowhere"
            if not source and one:
                return "I5: an item is handed out before its inputs are there"
    return "" if left == rows.left else "I1: another number of items is left than is counted"
