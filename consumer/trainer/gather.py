"""Trains what arrives until no batch of the oldest open iteration is missing.

    what comes (onbeat/loop/gathering.py) ─▶ a rank that is free: forward, backward ─▶ its sums wait for the step

Consumes:     the batches of that iteration, each once.
Waits for:    the next batch, or a rank; `timeouts.iteration_s` for all of them, and for ranks that train and take no
              more until one has trained; `timeouts.no_generator_s` for a generator, `timeouts.no_stage_worker_s` for a
              worker of a stage that has work. Where the schedule says so, the first claim waits until the last batch
              is published, and under `colocated` until the generators sleep.
Unblocked by: what gathering waits for; ranks that answer.
Produces:     a complete iteration, its gradient in the ranks.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence

from broker.trainer_side import Arrived
from consumer.gradient.learner import Trained
from consumer.trainer.held_job import HeldJob
from consumer.trainer.iteration import Iteration
from contracts.rollouts import RolloutBatch
from onbeat.base.process.waiting import Waiting
from onbeat.loop.gathering import CLAIMED_AT_ONCE, WAIT_S, Gathering

log = logging.getLogger(__name__)


def gather(job: HeldJob, iteration: Iteration, *, on_turn: Callable[[], None] = lambda: None) -> None:
    """Trains the batches of an iteration as they come, until each is trained, scored as an evaluation, or abandoned.

    Args:
        job: The job.
        iteration: The oldest open one.
        on_turn: Called before the first batch is taken, where the trainer takes turns with the generators.

    Raises:
        DeadlineExceeded: After `timeouts.iteration_s`; and as `LeaseKeeper.check`, `Gathering` and the training of a
            batch do.
    """
    ranks = job.ranks
    side = job.side
    num_training = 0  # batches that ranks have and haven't given back

    def book(trained: Sequence[Trained]) -> None:
        nonlocal num_training
        num_training -= len(trained)
        _book(job, iteration, trained)

    def train(item: Arrived, batch: RolloutBatch) -> None:
        nonlocal num_training
        job.keeper.check()
        num_training += 1
        with job.keeper.training(longest_pass_s=job.spec.timeouts.iteration_s):
            trained = ranks.train(batch)
        book(trained)

    def has_use_for_more() -> bool:
        return not iteration.is_complete and num_training < ranks.most_handed_out

    gathering = Gathering(job, iteration, train=train, repair=functools.partial(_repair_weights, job, iteration))
    limit = functools.partial(Waiting, deadline_s=job.spec.timeouts.iteration_s, cure="raise timeouts.iteration_s")
    waiting = limit(gathering.missing_in_words)
    passes = limit("a batch's passes")
    may_take = job.schedule.takes_at_once
    is_sampled = False
    while not iteration.is_complete or num_training:
        job.keeper.check()
        if not may_take:
            may_take = side.fence().is_sampled
            if may_take and job.schedule.takes_turns:
                job.generators.wait_for_turn(job.folder.job_id, job.keeper.check)
                on_turn()
        took = may_take and has_use_for_more() and gathering.take()
        # The claims say it, without a call of the server, unless the ranks could take no more than was claimed.
        is_sampled = is_sampled or iteration.is_complete or (not has_use_for_more() and side.fence().is_sampled)
        if took:
            book(ranks.train(is_sampled=is_sampled))
            passes.progress()
            # A claim that found less than it may take is followed by a wait, not by one that finds nothing.
            if took == CLAIMED_AT_ONCE or not has_use_for_more():
                continue
        idle_since_s = time.monotonic()
        wait_s = 0.0
        gathering.look()
        if has_use_for_more():
            waiting.poke(gathering.missing_in_words)
            gathering.wait()
            passes.progress()
        elif num_training:
            # No batch is awaited, or the ranks could take none: the deadline is that of one batch.
            passes.poke(f"the passes of {num_training} batches of iteration {iteration.number}")
            wait_s = WAIT_S
        trained = ranks.train(wait_s=wait_s, is_sampled=is_sampled)
        if num_training == len(trained):
            iteration.waited(time.monotonic() - idle_since_s)
        if trained:
            passes.progress()
        book(trained)


def _book(job: HeldJob, iteration: Iteration, trained: Sequence[Trained]) -> None:
    """Books batches that went into the gradient, and writes the records of those that have one."""
    iteration.record(*trained)
    for batch in trained:
        job.recorder.write(batch.stats.batch_id, advantages=batch.stats.advantages, trainer_logprobs=batch.logprobs)


def _repair_weights(job: HeldJob, iteration: Iteration, refused: frozenset[str]) -> None:
    """Writes a version again that a generator refuses, if its files have another digest than when it was published.

    Parameters do not move inside an iteration: the policy holds the iteration's own version. A version before it is in
    no memory; a trainer that starts publishes it again from its checkpoint, so that this trainer ends.
    """
    manifests = [manifest for manifest in job.window.manifests if manifest.directory in refused]
    if not manifests:
        return
    log.warning(
        "a generator refuses %s: it is checked, and written again if it is damaged",
        ", ".join(manifest.directory for manifest in manifests),
    )
    for manifest in manifests:
        if manifest.policy_version < iteration.number:
            job.check_published(manifest)
    # Also where an older version is refused and is whole: adapters stand on a base, which is written with any version.
    job.publish_weights(iteration.number, is_again=True)
