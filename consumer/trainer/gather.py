"""Trains what arrives until no batch of the oldest open iteration is missing.

    published batch ─▶ claimed, checked ─▶ a rank that is free: forward, backward ─▶ its sums wait for the step
    (with stages: once its columns are complete, which are read, checked and put beside it)
    dead batch ──────▶ abandoned, or the end of the job

Consumes:     rollout batches of that iteration, in the order in which they arrive. What generators publish into the
              later ones of the window stays in Redis until their turn.
Waits for:    the next batch, or a rank; `timeouts.iteration_s` for all of them, and for ranks that train and take no
              more until one has trained; `timeouts.no_generator_s` for a generator, `timeouts.no_stage_worker_s` for a
              worker of a stage that has work. Where the schedule says so, the first claim waits until the last batch
              is published, and under `colocated` until the generators sleep.
Unblocked by: generators that publish, or fail, a batch; stage workers that put the last of its columns; ranks that
              answer.
Produces:     a complete iteration, its gradient in the ranks.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence

from broker.trainer_side import Arrived
from consumer.gradient.learner import Trained
from consumer.trainer.held_job import HeldJob
from consumer.trainer.iteration import Iteration
from consumer.trainer.schedule import all_published
from contracts.errors import BatchFailed, FenceViolation
from contracts.events import BatchDead
from contracts.rollouts import RolloutBatch
from onbeat.loop.staged import staged_batch
from onbeat.process.waiting import Waiting
from onbeat.telemetry.correlation import about_batch

CLAIMED_AT_ONCE = 4
"""Few enough that a cancel is noticed soon, many enough that a small model does not wait for round trips."""
WAIT_S = 1.0
RECONCILE_EVERY_S = 2.0
STAGE_REASON = "stage "
"""The reason of a batch that died in a stage begins with it (fail_rows.lua, claim_rows.lua)."""

log = logging.getLogger(__name__)


def gather(held: HeldJob, iteration: Iteration) -> None:
    """Returns when each expected batch is trained, scored as an evaluation, or abandoned.

    Raises what `LeaseKeeper.check` does, BatchFailed, DeadlineExceeded, and what ended the training of a batch.
    """
    ranks, side = held.ranks, held.side

    def has_use_for_more() -> bool:
        return not iteration.is_complete and ranks.has_room

    limit = functools.partial(Waiting, deadline_s=held.spec.timeouts.iteration_s, cure="raise timeouts.iteration_s")
    waiting, passes = limit(iteration.missing_in_words), limit("a batch's passes")
    reconciled_s = time.monotonic()
    may_take, is_sampled = held.schedule.takes_at_once, False
    while not iteration.is_complete or ranks.num_training:
        held.keeper.check()
        if not may_take and (may_take := held.schedule.may_take(side.fence())) and held.schedule.takes_turns:
            held.generators.wait_for_turn(held.folder.job_id, held.keeper.check)
        took = _take(held, iteration) if may_take and has_use_for_more() else 0
        if not is_sampled and ranks.num_training > 1 and (is_sampled := all_published(side.fence())):
            ranks.all_sampled()
        if took:
            passes.progress()
            continue
        idle_since_s = time.monotonic()
        _mend_weights(held, iteration)
        held.stages.check(iteration.number)
        if idle_since_s - reconciled_s >= RECONCILE_EVERY_S:
            reconciled_s = idle_since_s
            _reconcile(held, iteration)
        if has_use_for_more():
            waiting.poke(iteration.missing_in_words)
            side.wait_for_rollouts(iteration.number, WAIT_S)
            passes.progress()
        elif ranks.num_training:
            # No batch is awaited, or the ranks could take none: the deadline is that of one batch.
            passes.poke(f"the passes of {ranks.num_training} batches of iteration {iteration.number}")
            ranks.wait(WAIT_S)
        if not ranks.num_training:
            iteration.waited(time.monotonic() - idle_since_s)
        if trained := ranks.trained():
            passes.progress()
        _book(held, iteration, trained)


def _take(held: HeldJob, iteration: Iteration) -> int:
    """Claims what is published, trains it, settles what is dead; how many batches came."""
    arrived, num_dead = held.side.claim_rollouts(iteration.number, max_batches=CLAIMED_AT_ONCE)
    if num_dead > len(iteration.abandoned):
        _settle_dead(held, iteration)
    for item in arrived:
        batch = item.batch
        with about_batch(batch.job_id, iteration=batch.iteration, batch_id=batch.batch_id, attempt=batch.attempt):
            _take_one(held, iteration, item)
    _book(held, iteration, held.ranks.trained())
    return len(arrived)


def _take_one(held: HeldJob, iteration: Iteration, item: Arrived) -> None:
    if not iteration.take(item):
        log.info("a second copy of batch %s is ignored", item.batch.batch_id)
    elif item.batch.purpose == "train":
        held.keeper.check()
        batch = _as_trained(held, iteration, item.batch)
        _record(held, iteration, item, batch)
        with held.keeper.training(longest_pass_s=held.spec.timeouts.iteration_s):
            held.ranks.train(batch)
    else:
        _record(held, iteration, item, item.batch)
        held.recorder.write(item.batch.batch_id)


def _record(held: HeldJob, iteration: Iteration, item: Arrived, batch: RolloutBatch) -> None:
    """Takes a batch into the job's records, where they are to have it. batch: as it is trained."""
    if held.recorder.takes(batch):
        held.recorder.take(
            item.batch,
            asked=iteration.expected[batch.batch_id],
            digest=item.digest,
            manifests=held.window.manifests,
            engine=lambda: held.side.fence().engine,
            as_trained=batch,
        )


def _book(held: HeldJob, iteration: Iteration, trained: Sequence[Trained]) -> None:
    """Books batches that went into the gradient, and writes the records of those that have one."""
    iteration.record(*trained)
    for one in trained:
        held.recorder.write(one.stats.batch_id, advantages=one.stats.advantages, trainer_logprobs=one.logprobs)


def _as_trained(held: HeldJob, iteration: Iteration, batch: RolloutBatch) -> RolloutBatch:
    """Returns the batch with what stages have made of it; in a job without stages, as it came.

    Raises FenceViolation where columns are gone, ContractViolation where they are not those of the job's stages.
    """
    if not held.spec.stages:
        return batch
    as_trained, digest = staged_batch(batch, held.side.columns(batch), held.spec)
    iteration.put_columns(as_trained, digest)
    return as_trained


def _settle_dead(held: HeldJob, iteration: Iteration) -> None:
    """Raises BatchFailed where the spec says that a dead batch fails the job."""
    for batch_id, reason in iteration.abandon(held.side.dead_batches(iteration.number)).items():
        held.tell(BatchDead(at_s=time.time(), batch_id=batch_id, reason=reason))
        if held.spec.rollout.on_failed_batch == "fail":
            attempts = f" after {held.spec.rollout.max_attempts} attempts"
            # The attempts of a stage are its own, and its reason has their number where it matters.
            tried = "" if held.spec.stages and reason.startswith(STAGE_REASON) else attempts
            raise BatchFailed(f"is dead{tried}: {reason}", field=f"batch {batch_id}")
        log.warning("batch %s is abandoned: %s", batch_id, reason)


def _reconcile(held: HeldJob, iteration: Iteration) -> None:
    """Dispatches again what a restarted server has lost of any open iteration.

    Raises FenceViolation where it has lost the commit of the iteration before, or an opening.
    """
    committed = held.side.fence().committed
    if committed != iteration.number - 1:
        raise FenceViolation(
            f"the trainer is at iteration {iteration.number}, a restart of the server has lost the commits since "
            f"{committed}"
        )
    for number, batches in ((iteration.number, iteration.missing), *held.window.ahead_of(iteration.number)):
        if again := held.side.reconcile(number, batches):
            log.warning("%d batches of iteration %d were lost and go out again", again, number)


def _mend_weights(held: HeldJob, iteration: Iteration) -> None:
    """Writes a version again that a generator refuses, if its files are not what was published.

    Parameters do not move inside an iteration: the policy holds the iteration's own version. One before it is in no
    memory; a trainer that starts publishes it again from its checkpoint, so that this one ends.
    """
    refused = held.generators.check()
    manifests = [one for one in held.window.manifests if one.directory in refused]
    if not manifests:
        return
    log.warning(
        "a generator refuses %s: it is checked, and written again if it is damaged",
        ", ".join(one.directory for one in manifests),
    )
    for manifest in manifests:
        if manifest.policy_version < iteration.number:
            held.check_published(manifest)
    # Also where an older one is refused and is whole: adapters stand on a base, which is written with any version.
    held.publish_weights(iteration.number, is_again=True)
