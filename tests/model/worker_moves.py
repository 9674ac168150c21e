"""What a generator or a stage worker does next: idle → it holds a claim, by a lease or as a copy of another's → idle.

A late one publishes, or puts, as any other does.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.model import table
from tests.model.invariants import (
    accepted_unshown,
    attempts_of,
    broken_by_put,
    counted_for_another,
    handed_out_unshown,
    holds,
    holds_lease,
    left_unheard,
    opening_of,
    refused_after_all,
    robbery,
)
from tests.model.move import Move, with_engine, with_worker, wrote
from tests.model.server import DEAD, DONE, LEASED, NONE, VARIANTS, Claim, Off, Open, Place, Server, known
from tests.model.state import IDLE, UNHEARD, Bounds, State


def worker_moves(state: State, bounds: Bounds, off: Off, who: int, may_fail: bool) -> Iterator[Move]:
    claim, server = state.workers[who], state.server
    if bounds.proves and bounds.is_generator(who):
        yield from _proves(state, bounds, off, who, may_fail)
    if not holds(claim):
        is_refused = table.is_other_engine(server, bounds.engine_of(who)) and "claim.engine" not in off
        if is_refused and server.window:
            yield Move("asks for work: wrong_engine", who, state)
        again = [] if is_refused or not claim else list(_claims_again(state, bounds, off, who))
        yield from again
        for opened in () if is_refused or again else server.window:
            yield from _claims(state, bounds, off, who, may_fail, opened)
        return
    yield from (_puts if claim[2] else _publishes)(state, bounds, off, who, may_fail)
    _, renewed = table.renew(server, claim, who, off)
    if renewed != server:
        breaks = robbery(state, who, claim)
        yield Move("renews its lease", who, wrote(state, renewed, bounds), breaks=breaks)
    if may_fail:
        tired = with_worker(state, who, IDLE)._replace(faults=state.faults + 1)
        yield Move("worker dies", who, tired, is_fault=True)
        for verb, is_released in (("fails", False), ("gives back", True)):
            most = bounds.max_attempts_of(claim[2])
            outcome, after = table.fail(server, claim, who, most, off, is_released=is_released)
            if after != server:
                costs = counted_for_another(is_released, claim[4], attempts_of(after, claim))
                breaks = robbery(state, who, claim) or costs
                tried = wrote(tired, after, bounds)
                yield Move(f"{verb} its item: {outcome}", who, tried, True, breaks, claim[:4])
        if 1 < claim[4] < bounds.max_attempts_of(claim[2]):
            # By the words of an attempt before it, which the model doesn't keep: any may have had them.
            outcome, after = table.fail(server, claim, who, claim[4], off)
            if after != server:
                breaks = robbery(state, who, claim)
                tried = wrote(tired, after, bounds)
                yield Move(f"fails its item by the same words: {outcome}", who, tried, True, breaks, claim[:4])


def _claims(state: State, bounds: Bounds, off: Off, who: int, may_fail: bool, opened: Open) -> Iterator[Move]:
    server, opening = state.server, opening_of(state, opened)
    for place, item in _places(server, bounds, opened, who):
        is_at_work = holds_lease(state, place)
        for held, source in _answers(server, bounds, place, off):
            is_due = table.is_proof_due(server, place, source, who, off)
            if is_at_work and not place[2] and not is_due:
                copy = (*place, item[1], source, item[3])
                breaks = handed_out_unshown(state, who, copy)
                yield Move("takes a copy", who, with_worker(state, who, copy), breaks=breaks, place=place)
            if is_at_work and not may_fail:
                continue
            outcome, after, claim = table.claim(
                server,
                bounds.stages,
                place,
                who,
                opening=opening,
                max_attempts=bounds.max_attempts_of(place[2]),
                held=held,
                engine=bounds.engine_of(who),
                off=off,
            )
            slow = "claims from a slow one" if is_at_work else "claims from a dead one"
            name = slow if item[0] == LEASED else "claims"
            if outcome == "unproved":
                yield Move(f"{name}: {outcome}", who, state, place=place)
                continue
            breaks = left_unheard(state, who) or handed_out_unshown(state, who, claim)
            taken = with_worker(wrote(state, after, bounds), who, claim)
            taken = taken._replace(faults=state.faults + is_at_work)
            yield Move(f"{name}: {outcome}", who, taken, is_at_work, breaks, place)
            if name == "claims" and claim and may_fail and held == NONE and not breaks:
                unheard = (*claim[:5], claim[5] if place[2] else (), claim[6], UNHEARD)
                lost = with_worker(taken, who, unheard)._replace(faults=state.faults + 1)
                yield Move("claims, answer lost", who, lost, True, place=place)


def _proves(state: State, bounds: Bounds, off: Off, who: int, may_fail: bool) -> Iterator[Move]:
    """Its engine shows the fence what it computes with an announced version; or computes wrongly from now on."""
    server, engine = state.server, state.engines[who]
    for digest in known(server.weights, 0, bounds.iterations):
        outcome, after = table.prove(server, who, digest, is_right=not engine.is_wrong, off=off)
        if outcome == "unknown":
            continue
        shown = list(engine.shown)
        # What the engine has shown is what it computes, whatever the fence makes of it.
        shown[digest // VARIANTS] = NONE if engine.is_wrong else digest
        moved = with_engine(wrote(state, after, bounds), who, engine._replace(shown=tuple(shown)))
        yield Move(f"proves: {outcome}", who, moved, place=(digest,))
    if engine.is_wrong:
        yield Move("makes its engine anew", who, with_engine(state, who, engine._replace(is_wrong=False)))
    elif may_fail:
        wrong = with_engine(state, who, engine._replace(is_wrong=True))._replace(faults=state.faults + 1)
        yield Move("its engine goes wrong", who, wrong, is_fault=True)


def _places(server: Server, bounds: Bounds, opened: Open, who: int) -> Iterator[tuple[Place, tuple[object, ...]]]:
    """What it may claim of an iteration: generators items of stage 0, and stage workers those after it."""
    for index, batch in enumerate(server.slot_of(opened.iteration).batches):
        for stage, items in enumerate(batch.items if batch else ()):
            if bool(stage) != bounds.is_generator(who):
                for item, one in enumerate(items):
                    if one and one[0] not in (DONE, DEAD):
                        yield (opened.iteration, index, stage, item), one


def _claims_again(state: State, bounds: Bounds, off: Off, who: int) -> Iterator[Move]:
    """What it gets that has not heard of its newest claim."""
    unheard, server = state.workers[who], state.server
    place = unheard[:4]
    for held, _ in _answers(server, bounds, place, off) if server.item_at(place) else ():
        claim = table.claim_again(server, bounds.stages, unheard[:7], who, held=held, off=off)
        if claim and table.is_proof_due(server, place, claim[5], who, off) and "claims_again.proof" not in off:
            yield Move("claims again: unproved", who, state, place=place)
        elif claim:
            is_over = not table.is_leased(server.item_at(place), claim, who)
            breaks = "I5: a claim comes again that is over" if is_over else handed_out_unshown(state, who, claim)
            yield Move("claims again", who, with_worker(state, who, claim), False, breaks, place)


def _answers(server: Server, bounds: Bounds, place: Place, off: Off) -> list[tuple[int, table.Source]]:
    """(what its asker may hold, what it is told to compute from), each answer once.

    A generator may hold whatever was ever announced and isn't gone, or a version of a future that was abandoned.
    """
    announced = [digest for digest in server.weights if digest != NONE] if bounds.is_bounded and not place[2] else []
    answers: dict[table.Source, int] = {}
    for held in (NONE, *announced):
        answers.setdefault(table.source_of(server, bounds.stages, place, held, off), held)
    return [(held, source) for source, held in answers.items() if source]


def _publishes(state: State, bounds: Bounds, off: Off, who: int, may_fail: bool) -> Iterator[Move]:
    server, claim = state.server, state.workers[who]
    iteration, index = claim[:2]
    engine = bounds.engine_of(who)
    content = max(0, engine - 1) if bounds.is_deterministic else 4 * claim[4] + who
    for is_complete in (True, False):
        outcome, after = table.publish(
            server,
            claim,
            who,
            content,
            is_complete=is_complete,
            rollout_id=_rollout_id(state, claim),
            stages=bounds.stages_of(index),
            max_waiting=bounds.max_waiting,
            room=bounds.room,
            engine=engine,
            off=off,
        )
        if outcome == "no_room" and iteration > server.window[0].iteration and "claim.oldest_only" not in off:
            # It holds the batch, and has a hand left for the oldest iteration: here it drops it, which is worse.
            yield from _claims(with_worker(state, who, IDLE), bounds, off, who, may_fail, server.window[0])
        if outcome in ("full", "no_room"):
            continue  # its generator holds the batch, and asks again
        moved = wrote(state, after, bounds)
        done = with_worker(moved, who, IDLE)
        if is_complete:
            breaks = refused_after_all(state, who, outcome)
            if after != server:
                breaks = breaks or accepted_unshown(state, who, claim)
            yield Move(f"publishes: {outcome}", who, done, False, breaks, claim[:4])
        if moved is not state and not is_complete:
            yield Move(f"publishes a part: {outcome}", who, done, place=claim[:4])
        elif moved is not state and may_fail:
            lost = moved._replace(faults=state.faults + 1)
            yield Move("publishes, answer lost", who, lost, True, place=claim[:4])
    oldest, newest = bounds.versions_of(iteration, index)
    for version, digest in enumerate(server.weights):
        if digest != NONE and not oldest <= version <= newest:
            wrong, told = (*claim[:5], (digest,), claim[6]), {"rollout_id": _rollout_id(state, claim), "off": off}
            outcome, after = table.publish(server, wrong, who, content, is_complete=True, engine=engine, **told)
            if after != server:
                done = with_worker(wrote(state, after, bounds), who, IDLE)
                yield Move(f"publishes what another version sampled: {outcome}", who, done, place=claim[:4])


def value_of(bounds: Bounds, claim: Claim, who: int) -> tuple[object, ...]:
    """What this stage worker computes of its claim's source."""
    return (claim[5], who if bounds.stages_vary else 0)


def _puts(state: State, bounds: Bounds, off: Off, who: int, may_fail: bool) -> Iterator[Move]:
    claim = state.workers[who]
    outcome, after = _put(state, bounds, off, claim, who)
    moved = wrote(state, after, bounds)
    breaks = broken_by_put(state, after, claim)
    yield Move(f"puts: {outcome}", who, with_worker(moved, who, IDLE), False, breaks, claim[:4])
    if moved is not state and may_fail:
        yield Move("puts, answer lost", who, moved._replace(faults=state.faults + 1), True, breaks, claim[:4])
    # What a wrong stage worker would put; the script must refuse it, and then nothing has changed.
    for later, (_, after_stages) in enumerate(bounds.stages, start=1):
        if claim[2] in after_stages:
            wrong = (*claim[:2], later, 0, claim[4], claim[5][:1], claim[6])
            outcome, after = _put(state, bounds, off, wrong, who)
            if after != state.server:
                done = with_worker(wrote(state, after, bounds), who, IDLE)
                breaks = broken_by_put(state, after, wrong)
                yield Move(f"puts before its inputs: {outcome}", who, done, False, breaks, claim[:4])


def _put(state: State, bounds: Bounds, off: Off, claim: Claim, who: int) -> tuple[str, Server]:
    value, rollout_id = value_of(bounds, claim, who), _rollout_id(state, claim)
    return table.put(state.server, bounds.stages, claim, value, rollout_id=rollout_id, off=off)


def _rollout_id(state: State, claim: Claim) -> int:
    return 16 * state.era + len(state.server.slot_of(claim[0]).rollouts) + 1
