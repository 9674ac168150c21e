"""Each schedule's formula: worked out by hand, and next to what was measured of every schedule."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from contracts.schedule import ScheduleName
from onbeat.planning.formulas import SCHEDULES, compare, iteration_s, predict
from onbeat.planning.measured import MeasuredTimes
from tests.building.specs import SpecBuilder

ROOT = Path(__file__).parents[3]
SCHEDULES_RESULT = ROOT / "benchmarks/results/schedules-2026-11-22.json"
REACH = 0.10


def times(**changes: float) -> MeasuredTimes:
    """Makes times of zero seconds but for what a test names; a batch has 100 tokens."""
    names = [name for name in MeasuredTimes.__struct_fields__ if name.endswith("_s")]
    values: dict[str, float] = {**dict.fromkeys(names, 0.0), **changes}
    values["first_batch_s"] = changes.get("first_batch_s", values["generate_s"])
    return MeasuredTimes(
        job_id="job-0123456789ab", schedule="synchronous", num_iterations=6, tokens_per_batch=100.0, **values
    )


planned_job = SpecBuilder(rollout__batches_per_iteration=8)


def seconds(schedule: ScheduleName, measured: MeasuredTimes, *, generators: int = 1, ranks: int = 1) -> float:
    return iteration_s(schedule, measured, batches=8, generators=generators, ranks=ranks)


def test_synchronous_takes_generation_training_and_the_way_of_the_weights_in_turn() -> None:
    measured = times(generate_s=1.0, train_s=2.0, step_s=0.125, load_s=0.5, score_s=0.75)
    assert seconds("synchronous", measured) == 8 * 1.0 + 0.75 + 8 * 2.0 + 0.125 + 0.5


@pytest.mark.parametrize(("generate_s", "train_s"), [(1.0, 1.0), (1.0, 3.0), (3.0, 1.0)])
def test_periodic_is_late_by_the_first_batch_or_the_last_one(generate_s: float, train_s: float) -> None:
    measured = times(generate_s=generate_s, train_s=train_s, step_s=0.5)
    assert seconds("periodic", measured) == 0.5 + max(8 * generate_s + train_s, generate_s + 8 * train_s)


@pytest.mark.parametrize("name", ["delayed", "bounded"])
@pytest.mark.parametrize(("generate_s", "train_s"), [(1.0, 1.0), (1.0, 3.0), (3.0, 1.0)])
def test_a_lag_leaves_the_slower_side_without_a_pause(name: Any, generate_s: float, train_s: float) -> None:
    measured = times(generate_s=generate_s, train_s=train_s, step_s=0.5, load_s=0.25)
    assert seconds(name, measured) == max(8 * generate_s + 0.25, 8 * train_s + 0.5)


def test_generators_share_an_iteration_in_whole_batches_unless_the_next_one_is_open() -> None:
    measured = times(generate_s=1.0, train_s=0.0, longest_batch_s=2.5)
    assert seconds("synchronous", measured, generators=3) == 3.0
    assert seconds("delayed", measured, generators=3) == pytest.approx(8 / 3)
    # No number of generators makes the longest batch shorter.
    assert seconds("synchronous", measured, generators=8) == 2.5


def test_ranks_share_the_passes() -> None:
    measured = times(generate_s=1.0, train_s=1.0, step_s=0.5)
    assert seconds("synchronous", measured, ranks=4) == 8.0 + 2.0 + 0.5


def test_colocated_phases_have_all_devices_at_best() -> None:
    measured = times(generate_s=1.0, train_s=2.0)
    assert seconds("colocated", measured, generators=3) == pytest.approx(3 * 1.0 / (4 / 3) + 16.0 / 4)
    assert predict(planned_job(), "colocated", measured, generators=3).is_best_case
    assert not predict(planned_job(), "periodic", measured, generators=3).is_best_case


def test_a_prediction_says_how_fast_it_is_and_which_side_waits() -> None:
    row = predict(planned_job(), "delayed", times(generate_s=1.0, train_s=2.0), generators=1)
    assert (row.iteration_s, row.generators_busy, row.trainer_busy) == (16.0, 0.5, 1.0)
    assert row.tokens_per_s == 8 * 100 / 16.0


def test_a_plan_has_a_row_for_each_schedule_with_each_number_of_generators() -> None:
    plan = compare(planned_job(), times(generate_s=1.0, train_s=1.0), generators=[1, 4])
    assert [(row.generators, row.schedule) for row in plan.predictions] == [
        (number, schedule) for number in (1, 4) for schedule in SCHEDULES
    ]


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
        gaps_s = parts["iteration_s"] - parts["generation_s"] - parts["training_s"] - parts["sync_s"]
        measured = times(
            generate_s=(parts["generation_s"] + gaps_s) * source["generators"] / batches,
            first_batch_s=parts["first_s"],
            train_s=parts["training_s"] / batches,
            step_s=parts["step_s"] + parts["publish_s"],
            load_s=parts["sync_s"] - parts["step_s"] - parts["publish_s"],
        )
        predicted_s = iteration_s(run["schedule"], measured, batches=batches, generators=run["generators"])
        errors.append(predicted_s / run["pipeline"]["iteration_s"] - 1)
    return errors


def test_the_formulas_are_as_near_to_the_benchmark_of_every_schedule_as_the_page_says() -> None:
    errors = [abs(error) for error in benchmark_errors()]
    within = sum(error <= REACH for error in errors)
    page = " ".join((ROOT / "docs/schedules.md").read_text().split())
    assert f"{within} of {len(errors)} runs" in page
    assert f"the median error was {statistics.median(errors):.1%}" in page.replace(" %", "%")
    assert f"the largest {max(errors):.0%}" in page.replace(" %", "%")
