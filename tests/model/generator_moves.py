"""What a generator does next: idle → it holds a claim, by a lease or as a copy of another's → idle."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model import prompts
from tests.model.invariants import (
    attempts_of,
    counted_for_another,
    holds,
    holds_lease,
    left_unheard,
    opening_of,
    refused_after_all,
    robbery,
)
from tests.model.move import Move, with_generator, wrote
from tests.model.server import NONE, Off, Open, Server
from tests.model.state import IDLE, UNHEARD, Bounds, State


def generator_moves(state: State, bounds: Bounds, off: Off, who: int, may_fail: bool) -> Iterator[Move]:
    claim = state.generators[who]
    if not holds(claim):
        is_refused = prompts.is_other_engine(state.server, bounds.engine_of(who)) and "claim.engine" not in off
        if is_refused and state.server.window:
            yield Move("asks for work: wrong_engine", who, state)
        again = [] if is_refused or not claim else list(_claims_again(state, bounds, off, who))
        yield from again
        for opened in () if is_refused or again else state.server.window:
            yield from _claims(state, bounds, off, who, may_fail, opened)
        return
    claim, server, idle = claim[:5], state.server, with_generator(state, who, IDLE)
    iteration, batch = claim[:2]
    yield from _publishes(state, bounds, off, who, may_fail)
    _, renewed = prompts.renew_prompt(server, claim, who, off)
    if renewed != server:
        breaks = robbery(state, renewed, who, iteration, batch)
        yield Move("renews its lease", who, wrote(state, renewed, bounds), breaks=breaks)
    if may_fail:
        tired = idle._replace(faults=state.faults + 1)
        yield Move("generator dies", who, tired, is_fault=True)
        for verb, is_released in (("fails", False), ("gives back", True)):
            outcome, after = prompts.fail(server, claim, who, bounds.max_attempts, off, is_released=is_released)
            if after != server:
                costs = counted_for_another(is_released, claim[4], attempts_of(after, iteration, batch))
                breaks = robbery(state, after, who, iteration, batch) or costs
                tried = wrote(tired, after, bounds)
                yield Move(f"{verb} its batch: {outcome}", who, tried, True, breaks, batch, iteration)


def _publishes(state: State, bounds: Bounds, off: Off, who: int, may_fail: bool) -> Iterator[Move]:
    server, claim = state.server, state.generators[who][:5]
    iteration, batch = claim[:2]
    engine = bounds.engine_of(who)
    content = max(0, engine - 1) if bounds.is_deterministic else 4 * claim[4] + who
    rollout_id = 16 * state.era + len(server.slot_of(iteration).rollouts) + 1
    for is_complete in (True, False):
        outcome, after = prompts.publish(
            server,
            claim,
            who,
            content,
            is_complete=is_complete,
            rollout_id=rollout_id,
            stages=bounds.stages_of(batch),
            max_waiting=bounds.max_waiting,
            room=bounds.room,
            engine=engine,
            off=off,
        )
        if outcome == "no_room" and iteration > server.window[0].iteration and "claim.oldest_only" not in off:
            # It holds the batch, and has a hand left for the oldest iteration: here it drops it, which is worse.
            yield from _claims(with_generator(state, who, IDLE), bounds, off, who, may_fail, server.window[0])
        if outcome in ("full", "no_room"):
            continue  # its generator holds the batch, and asks again
        moved = wrote(state, after, bounds)
        done = with_generator(moved, who, IDLE)
        if is_complete:
            breaks = refused_after_all(state, who, outcome)
            yield Move(f"publishes: {outcome}", who, done, breaks=breaks, batch=batch, iteration=iteration)
        if moved is not state and not is_complete:
            yield Move(f"publishes a part: {outcome}", who, done, batch=batch, iteration=iteration)
        elif moved is not state and may_fail:
            lost = moved._replace(faults=state.faults + 1)
            yield Move("publishes, answer lost", who, lost, True, batch=batch, iteration=iteration)
    oldest, newest = bounds.versions_of(iteration, batch)
    for version, digest in enumerate(server.weights):
        if digest != NONE and not oldest <= version <= newest:
            wrong = (*claim[:2], digest, *claim[3:])
            outcome, after = prompts.publish(
                server, wrong, who, content, is_complete=True, rollout_id=rollout_id, engine=engine, off=off
            )
            if after != server:
                done = with_generator(wrote(state, after, bounds), who, IDLE)
                name = f"publishes what another version sampled: {outcome}"
                yield Move(name, who, done, batch=batch, iteration=iteration)


def _claims(state: State, bounds: Bounds, off: Off, who: int, may_fail: bool, opened: Open) -> Iterator[Move]:
    server, iteration = state.server, opened.iteration
    tag = opening_of(state, opened)
    for batch, (_, entry) in enumerate(server.slot_of(iteration).batches):
        if not entry:
            continue
        is_at_work = holds_lease(state, iteration, batch)
        for held, digest in _answers(server, bounds, iteration, batch, off):
            if is_at_work:
                copied = (iteration, batch, digest, entry[0], entry[1] + entry[2] - 1, tag)
                copies = with_generator(state, who, copied)
                yield Move("takes a copy", who, copies, batch=batch, iteration=iteration)
                if not may_fail:
                    continue
            outcome, after, claim = prompts.claim_prompt(
                server,
                iteration,
                batch,
                who,
                bounds.max_attempts,
                held=held,
                engine=bounds.engine_of(who),
                off=off,
            )
            name = "claims from a slow one" if is_at_work else "claims from a dead one" if entry[2] else "claims"
            breaks = left_unheard(state, who)
            taken = with_generator(wrote(state, after, bounds), who, (*claim, tag) if claim else IDLE)
            taken = taken._replace(faults=state.faults + is_at_work)
            yield Move(f"{name}: {outcome}", who, taken, is_at_work, breaks, batch=batch, iteration=iteration)
            if name == "claims" and claim and may_fail and held == NONE and not breaks:
                unheard = (iteration, batch, NONE, *claim[3:], tag, UNHEARD)
                lost = with_generator(taken, who, unheard)._replace(faults=state.faults + 1)
                yield Move("claims, answer lost", who, lost, True, batch=batch, iteration=iteration)


def _claims_again(state: State, bounds: Bounds, off: Off, who: int) -> Iterator[Move]:
    """What it gets that has not heard of its newest claim."""
    unheard, server = state.generators[who], state.server
    iteration, batch = unheard[:2]
    if not server.open_at(iteration) or not server.slot_of(iteration).batches[batch][1]:
        return
    for held, _ in _answers(server, bounds, iteration, batch, off):
        claim = prompts.claim_again(server, unheard[:5], who, held=held, off=off)
        if claim:
            entry = server.slot_of(iteration).batches[batch][1]
            breaks = "" if prompts.is_claim(entry, claim, who) else "I5: a claim comes again that is over"
            taken = with_generator(state, who, (*claim, unheard[5]))
            yield Move("claims again", who, taken, False, breaks, batch=batch, iteration=iteration)


def _answers(server: Server, bounds: Bounds, iteration: int, batch: int, off: Off) -> list[tuple[int, int]]:
    """(what a generator may hold, what it is told to sample with), each answer once.

    It may hold whatever was ever announced and isn't gone, or a version of a future that was abandoned.
    """
    announced = [digest for digest in server.weights if digest != NONE] if bounds.is_bounded else []
    answers: dict[int, int] = {}
    for held in (NONE, *announced):
        digest = prompts.sampler(server, iteration, batch, held, off)
        answers.setdefault(digest, held)
    return [(held, digest) for digest, held in answers.items() if digest != NONE]
