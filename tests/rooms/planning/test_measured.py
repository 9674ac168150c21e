"""Times that are read off a finished job's run folder, and runs that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from contracts.encoding.json_lines import append_json_lines, read_json_lines
from contracts.errors import InvalidInput
from contracts.events import TimelineSpan
from onbeat.planning.formulas import iteration_s
from onbeat.planning.measured import check_same_work, measured_times
from tests.building.specs import SpecBuilder
from tests.rooms.planning.timelines import JOB, SECONDS, TOKENS, write_synchronous_run

measured_job = SpecBuilder(
    iterations=8, schedule="synchronous", evaluation__num_prompts=0, trainer__checkpoint_every_iterations=100
)
"""Four batches an iteration, no evaluation, no checkpoint but the last."""


def test_the_measured_times_are_those_of_the_run(tmp_path: Path) -> None:
    times = measured_times(write_synchronous_run(tmp_path, measured_job()))
    assert (times.job_id, times.schedule, times.num_iterations) == (JOB, "synchronous", 6)
    assert times.tokens_per_batch == TOKENS / 4
    assert times.generate_s == pytest.approx(SECONDS.generate + SECONDS.claim)
    assert times.first_batch_s == times.longest_batch_s == pytest.approx(SECONDS.generate)
    assert times.score_s == pytest.approx(SECONDS.score)
    # The first pass waits for the arrival of the last batch, and each other one takes its batch.
    assert times.train_s == pytest.approx(SECONDS.train + (SECONDS.arrival + 3 * SECONDS.take) / 4)
    assert times.step_s == pytest.approx(SECONDS.step + SECONDS.publish + SECONDS.open)
    assert times.load_s == pytest.approx(SECONDS.load)


def test_the_formula_of_the_measured_schedule_gives_the_measured_iteration(tmp_path: Path) -> None:
    times = measured_times(write_synchronous_run(tmp_path, measured_job()))
    assert iteration_s("synchronous", times, batches=4, generators=1) == pytest.approx(times.iteration_s)


def test_batches_that_a_generator_samples_together_share_its_time(tmp_path: Path) -> None:
    folder = write_synchronous_run(tmp_path, measured_job())
    spans = read_json_lines(folder.timeline, TimelineSpan)
    folder.timeline.unlink()
    # Each second batch of the four is sampled with the one before it.
    moved = [
        replace(span, started_s=span.started_s - 1.25, ended_s=span.ended_s - 1.25)
        if span.what in ("generate", "score") and span.batch_id.endswith(("/1", "/3"))
        else span
        for span in spans
    ]
    append_json_lines(folder.timeline, moved)
    times = measured_times(folder)
    # Two of the three gaps are 0, inside the pairs, so the median claim is 0 as well.
    assert times.generate_s == pytest.approx(SECONDS.generate / 2)
    assert times.first_batch_s == pytest.approx(SECONDS.generate)


def test_lines_that_a_replay_wrote_again_count_once(tmp_path: Path) -> None:
    folder = write_synchronous_run(tmp_path, measured_job())
    before = measured_times(folder)
    spans = read_json_lines(folder.timeline, TimelineSpan)
    append_json_lines(folder.timeline, [span for span in spans if span.iteration == 4])
    assert measured_times(folder) == before


def test_a_run_that_is_too_short_is_refused(tmp_path: Path) -> None:
    folder = write_synchronous_run(tmp_path, measured_job(iterations=4))
    with pytest.raises(InvalidInput, match="4 iterations; the first 2 warm up and 3 more are needed"):
        measured_times(folder)


@pytest.mark.parametrize(
    ("schedule", "changes"),
    [("colocated", {}), ("delayed", {"max_policy_lag": 1, "algorithm": {"correction": "tis"}})],
)
def test_a_job_whose_phases_cannot_be_told_apart_is_no_source(
    tmp_path: Path, schedule: str, changes: dict[str, Any]
) -> None:
    folder = write_synchronous_run(tmp_path, measured_job(schedule=schedule, **changes))
    with pytest.raises(InvalidInput, match=f"was {schedule}, so its phases can't be told apart"):
        measured_times(folder)


def test_a_run_without_the_times_of_its_batches_is_refused(tmp_path: Path) -> None:
    folder = write_synchronous_run(tmp_path, measured_job())
    spans = read_json_lines(folder.timeline, TimelineSpan)
    folder.timeline.unlink()
    append_json_lines(folder.timeline, [span for span in spans if span.what != "generate"])
    with pytest.raises(InvalidInput, match="has no timeline of its batches"):
        measured_times(folder)


def test_a_timeline_that_no_run_leaves_is_refused_by_its_span(tmp_path: Path) -> None:
    folder = write_synchronous_run(tmp_path, measured_job())
    backward = TimelineSpan(who="trainer", what="step", iteration=7, started_s=1005.0, ended_s=1004.0)
    append_json_lines(folder.timeline, [backward])
    with pytest.raises(InvalidInput, match="step of iteration 7 by trainer takes -1 s"):
        measured_times(folder)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rollout__group_size": 8}, "rollout.group_size"),
        ({"rollout__sampling": {"max_new_tokens": 9}}, "rollout.sampling"),
        ({"trainer__packing": "padded"}, "trainer.packing"),
        ({"model": {"path": "another"}}, "model.path"),
    ],
)
def test_a_job_with_other_batches_says_nothing_about_these(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    folder = write_synchronous_run(tmp_path, measured_job())
    with pytest.raises(InvalidInput, match=JOB) as refused:
        check_same_work(measured_job(**changes), folder, model_root=Path())
    assert refused.value.field == field
    check_same_work(measured_job(schedule="periodic", iterations=100), folder, model_root=Path())
