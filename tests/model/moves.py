"""What may happen next: trainers, generators and the server's misfortunes, over the scripts of fence.py.

    trainer     OFF → START ┬─────────→ ANNOUNCE → OPEN → GATHER → STEPPED → COMMIT → SETTLE → GATHER of the next | ENDS
                            └→ REWIND ──↗                  (claim, train)   (weights)        (checkpoint)
    generator   idle → holds a claim, by a lease or as a copy of another's → idle

A trainer that is refused ends, as a process does that gets FencedOff or FenceViolation, and another may start. A lease
of a process that is gone ends by itself, as time passes. These are faults, and a run has a budget of them: a process
that dies, a lease that ends while its holder lives (paused, slow), an answer that is lost after its script ran, a batch
that fails, a job that fails or is given up, a server that comes back without its last writes. The owner of a job
resumes or removes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tests.model import fence
from tests.model.fence import ACTIVE, COMMIT, DEAD, ENDED, REMOVED, REWIND, SUCCEEDED, VARIANTS, Off, Rollout, Server
from tests.model.invariants import broken_by_call, broken_by_success, holds_lease, robbery
from tests.model.state import (
    ANNOUNCE,
    COMMITS,
    ENDS,
    GATHER,
    IDLE,
    OPEN,
    REWINDS,
    SETTLE,
    START,
    STEPPED,
    Bounds,
    State,
    Trainer,
)


class Move(NamedTuple):
    name: str
    who: int
    state: State
    is_fault: bool = False
    breaks: str = ""
    """The invariant that this step breaks."""
    batch: int = -1


def moves(state: State, bounds: Bounds, off: Off) -> Iterator[Move]:
    if state.is_done:
        return
    may_fail = state.faults < bounds.faults
    for who in range(bounds.trainers):
        yield from _trainer_moves(state, bounds, off, who, may_fail)
    for who in range(bounds.generators):
        yield from _generator_moves(state, bounds, off, who, may_fail)
    yield from _job_moves(state, bounds, off, may_fail)
    if may_fail and bounds.lost_writes:
        if not state.disk:
            yield Move("writes reach the disk", -1, state._replace(disk=(state.server, 0)))
        elif state.disk[1]:
            back = state._replace(server=state.disk[0], disk=(), era=state.era + 1, faults=state.faults + 1)
            yield Move("the last writes are lost", -1, back, is_fault=True)


def _job_moves(state: State, bounds: Bounds, off: Off, may_fail: bool) -> Iterator[Move]:
    """Its consumer gives it up, whatever its trainers do; its owner resumes it."""
    server = state.server
    if may_fail and bounds.may_end and server.job == ACTIVE:
        ended = fence.give_up(server, clock=state.clock + 1, off=off)
        given_up = _after(state, ended, bounds)._replace(faults=state.faults + 1, clock=max(state.clock, ended.epoch))
        yield Move("the job is given up", -1, given_up, is_fault=True)
    is_held = any(one and one.epoch == server.epoch for one in state.trainers)
    if bounds.may_remove and server.job == ENDED and not is_held:
        # The answer to a removal waits for the server's disk.
        yield Move("the job is removed", -1, state._replace(server=fence.removed(server), disk=()))
    if server.job == ENDED:
        resumed = fence.resume_job(server, clock=state.clock + 1, off=off)
        yield Move(
            "the job is resumed", -1, _after(state, resumed, bounds)._replace(clock=max(state.clock, resumed.epoch))
        )


def _after(state: State, server: Server, bounds: Bounds) -> State:
    """The server wrote; what lies too many writes back is on its disk by now."""
    disk = state.disk
    if server == state.server:
        return state
    if disk:
        disk = (disk[0], disk[1] + 1) if disk[1] < bounds.lost_writes else ()
    return state._replace(server=server, disk=disk)


def _with_trainer(state: State, who: int, trainer: Trainer | tuple[()]) -> State:
    return state._replace(trainers=(*state.trainers[:who], trainer, *state.trainers[who + 1 :]))


def _with_generator(state: State, who: int, claim: tuple[int, ...]) -> State:
    return state._replace(generators=(*state.generators[:who], claim, *state.generators[who + 1 :]))


# Trainers


def _trainer_moves(state: State, bounds: Bounds, off: Off, who: int, may_fail: bool) -> Iterator[Move]:
    trainer = state.trainers[who]
    if not trainer:
        yield from _acquires(state, bounds.max_epochs, off, who, may_fail)
        return
    if may_fail:
        dead = _with_trainer(state, who, ())._replace(faults=state.faults + 1)
        yield Move("trainer dies", who, dead, is_fault=True)
        if trainer.phase == GATHER and bounds.may_end:
            outcome, server = fence.set_state(state.server, trainer.epoch, ENDED, off)
            yield Move(f"fails the job: {outcome}", who, _after(dead, server, bounds), True)
    if trainer.phase == START:
        yield Move("reads fence and checkpoint", who, _started(state, bounds, off, who, trainer))
    elif trainer.phase == SETTLE:
        yield _settles(state, bounds, off, who, trainer)
    elif trainer.phase == ENDS:
        yield _ends(state, bounds, off, who, trainer)
    else:
        for name, outcome, server, after in _calls(state, bounds, off, trainer):
            breaks = broken_by_call(state, trainer, server, outcome)
            moved = _after(state, server, bounds)
            after_it = _with_trainer(moved, who, after)
            if after_it != state:
                yield Move(f"{name}: {outcome}", who, after_it, breaks=breaks)
            if may_fail and moved is not state and after is not trainer:
                yield Move(f"{name}, answer lost", who, moved._replace(faults=state.faults + 1), True, breaks)


def _acquires(state: State, max_epochs: int, off: Off, who: int, may_fail: bool) -> Iterator[Move]:
    if state.server.job not in (ACTIVE, REMOVED):
        return
    is_held = any(one and one.epoch == state.server.epoch for one in state.trainers)
    is_stolen = is_held and "acquire.lease" not in off
    if (is_stolen and not may_fail) or state.clock >= max_epochs:
        return
    server = fence.acquire(state.server, clock=state.clock + 1, off=off)
    if server == state.server:
        return  # of a job that was removed
    taken = _with_trainer(_after_any(state, server), who, Trainer(START, server.epoch, 0, 0, (), 0, ()))
    breaks = "I4: an epoch is handed out twice" if server.epoch <= state.clock else ""
    taken = taken._replace(clock=max(state.clock, server.epoch), faults=state.faults + is_stolen)
    yield Move("acquires" + (" from a paused one" if is_held else ""), who, taken, is_stolen, breaks)


def _after_any(state: State, server: Server) -> State:
    """Acquisitions don't count among the writes that a restart may lose: they are what must be survived."""
    return state._replace(server=server)


def _started(state: State, bounds: Bounds, off: Off, who: int, trainer: Trainer) -> State:
    server, final = state.server, bounds.iterations - 1
    known = final if "resume.not_after_the_fence" in off else min(server.committed, final)
    start, digest = 0, 0
    for iteration in range(known, -1, -1):
        if state.checkpoints[iteration] != -1:
            start, digest = iteration + 1, state.checkpoints[iteration]
            break
    if start == bounds.iterations and server.committed >= final:
        return _with_trainer(state, who, Trainer(ENDS, trainer.epoch, start, digest, (), 0, server.last))
    is_ahead = server.committed >= start or (server.is_open and (server.iteration, server.digest) != (start, digest))
    phase = REWINDS if is_ahead and "resume.rewinds" not in off else ANNOUNCE
    blank = ((),) * bounds.batches
    return _with_trainer(state, who, Trainer(phase, trainer.epoch, start, digest, blank, 0, server.last))


def _finished(state: State) -> State:
    """Nothing that comes after is asked about."""
    gone = ((),) * len(state.trainers)
    return state._replace(disk=(), generators=(IDLE,) * len(state.generators), trainers=gone, is_done=True)


def _settles(state: State, bounds: Bounds, off: Off, who: int, trainer: Trainer) -> Move:
    """The commit is on the server's disk before the checkpoint is on the trainers'."""
    done = trainer.iteration
    if state.server.committed < done and "settle.confirms" not in off:
        return Move("finds its commit lost", who, _with_trainer(state, who, ()))
    checkpoints = (*state.checkpoints[:done], _made(trainer, bounds), *state.checkpoints[done + 1 :])
    disk = state.disk if "settle.persisted" in off else ()
    state = state._replace(checkpoints=checkpoints, disk=disk)
    if done == bounds.iterations - 1:
        last = trainer._replace(phase=ENDS, iteration=done + 1, digest=_made(trainer, bounds), trained=(), last=0)
        return Move("writes the last checkpoint", who, _with_trainer(state, who, last))
    blank = ((),) * bounds.batches
    following = trainer._replace(phase=GATHER, iteration=done + 1, digest=_made(trainer, bounds), trained=blank, last=0)
    return Move("writes its checkpoint", who, _with_trainer(state, who, following))


def _ends(state: State, bounds: Bounds, off: Off, who: int, trainer: Trainer) -> Move:
    outcome, server = fence.set_state(state.server, trainer.epoch, SUCCEEDED, off)
    if outcome == "set":
        return Move(f"ends the job: {outcome}", who, _finished(state), breaks=broken_by_success(state, bounds))
    return Move(f"ends the job: {outcome}", who, _with_trainer(_after(state, server, bounds), who, ()))


def _made(trainer: Trainer, bounds: Bounds) -> int:
    """The digest of the version that this trainer's step makes."""
    return VARIANTS * (trainer.iteration + 1) + (0 if bounds.is_deterministic else trainer.epoch)


Call = tuple[str, str, Server, Trainer | tuple[()]]


def _calls(state: State, bounds: Bounds, off: Off, trainer: Trainer) -> Iterator[Call]:
    """(script, outcome, server, trainer) of what this trainer calls next; () is one that ends."""
    server, epoch, iteration = state.server, trainer.epoch, trainer.iteration
    if trainer.phase == REWINDS:
        outcome, server = fence.rewind(server, epoch, iteration, follows=trainer.link, off=off)
        went = trainer._replace(phase=ANNOUNCE, link=(REWIND, iteration, epoch))
        yield "rewind", outcome, server, went if outcome in ("rewound", "already_rewound") else ()
    elif trainer.phase == ANNOUNCE:
        outcome, server = fence.publish_weights(server, epoch, trainer.digest, oldest_kept=iteration, off=off)
        yield "announces", outcome, server, trainer._replace(phase=OPEN) if outcome == "published" else ()
    elif trainer.phase == OPEN:
        outcome, server = fence.open_iteration(
            server, epoch, iteration, trainer.digest, off, first=bounds.first_batches
        )
        went = trainer._replace(phase=GATHER)
        yield "opens", outcome, server, went if outcome in ("opened", "already_open") else ()
    elif trainer.phase == GATHER:
        yield from _gathers(server, bounds, off, trainer)
    elif trainer.phase == STEPPED:
        made = _made(trainer, bounds)
        outcome, server = fence.publish_weights(server, epoch, made, oldest_kept=iteration, off=off)
        yield "announces the next", outcome, server, trainer._replace(phase=COMMITS) if outcome == "published" else ()
    else:
        yield _commits(server, bounds, off, trainer)


def _gathers(server: Server, bounds: Bounds, off: Off, trainer: Trainer) -> Iterator[Call]:
    outcome, given, rollouts = fence.claim_rollouts(server, trainer.epoch, trainer.last, off)
    if outcome == "fenced":
        yield "claims rollouts", outcome, server, ()
        return
    yield "claims rollouts", outcome, given, _trains(trainer, rollouts, off)
    missing = [
        not mine and ledger[:1] != (DEAD,) for mine, (ledger, _) in zip(trainer.trained, server.batches, strict=True)
    ]
    if any(missing):
        if "trainer.reconciles" not in off:
            outcome, after = fence.reconcile(server, trainer.epoch, trainer.iteration, off)
            yield "reconciles", outcome, after, trainer if outcome == "dispatched" else ()
        # What a wrong trainer would do; the script must refuse it, and then nothing has changed.
        _, outcome, after, _ = _commits(server, bounds, off, trainer)
        yield "commits with a gap", outcome, after, trainer
    elif server.epoch != trainer.epoch and "step.renews" not in off:
        yield "renews its lease", "fenced", server, ()
    elif any(trainer.trained):
        yield "renews its lease, steps", "renewed", server, trainer._replace(phase=STEPPED)


def _trains(trainer: Trainer, rollouts: tuple[Rollout, ...], off: Off) -> Trainer | tuple[()]:
    """The trainer after what it was given: it checks each again, and ignores a second copy; () where it ends."""
    trained = list(trainer.trained)
    last = trainer.last
    for rollout_id, batch, iteration, digest, content, _, _ in rollouts:
        if (iteration, digest) != (trainer.iteration, trainer.digest) and "trainer.weights" not in off:
            return ()
        mine = trained[batch]
        if mine and mine[1] != content and "trainer.content" not in off:
            return ()
        copies = mine[0] if mine else 0
        trained[batch] = (copies + 1 if not copies or "trainer.own_list" in off else copies, content, digest)
        last = max(last, rollout_id)
    return trainer._replace(trained=tuple(trained), last=last)


def _commits(server: Server, bounds: Bounds, off: Off, trainer: Trainer) -> Call:
    contents = tuple(mine[1] if mine else -1 for mine in trainer.trained)
    made = _made(trainer, bounds)
    opening = made if trainer.iteration < bounds.iterations - 1 else -1
    outcome, server = fence.commit(
        server,
        trainer.epoch,
        trainer.iteration,
        contents,
        opening,
        follows=trainer.link,
        first=bounds.first_batches,
        off=off,
    )
    link = (COMMIT, trainer.iteration, trainer.epoch)
    is_through = outcome in ("committed", "already_committed")
    return "commits", outcome, server, trainer._replace(phase=SETTLE, link=link) if is_through else ()


# Generators


def _generator_moves(state: State, bounds: Bounds, off: Off, who: int, may_fail: bool) -> Iterator[Move]:
    claim = state.generators[who]
    if not claim:
        if state.server.is_open:
            yield from _claims(state, bounds, who, may_fail)
        return
    server, batch = state.server, claim[1]
    content = 0 if bounds.is_deterministic else 4 * claim[4] + who
    rollout_id = 16 * state.era + len(server.rollouts) + 1
    for is_complete in (True, False):
        outcome, after = fence.publish(
            server, claim, who, content, is_complete=is_complete, rollout_id=rollout_id, off=off
        )
        moved = _after(state, after, bounds)
        if is_complete:
            yield Move(f"publishes: {outcome}", who, _with_generator(moved, who, IDLE), batch=batch)
        if moved is not state and not is_complete:
            yield Move(f"publishes a part: {outcome}", who, _with_generator(moved, who, IDLE), batch=batch)
        elif moved is not state and may_fail:
            yield Move("publishes, answer lost", who, moved._replace(faults=state.faults + 1), True, batch=batch)
    _, renewed = fence.renew_prompt(server, claim, who, off)
    if renewed != server:
        yield Move("renews its lease", who, _after(state, renewed, bounds), breaks=robbery(state, renewed, who, batch))
    if may_fail:
        tired = _with_generator(state, who, IDLE)._replace(faults=state.faults + 1)
        yield Move("generator dies", who, tired, is_fault=True)
        outcome, after = fence.fail(server, claim, who, bounds.max_attempts, off)
        if after != server:
            breaks = robbery(state, after, who, batch)
            yield Move(f"fails its batch: {outcome}", who, _after(tired, after, bounds), True, breaks, batch)


def _claims(state: State, bounds: Bounds, who: int, may_fail: bool) -> Iterator[Move]:
    for batch, (_, entry) in enumerate(state.server.batches):
        if not entry:
            continue
        name, is_stolen = "claims", False
        if holds_lease(state, batch):
            copied = (state.server.iteration, batch, state.server.weights[state.server.iteration])
            copied = (*copied, entry[0], entry[1] + entry[2] - 1)
            yield Move("takes a copy", who, _with_generator(state, who, copied), batch=batch)
            if not may_fail:
                continue
            name, is_stolen = "claims from a slow one", True
        elif entry[2]:
            name = "claims from a dead one"
        outcome, server, claim = fence.claim_prompt(state.server, batch, who, bounds.max_attempts)
        after = _with_generator(_after(state, server, bounds), who, claim)
        yield Move(f"{name}: {outcome}", who, after._replace(faults=state.faults + is_stolen), is_stolen, batch=batch)
