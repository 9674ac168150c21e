"""One schedule on given machines, in numbers: walks of its pipeline, their mean and their spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import accumulate, pairwise

from contracts.encoding.wire import Record
from contracts.schedule import Schedule, ScheduleName
from contracts.spec.job import JobSpec
from onbeat.planning.pipeline.costs import Costs, Machines, batch_bytes
from onbeat.planning.pipeline.walk import Run, walk

MOST_WALKED_BATCHES = 2048
"""One replication ends there; a longer job is its beginning, repeated."""
FEWEST_WALKED = 12
"""Iterations, where the job has as many, also of very large ones."""
PRESENCE_S, BEATS_PER_LEASE = 2.0, 3
"""As in onbeat/work/heartbeat.py."""


class Range(Record, frozen=True, kw_only=True):
    """A number that varies from iteration to iteration."""

    mean: float
    low: float
    """The 5th percentile of single iterations over all replications."""
    high: float
    """The 95th."""


class RedisLoad(Record, frozen=True, kw_only=True):
    """What a job asks of Redis; its prompts, events and audit chain are not in it."""

    scripts_per_s: float
    """Calls of scripts, heartbeats of all processes with them."""
    bytes_per_s: float
    """Rollout batches, in from the generators and out to the trainer."""
    most_resident_bytes: float
    """Rollout batches that are there at the same time: at most those of max_policy_lag + 1 iterations."""


class Prediction(Record, frozen=True, kw_only=True):
    """A row of a plan."""

    schedule: ScheduleName
    max_policy_lag: int
    generators: int
    world_size: int
    iteration_s: Range
    """From commit to commit."""
    bound_s: float
    """The least that an iteration can take under this schedule (`lower_bound_s`)."""
    job_s: float
    """All iterations of the job."""
    tokens_per_s: float
    generators_busy: float
    """Share of the time in which a generator samples, over all of them."""
    trainer_busy: float
    """Share of the time in which a rank trains or steps, over all of them."""
    lag_mean: float
    """The mean over the trained batches."""
    is_at_best: bool = False
    """Whether it takes devices to scale ideally: `colocated` without a stated gain."""
    redis: RedisLoad


def predict(
    spec: JobSpec, schedule: Schedule, machines: Machines, costs: Costs, *, replications: int = 5, seed: int = 0
) -> Prediction:
    """Walks the pipeline `replications` times, with the seeds from `seed` on."""
    number, first = num_walked(spec), warm_up(spec, schedule)
    runs = [
        walk(spec, schedule, machines, costs, num_iterations=number, seed=seed + each) for each in range(replications)
    ]
    durations_s = [after - before for run in runs for before, after in pairwise(run.commits_s[first:])]
    mean_s = statistics.fmean(durations_s)
    total_s = sum(run.commits_s[-1] for run in runs)
    batches = [batch for run in runs for batch in run.batches]
    lags = [batch.iteration - batch.version for batch in batches if batch.is_training]
    return Prediction(
        schedule=schedule.name,
        max_policy_lag=schedule.max_policy_lag,
        generators=machines.num_generators,
        world_size=machines.world_size,
        iteration_s=Range(mean=mean_s, low=_percentile(durations_s, 0.05), high=_percentile(durations_s, 0.95)),
        bound_s=lower_bound_s(spec, schedule, machines, costs),
        job_s=mean_s * spec.iterations,
        tokens_per_s=sum(batch.cost.num_tokens for batch in batches if batch.is_training) / total_s,
        generators_busy=sum(run.busy_s("generate") for run in runs) / (total_s * machines.num_generators),
        trainer_busy=sum(run.busy_s("train", "step") for run in runs) / (total_s * machines.world_size),
        lag_mean=statistics.fmean(lags),
        is_at_best=schedule.name == "colocated" and not machines.is_gain_known,
        redis=_redis_load(spec, machines, runs, total_s),
    )


def num_walked(spec: JobSpec) -> int:
    """Iterations of one replication."""
    most = max(FEWEST_WALKED, MOST_WALKED_BATCHES // spec.rollout.batches_per_iteration)
    return min(spec.iterations, most)


def warm_up(spec: JobSpec, schedule: Schedule) -> int:
    """Commits until the pipeline is full; of a very short job it is never."""
    return min(schedule.max_policy_lag + 1, max(0, num_walked(spec) - 2))


def lower_bound_s(spec: JobSpec, schedule: Schedule, machines: Machines, costs: Costs) -> float:
    """The least that an iteration without an evaluation and a checkpoint can take, whatever the order of its events.

    synchronous, colocated    T_gen + T_train + T_sync
    periodic                  T_sync + max(T_gen + t_last, t_first + T_train)
    delayed, bounded          max(T_gen + swap, T_train + T_step)

    T_gen and T_train are the work of an iteration over all generators or ranks, as if it could be divided at will;
    T_sync is the way from the last gradient to the first token of the next version; t_last is the training of the last
    batch, and t_first the generation of the first one.
    """
    batches, waits = spec.rollout.batches_per_iteration, costs.waits
    is_colocated = schedule.name == "colocated"
    of_generator = machines.generator_gain if is_colocated else 1.0
    of_rank = machines.trainer_gain if is_colocated else 1.0
    size = spec.rollout.prompts_per_batch * spec.rollout.group_size
    at_once = max(1, -(-machines.completions_at_once // size))
    each_s = costs.generate_s / of_generator
    generate_s = batches * (each_s + waits.claim_s) / (machines.num_generators * at_once)
    train_s = batches * costs.train_s / machines.world_size / of_rank
    step_s = statistics.fmean(one.step_s for one in costs.steps) / of_rank
    publish_s = statistics.fmean(one.publish_s for one in costs.steps)
    boundary_s = step_s + publish_s + waits.open_s
    sync_s = boundary_s + waits.load_s
    if schedule.lags:
        return max(generate_s + waits.swap_s, train_s + boundary_s + waits.after_s)
    if schedule.takes_at_once:
        score_s = statistics.fmean(batch.rounds[-1].score_s for batch in costs.training)
        last_s = score_s + costs.train_s / of_rank
        return sync_s + max(generate_s + last_s, each_s + score_s + train_s)
    switch_s = 2 * machines.switch_s if is_colocated else 0.0
    return generate_s + train_s + sync_s + switch_s


def _redis_load(spec: JobSpec, machines: Machines, runs: Sequence[Run], total_s: float) -> RedisLoad:
    beat_s = min(PRESENCE_S, spec.timeouts.generator_lease_s / BEATS_PER_LEASE)
    # A heartbeat shows the generator and renews its leases; a claim brings the next one forward.
    beats = 2 * (machines.num_generators / beat_s + sum(run.num_claims for run in runs) / total_s)
    renewals = BEATS_PER_LEASE / spec.timeouts.trainer_lease_s
    num_bytes = sum(batch_bytes(spec, batch.cost) for run in runs for batch in run.batches)
    return RedisLoad(
        scripts_per_s=sum(run.num_scripts for run in runs) / total_s + beats + renewals,
        bytes_per_s=2 * num_bytes / total_s,
        most_resident_bytes=max(most_resident(run, spec) for run in runs),
    )


def most_resident(run: Run, spec: JobSpec) -> float:
    """Bytes of rollout batches that Redis holds at the same time: an iteration's go when it is committed."""
    sizes = [(batch, batch_bytes(spec, batch.cost)) for batch in run.batches]
    changes = [(batch.scored_s, size) for batch, size in sizes]
    changes += [(run.commits_s[batch.iteration], -size) for batch, size in sizes]
    return max(accumulate(num_bytes for _, num_bytes in sorted(changes)))


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
