"""The batches of one open iteration on their way to its trainer, whichever trainer that is.

    published batch ─▶ claimed, checked ─▶ (its columns are read, checked and put beside it) ─▶ the trainer
    dead batch ──────▶ abandoned, or the end of the job

Consumes:     rollout batches of that iteration, in the order in which they arrive. What generators publish into the
              later ones of the window stays in Redis until their turn.
Waits for:    the next batch, for as long as the caller says.
Unblocked by: generators that publish, or fail, a batch; stage workers that put the last of its columns.
Produces:     each expected batch once, as it is trained.
"""

from __future__ import annotations

import functools
import logging
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from broker.ledger import SAME_WORDS
from broker.trainer_side import Arrived
from contracts.encoding.digests import Digest
from contracts.errors import BatchFailed, ContractViolation, FenceViolation, WeightsRejected, WeightsUnfit
from contracts.events import BatchDead
from contracts.experience.columns import ColumnValues, check_values, row_shapes, values_digest
from contracts.rewards import StatedReason
from contracts.rollouts import Rollout, RolloutBatch
from contracts.spec.job import JobSpec
from contracts.spec.stages import STAGE_REASONS, JudgingStage
from onbeat.base.telemetry.correlation import about_batch
from onbeat.base.telemetry.observing import observed
from onbeat.loop.expected import ExpectedIteration
from onbeat.loop.trained_job import TrainedJob

CLAIMED_AT_ONCE = 4
"""Few enough that a cancel is noticed soon, many enough that a small model does not wait for round trips."""
WAIT_S = 1.0
RECONCILE_EVERY_S = 2.0
STAGE_REASON = "stage "
"""The reason of a batch that died in a stage begins with it (broker/leases.py, scripts/stage.lua)."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Gathering:
    """Used by one thread: `take` while something comes, `look` and `wait` where nothing did."""

    job: TrainedJob
    iteration: ExpectedIteration
    train: Callable[[Arrived, RolloutBatch], None]
    """Takes each training batch once, as it came and as it is trained."""
    repair: Callable[[frozenset[str]], None]
    """Looks at the versions that generators refuse, by their folders; it raises where one can't be repaired."""
    _reconciled_s: float = field(default_factory=time.monotonic)
    _awaited: str = ""
    """The batch that lasts, who has it, and why it isn't there: as of the last look."""

    @property
    def missing_in_words(self) -> str:
        """`3 of 9 batches of iteration 4 (4/train/1, …): batch 4/train/1, which g1 failed at attempt 1, …`"""
        missing = self.iteration.missing_in_words
        if not self._awaited:
            return missing
        return f"{missing}: {self._awaited}"

    def take(self) -> int:
        """Claims what is published, and settles what is dead; answers how many batches came.

        Raises BatchFailed where the spec says that a dead batch fails the job, FenceViolation for what wasn't asked for
        and where columns are gone, ContractViolation where they are not those of the job's stages.
        """
        arrived, num_dead = self.job.side.claim_rollouts(self.iteration.number, max_batches=CLAIMED_AT_ONCE)
        if num_dead > len(self.iteration.abandoned):
            self._settle_dead()
        for item in arrived:
            batch = item.batch
            with about_batch(batch.job_id, iteration=batch.iteration, batch_id=batch.batch_id, attempt=batch.attempt):
                self._take_one(item)
        return len(arrived)

    def look(self) -> None:
        """Notices what keeps batches away: refused weights, stages without workers, what a restarted server has lost.

        Raises what `repair` does, DeadlineExceeded, FenceViolation where a commit or an opening is gone, and
        WeightsUnfit for a version that is whole and that no generator can load.
        """
        refused = self.job.generators.check()
        for change in self.job.generators.take_changes():
            self.job.tell(change)
        if refused:
            self._check_fit(refused)
            self.repair(refused)
        self.job.stages.check(self.iteration.number)
        if time.monotonic() - self._reconciled_s >= RECONCILE_EVERY_S:
            self._reconciled_s = time.monotonic()
            self._reconcile()
            ask = functools.partial(self.job.side.awaited_batch, self.job.generators.live)
            self._awaited = observed("which batch the trainer waits for", ask) or ""

    def wait(self) -> None:
        self.job.side.wait_for_rollouts(self.iteration.number, WAIT_S)

    def _check_fit(self, refused: frozenset[str]) -> None:
        """Raises WeightsUnfit where all generators refuse the tensors of a version and its bytes are as published.

        A damaged one is written again, and may then be loaded. Of a whole one no copy helps, nor another generator of
        the kind: the fault is the trainer's, and it isn't waited for.
        """
        unfit = self.job.generators.unfit
        for manifest in self.job.window.manifests:
            if manifest.directory not in refused or manifest.directory not in unfit:
                continue
            try:
                self.job.published.check(manifest)
            except WeightsRejected:
                continue
            raise WeightsUnfit(
                f"version {manifest.policy_version} is whole, and no engine can load it: {unfit[manifest.directory]}",
                field="model.path",
                cure="take a model that these generators load, or generators of another engine",
            )

    def _take_one(self, item: Arrived) -> None:
        if not self.iteration.take(item):
            log.info("a second copy of batch %s is ignored", item.batch.batch_id)
        elif item.batch.purpose == "train":
            batch = self._as_trained(item.batch)
            self._record(item, batch)
            self.train(item, batch)
        else:
            self._record(item, item.batch)
            self.job.recorder.write(item.batch.batch_id)

    def _as_trained(self, batch: RolloutBatch) -> RolloutBatch:
        """Returns the batch with what stages have made of it; in a job without stages, as it came."""
        if not self.job.spec.stages:
            return batch
        as_trained, digest = staged_batch(batch, self.job.side.columns(batch), self.job.spec)
        self.iteration.put_columns(as_trained, digest)
        return as_trained

    def _record(self, item: Arrived, as_trained: RolloutBatch) -> None:
        """Takes a batch into the job's records, where they are to have it; the trainer writes those that it trains."""
        job = self.job
        if job.recorder.takes(as_trained):
            job.recorder.take(
                item.batch,
                prompts=self.iteration.expected[as_trained.batch_id],
                digest=item.digest,
                manifests=job.window.manifests,
                engine=lambda: job.side.fence().engine,
                as_trained=as_trained,
            )

    def _settle_dead(self) -> None:
        job = self.job
        for batch_id, reason in self.iteration.abandon(job.side.dead_batches(self.iteration.number)).items():
            job.tell(BatchDead(at_s=time.time(), batch_id=batch_id, reason=reason))
            if job.spec.rollout.on_failed_batch == "fail":
                num_attempts = job.spec.rollout.max_attempts
                attempts = f", after {num_attempts} attempt{'s' if num_attempts > 1 else ''}"
                # The attempts of a stage are its own, and its reason has their number where it matters. A fault that
                # repeats word for word had no more than it needed for that.
                is_of_a_stage = job.spec.stages and reason.startswith(STAGE_REASON)
                tried = attempts
                if is_of_a_stage or reason.endswith(SAME_WORDS):
                    tried = ""
                # The cause comes first: a list of jobs shows no more than the first words.
                raise BatchFailed(f"{reason}; so batch {batch_id} is dead{tried}")
            log.warning("batch %s is abandoned: %s", batch_id, reason)

    def _reconcile(self) -> None:
        """Dispatches again what a restarted server has lost of any open iteration."""
        side, current = self.job.side, self.iteration.number
        committed = side.fence().committed
        if committed != current - 1:
            raise FenceViolation(
                f"the trainer is at iteration {current}, a restart of the server has lost the commits since "
                f"{committed}",
                cure="start the trainer again: it goes on from what the server has",
            )
        for number, batches in ((current, self.iteration.missing), *self.job.window.ahead_of(current)):
            if again := side.reconcile(number, batches):
                log.warning("%d batches of iteration %d were lost and go out again", again, number)


def staged_batch(batch: RolloutBatch, values: ColumnValues, spec: JobSpec) -> tuple[RolloutBatch, Digest]:
    """Returns the batch as it is trained, and the digest of its columns; its own stays that of what was sampled.

    values: column → a value for each row, of all stages of the job. Raises ContractViolation naming the column and the
    row, for values that are not those of the job's stages.
    """
    check_values(values, spec.stage_graph.outputs, row_shapes(batch), of=f"batch {batch.batch_id}")
    with_columns = replace(batch, columns={name: tuple(of_rows) for name, of_rows in values.items()})
    rewarded = with_stage_rewards(with_columns, values, spec.stage_reward_weights)
    return _marked(rewarded, values, spec), values_digest(values)


def with_stage_rewards(batch: RolloutBatch, values: ColumnValues, weights: dict[str, float]) -> RolloutBatch:
    """Adds weight x value of each reward column to the rewards; the value joins the breakdown, as a component does."""
    if not weights:
        return batch

    def rewarded(rollout: Rollout, row: int) -> Rollout:
        scores = {name: struct.unpack("<f", values[name][row])[0] for name in weights}
        added = [weight * scores[name] for name, weight in weights.items()]
        return replace(
            rollout,
            # The order is that of the spec: sums of floats are the same every time (I7).
            reward=sum(added, start=rollout.reward),
            reward_breakdown=rollout.reward_breakdown | scores,
        )

    return _with_each(batch, rewarded)


def _marked(batch: RolloutBatch, values: ColumnValues, spec: JobSpec) -> RolloutBatch:
    """Marks the completions that a stage could not judge. Raises ContractViolation for a reason or a score that isn't
    what the spec states: a stage worker wrote both."""
    stating = [stage for stage in spec.stages if isinstance(stage, JudgingStage) and stage.stated_score is not None]
    marks: dict[int, dict[str, StatedReason]] = {}
    for stage in stating:
        stated = struct.pack("<f", stage.stated_score)
        for row, text in enumerate(values[stage.failure_column]):
            if not text:
                continue
            reason: StatedReason | None = next((known for known in STAGE_REASONS if known.encode() == text), None)
            if reason is None or any(values[name][row] != stated for name in stage.reward_weights):
                raise ContractViolation(
                    f"column {stage.failure_column}, row {row}: is no reason with the score that the spec states",
                    field=f"batch {batch.batch_id}",
                )
            marks.setdefault(row, {})[stage.name] = reason
    if not marks:
        return batch
    return _with_each(batch, lambda rollout, row: replace(rollout, unscorable=rollout.unscorable | marks.get(row, {})))


def _with_each(batch: RolloutBatch, changed: Callable[[Rollout, int], Rollout]) -> RolloutBatch:
    """changed: of a rollout and its row in the batch."""
    size = batch.group_size
    groups = tuple(
        replace(group, rollouts=tuple(changed(rollout, place * size + i) for i, rollout in enumerate(group.rollouts)))
        for place, group in enumerate(batch.groups)
    )
    return replace(batch, groups=groups)
