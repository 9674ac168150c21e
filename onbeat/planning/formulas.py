"""Predicts seconds an iteration under each schedule by a closed formula of measured times.

B batches an iteration, N generators, W ranks of the trainer, K versions of lag:

    T_gen    B batches over N generators, each batch with its claim
    T_train  B first passes over W ranks
    T_step   the optimizer, publishing the version, the commit
    T_sync   T_step and loading the version

    synchronous          T_gen + T_score + T_train + T_sync
    colocated            the same, each phase as much faster as it gains devices
    periodic             T_sync + max(T_gen + T_score + one pass, one batch + T_score + T_train)
    delayed, bounded     max(T_gen + loading the version, T_train + T_step)

The formulas know means alone. They leave out what single long batches and the order of events cost, so that they are
best where one side decides and lowest where several generators share few batches of very different lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from contracts.encoding.wire import Record
from contracts.schedule import Schedule, ScheduleName
from contracts.spec.job import JobSpec
from onbeat.planning.measured import MeasuredTimes

NEARLY = 1.05
"""A schedule that takes at most so many times the fastest one's seconds counts as fast; other reasons decide there."""
BYTES_OF_A_TOKEN = 12
"""Its id, its log-prob, and four characters: English text in vocabularies of today."""
BYTES_OF_A_COMPLETION = 125
BYTES_OF_A_BATCH = 450
"""What else is encoded: names, rewards, times."""
BYTES_OF_A_PROMPT_TOKEN = 4
LONGEST_COUNTED_PROMPT = 256
"""Tokens; prompts are taken to be no longer."""
COLOCATED_IS_IDEAL = (
    "colocated is shown at best, as if each phase became faster by all the devices that it gains, so it is not "
    "recommended"
)


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The processes of a planned job and the cores that they share."""

    num_generators: int
    world_size: int
    num_cores: int = 0
    """Cores of the one machine that all processes share; 0: each process has cores or devices of its own."""
    threads: int = 1
    """Threads of each process, with `num_cores`."""


class Prediction(Record, frozen=True, kw_only=True):
    """A row of a plan."""

    schedule: ScheduleName
    max_policy_lag: int
    generators: int
    world_size: int
    iteration_s: float
    """From commit to commit, of an iteration without an evaluation and a checkpoint."""
    job_s: float
    """All iterations of the job, with its evaluations and checkpoints."""
    tokens_per_s: float
    """Sampled tokens."""
    generators_busy: float
    """Share of an iteration in which a generator samples; for the rest it waits."""
    trainer_busy: float
    """Share of an iteration in which a rank trains or steps; for the rest it waits."""
    redis_bytes: float
    """Rollout batches that are in Redis at once: at most those of all open iterations."""
    redis_bytes_per_s: float
    """Rollout batches, in from the generators and out to the trainer."""
    is_at_best: bool = False
    """True of `colocated`, whose phases are taken to scale ideally."""


class Plan(Record, frozen=True, kw_only=True):
    """The answer of `onbeat plan --json`."""

    job: str
    """The spec's name."""
    measured: MeasuredTimes
    warnings: tuple[str, ...]
    predictions: tuple[Prediction, ...]
    recommended: Prediction
    reason: str
    recommended_without_lag: Prediction
    """The recommendation among the schedules whose iterations are sampled by their own version."""
    balanced_generators: int
    """So many generators sample as fast as the trainer trains; further ones wait for it."""


def candidates(lags: Iterable[int], num_iterations: int) -> list[Schedule]:
    """Returns each schedule, the lagging ones with each lag that is shorter than the job."""
    without_lag = [Schedule("colocated"), Schedule("synchronous"), Schedule("periodic")]
    lagging_names: tuple[ScheduleName, ...] = ("delayed", "bounded")
    lagging = [Schedule(name, lag) for lag in lags if lag < num_iterations for name in lagging_names]
    return [*without_lag, *lagging]


def compare(
    spec: JobSpec,
    times: MeasuredTimes,
    *,
    machines: Sequence[Machines],
    schedules: Sequence[Schedule],
) -> Plan:
    """Predicts each schedule on each of `machines`, and recommends one."""
    predictions = tuple(predict(spec, schedule, times, each) for each in machines for schedule in schedules)
    comparable = [row for row in predictions if not row.is_at_best]
    recommended = recommend(comparable)
    without_lag = recommend([row for row in comparable if row.max_policy_lag == 0])
    warnings: list[str] = []
    if len(comparable) < len(predictions):
        warnings.append(COLOCATED_IS_IDEAL)
    slowest_s = max(row.iteration_s for row in predictions)
    if slowest_s > spec.timeouts.iteration_s:
        warnings.append(
            f"an iteration may take {slowest_s:.0f} s, which is more than timeouts.iteration_s = "
            f"{spec.timeouts.iteration_s:g} s: the job would fail"
        )
    return Plan(
        job=spec.name,
        measured=times,
        warnings=tuple(warnings),
        predictions=predictions,
        recommended=recommended,
        reason=_reason(recommended, without_lag, comparable),
        recommended_without_lag=without_lag,
        balanced_generators=balanced_generators(spec, times, world_size=machines[0].world_size),
    )


def predict(spec: JobSpec, schedule: Schedule, times: MeasuredTimes, machines: Machines) -> Prediction:
    """Predicts one schedule on given machines."""
    batches = spec.rollout.batches_per_iteration
    seconds = iteration_s(schedule, times, machines, batches=batches)
    generators_faster, ranks_faster = _gains(schedule, machines)
    sampling_s = batches * times.generate_s / machines.num_generators / generators_faster
    training_s = (batches * times.train_s / machines.world_size + times.step_s) / ranks_faster
    num_bytes = batches * batch_bytes(spec, times.tokens_per_batch)
    return Prediction(
        schedule=schedule.name,
        max_policy_lag=schedule.max_policy_lag,
        generators=machines.num_generators,
        world_size=machines.world_size,
        iteration_s=seconds,
        job_s=seconds * spec.iterations + _evaluations_s(spec, times, machines) + _checkpoints_s(spec, times),
        tokens_per_s=batches * times.tokens_per_batch / seconds,
        generators_busy=min(1.0, sampling_s / seconds),
        trainer_busy=min(1.0, training_s / seconds),
        redis_bytes=num_bytes * schedule.num_open,
        redis_bytes_per_s=2 * num_bytes / seconds,
        is_at_best=schedule.name == "colocated",
    )


def iteration_s(schedule: Schedule, times: MeasuredTimes, machines: Machines, *, batches: int) -> float:
    """Returns the formula's seconds from one commit to the next."""
    generators_faster, ranks_faster = _gains(schedule, machines)
    generate_s = (times.generate_s + times.claim_s) / generators_faster
    passes = math.ceil(batches / machines.world_size)
    train_s = passes * (times.train_s + times.take_s) / ranks_faster
    step_s = times.step_s / ranks_faster + times.publish_s + times.open_s
    sync_s = step_s + times.load_s
    score_s = times.score_s + times.arrival_s
    if schedule.lags:
        # The next iteration's batches are open already, so no generator waits for the others' last batches.
        sampling_s = batches * generate_s / machines.num_generators
        seconds = max(sampling_s + times.load_s, train_s + step_s + times.after_commit_s)
    else:
        # Each generator samples whole batches of this iteration alone, and waits when there is none left.
        rounds = math.ceil(batches / machines.num_generators)
        sampling_s = max(rounds * generate_s, times.longest_batch_s / generators_faster)
        if schedule.takes_at_once:
            last_s = sampling_s + score_s + times.train_s
            first_s = times.batch_latency_s + score_s + train_s
            seconds = sync_s + max(last_s, first_s)
        else:
            seconds = sampling_s + score_s + train_s + sync_s
    return max(seconds, _shared_cores_s(schedule, times, machines, batches=batches))


def balanced_generators(spec: JobSpec, times: MeasuredTimes, *, world_size: int) -> int:
    """Returns the fewest generators that sample an iteration while the trainer trains one, and at least 1."""
    batches = spec.rollout.batches_per_iteration
    sampling_s = batches * (times.generate_s + times.claim_s)
    trainer_s = math.ceil(batches / world_size) * (times.train_s + times.take_s)
    trainer_s += times.step_s + times.publish_s + times.open_s + times.after_commit_s
    return max(1, math.ceil(sampling_s / trainer_s)) if trainer_s > 0.0 else 1


def recommend(rows: Sequence[Prediction]) -> Prediction:
    """Chooses among the rows nearly as fast as the fastest.

    Fewer generators come first, then a shorter lag, then determinism, then speed.
    """
    fastest_s = min(row.iteration_s for row in rows)
    fast = [row for row in rows if row.iteration_s <= NEARLY * fastest_s]
    return min(fast, key=lambda row: (row.generators, row.max_policy_lag, row.schedule == "bounded", row.iteration_s))


def name_of(row: Prediction) -> str:
    """Returns `delayed, lag 1, with 3 generators`."""
    lag = f", lag {row.max_policy_lag}," if row.max_policy_lag else ""
    plural = "" if row.generators == 1 else "s"
    return f"{row.schedule}{lag} with {row.generators} generator{plural}"


def batch_bytes(spec: JobSpec, num_tokens: float) -> float:
    """Returns the bytes of a published rollout batch of so many sampled tokens, within some 10 % of its record."""
    rollout = spec.rollout
    prompt_bytes = BYTES_OF_A_PROMPT_TOKEN * min(rollout.max_prompt_tokens, LONGEST_COUNTED_PROMPT)
    group_bytes = prompt_bytes + BYTES_OF_A_COMPLETION * rollout.group_size
    return BYTES_OF_A_BATCH + rollout.prompts_per_batch * group_bytes + BYTES_OF_A_TOKEN * num_tokens


def _gains(schedule: Schedule, machines: Machines) -> tuple[float, float]:
    """Returns how many times as fast a generator and a rank are under a schedule, at best.

    Under `colocated` each phase has all the devices in its turn; under every other schedule it has its own.
    """
    if not schedule.takes_turns:
        return 1.0, 1.0
    generators, ranks = machines.num_generators, machines.world_size
    if machines.num_cores:
        cores_a_thread = machines.num_cores / machines.threads
        return max(1.0, cores_a_thread / generators), max(1.0, cores_a_thread / ranks)
    devices = generators + ranks
    return devices / generators, devices / ranks


def _shared_cores_s(schedule: Schedule, times: MeasuredTimes, machines: Machines, *, batches: int) -> float:
    """Returns the seconds that the shared cores need for an iteration's work, however it is arranged; 0 if unshared."""
    if machines.num_cores == 0 or schedule.takes_turns:
        return 0.0
    threads_s = machines.threads * (batches * (times.generate_s + times.train_s) + times.step_s)
    return threads_s / machines.num_cores


def _evaluations_s(spec: JobSpec, times: MeasuredTimes, machines: Machines) -> float:
    """Returns the seconds of all evaluations, which generators sample before they go on with training batches."""
    number = sum(spec.evaluates(version) for version in range(spec.iterations + 1))
    rounds = math.ceil(spec.evaluation.num_batches / machines.num_generators)
    return number * rounds * times.evaluation_s


def _checkpoints_s(spec: JobSpec, times: MeasuredTimes) -> float:
    return times.checkpoint_s * sum(spec.checkpoints_after(iteration) for iteration in range(spec.iterations))


def _reason(chosen: Prediction, without_lag: Prediction, rows: Sequence[Prediction]) -> str:
    """Says why a row is recommended, with the numbers that decided."""
    fastest = min(rows, key=lambda row: row.iteration_s)
    parts = [f"{name_of(chosen)} takes {chosen.iteration_s:.3g} s an iteration"]
    if chosen is not fastest:
        parts.append(
            f"which is within {NEARLY - 1:.0%} of the fastest, {name_of(fastest)} with {fastest.iteration_s:.3g} s"
        )
    if chosen.max_policy_lag:
        gain = without_lag.iteration_s / chosen.iteration_s
        parts.append(f"{gain:.2f} times as fast as the best without a lag, {name_of(without_lag)}")
    return "; ".join([", ".join(parts), _limit(chosen)])


def _limit(chosen: Prediction) -> str:
    """Says which side waits for the other."""
    if chosen.trainer_busy >= chosen.generators_busy:
        waiting = 1.0 - chosen.generators_busy
        return f"the trainer is busy {chosen.trainer_busy:.0%} of the time, the generators wait for {waiting:.0%}"
    waiting = 1.0 - chosen.trainer_busy
    return (
        f"the generators are busy {chosen.generators_busy:.0%} of the time, the trainer waits for {waiting:.0%} of it"
    )
