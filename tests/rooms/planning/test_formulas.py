"""Each schedule's formula: worked out by hand, and beside what was measured of every schedule."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from contracts.encoding.wire import encode
from contracts.schedule import Schedule
from contracts.spec.job import JobSpec
from onbeat.planning.formulas import (
    Machines,
    Prediction,
    balanced_generators,
    batch_bytes,
    candidates,
    compare,
    iteration_s,
    predict,
    recommend,
)
from onbeat.planning.measured import MeasuredTimes
from tests.builders import job_spec, rollout_batch

ROOT = Path(__file__).parents[3]
SCHEDULES_RESULT = ROOT / "benchmarks/results/schedules-2026-11-22.json"
REACH = 0.10
ONE_EACH = Machines(num_generators=1, world_size=1)


def times(**changes: float) -> MeasuredTimes:
    """Zero seconds but for what a test names; a batch has 100 tokens."""
    names = [name for name in MeasuredTimes.__struct_fields__ if name.endswith("_s")]
    values: dict[str, float] = {**dict.fromkeys(names, 0.0), **changes}
    values.setdefault("batch_latency_s", 0.0)
    values["batch_latency_s"] = changes.get("batch_latency_s", values["generate_s"])
    return MeasuredTimes(
        job_id="job-0123456789ab", schedule="synchronous", num_iterations=6, tokens_per_batch=100.0, **values
    )


def spec(**changes: Any) -> JobSpec:
    """Eight batches an iteration, no evaluation, no checkpoint but the last."""
    values = {"iterations": 20, "evaluation__num_prompts": 0, "rollout__batches_per_iteration": 8}
    return job_spec(**{**values, "trainer__checkpoint_every_iterations": 100, **changes})


def seconds(schedule: Schedule, measured: MeasuredTimes, machines: Machines = ONE_EACH) -> float:
    return iteration_s(schedule, measured, machines, batches=8)


def test_synchronous_takes_generation_training_and_the_way_of_the_weights_in_turn() -> None:
    measured = times(generate_s=1.0, train_s=2.0, step_s=0.125, publish_s=0.0625, load_s=0.5, open_s=0.25, score_s=0.75)
    expected = 8 * 1.0 + 0.75 + 8 * 2.0 + 0.125 + 0.0625 + 0.25 + 0.5
    assert seconds(Schedule("synchronous"), measured) == expected


@pytest.mark.parametrize(("generate_s", "train_s"), [(1.0, 1.0), (1.0, 3.0), (3.0, 1.0)])
def test_periodic_is_late_by_the_first_batch_or_the_last_one(generate_s: float, train_s: float) -> None:
    measured = times(generate_s=generate_s, train_s=train_s, step_s=0.5)
    expected = 0.5 + max(8 * generate_s + train_s, generate_s + 8 * train_s)
    assert seconds(Schedule("periodic"), measured) == expected


@pytest.mark.parametrize("name", ["delayed", "bounded"])
@pytest.mark.parametrize(("generate_s", "train_s"), [(1.0, 1.0), (1.0, 3.0), (3.0, 1.0)])
def test_a_lag_leaves_the_slower_side_without_a_pause(name: Any, generate_s: float, train_s: float) -> None:
    measured = times(generate_s=generate_s, train_s=train_s, step_s=0.5, load_s=0.25)
    expected = max(8 * generate_s + 0.25, 8 * train_s + 0.5)
    assert seconds(Schedule(name, 1), measured) == expected


def test_generators_share_an_iteration_in_whole_batches_unless_the_next_one_is_open() -> None:
    measured = times(generate_s=1.0, train_s=0.0, longest_batch_s=2.5)
    three = Machines(num_generators=3, world_size=1)
    eight = Machines(num_generators=8, world_size=1)
    assert seconds(Schedule("synchronous"), measured, three) == 3.0
    assert seconds(Schedule("delayed", 1), measured, three) == pytest.approx(8 / 3)
    # No number of generators makes the longest batch shorter.
    assert seconds(Schedule("synchronous"), measured, eight) == 2.5


def test_ranks_share_the_passes() -> None:
    measured = times(generate_s=1.0, train_s=1.0, step_s=0.5)
    assert seconds(Schedule("synchronous"), measured, Machines(num_generators=1, world_size=4)) == 8.0 + 2.0 + 0.5


def test_colocated_phases_have_all_devices_at_best() -> None:
    measured = times(generate_s=1.0, train_s=2.0)
    apart = Machines(num_generators=3, world_size=1)
    assert seconds(Schedule("colocated"), measured, apart) == pytest.approx(3 * 1.0 / (4 / 3) + 16.0 / 4)
    shared = Machines(num_generators=1, world_size=1, num_cores=4, threads=2)
    assert seconds(Schedule("colocated"), measured, shared) == pytest.approx(8.0 / 2 + 16.0 / 2)
    assert predict(spec(), Schedule("colocated"), measured, apart).is_at_best


def test_processes_on_one_machine_take_at_least_the_seconds_of_its_cores() -> None:
    measured = times(generate_s=1.0, train_s=1.0)
    delayed = Schedule("delayed", 1)
    assert seconds(delayed, measured) == 8.0
    assert seconds(delayed, measured, Machines(num_generators=1, world_size=1, num_cores=2)) == 8.0
    assert seconds(delayed, measured, Machines(num_generators=1, world_size=1, num_cores=1)) == 16.0


def test_a_prediction_has_what_waits_and_what_redis_holds() -> None:
    measured = times(generate_s=1.0, train_s=2.0)
    row = predict(spec(), Schedule("delayed", 2), measured, ONE_EACH)
    assert (row.iteration_s, row.generators_busy, row.trainer_busy) == (16.0, 0.5, 1.0)
    assert row.tokens_per_s == 8 * 100 / 16.0
    assert row.redis_bytes == 3 * 8 * batch_bytes(spec(), 100.0)
    assert row.redis_bytes_per_s == 2 * 8 * batch_bytes(spec(), 100.0) / 16.0
    assert balanced_generators(spec(), measured, world_size=1) == 1
    assert balanced_generators(spec(), times(generate_s=5.0, train_s=2.0), world_size=1) == 3


def test_a_job_has_its_evaluations_and_checkpoints_beside_its_iterations() -> None:
    measured = times(generate_s=1.0, train_s=1.0, evaluation_s=0.5, checkpoint_s=3.0)
    evaluating = spec(evaluation__num_prompts=8, evaluation__prompts_per_batch=4, evaluation__every_iterations=10)
    row = predict(evaluating, Schedule("synchronous"), measured, ONE_EACH)
    # Versions 0, 10 and 20 are evaluated, each by two sampled and two greedy batches; the one checkpoint is the last.
    assert row.job_s == pytest.approx(20 * 16.0 + 3 * 4 * 0.5 + 3.0)


@pytest.mark.parametrize("tokens", [5, 200])
def test_the_bytes_of_a_batch_are_nearly_those_of_its_encoded_record(tokens: int) -> None:
    encoded = len(encode(rollout_batch(prompt_tokens=(8, 8), response_tokens=(tokens, tokens))))
    short_prompts = spec(rollout__max_prompt_tokens=8)
    # Texts of builders are empty: here they would have four characters for each token.
    assert batch_bytes(short_prompts, 8 * tokens) == pytest.approx(encoded + 4 * 8 * tokens, rel=0.1)


def test_each_schedule_is_tried_and_lags_that_the_job_is_too_short_for_are_not() -> None:
    assert [(schedule.name, schedule.max_policy_lag) for schedule in candidates([1, 5], 4)] == [
        ("colocated", 0),
        ("synchronous", 0),
        ("periodic", 0),
        ("delayed", 1),
        ("bounded", 1),
    ]


def row(schedule: Any, iteration_seconds: float, *, lag: int = 0, generators: int = 1) -> Prediction:
    base = predict(spec(), Schedule(schedule, lag), times(generate_s=1.0, train_s=1.0), ONE_EACH)
    return replace(base, iteration_s=iteration_seconds, generators=generators)


def test_fewer_generators_and_a_shorter_lag_are_preferred_among_the_nearly_fastest() -> None:
    periodic = row("periodic", 1.04)
    delayed = row("delayed", 1.01, lag=1)
    bounded = row("bounded", 1.0, lag=1)
    assert recommend([bounded, delayed, periodic]) is periodic
    assert recommend([bounded, delayed, row("periodic", 1.2)]) is delayed
    assert recommend([row("periodic", 0.99, generators=4), delayed]) is delayed
    assert recommend([row("periodic", 0.5, generators=4), delayed]).generators == 4


def test_the_advice_says_who_waits_and_what_a_lag_gains() -> None:
    measured = times(generate_s=1.0, train_s=2.0, step_s=1.0, load_s=2.0)
    plan = compare(spec(), measured, machines=[ONE_EACH], schedules=candidates([1], 20))
    assert (plan.recomrepaired.schedule, plan.recomrepaired.max_policy_lag) == ("delayed", 1)
    assert plan.recomrepaired_without_lag.schedule == "periodic"
    # Periodic: 3 s between the iterations, the first batch, 8 passes. Delayed: 8 passes and a step.
    assert "1.18 times as fast as the best without a lag, periodic with 1 generator" in plan.reason
    assert "the trainer is busy 100% of the time, the generators wait for 53%" in plan.reason
    assert any("colocated is shown at best" in warning for warning in plan.warnings)


def test_an_iteration_that_outlasts_its_deadline_is_named() -> None:
    slow = times(generate_s=1000.0, train_s=1.0)
    plan = compare(spec(), slow, machines=[ONE_EACH], schedules=[Schedule("periodic")])
    assert any("more than timeouts.iteration_s = 3600 s" in warning for warning in plan.warnings)


def benchmark_errors() -> list[float]:
    """Predicts every other schedule of the benchmark from the synchronous run of its workload.

    The result has no run folders, but the seconds of each run's parts. What the synchronous run took beyond them are
    the gaps before its batches.
    """
    runs = json.loads(SCHEDULES_RESULT.read_bytes())["runs"]
    sources = {run["workload"]: run for run in runs if run["schedule"] == "synchronous"}
    errors = []
    for run in runs:
        if run["schedule"] in ("colocated", "synchronous"):
            continue
        source = sources[run["workload"]]
        parts = source["pipeline"]
        batches = 6 if run["workload"] == "tailed 1:3" else 8
        generators = source["generators"]
        gaps_s = parts["iteration_s"] - parts["generation_s"] - parts["training_s"] - parts["sync_s"]
        measured = times(
            generate_s=parts["generation_s"] * generators / batches,
            claim_s=gaps_s * generators / batches,
            batch_latency_s=parts["first_s"],
            train_s=parts["training_s"] / batches,
            step_s=parts["step_s"],
            publish_s=parts["publish_s"],
            load_s=parts["sync_s"] - parts["step_s"] - parts["publish_s"],
        )
        machines = Machines(num_generators=run["generators"], world_size=1, num_cores=2)
        schedule = Schedule(run["schedule"], run["max_policy_lag"])
        predicted_s = iteration_s(schedule, measured, machines, batches=batches)
        errors.append(predicted_s / run["pipeline"]["iteration_s"] - 1)
    return errors


def test_the_formulas_are_as_near_to_the_benchmark_of_every_schedule_as_the_page_says() -> None:
    errors = [abs(error) for error in benchmark_errors()]
    within = sum(error <= REACH for error in errors)
    page = " ".join((ROOT / "docs/schedules.md").read_text().split())
    assert f"{within} of {len(errors)} runs" in page
    assert f"the median error was {statistics.median(errors):.1%}" in page.replace(" %", "%")
    assert f"the largest {max(errors):.0%}" in page.replace(" %", "%")
