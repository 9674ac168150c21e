"""Predicts seconds an iteration under each schedule by a closed formula of measured times.

B batches an iteration, N generators, W ranks of the trainer:

    T_gen    B batches over N generators, each batch with its claim
    T_train  B first passes over W ranks
    T_step   the optimizer, publishing the version, the commit, opening the next iteration
    T_sync   T_step and loading the version

    synchronous          T_gen + T_score + T_train + T_sync
    colocated            the same, each phase as much faster as it gains devices
    periodic             T_sync + max(T_gen + T_score + one pass, one batch + T_score + T_train)
    delayed, bounded     max(T_gen + loading the version, T_train + T_step), whatever the lag

The formulas know means alone. They leave out what single long batches and the order of events cost, so that they are
best where one side decides and lowest where several generators share few batches of very different lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

from contracts.encoding.wire import Record
from contracts.schedule import ScheduleName
from contracts.spec.job import JobSpec
from onbeat.planning.measured import MeasuredTimes

SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)


class Prediction(Record, frozen=True, kw_only=True):
    """A row of a plan."""

    schedule: ScheduleName
    generators: int
    iteration_s: float
    """From commit to commit, of an iteration without an evaluation and a checkpoint."""
    tokens_per_s: float
    """Sampled tokens."""
    generators_busy: float
    """Share of an iteration in which a generator samples; for the rest it waits."""
    trainer_busy: float
    """Share of an iteration in which a rank trains or steps; for the rest it waits."""
    is_best_case: bool = False
    """True of `colocated`, whose phases are taken to be faster by all the devices that they gain."""


class Plan(Record, frozen=True, kw_only=True):
    """The answer of `onbeat plan --json`."""

    job: str
    """The spec's name."""
    measured: MeasuredTimes
    predictions: tuple[Prediction, ...]


def compare(spec: JobSpec, times: MeasuredTimes, *, generators: Sequence[int]) -> Plan:
    """Predicts each schedule with each number of generators."""
    predictions = tuple(
        predict(spec, schedule, times, generators=number) for number in generators for schedule in SCHEDULES
    )
    return Plan(job=spec.name, measured=times, predictions=predictions)


def predict(spec: JobSpec, schedule: ScheduleName, times: MeasuredTimes, *, generators: int) -> Prediction:
    """Predicts one schedule with one number of generators."""
    batches = spec.rollout.batches_per_iteration
    ranks = spec.trainer.world_size
    seconds = iteration_s(schedule, times, batches=batches, generators=generators, ranks=ranks)
    generators_faster, ranks_faster = _gains(schedule, generators=generators, ranks=ranks)
    sampling_s = batches * times.generate_s / generators / generators_faster
    training_s = (batches * times.train_s / ranks + times.step_s) / ranks_faster
    return Prediction(
        schedule=schedule,
        generators=generators,
        iteration_s=seconds,
        tokens_per_s=batches * times.tokens_per_batch / seconds,
        generators_busy=min(1.0, sampling_s / seconds),
        trainer_busy=min(1.0, training_s / seconds),
        is_best_case=schedule == "colocated",
    )


def iteration_s(
    schedule: ScheduleName, times: MeasuredTimes, *, batches: int, generators: int, ranks: int = 1
) -> float:
    """Returns the formula's seconds from one commit to the next."""
    if schedule in ("delayed", "bounded"):
        # The next iteration's batches are open already, so no generator waits for the others' last batches.
        sampling_s = batches * times.generate_s / generators + times.load_s
        training_s = _passes_s(times, batches=batches, ranks=ranks) + times.step_s
        return max(sampling_s, training_s)
    generators_faster, ranks_faster = _gains(schedule, generators=generators, ranks=ranks)
    # Each generator samples whole batches of this iteration alone, and waits when there is none left. No number of
    # generators makes the longest batch shorter.
    rounds = math.ceil(batches / generators)
    sampling_s = max(rounds * times.generate_s, times.longest_batch_s) / generators_faster
    training_s = _passes_s(times, batches=batches, ranks=ranks) / ranks_faster
    sync_s = times.step_s / ranks_faster + times.load_s
    if schedule == "periodic":
        # Training begins with the first batch, and ends one pass after the last one at the earliest.
        last_batch_s = sampling_s + times.score_s + times.train_s
        first_batch_s = times.first_batch_s + times.score_s + training_s
        return sync_s + max(last_batch_s, first_batch_s)
    return sampling_s + times.score_s + training_s + sync_s


def _passes_s(times: MeasuredTimes, *, batches: int, ranks: int) -> float:
    """Returns the seconds of an iteration's first passes: each rank makes whole ones, at the same time."""
    return math.ceil(batches / ranks) * times.train_s


def _gains(schedule: ScheduleName, *, generators: int, ranks: int) -> tuple[float, float]:
    """Returns how many times as fast a generator and a rank are under a schedule, at best.

    Under `colocated` each phase has all the devices in its turn; under every other schedule it has its own.
    """
    if schedule != "colocated":
        return 1.0, 1.0
    devices = generators + ranks
    return devices / generators, devices / ranks
