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

from consumer.trainer.commit import Commits
from consumer.trainer.gather import gather
from consumer.trainer.held_job import HeldJob
from consumer.trainer.iteration import Boundary, Iteration
from consumer.trainer.report import RunLog, log_run
from consumer.trainer.start import start
from consumer.trainer.step import step
from onbeat.base.telemetry.correlation import about


def run_iterations(held: HeldJob) -> None:
    """Trains a job under one trainer epoch, from its newest checkpoint; returns when its last iteration is committed.

    Every other end is an exception: Cancelled, Stopped, FencedOff, BrokerUnavailable, or what fails the job.
    """
    boundary: Boundary | None = None
    with contextlib.ExitStack() as at_its_end:
        run_log = at_its_end.enter_context(contextlib.closing(RunLog(held.folder, held.spec)))
        succession = start(held)
        held.keeper.loaded()
        # The one before it may have died between its last checkpoint and the end of the job.
        held.health.check()
        commits = Commits(held, run_log, succession)
        learner = held.ranks.learner
        log_run(
            held.folder.job_id, held.spec, learner.policy, first=succession.next, num_ranks=learner.place.world_size
        )
        while (number := succession.next) is not None:
            with about(job=held.folder.job_id, iteration=number):
                asked = held.window.turn_to(number)
                iteration = Iteration(asked, trainer_epoch=held.side.trainer_epoch, boundary=boundary)
                gather(held, iteration)
                # A trainer that was paused past its lease ends here, before it moves a weight or writes a file.
                held.side.renew()
                stepped = step(held, iteration) if iteration.number < held.spec.iterations else None
                boundary = commits.commit(iteration, stepped)
        held.side.confirm(held.spec.last_iteration)
