"""Compares every schedule for a job, and every number of generators that is asked about; and recommends one.

spec, costs ─▶ candidates ─▶ predict each ─▶ Plan: a row each, a recommendation with its reason
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from contracts.encoding.wire import Record
from contracts.schedule import Schedule, ScheduleName
from contracts.spec.job import JobSpec
from onbeat.planning.pipeline.costs import Costs, Machines
from onbeat.planning.predictions import Prediction, predict

NEARLY = 1.05
"""What is at most so many times as long as the fastest counts as fast: the rest is decided by what else matters."""
COLOCATED_IS_IDEAL = (
    "colocated is shown at best, as if each phase became faster by all the devices that it gains, so it is not "
    "recommended here; --colocated G,T states the gains"
)


class Plan(Record, frozen=True, kw_only=True):
    """What `onbeat plan --json` prints."""

    job: str
    """The spec's name."""
    source: str
    """Where the rates come from."""
    warnings: tuple[str, ...]
    predictions: tuple[Prediction, ...]
    recommended: Prediction
    reason: str
    recommended_without_lag: Prediction
    """The same among the schedules whose iterations are sampled by their own version."""
    picture: str = ""
    """The file of the swim lanes."""


def candidates(lags: Iterable[int], num_iterations: int) -> list[Schedule]:
    """Each schedule, the lagging ones with each lag that is shorter than the job."""
    own = [Schedule("colocated"), Schedule("synchronous"), Schedule("periodic")]
    names: tuple[ScheduleName, ...] = ("delayed", "bounded")
    lagging = [Schedule(name, lag) for lag in lags if lag < num_iterations for name in names]
    return [*own, *lagging]


def compare(
    spec: JobSpec,
    costs: Costs,
    machines: Machines,
    *,
    schedules: Sequence[Schedule],
    generators: Sequence[int],
    replications: int,
    seed: int,
) -> Plan:
    """Predicts each schedule with each number of generators."""
    of_each = [replace(machines, num_generators=number) for number in generators]
    found = tuple(
        predict(spec, schedule, machines_for(schedule, one), costs, replications=replications, seed=seed)
        for one in of_each
        for schedule in schedules
    )
    sure = [one for one in found if not one.is_at_best]
    chosen = choose(sure)
    without_lag = choose([one for one in sure if one.max_policy_lag == 0])
    warnings = list(costs.warnings)
    if len(sure) < len(found):
        warnings.append(COLOCATED_IS_IDEAL)
    slowest_s = max(one.iteration_s.high for one in found)
    if slowest_s > spec.timeouts.iteration_s:
        warnings.append(
            f"an iteration may take {slowest_s:.0f} s, which is more than timeouts.iteration_s = "
            f"{spec.timeouts.iteration_s:g} s: the job would fail"
        )
    return Plan(
        job=spec.name,
        source=costs.source,
        warnings=tuple(warnings),
        predictions=found,
        recommended=chosen,
        reason=reason_for(chosen, without_lag, sure),
        recommended_without_lag=without_lag,
    )


def machines_for(schedule: Schedule, machines: Machines) -> Machines:
    """Under `colocated` each phase has all the devices, and shares them with nothing."""
    if schedule.name != "colocated" or machines.is_gain_known:
        return machines
    generators, ranks = machines.num_generators, machines.world_size
    if machines.num_cores:
        of_generator = machines.num_cores / (generators * machines.threads)
        of_rank = machines.num_cores / (ranks * machines.threads)
    else:
        of_generator, of_rank = (generators + ranks) / generators, (generators + ranks) / ranks
    return replace(machines, generator_gain=max(1.0, of_generator), trainer_gain=max(1.0, of_rank), num_cores=0)


def choose(found: Sequence[Prediction]) -> Prediction:
    """Prefers, of those nearly as fast as the fastest, the fewest generators, then the least lag, then determinism."""
    fastest_s = min(one.iteration_s.mean for one in found)
    fast = [one for one in found if one.iteration_s.mean <= NEARLY * fastest_s]
    return min(
        fast, key=lambda one: (one.generators, one.max_policy_lag, one.schedule == "bounded", one.iteration_s.mean)
    )


def reason_for(chosen: Prediction, without_lag: Prediction, found: Sequence[Prediction]) -> str:
    """In words, with the numbers that decided."""
    fastest = min(found, key=lambda one: one.iteration_s.mean)
    parts = [f"{named(chosen)} takes {chosen.iteration_s.mean:.3g} s an iteration"]
    if chosen is not fastest:
        parts.append(
            f"which is within {NEARLY - 1:.0%} of the fastest, {named(fastest)} with {fastest.iteration_s.mean:.3g} s"
        )
    if chosen.max_policy_lag:
        gain = without_lag.iteration_s.mean / chosen.iteration_s.mean
        parts.append(f"{gain:.2f} times as fast as the best without a lag, {named(without_lag)}")
    generators, trainer = chosen.generators_busy, chosen.trainer_busy
    if trainer < 0.8 and generators < 0.8:
        limit = "neither part is busy all the time: what is left are waits for each other and for weights"
    elif trainer >= generators:
        limit = f"the trainer is the limit, at {trainer:.0%}: further generators would wait for it"
    else:
        limit = f"the generators are the limit, at {generators:.0%}, the trainer waits {1 - trainer:.0%} of the time"
    return "; ".join([", ".join(parts), limit])


def named(one: Prediction) -> str:
    """`delayed, lag 1, with 3 generators`"""
    lag = f", lag {one.max_policy_lag}," if one.max_policy_lag else ""
    return f"{one.schedule}{lag} with {one.generators} generator{'' if one.generators == 1 else 's'}"
