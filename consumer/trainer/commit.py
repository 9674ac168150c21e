"""Ends an iteration: reports it, commits it and opens another in one script, then saves what is due.

    metrics, timeline, evaluation ─▶ commit t, open t+1+K ─▶ (evaluation of t+1) ─▶ checkpoint of t ─▶ old ones go
                                     (one script)             └───── the generators are at work again ─────┘

K is the job's largest lag. Where it is above 0, the batches that evaluate version t+1 go out here, beside the opening:
iteration t+1 has been open for K commits, and its own version is there only now.

A checkpoint is written after its commit is on the server's disk: it costs the generators no waiting, and it is never
ahead of the fence (I4). A trainer that dies in between leaves an older one, and its successor replays from there.
Where generators and trainer take turns, t+1 is opened by a script of its own, as the last thing of the trainer's turn.

Consumes:     a complete iteration, and the version that its step made; none where it only evaluated.
Waits for:    Redis, and the disk under the checkpoint.
Unblocked by: nothing but them.
Produces:     an audit record, one more open iteration, lines of the run log; a checkpoint where one is due.
"""

from __future__ import annotations

import contextlib
import logging
import time

from broker.openings import IterationOpening
from consumer.gradient.saved_state import adapter_state
from consumer.model.checkpoint import keep_newest_and_best, write_checkpoint
from consumer.trainer.held_job import HeldJob
from consumer.trainer.iteration import Boundary, Iteration
from consumer.trainer.report import RunLog, log_iteration, sampled_scores
from consumer.trainer.step import Stepped
from contracts.errors import Unavailable, WeightsRejected
from contracts.events import CheckpointWritten, TimelineSpan
from contracts.timeline import TRAINER
from contracts.versions import WeightManifest
from onbeat.base.process.crash_points import reach
from onbeat.loop.chain import furthest_commit
from onbeat.loop.lease_keeper import Cancelled, Stopped
from onbeat.loop.trained_job import Succession

log = logging.getLogger(__name__)


class Commits:
    """The commits of one trainer: each record of the audit chain names the one before it."""

    def __init__(self, held: HeldJob, run_log: RunLog, succession: Succession) -> None:
        self._held = held
        self._run_log = run_log
        self.succession = succession
        self._furthest = furthest_commit(succession.records)

    def commit(self, iteration: Iteration, stepped: Stepped | None) -> Boundary:
        """The times between this iteration and the next one. stepped: None for an evaluation."""
        held = self._held
        opening_started_s = time.time()
        # Numbers precede the commit: a watcher that sees an iteration committed finds them. A replay repeats them.
        if stepped is not None:
            self._run_log.metrics(stepped.metrics)
        self._run_log.timeline(iteration.spans)
        takes_turns = held.schedule.takes_turns
        opening = self.succession.commit(
            iteration,
            made=stepped.made if stepped else None,
            metrics=stepped.metrics if stepped else None,
            write_score=self._run_log.evaluation,
            opens=not takes_turns,
        )
        if stepped is not None:
            log_iteration(stepped.metrics, held.spec.iterations)
        held.measure(iteration.spans, stepped.metrics if stepped else None)
        # The lease comes before the files: a trainer that slept since its commit would write into its successor's.
        held.side.renew()
        reported = held.spans.take()
        if reported:
            self._run_log.timeline(reported)
        # What evaluates the version that was just made. A trainer that dies before it leaves no checkpoint of its
        # commit: the successor rewinds, and opens the iteration with it.
        following = self.succession.next if held.schedule.lags else None
        if following is not None and (batches := held.window.evaluation(following)):
            held.side.dispatch(following, batches)
        # After the commit, so that no generator waits for it; before a checkpoint, after which nothing is replayed.
        if stepped is None:
            held.recorder.commit(iteration.number)
        else:
            scaling = stepped.scaling
            held.recorder.commit(iteration.number, deviation=scaling.deviation)
        if takes_turns and stepped is not None:
            self._end_turn(stepped.made, opening)
        boundary = Boundary(
            last_token_s=iteration.last_token_s,
            generations=iteration.later_generations,
            opening_started_s=opening_started_s,
            opened_s=time.time(),
        )
        if stepped is not None and not takes_turns:
            self._settle(stepped.made)
        has_checkpoint = stepped is not None and held.spec.checkpoints_after(iteration.number)
        held.keep_files(iteration.number, has_checkpoint=has_checkpoint)
        held.health.check()
        return boundary

    def _end_turn(self, made: WeightManifest, opening: IterationOpening | None) -> None:
        """Leaves nothing to do, and no memory that a generator could use, before the generators have their turn."""
        held = self._held
        self._settle(made)
        if opening is not None:
            held.ranks.rest()
            held.side.open_iteration(opening, held.window.digests)

    def _settle(self, made: WeightManifest) -> None:
        """Saves and clears up after a commit; the generators are at work again, unless they wait for their turn."""
        held = self._held
        held.settled = made
        # The lease comes before the files: a trainer that was paused since its commit would take away versions that
        # its successor's generators load.
        held.side.renew()
        iteration = made.policy_version - 1
        if held.spec.checkpoints_after(iteration):
            started_s = time.time()
            _write_checkpoint(held, made)
            # The lease comes before the files once more: a checkpoint takes long enough to sleep past it.
            held.side.renew()
            # What is done after the lines of its iteration are written.
            span = TimelineSpan(
                who=TRAINER, what="checkpoint", iteration=iteration, started_s=started_s, ended_s=time.time()
            )
            self._run_log.timeline([span])
            held.measure([span], None)
        held.remove_older(iteration)
        if iteration > self._furthest:
            # What is replayed is no progress: a trainer that always dies at the same place would start for ever.
            self._furthest = iteration
            held.jobs.reset_trainer_starts(held.job_id)


def save(held: HeldJob) -> None:
    """A checkpoint of the last committed version, unless there is one already or nothing was trained."""
    settled = held.settled
    if settled is None or settled.policy_version == 0:
        return
    if not held.folder.checkpoint_after(settled.policy_version - 1).exists():
        _write_checkpoint(held, settled)
        # Copies that can't be reached don't hold up a job that is asked to end.
        with contextlib.suppress(Cancelled, Stopped):
            held.keep_files(settled.policy_version - 1, has_checkpoint=True)


def _write_checkpoint(held: HeldJob, settled: WeightManifest) -> None:
    iteration = settled.policy_version - 1
    # The commit comes before its checkpoint, on disk: a server that lost the commit would be behind it (I4).
    held.side.confirm(iteration)
    # By these records it follows from the chain of a server that comes back older than it, from a backup for instance.
    held.chain_file.sync()
    target = held.folder.checkpoint_after(iteration)
    needed = held.window.older_than(settled.policy_version)
    older = [one for one in held.window.manifests if one.policy_version in needed]
    try:
        write_checkpoint(
            target,
            job_id=held.folder.job_id,
            iteration=iteration,
            weights_digest=settled.weights_digest,
            save=held.ranks.save,
            adapters=adapter_state(held.ranks.learner.policy),
            save_older=lambda scratch: held.published.save(older, scratch),
        )
    except WeightsRejected as error:
        raise Unavailable(f"{error}; the trainer that starts next publishes it again") from error
    reach("consumer.after_checkpoint")
    log.info("version %d is saved: %s", settled.policy_version, held.folder.relative(target))
    keep_newest_and_best(
        held.folder.checkpoints,
        held.spec.trainer.keep_checkpoints,
        scores=sampled_scores(held.folder),
        needed=held.jobs.forks_of(held.job_id).values(),
    )
    held.tell(
        CheckpointWritten(
            at_s=time.time(),
            iteration=iteration,
            directory=held.folder.relative(target),
            weights_digest=settled.weights_digest,
        )
    )
