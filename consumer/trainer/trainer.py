"""The trainer's loop: claim, train, step, publish, commit; once around is one iteration.

    open t ─▶ claim batches in arrival order ─▶ step ─▶ weights t+1 ─▶ commit t, open t+1 ─▶ checkpoint t
                 └─ forward, backward, accumulate ─┘                    (one script)
                            └── the same batches again for each further update ──┘

A checkpoint is written after its commit is on the server's disk: it costs the generators no waiting, and it is never
ahead of the fence. A trainer that dies in between leaves an older checkpoint, and its successor replays from there.
"""

from __future__ import annotations

import logging
import time

from broker.connection.client import Broker
from broker.job_store import JobStore
from broker.presence import Presence
from broker.trainer_side import Opening, TrainerSide
from consumer.gradient.learner import OptimizerStep
from consumer.gradient.optimizer import horizon_at, learning_rate_at
from consumer.gradient.statistics import MicroBatchStats, Scaling, Update, iteration_scaling
from consumer.ranks.base import Ranks
from consumer.trainer.audit import commit_record
from consumer.trainer.evaluation import evaluation_score
from consumer.trainer.generator_watch import GeneratorWatch
from consumer.trainer.iteration import Boundary, Iteration
from consumer.trainer.kept_checkpoints import KeptCheckpoints
from consumer.trainer.lease_keeper import LeaseKeeper
from consumer.trainer.mismatch import LIKELY_CAUSES, in_words, mismatch_alarm
from consumer.trainer.plan import IterationPlan
from consumer.trainer.report import RunLog
from consumer.trainer.resume import (
    check_same_run,
    furthest_commit,
    is_finished,
    needs_rewind,
    next_iteration,
    rewind_record,
)
from contracts.errors import BatchFailed, TrainingDiverged
from contracts.events import (
    BatchDead,
    EvaluationFinished,
    IterationCommitted,
    IterationMetrics,
    JobEvent,
    TrainerStarted,
    record_digest,
)
from contracts.run_folder import RunFolder
from contracts.spec import JobSpec
from contracts.versions import WeightManifest
from process.crash_points import reach
from process.waiting import Waiting
from weight_store.publication import Publication
from weight_store.transports import make_publisher

log = logging.getLogger(__name__)

CLAIMED_AT_ONCE = 4
"""Few enough that a cancel is noticed soon, many enough that a small model does not wait for round trips."""
WAIT_S = 1.0
RECONCILE_EVERY_S = 2.0


class Trainer:
    """Runs one job under one trainer epoch, from its newest checkpoint to its last iteration."""

    def __init__(
        self,
        spec: JobSpec,
        *,
        broker: Broker,
        side: TrainerSide,
        keeper: LeaseKeeper,
        ranks: Ranks,
        plan: IterationPlan,
        folder: RunFolder,
        peak_flops: float = 0.0,
    ) -> None:
        self._spec = spec
        self._side = side
        self._keeper = keeper
        self._ranks = ranks
        self._learner = ranks.learner
        self._plan = plan
        self._folder = folder
        self._peak_flops = peak_flops
        self._broker = broker
        self._jobs = JobStore(broker)
        lora = spec.trainer.lora
        self._weights = make_publisher(
            spec,
            folder,
            chunks=side,
            announce=side.announce_shard,
            pause=self._pause,
            adapters=ranks.adapter_source() if lora and lora.publish == "adapter" else None,
        )
        self._layout = self._learner.policy.weights().layout
        self._generators = GeneratorWatch(
            Presence(broker), deadline_s=spec.timeouts.no_generator_s, deterministic=spec.deterministic
        )
        self._run_log = RunLog(folder, spec)
        self._checkpoints = KeptCheckpoints(spec, folder, side=side, ranks=ranks, tell=self._tell)
        self._horizons = self._jobs.horizons(folder.job_id)
        self._last_link = ""
        self._boundary: Boundary | None = None
        self._furthest = -1
        """The last iteration that was ever committed, also by a trainer whose commits were rewound."""
        self._settled: WeightManifest | None = None
        """The version that the policy holds and a commit has made; None while the two may differ."""

    def run(self) -> None:
        """Returns when the last iteration is committed; every other end is an exception.

        Raises Cancelled, Stopped, FencedOff, BrokerUnavailable, or the OnbeatError that fails the job.
        """
        try:
            opening = self._start()
            self._keeper.loaded()
            while opening is not None:
                opening = self._run_iteration(opening)
            self._side.confirm(self._spec.last_iteration)
        finally:
            self._run_log.close()

    def save(self) -> None:
        """A checkpoint of the last committed iteration, unless there is one already or nothing was trained."""
        if self._settled is not None:
            self._checkpoints.write_missing(self._settled)

    def close(self) -> None:
        """Ends the ranks beside this one."""
        self._ranks.close()

    def clear(self) -> None:
        """After the job's end: its versions go from memory that others need. A resume writes its first one again."""
        self._weights.remove_all()

    def _start(self) -> Opening | None:
        """Restores, rewinds where the fence is ahead, and opens the first iteration; None when all is done."""
        fence = self._side.fence()
        chain, self._last_link = self._jobs.audit_outline(self._folder.job_id)
        self._furthest = furthest_commit(chain)
        checkpoint = self._checkpoints.latest(chain, committed=fence.committed)
        start = next_iteration(checkpoint)
        self._ranks.begin(checkpoint)
        self._side.renew()
        self._weights.clear_scratch()
        manifest = self._publish_weights(start)
        check_same_run(chain, manifest, self._spec)
        self._settled = manifest
        epoch = self._side.trainer_epoch
        self._tell(TrainerStarted(at_s=time.time(), trainer_epoch=epoch, next_iteration=start, resumed=bool(chain)))
        if is_finished(fence, checkpoint, self._spec):
            return None
        if needs_rewind(fence, manifest):
            log.warning("the fence is at iteration %d, the newest checkpoint resumes at %d", fence.iteration, start)
            record = rewind_record(self._last_link, manifest, trainer_epoch=epoch)
            self._side.rewind(record)
            self._last_link = record_digest(record)
            self._weights.remove_after(start)
        self._side.publish_weights(manifest, oldest_kept=start)
        self._checkpoints.forget_after(start - 1)
        opening = self._plan.opening(start, manifest)
        self._side.open_iteration(opening)
        reach("consumer.after_opening")
        return opening

    def _run_iteration(self, opening: Opening) -> Opening | None:
        """From an open iteration to the next one."""
        iteration = Iteration(opening, trainer_epoch=self._side.trainer_epoch, boundary=self._boundary)
        self._gather(iteration)
        # A trainer that was paused past its lease ends here, before it moves a weight or writes a file.
        self._side.renew()
        made: WeightManifest | None = None
        metrics: IterationMetrics | None = None
        if iteration.number < self._spec.iterations:
            made, metrics = self._step(iteration)
        opening_started_s = time.time()
        self._report(iteration, metrics)
        following = None
        if made is not None and iteration.number < self._spec.last_iteration:
            following = self._plan.opening(made.policy_version, made)
        self._commit(iteration, metrics, made, following)
        self._boundary = Boundary(
            last_token_s=iteration.last_token_s, opening_started_s=opening_started_s, opened_s=time.time()
        )
        if made is not None:
            self._settle(made)
        return following

    def _gather(self, iteration: Iteration) -> None:
        """Trains what arrives until nothing is missing; `synchronous` starts when the last batch is published."""
        timeouts = self._spec.timeouts
        waiting = Waiting(
            iteration.missing_in_words, deadline_s=timeouts.iteration_s, cure="raise timeouts.iteration_s"
        )
        reconciled_s = time.monotonic()
        holds_back = self._spec.schedule == "synchronous"
        while not iteration.is_complete or self._ranks.num_training:
            self._keeper.check()
            holds_back = holds_back and not self._all_published()
            if not iteration.is_complete and self._ranks.has_room and not holds_back and self._claim(iteration):
                continue
            idle_since_s = time.monotonic()
            self._mend_weights(iteration, self._generators.check())
            waiting.poke(iteration.missing_in_words)
            if idle_since_s - reconciled_s >= RECONCILE_EVERY_S:
                reconciled_s = idle_since_s
                if again := self._side.reconcile(iteration.number, iteration.missing):
                    log.warning("%d batches of iteration %d were lost and go out again", again, iteration.number)
            if not iteration.is_complete and self._ranks.has_room:
                self._side.wait_for_rollouts(WAIT_S)
            elif self._ranks.num_training:
                self._ranks.wait(WAIT_S)
            if not self._ranks.num_training:
                iteration.waiting_s += time.monotonic() - idle_since_s
            self._record(iteration)

    def _mend_weights(self, iteration: Iteration, rejected: frozenset[str]) -> None:
        """Writes the open version again if a generator refuses it and its files are not what was published.

        Parameters do not move inside an iteration: the policy holds this very version.
        """
        version = iteration.policy_version
        directory = self._folder.relative(self._folder.weights_of(version))
        if directory in rejected:
            log.warning("a generator refuses %s: it is checked, and written again if it is damaged", directory)
            self._publish_weights(version, is_again=True)

    def _all_published(self) -> bool:
        fence = self._side.fence()
        return fence.published + fence.dead >= fence.expected

    def _claim(self, iteration: Iteration) -> int:
        """Takes what is published, trains it, settles what is dead; how many batches came."""
        arrived, num_dead = self._side.claim_rollouts(max_batches=CLAIMED_AT_ONCE)
        if num_dead > len(iteration.abandoned):
            self._settle_dead(iteration)
        for item in arrived:
            if not iteration.take(item):
                log.info("a second copy of batch %s is ignored", item.batch.batch_id)
            elif item.batch.purpose == "train":
                self._keeper.check()
                self._ranks.train(item.batch)
        self._record(iteration)
        return len(arrived)

    def _record(self, iteration: Iteration) -> None:
        for trained in self._ranks.trained():
            iteration.record(trained)

    def _settle_dead(self, iteration: Iteration) -> None:
        """Raises BatchFailed where the job's policy is to fail."""
        for batch_id, reason in iteration.abandon(self._side.dead_batches()).items():
            self._tell(BatchDead(at_s=time.time(), batch_id=batch_id, reason=reason))
            if self._spec.rollout.on_failed_batch == "fail":
                raise BatchFailed(
                    f"is dead after {self._spec.rollout.max_attempts} attempts: {reason}", field=f"batch {batch_id}"
                )
            log.warning("batch %s is abandoned: %s", batch_id, reason)

    def _step(self, iteration: Iteration) -> tuple[WeightManifest, IterationMetrics]:
        """The iteration's optimizer steps, and the version that they made, written for the generators."""
        horizon = horizon_at(iteration.number, self._horizons, self._spec.iterations)
        rate = learning_rate_at(iteration.number, self._spec.optimizer, horizon)
        if not iteration.stats:
            raise BatchFailed(f"every training batch of iteration {iteration.number} is dead", field="rollout")
        self._check_mismatch(iteration)
        self._settled = None
        scaling = iteration_scaling(iteration.stats, self._spec.algorithm)
        with self._weights.begin(self._layout, policy_version=iteration.number + 1) as publication:
            updates = self._update(iteration, rate, scaling, publication)
            with iteration.span("publish"):
                self._side.renew()
                made = publication.finish()
                self._side.publish_weights(made, oldest_kept=iteration.number)
        reach("consumer.after_weights")
        return made, iteration.metrics(updates, learning_rate=rate, scaling=scaling, peak_flops=self._peak_flops)

    def _update(self, iteration: Iteration, rate: float, scaling: Scaling, publication: Publication) -> list[Update]:
        """The steps; the weights are published while the last one makes them."""
        updates: list[Update] = []
        for left in reversed(range(self._spec.algorithm.updates_per_iteration)):
            stats = self._train_again(iteration) if updates else iteration.stats
            with iteration.span("step"):
                step = OptimizerStep(
                    divisor=scaling.divisor, baseline=scaling.baseline, learning_rate=rate, is_last=left == 0
                )
                grad_norm = self._ranks.step(step, None if left else publication)
            updates.append(Update(stats=stats, grad_norm=grad_norm))
            reach("consumer.after_step")
        return updates

    def _check_mismatch(self, iteration: Iteration) -> None:
        """Raises TrainingDiverged where the job's policy is to fail; no weight was moved yet."""
        trainer = self._spec.trainer
        alarm = mismatch_alarm(iteration.stats, iteration=iteration.number, threshold=trainer.mismatch_alarm)
        if alarm is None:
            return
        self._tell(alarm)
        if trainer.on_mismatch == "fail":
            raise TrainingDiverged(in_words(alarm), field="mismatch_k3", cure=LIKELY_CAUSES)
        log.warning("%s; %s", in_words(alarm), LIKELY_CAUSES)

    def _train_again(self, iteration: Iteration) -> list[MicroBatchStats]:
        """Numbers of every batch under the weights of the last step.

        A cancel waits for the end of the iteration: weights between two updates are no version that could be saved.
        """
        again = {stats.batch_id: stats for stats in iteration.stats}
        for trained in self._ranks.train_again(self._keeper.check_lease):
            iteration.record_span(trained)
            again[trained.stats.batch_id] = trained.stats
        return list(again.values())

    def _report(self, iteration: Iteration, metrics: IterationMetrics | None) -> None:
        """Before the commit: whoever sees an iteration committed finds its numbers. A replay reports them again."""
        if metrics is not None:
            self._run_log.metrics(metrics)
        self._run_log.timeline(iteration.spans)
        score = evaluation_score(iteration.evaluation_batches, iteration.evaluation)
        if score is not None:
            self._run_log.evaluation(score)
            self._jobs.record_evaluation(self._folder.job_id, score)
            self._tell(EvaluationFinished(at_s=time.time(), score=score))

    def _commit(
        self,
        iteration: Iteration,
        metrics: IterationMetrics | None,
        made: WeightManifest | None,
        following: Opening | None,
    ) -> None:
        record = commit_record(
            iteration, self._spec, metrics, made, trainer_epoch=self._side.trainer_epoch, previous=self._last_link
        )
        event = None
        if metrics is not None and made is not None:
            event = IterationCommitted(at_s=time.time(), metrics=metrics, weights_digest=made.weights_digest)
        self._side.commit(record, iteration.digests, event=event, opening=following)
        self._last_link = record_digest(record)
        reach("consumer.after_commit")

    def _settle(self, made: WeightManifest) -> None:
        """After a commit, while the generators are at work again: checkpoint, old files, the count of starts."""
        self._settled = made
        # One that was paused since its commit would take away files that its successor's generators load.
        self._side.renew()
        iteration = made.policy_version - 1
        if self._checkpoints.due_after(iteration):
            self._checkpoints.write(made)
        # Of the two newest one is asked for, the other was until this commit. An older one is read by a generator that
        # lost its lease while it loads; it says so, and without it would report a damaged store.
        self._weights.remove_before(iteration, in_use=self._generators.loading())
        if iteration > self._furthest:
            # What is replayed is no progress: a trainer that always dies at the same place would start for ever.
            self._furthest = iteration
            self._jobs.reset_trainer_starts(self._folder.job_id)

    def _publish_weights(self, policy_version: int, *, is_again: bool = False) -> WeightManifest:
        self._side.renew()
        with self._weights.begin(self._layout, policy_version=policy_version, is_again=is_again) as publication:
            self._ranks.publish(publication)
            return publication.finish()

    def _pause(self, seconds: float) -> None:
        self._keeper.check()
        time.sleep(seconds)

    def _tell(self, event: JobEvent) -> None:
        self._jobs.tell(self._folder.job_id, event)
