"""The trainer's loop: start, gather, step, commit; once around is one iteration.

    start ─▶ open t ─▶ gather: claim batches in arrival order ─▶ step ─▶ commit t, open t+1 ─▶ checkpoint of t
                 │             └ forward, backward, accumulate ┘   │        (one script)                │
                 │             └── the same batches again for ─────┘                                    │
                 │                 each further update; the last step writes weights t+1                │
                 └◀─────────────────────────────────────────────────────────────────────────────────────┘

Where batches may lag by K versions, t, …, t+K are open (window.py), and the commit of t opens t+1+K: generators sample
ahead, while t is gathered.

Each phase is a file of its own, which says what it consumes and waits for: start.py, gather.py, step.py, commit.py.
What they share is a `HeldJob`; what one hands to the next is a number, an `Iteration`, a `Stepped`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

from consumer.trainer.commit import Commits, save
from consumer.trainer.dry_pass import dry_pass
from consumer.trainer.gather import gather
from consumer.trainer.held_job import HeldJob
from consumer.trainer.iteration import Boundary, Iteration
from consumer.trainer.report import RunLog, log_run
from consumer.trainer.start import start
from consumer.trainer.step import Stepped, step
from onbeat.base.telemetry.correlation import about
from onbeat.base.telemetry.observing import observed
from onbeat.loop.trained_job import Succession


def is_dry_pass_due(job: HeldJob, succession: Succession) -> bool:
    """Returns True where a job that has committed nothing is to train. One that only evaluates has no such pass."""
    return succession.committed < 0 and succession.next is not None and succession.next < job.spec.iterations


def no_dry_pass() -> None:
    """Does nothing: the dry pass was made."""


def run_iterations(job: HeldJob) -> str:
    """Trains a job under one trainer epoch, from its newest checkpoint, until its last iteration is committed.

    Every other end is an exception.

    Returns:
        The reason why `evaluation.stop_when` ended the job earlier; "" where it trained all iterations.

    Raises:
        Cancelled, Stopped, FencedOff, BrokerUnavailable: As the lease keeper and Redis have it; and an OnbeatError that
            fails the job.
    """
    boundary: Boundary | None = None
    with contextlib.ExitStack() as at_its_end:
        run_log = at_its_end.enter_context(contextlib.closing(RunLog(job.folder, job.spec)))
        succession = start(job)
        job.keeper.loaded()
        # The trainer before may have died between its last checkpoint and the end of the job.
        job.health.check()
        commits = Commits(job, run_log, succession)
        learner = job.ranks.learner
        say = partial(
            log_run,
            job.folder.job_id,
            job.spec,
            learner.policy,
            first=succession.next,
            num_ranks=learner.place.world_size,
        )
        observed("the lines about the run", say)
        number = succession.next
        on_turn: Callable[[], None] = no_dry_pass
        if is_dry_pass_due(job, succession):
            if job.schedule.takes_turns:
                # The memory is the generators' until they sleep.
                on_turn = partial(dry_pass, job)
            else:
                # While they sample the first batches.
                dry_pass(job)
        while number is not None:
            with about(job=job.folder.job_id, iteration=number):
                expected = job.window.turn_to(number)
                iteration = Iteration(expected, trainer_epoch=job.side.trainer_epoch, boundary=boundary)
                gather(job, iteration, on_turn=on_turn)
                on_turn = no_dry_pass
                # A trainer that was paused past its lease ends here, before it moves a weight or writes a file.
                job.side.renew()
                stepped: Stepped | None = None
                stopped = succession.stop_reason(iteration)
                # The last number is `iterations` where the last version is evaluated: nothing is trained in it.
                if iteration.number < job.spec.iterations and not stopped:
                    stepped = step(job, iteration)
                boundary = commits.commit(iteration, stepped, stopped=stopped)
            number = succession.next
        job.side.confirm(succession.last_iteration)
        if succession.stopped is None:
            return ""
        # The version that was evaluated is the job's last one, whether or not a checkpoint of it was due.
        job.side.renew()
        save(job)
        return succession.stopped.stopped or ""
