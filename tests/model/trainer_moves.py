"""What a trainer does next.

OFF → START ┬─────────→ ANNOUNCE → OPEN → GATHER → STEPPED → COMMITS ┬──────────→ SETTLE → GATHER of the next | ENDS
            └→ REWINDS ──↗ each    each   (claim, train)  (weights)  └→ DISPATCHES ──↗ (checkpoint)
                         version iteration                              (evaluation)
                          of the window
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.model import fence, table
from tests.model.invariants import broken_by_call, broken_by_success
from tests.model.move import Move, with_trainer, wrote
from tests.model.server import (
    ACTIVE,
    COMMIT,
    ENDED,
    NONE,
    REMOVED,
    REWIND,
    SUCCEEDED,
    VARIANTS,
    Off,
    Opening,
    Rollout,
    Server,
)
from tests.model.state import (
    ANNOUNCE,
    COMMITS,
    DISPATCHES,
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

WRONG = VARIANTS - 1
"""The variant that a deterministic job's step makes of what the synchronous run would not have trained."""
Call = tuple[str, str, Server, Trainer | tuple[()]]


def trainer_moves(state: State, bounds: Bounds, off: Off, who: int, may_fail: bool) -> Iterator[Move]:
    trainer = state.trainers[who]
    if not trainer:
        yield from _acquires(state, bounds.max_epochs, off, who, may_fail)
        return
    if may_fail:
        dead = with_trainer(state, who, ())._replace(faults=state.faults + 1)
        yield Move("trainer dies", who, dead, is_fault=True)
        if trainer.phase == GATHER and bounds.may_end:
            outcome, server = fence.set_state(state.server, trainer.epoch, ENDED, off)
            yield Move(f"fails the job: {outcome}", who, wrote(dead, server, bounds), True)
    if trainer.phase == START:
        yield Move("reads fence and checkpoint", who, _started(state, bounds, off, who, trainer))
    elif trainer.phase == SETTLE:
        yield _settles(state, bounds, off, who, trainer)
    elif trainer.phase == ENDS:
        yield _ends(state, bounds, off, who, trainer)
    else:
        for name, outcome, server, after in _calls(state, bounds, off, trainer):
            breaks = broken_by_call(state, bounds, trainer, server, outcome)
            moved = wrote(state, server, bounds)
            after_it = with_trainer(moved, who, after)
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
    # Acquisitions don't count among the writes that a restart may lose: they are what must be survived.
    taken = with_trainer(state._replace(server=server), who, Trainer(START, server.epoch, 0, (), (), 0, ()))
    breaks = "I4: an epoch is handed out twice" if server.epoch <= state.clock else ""
    taken = taken._replace(clock=max(state.clock, server.epoch), faults=state.faults + is_stolen)
    yield Move("acquires" + (" from a paused one" if is_held else ""), who, taken, is_stolen, breaks)


def _started(state: State, bounds: Bounds, off: Off, who: int, trainer: Trainer) -> State:
    server, final = state.server, bounds.last_iteration
    known = final if "resume.not_after_the_fence" in off else min(server.committed, final)
    start, versions = 0, (0,)
    for iteration in range(known, -1, -1):
        if _is_of_the_chain(server, state.checkpoints[iteration], off):
            start, versions = iteration + 1, state.checkpoints[iteration]
            break
    if start == bounds.iterations and server.committed >= final:
        return with_trainer(state, who, Trainer(ENDS, trainer.epoch, start, versions, (), 0, server.last))
    is_ahead = server.committed >= start or not _goes_on(server, start, versions, off)
    phase = REWINDS if is_ahead and "resume.rewinds" not in off else ANNOUNCE
    blank = ((),) * bounds.batches
    return with_trainer(state, who, Trainer(phase, trainer.epoch, start, versions, blank, 0, server.last))


def _is_of_the_chain(server: Server, checkpoint: tuple[int, ...], off: Off) -> bool:
    """Whether it is there, and each version in it is the one of the audit chain."""
    if not checkpoint:
        return False
    return "resume.chain" in off or all(server.chain[digest // VARIANTS] == digest for digest in checkpoint)


def _goes_on(server: Server, start: int, versions: tuple[int, ...], off: Off) -> bool:
    """Whether the window that stands is sampled by these very versions."""
    if not server.window:
        return True
    asked = versions[-1:] if "resume.versions" in off else versions
    is_same = all(server.versions[digest // VARIANTS] in (digest, NONE) for digest in asked)
    return server.window[0].iteration == start and is_same


def _settles(state: State, bounds: Bounds, off: Off, who: int, trainer: Trainer) -> Move:
    """The commit is on the server's disk before a checkpoint is on the trainers'; without one it doesn't ask."""
    done = trainer.iteration
    is_last = done == bounds.last_iteration
    is_due = is_last or (done + 1) % bounds.checkpoint_every == 0
    if is_due and state.server.committed < done and "settle.confirms" not in off:
        return Move("finds its commit lost", who, with_trainer(state, who, ()))
    versions = (*trainer.versions, made_by(trainer, bounds))[-bounds.lag - 1 :]
    if is_due:
        checkpoints = (*state.checkpoints[:done], versions, *state.checkpoints[done + 1 :])
        disk = state.disk if "settle.persisted" in off else ()
        state = state._replace(checkpoints=checkpoints, disk=disk)
    if is_last:
        last = trainer._replace(phase=ENDS, iteration=done + 1, versions=versions, trained=(), last=0)
        return Move("writes the last checkpoint", who, with_trainer(state, who, last))
    blank = ((),) * bounds.batches
    following = trainer._replace(phase=GATHER, iteration=done + 1, versions=versions, trained=blank, last=0)
    name = "writes its checkpoint" if is_due else "goes on without a checkpoint"
    return Move(name, who, with_trainer(state, who, following))


def _ends(state: State, bounds: Bounds, off: Off, who: int, trainer: Trainer) -> Move:
    outcome, server = fence.set_state(state.server, trainer.epoch, SUCCEEDED, off)
    if outcome == "set":
        gone = ((),) * len(state.trainers)  # nothing that comes after is asked about
        idle = (IDLE,) * len(state.workers)
        done = state._replace(disk=(), workers=idle, trainers=gone, is_done=True)
        return Move(f"ends the job: {outcome}", who, done, breaks=broken_by_success(state, bounds))
    return Move(f"ends the job: {outcome}", who, with_trainer(wrote(state, server, bounds), who, ()))


def made_by(trainer: Trainer, bounds: Bounds) -> int:
    """The digest of the version that this trainer's step makes."""
    variant = trainer.epoch
    if bounds.is_deterministic:
        trained = [mine for batch, mine in enumerate(trainer.trained) if mine and not bounds.evaluates(batch)]
        # One kind of engine makes all versions, but for the first, which is the model as it was loaded.
        variant = trained[0][1] if trained and not trainer.iteration else trainer.digest % VARIANTS
        sampled_by = max(0, trainer.iteration - bounds.lag)
        right = VARIANTS * sampled_by + (variant if sampled_by else 0)
        is_right = all((content, digest) == (variant, right) for _, content, digest, *_ in trained)
        variant = variant if is_right else WRONG
    return VARIANTS * (trainer.iteration + 1) + variant


def _oldest_kept(bounds: Bounds, iteration: int, off: Off) -> int:
    return iteration if "trainer.keeps" in off else max(0, iteration - bounds.lag)


def _opening(bounds: Bounds, iteration: int, newest_made: int, off: Off) -> Opening:
    opening = bounds.opening(iteration, newest_made)
    return opening._replace(sent=_pins(bounds, iteration, opening.sent, off))


def _pins(bounds: Bounds, iteration: int, sent: tuple[tuple[int, int], ...], off: Off) -> tuple[tuple[int, int], ...]:
    if "trainer.pins" not in off:
        return sent
    return tuple((batch, NONE if pin == NONE else max(0, iteration - bounds.lag)) for batch, pin in sent)


def _calls(state: State, bounds: Bounds, off: Off, trainer: Trainer) -> Iterator[Call]:
    """(script, outcome, server, trainer) of what this trainer calls next; () is one that ends."""
    server, epoch, iteration = state.server, trainer.epoch, trainer.iteration
    if trainer.phase == REWINDS:
        outcome, server = fence.rewind(server, epoch, iteration, follows=trainer.link, off=off)
        went = trainer._replace(phase=ANNOUNCE, link=(REWIND, iteration, epoch))
        yield "rewind", outcome, server, went if outcome in ("rewound", "already_rewound") else ()
    elif trainer.phase == ANNOUNCE:
        digest, kept = trainer.versions[trainer.at], _oldest_kept(bounds, iteration, off)
        outcome, server = fence.publish_weights(server, epoch, digest, oldest_kept=kept, off=off)
        is_last = trainer.at == len(trainer.versions) - 1
        went = trainer._replace(phase=OPEN, at=0) if is_last else trainer._replace(at=trainer.at + 1)
        yield "announces", outcome, server, went if outcome == "published" else ()
    elif trainer.phase == OPEN:
        opening = _opening(bounds, iteration + trainer.at, iteration, off)
        yield from _opens_wrongly(server, off, trainer, opening)
        outcome, server = fence.open_iteration(server, epoch, opening, trainer.versions, off)
        is_last = trainer.at == bounds.lag or opening.iteration >= bounds.last_iteration
        went = trainer._replace(phase=GATHER, at=0) if is_last else trainer._replace(at=trainer.at + 1)
        yield "opens", outcome, server, went if outcome in ("opened", "already_open") else ()
    elif trainer.phase == GATHER:
        yield from _gathers(server, bounds, off, trainer)
        yield from _goes_wrong(server, bounds, off, trainer)
    elif trainer.phase == STEPPED:
        made, kept = made_by(trainer, bounds), _oldest_kept(bounds, iteration, off)
        outcome, server = fence.publish_weights(server, epoch, made, oldest_kept=kept, off=off)
        yield "announces the next", outcome, server, trainer._replace(phase=COMMITS) if outcome == "published" else ()
    elif trainer.phase == COMMITS:
        yield _commits(server, bounds, off, trainer)
    else:
        sent = tuple(one for one in bounds.sent(iteration + 1, iteration + 1) if bounds.evaluates(one[0]))
        sent = _pins(bounds, iteration + 1, sent, off)
        outcome, server = fence.reconcile(server, epoch, iteration + 1, sent, off)
        yield "dispatches", outcome, server, trainer._replace(phase=SETTLE) if outcome == "dispatched" else ()


def _opens_wrongly(server: Server, off: Off, trainer: Trainer, opening: Opening) -> Iterator[Call]:
    """What a wrong trainer would do; the script must refuse it, and then nothing has changed."""
    older = opening._replace(oldest=opening.oldest - 1, newest=opening.oldest - 1)
    if older.oldest >= 0:
        outcome, after = fence.open_iteration(server, trainer.epoch, older, trainer.versions, off)
        yield "opens for too old a version", outcome, after, trainer
    if not server.window:
        outcome, after = fence.open_iteration(server, trainer.epoch, opening, (), off)
        yield "opens without its versions", outcome, after, trainer


def _gathers(server: Server, bounds: Bounds, off: Off, trainer: Trainer) -> Iterator[Call]:
    outcome, given, rollouts = fence.claim_rollouts(server, trainer.epoch, trainer.iteration, trainer.last, off)
    if outcome != "claimed":
        yield "claims rollouts", outcome, server, ()
        return
    told = trainer._replace(engine=trainer.engine or server.engine) if rollouts else trainer
    yield "claims rollouts", outcome, given, _trains(told, bounds, rollouts, off)
    batches = server.slot_of(trainer.iteration).batches
    missing = [not mine and not (batch and batch.is_dead) for mine, batch in zip(trainer.trained, batches, strict=True)]
    unread = [batch for batch, mine in enumerate(trainer.trained) if mine and bounds.stages_of(batch) and not mine[3]]
    if unread:
        yield _reads_columns(server, off, trainer, unread[0])
    elif any(missing):
        if "trainer.reconciles" not in off:
            sent = _pins(bounds, trainer.iteration, bounds.sent(trainer.iteration, trainer.iteration), off)
            outcome, after = fence.reconcile(server, trainer.epoch, trainer.iteration, sent, off)
            yield "reconciles", outcome, after, trainer if outcome == "dispatched" else ()
        # What a wrong trainer would do; the script must refuse it, and then nothing has changed.
        _, outcome, after, _ = _commits(server, bounds, off, trainer)
        yield "commits with a gap", outcome, after, trainer
    elif server.epoch != trainer.epoch and "step.renews" not in off:
        yield "renews its lease", "fenced", server, ()
    elif not any(trainer.trained):
        # Each of its batches is dead: the job fails, and its owner may resume it (I6).
        outcome, after = fence.set_state(server, trainer.epoch, ENDED, off)
        yield "gives the job up", outcome, after, ()
    else:
        yield "renews its lease, steps", "renewed", server, trainer._replace(phase=STEPPED)


def _reads_columns(server: Server, off: Off, trainer: Trainer, batch: int) -> Call:
    """It ends where a restart has taken them away, or made them another copy's."""
    copies, content, digest, _ = trainer.trained[batch]
    outcome, columns = table.read_columns(server, trainer.iteration, batch, content, off)
    mine = (copies, content, digest, columns)
    trained = (*trainer.trained[:batch], mine, *trainer.trained[batch + 1 :])
    return "reads columns", outcome, server, trainer._replace(trained=trained) if outcome == "read" else ()


def _goes_wrong(server: Server, bounds: Bounds, off: Off, trainer: Trainer) -> Iterator[Call]:
    """What a wrong trainer would do to a window; the scripts must refuse it, and then nothing has changed."""
    following = trainer.iteration + 1
    if bounds.lag and server.open_at(following):
        batches = server.slot_of(following).batches
        published = tuple(batch.made[0] if batch and batch.made else NONE for batch in batches)
        made = VARIANTS * (following + 1)
        outcome, after = fence.commit(
            server, trainer.epoch, following, published, None, made=made, follows=trainer.link, off=off
        )
        yield "commits out of turn", outcome, after, trainer
    too_far = trainer.iteration + bounds.lag + 1
    if too_far <= bounds.last_iteration:
        opening = Opening(too_far, trainer.iteration, trainer.iteration, bounds.sent(too_far, too_far))
        outcome, after = fence.open_iteration(server, trainer.epoch, opening, trainer.versions, off)
        yield "opens one too many", outcome, after, trainer


def _trains(trainer: Trainer, bounds: Bounds, rollouts: tuple[Rollout, ...], off: Off) -> Trainer | tuple[()]:
    """The trainer after what it was given: it checks each again, and ignores a second copy; () where it ends."""
    trained = list(trainer.trained)
    last = trainer.last
    for rollout_id, batch, iteration, digest, content, _, _ in rollouts:
        oldest, newest = bounds.versions_of(trainer.iteration, batch)
        is_right = iteration == trainer.iteration and oldest <= digest // VARIANTS <= newest
        if not (is_right and digest in trainer.versions) and "trainer.weights" not in off:
            return ()
        mine = trained[batch]
        if mine and mine[1] != content and "trainer.content" not in off:
            return ()
        copies = mine[0] if mine else 0
        columns = ((mine[3] if mine else ()),) if bounds.stages else ()
        trained[batch] = (copies + 1 if not copies or "trainer.own_list" in off else copies, content, digest, *columns)
        last = max(last, rollout_id)
    return trainer._replace(trained=tuple(trained), last=last)


def _commits(server: Server, bounds: Bounds, off: Off, trainer: Trainer) -> Call:
    iteration = trainer.iteration
    contents = tuple(mine[1] if mine else NONE for mine in trainer.trained)
    far = iteration + bounds.lag + 1
    outcome, server = fence.commit(
        server,
        trainer.epoch,
        iteration,
        contents,
        _opening(bounds, far, iteration + 1, off) if far <= bounds.last_iteration else None,
        made=made_by(trainer, bounds),
        follows=trainer.link,
        engine=trainer.engine,
        off=off,
    )
    evaluates = bounds.lag and bounds.evaluations and iteration < bounds.last_iteration
    link = (COMMIT, iteration, trainer.epoch)
    went = trainer._replace(phase=DISPATCHES if evaluates else SETTLE, link=link)
    return "commits", outcome, server, went if outcome in ("committed", "already_committed") else ()
