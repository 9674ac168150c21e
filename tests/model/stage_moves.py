"""What a stage worker does next: idle → it holds an item → idle. A late one puts as any other does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.model import stages
from tests.model.invariants import counted_for_another, opening_of
from tests.model.move import Move, with_worker, wrote
from tests.model.server import DONE, LEASED, Off
from tests.model.stage_invariants import (
    attempts_of_item,
    broken_by_put,
    holds_item,
    left_unheard_item,
    robbed_item,
    stands,
    works_on,
)
from tests.model.state import UNHEARD, Bounds, State


def stage_moves(state: State, bounds: Bounds, off: Off, who: int, may_fail: bool) -> Iterator[Move]:
    claim = state.workers[who]
    if not works_on(claim):
        again = stages.claim_again(state.server, bounds.stages, claim[:7], who, off) if claim else ()
        if again:
            breaks = "" if stands(state, again, who) else "I5: a claim comes again that is over"
            taken = with_worker(state, who, again)
            yield Move("claims an item again", who, taken, False, breaks, again[1], again[0])
        else:
            yield from _claims(state, bounds, off, who, may_fail)
        return
    iteration, batch = claim[:2]
    server = state.server
    idle = with_worker(state, who, ())
    yield from _puts(state, bounds, off, who, may_fail)
    _, renewed = stages.renew_rows(server, claim, who, off)
    if renewed != server:
        breaks = robbed_item(state, who, claim)
        yield Move("renews its item", who, wrote(state, renewed, bounds), breaks=breaks)
    if may_fail:
        tired = idle._replace(faults=state.faults + 1)
        yield Move("stage worker dies", who, tired, is_fault=True)
        for verb, is_released in (("fails", False), ("gives back", True)):
            outcome, after = stages.fail_rows(server, claim, who, bounds.item_attempts, off, is_released=is_released)
            if after != server:
                costs = counted_for_another(is_released, claim[4], attempts_of_item(after, claim))
                breaks = robbed_item(state, who, claim) or costs
                tried = wrote(tired, after, bounds)
                yield Move(f"{verb} its item: {outcome}", who, tried, True, breaks, batch, iteration)


def value_of(bounds: Bounds, claim: tuple[Any, ...], who: int) -> stages.Value:
    """What this stage worker computes of its claim's source."""
    return (claim[5], who if bounds.stages_vary else 0)


def _puts(state: State, bounds: Bounds, off: Off, who: int, may_fail: bool) -> Iterator[Move]:
    claim = state.workers[who]
    value = value_of(bounds, claim, who)
    outcome, after = _put(state, bounds, off, claim, value)
    moved = wrote(state, after, bounds)
    breaks = broken_by_put(state, after, claim)
    yield Move(f"puts: {outcome}", who, with_worker(moved, who, ()), False, breaks, claim[1], claim[0])
    if moved is not state and may_fail:
        lost = moved._replace(faults=state.faults + 1)
        yield Move("puts, answer lost", who, lost, True, breaks, claim[1], claim[0])
    for what, wrong in _wrong_claims(state, bounds, claim):
        outcome, after = _put(state, bounds, off, wrong, value_of(bounds, wrong, who))
        if after != state.server:
            done = with_worker(wrote(state, after, bounds), who, ())
            breaks = broken_by_put(state, after, wrong)
            yield Move(f"{what}: {outcome}", who, done, False, breaks, claim[1], claim[0])


def _put(state: State, bounds: Bounds, off: Off, claim: tuple[Any, ...], value: stages.Value) -> tuple[str, Any]:
    rollout_id = 16 * state.era + len(state.server.slot_of(claim[0]).rollouts) + 1
    return stages.put_rows(state.server, bounds.stages, claim, value, rollout_id=rollout_id, off=off)


def _wrong_claims(state: State, bounds: Bounds, claim: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """What a wrong stage worker would put; the script must refuse it, and then nothing has changed."""
    iteration, batch, stage, _, attempt, source, number = claim
    for later, (_, after) in enumerate(bounds.stages):
        if stage in after:
            yield "puts before its inputs", (iteration, batch, later, 0, attempt, (source[0],), number)


def _claims(state: State, bounds: Bounds, off: Off, who: int, may_fail: bool) -> Iterator[Move]:
    server = state.server
    for opened in server.window:
        for batch, rows in enumerate(server.slot_of(opened.iteration).rows):
            for stage, items in enumerate(rows.items if rows else ()):
                for item, one in enumerate(items):
                    if not one or one[0] == DONE:
                        continue
                    place = (opened.iteration, batch, stage, item)
                    is_at_work = one[0] == LEASED and holds_item(state, place)
                    if is_at_work and not may_fail:
                        continue
                    outcome, after, claim = stages.claim_rows(
                        server,
                        bounds.stages,
                        place,
                        who,
                        opening=opening_of(state, opened),
                        max_attempts=bounds.item_attempts,
                        off=off,
                    )
                    slow = "claims an item from a slow one" if is_at_work else "claims an item from a dead one"
                    name = slow if one[0] == LEASED else "claims an item"
                    taken = with_worker(wrote(state, after, bounds), who, claim)
                    taken = taken._replace(faults=state.faults + is_at_work)
                    breaks = left_unheard_item(state, who)
                    yield Move(f"{name}: {outcome}", who, taken, is_at_work, breaks, batch, opened.iteration)
                    if name == "claims an item" and claim and may_fail and not breaks:
                        lost = with_worker(taken, who, (*claim, UNHEARD))._replace(faults=state.faults + 1)
                        yield Move(f"{name}, answer lost", who, lost, True, "", batch, opened.iteration)
