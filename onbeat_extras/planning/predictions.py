"""One schedule on given machines, in numbers: replications of its simulation, their mean and their spread."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from contracts.encoding.wire import Record
from contracts.schedule import Schedule, ScheduleName
from contracts.spec import JobSpec
from onbeat_extras.planning.bounds import lower_bound_s
from onbeat_extras.planning.pipeline.costs import Costs, batch_bytes
from onbeat_extras.planning.pipeline.generators import BEATS_PER_LEASE, PRESENCE_INTERVAL_S
from onbeat_extras.planning.pipeline.simulation import Machines, Outcome, Setup, simulate
from onbeat_extras.planning.pipeline.trainer import start

MOST_SIMULATED_BATCHES = 2048
"""One replication ends there; a longer job is its beginning, repeated."""
FEWEST_SIMULATED = 12
"""Iterations, where the job has as many, also of very large ones."""


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
    """The least that an iteration can take under this schedule (onbeat_extras/planning/bounds.py)."""
    job_s: float
    """All iterations of the job."""
    tokens_per_s: float
    generators_busy: float
    """Share of the time in which a generator samples, over all of them."""
    trainer_busy: float
    """Share of the time in which a rank trains or steps, over all of them."""
    lag_mean: float
    """The mean over the trained batches."""
    hedges: float
    """Copies of late batches, of an iteration."""
    is_at_best: bool = False
    """Whether it takes devices to scale ideally: `colocated` without a stated gain."""
    redis: RedisLoad


def predict(
    spec: JobSpec, schedule: Schedule, machines: Machines, costs: Costs, *, replications: int = 5, seed: int = 0
) -> Prediction:
    """Runs `replications` simulations, with the seeds from `seed` on."""
    of_schedule = scheduled(spec, schedule)
    setup = Setup(
        spec=of_schedule,
        schedule=schedule,
        machines=machines,
        costs=costs,
        batch_bytes=batch_bytes(of_schedule),
        num_iterations=num_simulated(of_schedule),
    )
    outcomes = [simulate(setup, seed + number, start=start) for number in range(replications)]
    first = warm_up(setup)
    durations_s = [after - before for found in outcomes for before, after in pairwise(found.commits_s[first:])]
    mean_s = statistics.fmean(durations_s)
    total_s = sum(found.commits_s[-1] for found in outcomes)
    num_commits = sum(len(found.commits_s) for found in outcomes)
    lags = sum((found.lags for found in outcomes), Counter[int]())
    return Prediction(
        schedule=schedule.name,
        max_policy_lag=schedule.max_policy_lag,
        generators=machines.num_generators,
        world_size=machines.world_size,
        iteration_s=Range(mean=mean_s, low=_percentile(durations_s, 0.05), high=_percentile(durations_s, 0.95)),
        bound_s=lower_bound_s(spec, schedule, machines, costs),
        job_s=mean_s * spec.iterations,
        tokens_per_s=sum(found.num_tokens for found in outcomes) / total_s,
        generators_busy=_busy(outcomes, ("generate",)) / (total_s * machines.num_generators),
        trainer_busy=_busy(outcomes, ("train", "step")) / (total_s * machines.world_size),
        lag_mean=sum(lag * number for lag, number in lags.items()) / max(1, lags.total()),
        hedges=sum(found.num_hedges for found in outcomes) / num_commits,
        is_at_best=schedule.name == "colocated" and not machines.is_gain_known,
        redis=_redis_load(of_schedule, machines, outcomes, total_s),
    )


def scheduled(spec: JobSpec, schedule: Schedule) -> JobSpec:
    """The spec under another schedule: a bounded lag is not deterministic, so that nothing is hedged."""
    return msgspec.structs.replace(spec, deterministic=False) if schedule.name == "bounded" else spec


def num_simulated(spec: JobSpec) -> int:
    """Iterations of one replication."""
    most = max(FEWEST_SIMULATED, MOST_SIMULATED_BATCHES // spec.rollout.batches_per_iteration)
    return min(spec.iterations, most)


def warm_up(setup: Setup) -> int:
    """Commits until the pipeline is full; of a very short job it is never."""
    return min(setup.schedule.max_policy_lag + 1, max(0, setup.num_iterations - 2))


def _busy(outcomes: Sequence[Outcome], kinds: Sequence[str]) -> float:
    return sum(found.busy_s[what] for found in outcomes for what in kinds)


def _redis_load(spec: JobSpec, machines: Machines, outcomes: Sequence[Outcome], total_s: float) -> RedisLoad:
    scripts = sum(found.scripts.total() for found in outcomes) / total_s
    beat_s = min(PRESENCE_INTERVAL_S, spec.timeouts.generator_lease_s / BEATS_PER_LEASE)
    claims = sum(found.scripts["claim_prompt"] for found in outcomes) / total_s
    # A heartbeat shows the generator and renews its leases; a claim brings the next one forward.
    beats = 2 * (machines.num_generators / beat_s + claims)
    renewals = BEATS_PER_LEASE / spec.timeouts.trainer_lease_s
    return RedisLoad(
        scripts_per_s=scripts + beats + renewals,
        bytes_per_s=2 * sum(found.rollout_bytes for found in outcomes) / total_s,
        most_resident_bytes=max(found.most_resident_bytes for found in outcomes),
    )


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
