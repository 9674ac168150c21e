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
from contracts.events import CheckpointWritten, IterationMetrics, TimelineSpan
from contracts.timeline import TRAINER
from contracts.versions import WeightManifest
from onbeat.base.process.crash_points import reach
from onbeat.loop.chain import furthest_commit
from onbeat.loop.lease_keeper import Cancelled, Stopped
from onbeat.loop.trained_job import Succession

log = logging.getLogger(__name__)


class Commits:
    """The commits of one trainer: each record of the audit chain names the record before it.

    `run_iterations` creates it after the start, and calls it at the end of each iteration.
    """

    def __init__(self, job: HeldJob, run_log: RunLog, succession: Succession) -> None:
        self._job = job
        self._run_log = run_log
        self.succession = succession
        self._furthest = furthest_commit(succession.records)

    def commit(self, iteration: Iteration, stepped: Stepped | None, *, stopped: str = "") -> Boundary:
        """Reports and commits an iteration, opens another, and saves what is due.

        Args:
            iteration: A complete iteration.
            stepped: The version and the numbers of its steps; None where it only evaluated.
            stopped: The reason why the job ends here, before a step; "" where it goes on.

        Returns:
            The times between this iteration and the next.
        """
        job = self._job
        opening_started_s = time.time()
        # Numbers precede the commit: a watcher that sees an iteration committed finds them. A replay repeats them.
        if stepped is not None:
            self._run_log.metrics(stepped.metrics)
        self._run_log.timeline(iteration.spans)
        takes_turns = job.schedule.takes_turns
        manifest: WeightManifest | None = None
        metrics: IterationMetrics | None = None
        if stepped is not None:
            manifest = stepped.manifest
            metrics = stepped.metrics
        opening = self.succession.commit(
            iteration,
            manifest=manifest,
            metrics=metrics,
            write_score=self._run_log.evaluation,
            opens=not takes_turns,
            stopped=stopped,
        )
        if stepped is not None:
            log_iteration(stepped.metrics, job.spec.iterations)
        job.measure(iteration.spans, metrics)
        # The lease comes before the files: a trainer that slept since its commit would write into its successor's.
        job.side.renew()
        reported = job.spans.take()
        if reported:
            self._run_log.timeline(reported)
        # The batches that evaluate the version that was just made. A trainer that dies before it leaves no checkpoint
        # of its commit: the successor rewinds, and opens the iteration with them.
        following = self.succession.next
        if job.schedule.lags and following is not None:
            batches = job.window.evaluation(following)
            if batches:
                job.side.dispatch(following, batches)
        # After the commit, so that no generator waits for it; before a checkpoint, after which nothing is replayed.
        if stepped is None:
            job.recorder.commit(iteration.number)
        else:
            job.recorder.commit(iteration.number, deviation=stepped.scaling.deviation)
        samples = job.recorder.take_samples()
        if samples:
            self._run_log.samples(iteration.number, samples)
        if takes_turns and stepped is not None:
            self._end_turn(stepped.manifest, opening)
        boundary = Boundary(
            last_token_s=iteration.last_token_s,
            generations=iteration.later_generations,
            opening_started_s=opening_started_s,
            opened_s=time.time(),
        )
        if stepped is not None and not takes_turns:
            self._settle(stepped.manifest)
        has_checkpoint = stepped is not None and job.spec.checkpoints_after(iteration.number)
        job.keep_files(iteration.number, has_checkpoint=has_checkpoint)
        job.health.check()
        return boundary

    def _end_turn(self, manifest: WeightManifest, opening: IterationOpening | None) -> None:
        """Saves, frees memory that generators could use, and then opens the iteration: the generators' turn begins."""
        job = self._job
        self._settle(manifest)
        if opening is not None:
            job.ranks.rest()
            job.side.open_iteration(opening, job.window.digests)

    def _settle(self, manifest: WeightManifest) -> None:
        """Saves and clears up after a commit; the generators are at work again, unless they wait for their turn."""
        job = self._job
        job.settled = manifest
        # The lease comes before the files: a trainer that was paused since its commit would take away versions that
        # its successor's generators load.
        job.side.renew()
        # Iteration t made version t + 1.
        iteration = manifest.policy_version - 1
        if job.spec.checkpoints_after(iteration):
            started_s = time.time()
            _write_checkpoint(job, manifest)
            # The lease comes before the files once more: a checkpoint takes long enough to sleep past it.
            job.side.renew()
            # A checkpoint is written after the timeline of its iteration: its span has a line of its own.
            span = TimelineSpan(
                who=TRAINER, what="checkpoint", iteration=iteration, started_s=started_s, ended_s=time.time()
            )
            self._run_log.timeline([span])
            job.measure([span], None)
        job.remove_older(iteration)
        if iteration > self._furthest:
            # A replay is no progress: a trainer that always dies at the same place would start for ever.
            self._furthest = iteration
            job.jobs.reset_trainer_starts(job.job_id)


def save(job: HeldJob) -> None:
    """Writes a checkpoint of the last committed version, unless there is one already or nothing was trained."""
    settled = job.settled
    if settled is None or settled.policy_version == 0:
        return
    if not job.folder.checkpoint_after(settled.policy_version - 1).exists():
        _write_checkpoint(job, settled)
        # Copies that can't be reached don't hold up a job that is asked to end.
        with contextlib.suppress(Cancelled, Stopped):
            job.keep_files(settled.policy_version - 1, has_checkpoint=True)


def _write_checkpoint(job: HeldJob, settled: WeightManifest) -> None:
    """Writes the checkpoint of a committed version, and removes those that it pushes out.

    Args:
        job: The trained job.
        settled: The version that the policy holds.

    Raises:
        Unavailable: Where the files of an older version are damaged: the trainer that starts next writes them again.
    """
    iteration = settled.policy_version - 1
    # The commit comes before its checkpoint, on disk: a server that lost the commit would be behind it (I4).
    job.side.confirm(iteration)
    # By these records it follows from the chain of a server that comes back older than it, from a backup for instance.
    job.chain_file.sync()
    target = job.folder.checkpoint_after(iteration)
    needed = job.window.older_than(settled.policy_version)
    older = [manifest for manifest in job.window.manifests if manifest.policy_version in needed]
    try:
        write_checkpoint(
            target,
            job_id=job.folder.job_id,
            iteration=iteration,
            weights_digest=settled.weights_digest,
            save=job.ranks.save,
            adapters=adapter_state(job.ranks.learner.policy),
            save_older=lambda scratch: job.published.save(older, scratch),
        )
    except WeightsRejected as error:
        raise Unavailable(f"{error}; the trainer that starts next publishes it again") from error
    reach("consumer.after_checkpoint")
    log.info("version %d is saved: %s", settled.policy_version, job.folder.relative(target))
    keep_newest_and_best(
        job.folder.checkpoints,
        job.spec.trainer.keep_checkpoints,
        scores=sampled_scores(job.folder),
        needed=job.jobs.forks_of(job.job_id).values(),
    )
    job.tell(
        CheckpointWritten(
            at_s=time.time(),
            iteration=iteration,
            directory=job.folder.relative(target),
            weights_digest=settled.weights_digest,
        )
    )
