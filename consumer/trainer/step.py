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

from consumer.gradient.learner import OptimizerStep, mini_batch_of
from consumer.gradient.optimizer import horizon_at, learning_rate_at
from consumer.gradient.statistics import BatchStats, Scaling, Update, divided_by, iteration_scaling
from consumer.gradient.terms.table import terms_of_job
from consumer.trainer.held_job import HeldJob
from consumer.trainer.iteration import Iteration
from consumer.trainer.report import LIKELY_CAUSES, clipped_noise, in_words, mismatch_alarm
from contracts.encoding.names import number_of
from contracts.errors import BatchFailed, ContractViolation, TrainingDiverged
from contracts.events import IterationMetrics
from contracts.versions import WeightManifest
from onbeat.base.process.crash_points import reach
from onbeat.weights.publication import Publication

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """A training iteration after its last step."""

    made: WeightManifest
    """The version that the steps made."""
    metrics: IterationMetrics
    scaling: Scaling


def step(held: HeldJob, iteration: Iteration) -> Stepped:
    """Raises BatchFailed or TrainingDiverged before it moves a weight; what the ranks and the publisher raise after."""
    spec = held.spec
    rate = learning_rate_at(
        iteration.number, spec.optimizer, horizon_at(iteration.number, held.horizons, spec.iterations)
    )
    if not iteration.stats:
        raise BatchFailed(f"every training batch of iteration {iteration.number} is dead", field="rollout")
    _check_mismatch(held, iteration)
    # From here to the commit the policy is no version that could be saved.
    held.settled = None
    scaling = iteration_scaling(iteration.stats, spec.algorithm)
    with held.weights.begin(held.layout, policy_version=iteration.number + 1) as publication:
        updates = _update(held, iteration, rate=rate, scaling=scaling, publication=publication)
        # While threads write the rest of the version.
        numbers = iteration.numbers(updates, scaling=scaling, terms=terms_of_job(spec))
        with iteration.span("sync"):
            # The lease comes before the name: a version is complete, and believed, once it is finished.
            held.side.renew()
            made = publication.finish()
            held.side.publish_weights(made, oldest_kept=held.window.oldest_version(iteration.number))
    reach("consumer.after_weights")
    metrics = iteration.metrics(
        updates, numbers, learning_rate=rate, peak_flops=held.peak_flops, max_policy_lag=spec.max_policy_lag
    )
    return Stepped(made=made, metrics=metrics, scaling=scaling)


def _update(
    held: HeldJob, iteration: Iteration, *, rate: float, scaling: Scaling, publication: Publication
) -> list[Update]:
    """Steps on each mini-batch in each pass over the iteration; the version is written while the last one makes it.

    A mini-batch whose batches all are dead has no step.
    """
    algorithm = held.spec.algorithm
    parts: dict[int, list[BatchStats]] = {}
    for stats in iteration.stats:
        parts.setdefault(mini_batch_of(stats.batch_id, held.spec), []).append(stats)
    steps = [(again, part) for again in range(algorithm.updates_per_iteration) for part in sorted(parts)]
    updates: list[Update] = []
    for again, part in steps:
        is_last = len(updates) == len(steps) - 1
        # Those of the first mini-batch are in the sums as they came.
        stats = _train_again(held, iteration, parts[part], mini_batch=part) if again or part else parts[part]
        of_part = replace(scaling, count=divided_by(stats, algorithm))
        with iteration.span("step"):
            one = OptimizerStep(
                iteration=iteration.number,
                divisor=of_part.divisor,
                learning_rate=rate,
                is_last=is_last,
                syncs_reference=is_last and algorithm.syncs_reference_after(iteration.number),
            )
            grad_norm = held.ranks.step(one, publication if is_last else None)
        _count_sums(iteration, held.ranks.learner.accumulator.added, stats)
        updates.append(Update(stats=stats, scaling=of_part, grad_norm=grad_norm))
        reach("consumer.after_step")
    return updates


def _count_sums(iteration: Iteration, added: tuple[int, ...] | None, stats: list[BatchStats]) -> None:
    """Notes which batches the sums of a step held, as the sums say. Raises ContractViolation where they aren't those
    that were trained for it (I1)."""
    if added is None:
        return
    trained = {number_of(one.batch_id) for one in stats if one.trained_rows}
    if strange := [number for number, times in enumerate(added) if times != (number in trained)]:
        raise ContractViolation(
            f"the sums of iteration {iteration.number} held batch {strange[0]} {added[strange[0]]} times, and it was "
            f"trained {int(strange[0] in trained)} times",
            field="gradient",
        )
    before = iteration.in_sums or (0,) * len(added)
    iteration.in_sums = tuple(map(sum, zip(before, added, strict=True)))


def _train_again(held: HeldJob, iteration: Iteration, stats: list[BatchStats], *, mini_batch: int) -> list[BatchStats]:
    """The numbers of a mini-batch under the weights of the last step. A cancel waits: these are no version to save."""
    again = {one.batch_id: one for one in stats}
    with held.keeper.training(longest_pass_s=held.spec.timeouts.iteration_s):
        all_again = held.ranks.train_again(held.keeper.check_lease, mini_batch)
    for trained in all_again:
        iteration.record_span(trained)
        again[trained.stats.batch_id] = trained.stats
    return list(again.values())


def _check_mismatch(held: HeldJob, iteration: Iteration) -> None:
    """Raises TrainingDiverged where the spec says that an alarm fails the job."""
    if problem := clipped_noise(iteration.stats, held.spec.algorithm):
        log.warning("in iteration %d %s", iteration.number, problem)
    trainer = held.spec.trainer
    alarm = mismatch_alarm(iteration.stats, iteration=iteration.number, threshold=trainer.mismatch_limit)
    if alarm is None:
        return
    held.tell(alarm)
    if trainer.on_mismatch == "fail":
        raise TrainingDiverged(in_words(alarm), field="mismatch_k3", cure=LIKELY_CAUSES)
    log.warning("%s; %s", in_words(alarm), LIKELY_CAUSES)
