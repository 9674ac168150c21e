"""What a timeline says: costs that are read from a run are those that made it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from contracts.encoding.json_lines import append_json_lines, read_json_lines
from contracts.encoding.wire import encode_json
from contracts.errors import InvalidInput, NotFound
from contracts.events import IterationMetrics, TimelineSpan
from contracts.run_folder import RunFolder
from contracts.schedule import Schedule
from contracts.spec.job import JobSpec
from onbeat.planning import measured
from onbeat.planning.pipeline.costs import Costs, Machines
from onbeat.planning.pipeline.walk import Run
from onbeat.planning.sources import costs_of_job, measured_folder
from tests.builders import job_spec
from tests.contract.golden_files import iteration_metrics
from tests.rooms.planned import NO_WAITS, batch, costs, run

JOB = "job-0123456789ab"
WAITS = replace(
    NO_WAITS, claim_s=0.25, load_s=0.5, swap_s=0.5, arrival_s=0.125, take_s=0.0625, open_s=0.375, after_s=0.03125
)


def spec(schedule: str = "periodic", **changes: object) -> JobSpec:
    stated = {"iterations": 8, "schedule": schedule, "evaluation__num_prompts": 0, "rollout__batches_per_iteration": 4}
    lag = {"max_policy_lag": 1, "algorithm__correction": "none"} if schedule == "delayed" else {}
    return job_spec(**{**stated, **lag, "trainer__checkpoint_every_iterations": 100, **changes})


def write_run(root: Path, of_job: JobSpec, found: Run) -> RunFolder:
    """A run folder as a trainer leaves it, out of a predicted run."""
    folder = RunFolder(root, JOB)
    folder.path.mkdir(parents=True)
    folder.spec.write_bytes(encode_json(of_job))
    append_json_lines(folder.timeline, found.spans)
    append_json_lines(folder.metrics, [_line(number, found) for number in range(of_job.iterations)])
    return folder


def measured_costs(folder: RunFolder, of_job: JobSpec, *, num_cores: int = 0) -> Costs:
    return measured.measured_costs(
        of_job,
        read_json_lines(folder.timeline, TimelineSpan),
        read_json_lines(folder.metrics, IterationMetrics),
        job_id=folder.job_id,
        num_cores=num_cores,
    )


def _line(number: int, found: Run) -> IterationMetrics:
    turned_s = found.commits_s[number - 1] + WAITS.after_s if number else 0.0
    return msgspec.structs.replace(iteration_metrics(), iteration=number, num_tokens=400, started_s=turned_s)


@pytest.mark.parametrize("schedule", ["periodic", "synchronous", "delayed"])
def test_costs_that_are_read_from_a_run_are_those_that_made_it(tmp_path: Path, schedule: str) -> None:
    of_job = spec(schedule)
    stated = costs(batch(1.0, 2.0, score_s=0.5), step_s=0.75, publish_s=0.25, waits=WAITS)
    folder = write_run(tmp_path, of_job, run(of_job, of_job.schedule_rule, stated))
    found = measured_costs(folder, of_job)
    assert {(one.generate_s, one.rounds[0].score_s, one.train_s) for one in rounded(found)} == {(1.0, 0.5, 2.0)}
    assert {one.num_tokens for one in found.training} == {100}
    assert {(round(one.step_s, 6), round(one.publish_s, 6)) for one in found.steps} == {(0.75, 0.25)}
    waits = found.waits
    assert (waits.claim_s, waits.open_s, waits.after_s) == pytest.approx((0.25, 0.375, 0.03125))
    assert waits.load_s == pytest.approx(0.5)
    if schedule != "delayed":  # its trainer is never idle here: the next batch is always there
        assert waits.arrival_s == pytest.approx(0.125)


def rounded(found: Costs) -> list:
    return [
        replace(
            one,
            train_s=round(one.train_s, 6),
            rounds=tuple(
                replace(each, generate_s=round(each.generate_s, 6), score_s=round(each.score_s, 6))
                for each in one.rounds
            ),
        )
        for one in found.training
    ]


def test_a_trainer_that_waits_and_one_that_has_the_next_batch_are_told_apart(tmp_path: Path) -> None:
    waiting = spec("periodic")
    folder = write_run(
        tmp_path / "waits", waiting, run(waiting, waiting.schedule_rule, costs(batch(3.0, 1.0), waits=WAITS))
    )
    assert measured_costs(folder, waiting).waits.arrival_s == pytest.approx(0.125)
    behind = spec("periodic")
    folder = write_run(
        tmp_path / "behind", behind, run(behind, behind.schedule_rule, costs(batch(1.0, 5.0), waits=WAITS))
    )
    assert measured_costs(folder, behind).waits.take_s == pytest.approx(0.0625, rel=0.5)


def test_what_others_slowed_on_the_same_cores_is_taken_off_again(tmp_path: Path) -> None:
    of_job = spec("delayed")
    stated = costs(batch(1.0, 1.0))
    folder = write_run(tmp_path, of_job, run(of_job, of_job.schedule_rule, stated, num_cores=1))
    stretched = measured_costs(folder, of_job)
    alone = measured_costs(folder, of_job, num_cores=1)
    assert stretched.generate_s > 1.5
    assert alone.generate_s == pytest.approx(1.0)
    assert alone.train_s == pytest.approx(1.0)


def test_a_checkpoint_is_measured_where_one_was_due(tmp_path: Path) -> None:
    of_job = spec("synchronous", trainer__checkpoint_every_iterations=3)
    found = run(of_job, of_job.schedule_rule, costs(batch(1.0, 1.0), waits=WAITS))
    folder = write_run(tmp_path, of_job, found)
    lines = [_line(number, found) for number in range(8)]
    for number in (3, 6):
        lines[number] = msgspec.structs.replace(lines[number], started_s=lines[number].started_s + 2.0)
    folder.metrics.write_bytes(b"".join(encode_json(line) + b"\n" for line in lines))
    assert measured_costs(folder, of_job).waits.checkpoint_s == pytest.approx(2.0)


def test_the_rounds_of_a_batch_that_was_resampled_stay_rounds(tmp_path: Path) -> None:
    of_job = spec("synchronous", rollout__max_resamples=1)
    one = batch(1.0, 1.0, score_s=0.25)
    twice = replace(one, rounds=(*one.rounds, *one.rounds))
    folder = write_run(tmp_path, of_job, run(of_job, of_job.schedule_rule, costs(twice, waits=WAITS)))
    assert {len(found.rounds) for found in measured_costs(folder, of_job).training} == {2}


def test_a_run_that_is_too_short_is_refused(tmp_path: Path) -> None:
    of_job = spec("periodic", iterations=4)
    folder = write_run(tmp_path, of_job, run(of_job, of_job.schedule_rule, costs(batch(1.0, 1.0))))
    with pytest.raises(InvalidInput, match="4 iterations, the first 2 warm up and 3 more are needed"):
        measured_costs(folder, of_job)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rollout__group_size": 8}, "rollout.group_size"),
        ({"rollout__sampling": {"max_new_tokens": 9}}, "rollout.sampling"),
        ({"trainer__packing": "padded"}, "trainer.packing"),
        ({"model": {"path": "another"}}, "model"),
    ],
)
def test_a_job_with_other_batches_says_nothing_about_these(tmp_path: Path, change: dict, field: str) -> None:
    of_job = spec("periodic")
    folder = write_run(tmp_path, of_job, run(of_job, of_job.schedule_rule, costs(batch(1.0, 1.0))))
    with pytest.raises(InvalidInput, match=JOB) as refused:
        costs_of_job(spec("periodic", **change), Machines(), folder)
    assert refused.value.field == field
    assert costs_of_job(spec("delayed", iterations=99), Machines(), folder).generate_s == pytest.approx(1.0)


def test_a_colocated_job_is_no_source(tmp_path: Path) -> None:
    of_job = spec("colocated")
    folder = write_run(tmp_path, of_job, run(of_job, Schedule("synchronous"), costs(batch(1.0, 1.0))))
    with pytest.raises(InvalidInput, match="was colocated"):
        costs_of_job(of_job, Machines(), folder)


def test_a_job_is_found_by_its_id_and_by_its_folder(tmp_path: Path) -> None:
    of_job = spec("periodic")
    folder = write_run(tmp_path, of_job, run(of_job, of_job.schedule_rule, costs(batch(1.0, 1.0))))
    assert measured_folder(JOB, {}, tmp_path).path == measured_folder(str(folder.path), {}, None).path
    with pytest.raises(NotFound, match="has no timeline"):
        measured_folder("job-ba9876543210", {}, tmp_path)


def test_lines_that_a_replay_wrote_again_count_once(tmp_path: Path) -> None:
    of_job = spec("synchronous")
    found = run(of_job, of_job.schedule_rule, costs(batch(1.0, 2.0), waits=WAITS))
    folder = write_run(tmp_path, of_job, found)
    before = measured_costs(folder, of_job)
    append_json_lines(folder.timeline, [span for span in found.spans if span.iteration == 4])
    assert measured_costs(folder, of_job) == before
    late = [TimelineSpan(who="trainer", what="train", iteration=5, batch_id="5/train/0", started_s=0.0, ended_s=0.001)]
    append_json_lines(folder.timeline, late)
    assert measured_costs(folder, of_job).training == before.training


def test_a_timeline_that_no_run_leaves_is_refused_by_its_span(tmp_path: Path) -> None:
    of_job = spec("synchronous")
    folder = write_run(tmp_path, of_job, run(of_job, of_job.schedule_rule, costs(batch(1.0, 2.0))))
    backward = TimelineSpan(who="trainer", what="step", iteration=9, started_s=5.0, ended_s=4.0)
    append_json_lines(folder.timeline, [backward])
    with pytest.raises(InvalidInput, match="step of iteration 9 by trainer takes -1 s"):
        measured_costs(folder, of_job)


def test_a_job_whose_mfu_is_above_one_has_a_wrong_setting(tmp_path: Path) -> None:
    of_job = spec("synchronous")
    folder = write_run(tmp_path, of_job, run(of_job, of_job.schedule_rule, costs(batch(1.0, 2.0))))
    lines = read_json_lines(folder.metrics, IterationMetrics)
    lines[5] = msgspec.structs.replace(lines[5], mfu=1.7)
    folder.metrics.write_bytes(b"".join(encode_json(line) + b"\n" for line in lines))
    with pytest.raises(InvalidInput, match=r"iteration 5 has an MFU of 1\.70"):
        measured_costs(folder, of_job)
