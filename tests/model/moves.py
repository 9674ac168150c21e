"""What may happen next: trainers, generators, stage workers and the server's misfortunes, over the scripts of fence.py
and table.py.

A trainer that is refused ends, as a process does that gets FencedOff or FenceViolation, and another may start. A lease
of a process that is gone ends by itself, as time passes. These are faults, and a run has a budget of them: a process
that dies, a lease that ends while its holder lives (paused, slow), an answer that is lost after its script ran, a batch
that fails, a job that fails or is given up, a checkpoint that is damaged, a server that comes back without its last
writes. The owner of a job resumes or removes it.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.model import fence
from tests.model.move import Move, wrote
from tests.model.server import ACTIVE, ENDED, NONE, Off, Server
from tests.model.state import Bounds, Engine, State
from tests.model.trainer_moves import trainer_moves
from tests.model.worker_moves import worker_moves


def moves(state: State, bounds: Bounds, off: Off) -> Iterator[Move]:
    if state.is_done:
        return
    may_fail = state.faults < bounds.faults
    for who in range(bounds.trainers):
        yield from trainer_moves(state, bounds, off, who, may_fail)
    for who in range(len(state.workers)):
        yield from worker_moves(state, bounds, off, who, may_fail)
    yield from _job_moves(state, bounds, off, may_fail)
    if may_fail and bounds.may_damage:
        yield from _damages(state)
    if may_fail and bounds.lost_writes:
        if not state.disk:
            yield Move("writes reach the disk", -1, state._replace(disk=(state.server, 0)))
        elif state.disk[1]:
            engines = _as_believed(state.engines, state.disk[0])
            back = state._replace(
                server=state.disk[0], disk=(), era=state.era + 1, faults=state.faults + 1, engines=engines
            )
            yield Move("the last writes are lost", -1, back, is_fault=True)


def _as_believed(engines: tuple[Engine, ...], server: Server) -> tuple[Engine, ...]:
    """A restart that has lost a failed proof believes the passed one before it again."""
    return tuple(
        engine._replace(
            shown=tuple(mark if mark != NONE else digest for mark, digest in zip(marks, engine.shown, strict=True))
        )
        for engine, marks in zip(engines, server.proofs, strict=True)
    )


def _job_moves(state: State, bounds: Bounds, off: Off, may_fail: bool) -> Iterator[Move]:
    """Its consumer gives it up, whatever its trainers do; its owner resumes it."""
    server = state.server
    if may_fail and bounds.may_end and server.job == ACTIVE:
        ended = fence.give_up(server, clock=state.clock + 1, off=off)
        given_up = wrote(state, ended, bounds)._replace(faults=state.faults + 1, clock=max(state.clock, ended.epoch))
        yield Move("the job is given up", -1, given_up, is_fault=True)
    is_held = any(one and one.epoch == server.epoch for one in state.trainers)
    if bounds.may_remove and server.job == ENDED and not is_held:
        # The answer to a removal waits for the server's disk.
        yield Move("the job is removed", -1, state._replace(server=fence.removed(server), disk=()))
    if server.job == ENDED:
        resumed = fence.resume_job(server, clock=state.clock + 1, off=off)
        yield Move(
            "the job is resumed", -1, wrote(state, resumed, bounds)._replace(clock=max(state.clock, resumed.epoch))
        )


def _damages(state: State) -> Iterator[Move]:
    """A damaged checkpoint is one that no start can use."""
    there = [iteration for iteration, versions in enumerate(state.checkpoints) if versions]
    if there:
        kept = (*state.checkpoints[: there[-1]], *((),) * (len(state.checkpoints) - there[-1]))
        damaged = state._replace(checkpoints=kept, faults=state.faults + 1)
        yield Move("the newest checkpoint is damaged", -1, damaged, is_fault=True)
