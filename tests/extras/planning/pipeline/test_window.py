"""The simulated window gives out batches in the fence's order, under the versions that the schedule allows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from consumer.ranks import group
from contracts.schedule import Schedule
from onbeat.loop import gathering
from onbeat.work import heartbeat
from onbeat_extras.planning.pipeline import generators, trainer
from onbeat_extras.planning.pipeline.window import LATE, RECENT, Batch, Window
from producer import generator
from tests.builders import job_spec

SCRIPTS = Path(__file__).parents[4] / "broker" / "scripts"


def window(schedule: Schedule, **spec: object) -> Window:
    opened = Window(job_spec(**{"evaluation__num_prompts": 0, "rollout__batches_per_iteration": 2, **spec}), schedule)
    opened.start()
    return opened


def take(opened: Window, held: int = -1) -> Batch:
    found = opened.claim(1, held, 0.0)
    assert found is not None
    return found


def finish(opened: Window, iteration: int, held: int = -1) -> None:
    """Claims and publishes what is left of the oldest iteration, and commits it."""
    for one in list(opened.open[iteration].leased):
        opened.publish(one, 1.0)
    while opened.open[iteration].fresh:
        opened.publish(take(opened, held), 1.0)
    assert opened.commit() == iteration


@pytest.mark.parametrize("name", ["periodic", "synchronous", "colocated"])
def test_without_a_lag_one_iteration_is_open_and_its_own_version_samples_it(name: str) -> None:
    opened = window(Schedule(name))  # type: ignore[arg-type]
    assert [(take(opened).batch_id, 0), (take(opened).batch_id, 0)] == [("0/train/0", 0), ("0/train/1", 0)]
    assert opened.claim(1, 0, 0.0) is None
    finish(opened, 0)
    assert (found := take(opened, 0)).batch_id == "1/train/0"
    assert found.version == 1


def test_a_lag_opens_later_iterations_and_the_oldest_one_comes_first() -> None:
    opened = window(Schedule("delayed", 2))
    assert list(opened.open) == [0, 1, 2]
    assert [take(opened).iteration for _ in range(6)] == [0, 0, 1, 1, 2, 2]
    assert opened.claim(1, 0, 0.0) is None


def test_delayed_iterations_are_sampled_by_exactly_the_version_of_their_lag() -> None:
    opened, versions = window(Schedule("delayed", 2)), {}
    for iteration in range(3):
        versions |= {one.iteration: one.version for one in (take(opened, 9), take(opened, 9))}
        finish(opened, iteration)
    assert versions == {0: 0, 1: 0, 2: 0}
    assert take(opened, 9).version == 1  # iteration 3


def test_a_bounded_lag_takes_what_the_generator_holds_and_else_the_newest() -> None:
    opened = window(Schedule("bounded", 2))
    finish(opened, 0)
    finish(opened, 1)
    assert sorted(opened.open) == [2, 3]
    assert [take(opened, held).version for held in (0, 1)] == [0, 1]
    assert [take(opened, held).version for held in (0, -1)] == [2, 2]  # iteration 3 begins at version 1


def test_an_evaluation_goes_out_when_the_version_that_it_measures_is_there() -> None:
    opened = window(
        Schedule("delayed", 1), evaluation__num_prompts=4, evaluation__greedy=False, evaluation__every_iterations=1
    )
    first = [take(opened) for _ in range(5)]
    assert [one.batch_id for one in first] == ["0/train/0", "0/train/1", "0/evaluation/0", "1/train/0", "1/train/1"]
    for one in first:
        opened.publish(one, 1.0)
    assert not opened.open[1].is_published  # its evaluation is expected
    opened.commit()
    assert ((late := take(opened, 0)).batch_id, late.version) == ("1/evaluation/0", 1)


def test_the_last_iteration_only_evaluates_and_none_is_opened_beyond_it() -> None:
    opened = window(Schedule("delayed", 1), iterations=2, evaluation__num_prompts=4, evaluation__greedy=False)
    for iteration in range(2):
        finish(opened, iteration)
    assert [(one.purpose, one.iteration) for one in opened.open[2].fresh] == [("evaluation", 2)]
    finish(opened, 2)
    assert opened.open == {}


def test_an_incomplete_iteration_is_not_committed() -> None:
    opened = window(Schedule("periodic"))
    opened.publish(take(opened), 1.0)
    with pytest.raises(AssertionError, match="1 of 2 batches"):
        opened.commit()


def test_a_late_batch_is_copied_once_by_another_generator_and_the_first_copy_counts() -> None:
    opened = window(Schedule("periodic"), rollout__batches_per_iteration=3)
    opened.publish(take(opened), 2.0)
    late, other = take(opened), opened.claim(2, 0, 0.5)
    assert other is not None
    assert opened.hedge(1, 2.0) == pytest.approx(0.5 + 1.5 * 2.0)  # 1 is late itself: it may copy only the other
    assert opened.hedge(2, 2.0) == 3.0
    assert opened.hedge(2, 3.0) is late
    assert opened.hedge(2, 9.0) is None
    assert opened.publish(late, 4.0)
    assert not opened.publish(late, 5.0)


def test_a_job_that_is_not_deterministic_copies_nothing() -> None:
    opened = window(Schedule("bounded", 1), deterministic=False)
    opened.publish(take(opened), 1.0)
    take(opened)
    assert opened.hedge(2, 100.0) is None


def test_the_simulation_counts_like_the_generator_the_trainer_and_the_fence() -> None:
    assert generators.MAX_FINISHING == generator.MAX_FINISHING
    assert generators.PRESENCE_INTERVAL_S == heartbeat.PRESENCE_S
    assert generators.COPY_LOOK_S == heartbeat.COPY_LOOK_S
    assert trainer.CLAIMED_AT_ONCE == gathering.CLAIMED_AT_ONCE
    assert trainer.HANDED_OUT_PER_RANK == group.HANDED_OUT_PER_RANK
    late = re.search(r"LATE = ([\d.]+) \*", (SCRIPTS / "claim_prompt.lua").read_text())
    recent = re.search(r"RECENT = (\d+)", (SCRIPTS / "prelude.lua").read_text())
    assert late is not None
    assert recent is not None
    assert (float(late[1]), int(recent[1])) == (LATE, RECENT)
