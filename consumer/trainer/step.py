"""The optimizer steps of an iteration, and the version that they make.

    sums of the ranks ─▶ step ─▶ (kept batches ─▶ step) ─▶ … the last step writes version t+1 as it makes it

Consumes:     a complete iteration, its gradient in the ranks.
Waits for:    the ranks, and the disk or Redis, which takes the version.
Unblocked by: the ranks.
Produces:     version t+1, written and announced, and the iteration's numbers. Nothing is committed yet.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial

from consumer.gradient.learner import OptimizerStep, mini_batch_of
from consumer.gradient.optimizer import horizon_at, learning_rate_at
from consumer.gradient.statistics import BatchStats, Scaling, Update, divided_by, iteration_scaling
from consumer.gradient.terms.table import terms_of_job
from consumer.trainer.held_job import HeldJob
from consumer.trainer.iteration import Iteration
from consumer.trainer.report import LIKELY_CAUSES, clipped_noise, in_words, mismatch_alarm
from contracts.encoding.names import number_of
from contracts.errors import ContractViolation, TrainingDiverged
from contracts.events import IterationMetrics
from contracts.versions import WeightManifest
from onbeat.base.process.crash_points import reach
from onbeat.base.telemetry.observing import observed
from onbeat.weights.publication import Publication

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """A training iteration after its last step. `step` creates it, and the commit reads it."""

    manifest: WeightManifest
    """The version that the steps made."""
    metrics: IterationMetrics
    scaling: Scaling


def step(job: HeldJob, iteration: Iteration) -> Stepped:
    """Steps on an iteration's sums, writes the version that the last step makes, and announces it.

    Raises:
        BatchFailed, TrainingDiverged: Before a weight moves; after that it raises as the ranks and the publisher.
    """
    spec = job.spec
    rate = learning_rate_at(
        iteration.number, spec.optimizer, horizon_at(iteration.number, job.horizons, spec.iterations)
    )
    if not iteration.stats:
        raise iteration.all_dead()
    _check_mismatch(job, iteration)
    # From here to the commit the policy holds no version that could be saved.
    job.settled = None
    scaling = iteration_scaling(iteration.stats, spec.algorithm)
    with job.weights.begin(job.layout, policy_version=iteration.number + 1) as publication:
        updates = _update(job, iteration, rate=rate, scaling=scaling, publication=publication)
        # While threads write the rest of the version.
        numbers = iteration.numbers(updates, scaling=scaling, terms=terms_of_job(spec))
        # And while they do, the ranks pass through once more, with the weights that they have just made.
        with iteration.span("probe"):
            job.probes.measure(iteration.number + 1)
        with iteration.span("sync"):
            # The lease comes before the name: a version is complete, and believed, once it is finished.
            job.side.renew()
            manifest = job.probes.with_probe(publication.finish())
            job.side.publish_weights(manifest, oldest_kept=job.window.oldest_version(iteration.number))
    reach("consumer.after_weights")
    metrics = iteration.metrics(
        updates, numbers, learning_rate=rate, peak_flops=job.peak_flops, max_policy_lag=spec.max_policy_lag
    )
    return Stepped(manifest=manifest, metrics=metrics, scaling=scaling)


def _update(
    job: HeldJob, iteration: Iteration, *, rate: float, scaling: Scaling, publication: Publication
) -> list[Update]:
    """Steps on each mini-batch in each pass over the iteration; the version is written while the last one makes it.

    A mini-batch whose batches all are dead has no step.
    """
    algorithm = job.spec.algorithm
    parts: dict[int, list[BatchStats]] = {}
    for stats in iteration.stats:
        parts.setdefault(mini_batch_of(stats.batch_id, job.spec), []).append(stats)
    steps = [(again, part) for again in range(algorithm.updates_per_iteration) for part in sorted(parts)]
    updates: list[Update] = []
    for again, part in steps:
        is_last = len(updates) == len(steps) - 1
        stats = parts[part]
        # The batches of the first mini-batch are in the sums as they came; all others go through the model now.
        if again or part:
            stats = _train_again(job, iteration, stats, mini_batch=part)
        # The count is the part's own, and the deviation the iteration's.
        part_scaling = replace(scaling, count=divided_by(stats, algorithm))
        with iteration.span("step"):
            optimizer_step = OptimizerStep(
                iteration=iteration.number,
                divisor=part_scaling.divisor,
                learning_rate=rate,
                is_last=is_last,
                syncs_reference=is_last and algorithm.syncs_reference_after(iteration.number),
            )
            # Only the weights of the last step are a version.
            grad_norm = job.ranks.step(optimizer_step, publication if is_last else None)
        _count_sums(iteration, job.ranks.learner.accumulator.added, stats)
        updates.append(Update(stats=stats, scaling=part_scaling, grad_norm=grad_norm))
        reach("consumer.after_step")
    return updates


def _count_sums(iteration: Iteration, added: tuple[int, ...] | None, stats: list[BatchStats]) -> None:
    """Notes which batches the sums of a step held, as the witnesses in the sums say.

    Args:
        iteration: Takes the note, for its audit record.
        added: Times that the sums held each batch, by its number; None of float sums, which have no witnesses.
        stats: The numbers of the batches that were trained for the step.

    Raises:
        ContractViolation: Where the sums held other batches, or one of them twice (I1).
    """
    if added is None:
        return
    trained = {number_of(batch.batch_id) for batch in stats if batch.trained_rows}
    for number, times in enumerate(added):
        expected = int(number in trained)
        if times != expected:
            raise ContractViolation(
                f"the sums of iteration {iteration.number} held batch {number} {times} times, and it was trained "
                f"{expected} times",
                field="gradient",
            )
    before = iteration.in_sums or (0,) * len(added)
    iteration.in_sums = tuple(map(sum, zip(before, added, strict=True)))


def _train_again(job: HeldJob, iteration: Iteration, stats: list[BatchStats], *, mini_batch: int) -> list[BatchStats]:
    """Trains a mini-batch under the weights of the last step, and returns its batches' new numbers, in their order.

    A cancel waits, and only the lease is checked: the weights between two steps are no version to save.
    """
    again = {batch.batch_id: batch for batch in stats}
    with job.keeper.training(longest_pass_s=job.spec.timeouts.iteration_s):
        all_again = job.ranks.train_again(job.keeper.check_lease, mini_batch)
    for trained in all_again:
        iteration.record_span(trained)
        again[trained.stats.batch_id] = trained.stats
    return list(again.values())


def _check_mismatch(job: HeldJob, iteration: Iteration) -> None:
    """Raises TrainingDiverged where the spec says that an alarm fails the job."""
    look = partial(clipped_noise, iteration.stats, job.spec.algorithm)
    problem = observed("the share of tokens that clips act on", look)
    if problem:
        log.warning("in iteration %d %s", iteration.number, problem)
    trainer = job.spec.trainer
    alarm = mismatch_alarm(iteration.stats, iteration=iteration.number, threshold=trainer.mismatch_limit)
    if alarm is None:
        return
    job.tell(alarm)
    if trainer.on_mismatch == "fail":
        raise TrainingDiverged(in_words(alarm), field="mismatch_k3", cure=LIKELY_CAUSES)
    log.warning("%s; %s", in_words(alarm), LIKELY_CAUSES)
