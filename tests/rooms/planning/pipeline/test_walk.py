"""Pipelines whose seconds can be worked out by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from contracts.schedule import Schedule
from contracts.spec.job import JobSpec
from onbeat.loop import gathering
from onbeat.planning import predictions
from onbeat.planning.pipeline import generators, trainer
from onbeat.planning.pipeline.costs import Machines, batch_bytes
from onbeat.planning.pipeline.walk import Run
from onbeat.planning.predictions import lower_bound_s, most_resident
from onbeat.work import heartbeat
from producer import generator
from tests.builders import job_spec
from tests.rooms.planned import NO_WAITS, batch, costs, run


def spec(**changes: object) -> JobSpec:
    """Eight batches an iteration, no evaluation, no checkpoint but the last."""
    stated = {"iterations": 12, "evaluation__num_prompts": 0, "rollout__batches_per_iteration": 8}
    return job_spec(**{**stated, "trainer__checkpoint_every_iterations": 100, **changes})


def iteration_s(found: Run) -> list[float]:
    """Seconds from commit to commit, from where the pipeline is full to where generation ends."""
    return [round(after - before, 6) for before, after in pairwise(found.commits_s[3:8])]


def test_synchronous_takes_generation_training_and_the_way_of_the_weights_in_turn() -> None:
    waits = replace(NO_WAITS, load_s=0.5, open_s=0.25)
    stated = costs(batch(1.0, 2.0), step_s=0.125, publish_s=0.0625, waits=waits)
    expected = 8 * 1.0 + 8 * 2.0 + 0.125 + 0.0625 + 0.25 + 0.5
    assert iteration_s(run(spec(), Schedule("synchronous"), stated)) == [expected] * 4
    assert lower_bound_s(spec(), Schedule("synchronous"), Machines(), stated) == expected


def lags(found: Run) -> Counter[int]:
    return Counter(one.iteration - one.version for one in found.batches)


@pytest.mark.parametrize(("generate_s", "train_s"), [(1.0, 1.0), (1.0, 3.0), (3.0, 1.0)])
def test_periodic_is_late_by_the_first_batch_or_the_last_one(generate_s: float, train_s: float) -> None:
    stated = costs(batch(generate_s, train_s), step_s=0.5)
    expected = 0.5 + max(8 * generate_s + train_s, generate_s + 8 * train_s)
    assert iteration_s(run(spec(), Schedule("periodic"), stated)) == [expected] * 4
    assert lower_bound_s(spec(), Schedule("periodic"), Machines(), stated) == expected


@pytest.mark.parametrize("name", ["delayed", "bounded"])
@pytest.mark.parametrize(("generate_s", "train_s"), [(1.0, 1.0), (1.0, 3.0), (3.0, 1.0)])
def test_a_lag_leaves_the_slower_part_without_a_pause(name: str, generate_s: float, train_s: float) -> None:
    stated = costs(batch(generate_s, train_s), step_s=0.5)
    schedule = Schedule(name, 1)  # type: ignore[arg-type]
    expected = max(8 * generate_s, 8 * train_s + 0.5)
    found = run(spec(), schedule, stated)
    assert iteration_s(found) == [expected] * 4
    assert lower_bound_s(spec(), schedule, Machines(), stated) == expected


def test_generators_share_an_iteration_and_ranks_share_its_batches() -> None:
    stated = costs(batch(1.0, 1.0))
    assert iteration_s(run(spec(), Schedule("synchronous"), stated, num_generators=4)) == [2.0 + 8.0] * 4
    assert iteration_s(run(spec(), Schedule("synchronous"), stated, num_generators=4, world_size=2)) == [2.0 + 4.0] * 4


def test_ranks_that_share_the_model_pass_together_and_wait_for_the_slowest() -> None:
    sharded = spec(trainer__world_size=2, trainer__sharding="fsdp")
    found = run(sharded, Schedule("synchronous"), costs(batch(1.0, 1.0), batch(1.0, 3.0)), world_size=2, seed=3)
    trained = [span for span in found.spans if span.what == "train"]
    for first, second in zip(trained[::2], trained[1::2], strict=True):
        assert first.started_s == second.started_s


def test_colocated_phases_have_all_devices_and_pay_for_the_change() -> None:
    stated = costs(batch(1.0, 2.0))
    found = run(spec(), Schedule("colocated"), stated, generator_gain=2.0, trainer_gain=4.0, switch_s=0.5)
    assert iteration_s(found) == [8 * 0.5 + 8 * 0.5 + 2 * 0.5] * 4


def test_processes_on_one_machine_slow_each_other_down_where_the_cores_are_too_few() -> None:
    stated = costs(batch(1.0, 1.0))
    apart = iteration_s(run(spec(), Schedule("delayed", 1), stated))
    on_two = iteration_s(run(spec(), Schedule("delayed", 1), stated, num_cores=2))
    on_one = iteration_s(run(spec(), Schedule("delayed", 1), stated, num_cores=1))
    assert apart == on_two == [8.0] * 4
    assert on_one == [pytest.approx(16.0, rel=0.05)] * 4


def test_an_engine_that_takes_several_batches_samples_them_beside_each_other() -> None:
    stated = costs(batch(2.0, 0.0))
    assert iteration_s(run(spec(), Schedule("synchronous"), stated, completions_at_once=8)) == [16.0] * 4
    assert iteration_s(run(spec(), Schedule("synchronous"), stated, completions_at_once=32)) == [4.0] * 4


def test_sampling_waits_where_too_many_batches_are_being_scored() -> None:
    slow = costs(batch(1.0, 0.0, score_s=10.0))
    # Four finish at a time: the fifth is claimed when the first is published, 11 s after the start.
    assert iteration_s(run(spec(), Schedule("synchronous"), slow)) == [pytest.approx(25.0, abs=1.0)] * 4


def test_evaluations_and_checkpoints_take_their_time_where_they_are_due() -> None:
    evaluating = spec(evaluation__num_prompts=8, evaluation__prompts_per_batch=4, evaluation__every_iterations=2)
    found = run(evaluating, Schedule("synchronous"), costs(batch(1.0, 1.0)))
    assert iteration_s(found) == [16.0 + 4.0, 16.0, 16.0 + 4.0, 16.0]
    often = spec(trainer__checkpoint_every_iterations=2)
    waits = replace(NO_WAITS, checkpoint_s=3.0)
    found = run(often, Schedule("periodic"), costs(batch(1.0, 3.0), waits=waits))
    # The generators work on while it is written, and the trainer waits only for the rest of it.
    assert iteration_s(found) == [25.0 + 2.0, 25.0, 25.0 + 2.0, 25.0]


def test_redis_holds_no_more_iterations_than_are_open() -> None:
    each = batch(0.1, 2.0, num_tokens=50)
    for schedule in (Schedule("periodic"), Schedule("delayed", 1), Schedule("delayed", 3)):
        found = run(spec(), schedule, costs(each))
        assert most_resident(found, spec()) == 8 * batch_bytes(spec(), each) * schedule.num_open
        assert len(found.batches) == 12 * 8


def test_the_lag_of_every_batch_is_within_the_schedules() -> None:
    delayed = run(spec(), Schedule("delayed", 2), costs(batch(1.0, 1.0)))
    assert lags(delayed) == {0: 8, 1: 8, 2: 80}
    # A generator that is slower than the trainer has the newest version at each claim.
    slow = lags(run(spec(), Schedule("bounded", 2), costs(batch(4.0, 1.0))))
    assert set(slow) <= {0, 1, 2}
    assert slow[0] + slow[1] > slow[2]


def test_a_long_tail_costs_less_where_later_iterations_are_open() -> None:
    tailed = costs(*[batch(0.5, 1.0)] * 9, batch(20.0, 1.0))
    apart = run(spec(), Schedule("periodic"), tailed, num_generators=4, seed=1).commits_s[-1]
    lagging = run(spec(), Schedule("delayed", 2), tailed, num_generators=4, seed=1).commits_s[-1]
    assert lagging < 0.8 * apart


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    tailed = costs(batch(1.0, 2.0), batch(3.0, 1.0), batch(5.0, 4.0))
    first, again, other = (run(spec(), Schedule("periodic"), tailed, seed=seed) for seed in (1, 1, 2))
    assert first.commits_s == again.commits_s != other.commits_s
    assert first.spans == again.spans


def test_a_plan_counts_like_the_generator_and_the_trainer() -> None:
    assert generators.MAX_FINISHING == generator.MAX_FINISHING
    assert trainer.CLAIMED_AT_ONCE == gathering.CLAIMED_AT_ONCE
    assert predictions.PRESENCE_S == heartbeat.PRESENCE_S
