"""What a trainer says of its job's health: once, when it changes, also after it was replaced; how it ends a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from broker.connection.client import Broker
from broker.job_store import JobStore
from broker.monitor import job_status
from contracts.encoding.json_lines import append_json_lines
from contracts.errors import Unhealthy
from contracts.events import HealthChanged, IterationMetrics
from contracts.jobs import EvaluationScore, HealthProblem
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from onbeat.loop.health import watch as watching
from onbeat.loop.health.watch import HealthWatch
from onbeat.terminal.job_view import past_health_lines
from tests.builders import job_spec
from tests.contract.golden_files import iteration_metrics


@dataclass
class BelowHalf:
    """Judges a job by its last reward, and counts what it was given."""

    spec: JobSpec
    seen: list[object] = field(default_factory=list)
    since: int | None = None
    past: tuple[HealthProblem, ...] = ()

    def score(self, score: EvaluationScore) -> None:
        self.seen.append(score.iteration)

    def iteration(self, metrics: IterationMetrics) -> tuple[HealthProblem, ...]:
        self.seen.append(metrics.reward_mean)
        if metrics.reward_mean >= 0.5:
            if self.since is not None:
                self.past = (self._problem(self.since, until=metrics.iteration),)
            self.since = None
            return ()
        self.since = metrics.iteration if self.since is None else self.since
        self.past = ()
        return (self._problem(self.since),)

    def _problem(self, since: int, **until: int) -> HealthProblem:
        return HealthProblem(rule="reward_collapsed", since=since, problem="it is low", cure="wait", **until)


@pytest.fixture
def watch(settings: StackSettings, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Callable[..., HealthWatch]:
    """Makes a trainer's watch over one job."""
    jobs = JobStore(broker)
    job_id, _ = jobs.create(job_spec())
    folder = RunFolder(settings.run_root_path, job_id)
    folder.path.mkdir()
    monkeypatch.setattr(watching, "Health", BelowHalf)

    def made(**spec: Any) -> HealthWatch:
        return HealthWatch(jobs, folder, job_spec(**spec))

    return made


def numbers(iteration: int, reward: float) -> IterationMetrics:
    return iteration_metrics(iteration=iteration, reward_mean=reward)


def told(made: HealthWatch) -> list[tuple[int, list[str]]]:
    """(iteration, rules) of each event."""
    events = [event for _, event in made._jobs.events_after(made._folder.job_id, "0-0")]
    changes = [event for event in events if isinstance(event, HealthChanged)]
    return [(event.iteration, [problem.rule for problem in event.problems]) for event in changes]


def test_a_change_is_told_once_and_stands_in_the_jobs_status(watch: Callable[..., HealthWatch], broker: Broker) -> None:
    made = watch()
    made.begin(0)
    for iteration, reward in enumerate([0.9, 0.1, 0.1]):
        made.committed(numbers(iteration, reward))
        made.check()
    assert told(made) == [(1, ["reward_collapsed"])]
    (problem,) = job_status(broker, made._folder.job_id).health
    assert (problem.rule, problem.cure) == ("reward_collapsed", "wait")
    made.committed(numbers(3, 0.9))
    assert told(made)[-1] == (3, [])
    status = job_status(broker, made._folder.job_id)
    assert status.health == ()
    assert [problem.in_words for problem in status.health_past] == [
        "reward collapsed from iteration 1 until 3: it is low"
    ]
    assert [line.plain for line in past_health_lines(status)] == [
        "! was reward collapsed from iteration 1 until 3: it is low; wait"
    ]


def test_what_was_wrong_for_a_time_stays_in_the_status_also_after_the_next_trainer_and_until_it_comes_again(
    watch: Callable[..., HealthWatch], broker: Broker
) -> None:
    first = watch()
    rows = [numbers(iteration, reward) for iteration, reward in enumerate([0.1, 0.9, 0.9])]
    append_json_lines(first._folder.metrics, rows)
    first.begin(3)
    second = watch()
    second.begin(3)
    (past,) = job_status(broker, first._folder.job_id).health_past
    assert (past.since, past.until) == (0, 1)
    assert told(second) == [], "it was gone before these trainers, and is no news"
    second.committed(numbers(3, 0.1))
    status = job_status(broker, first._folder.job_id)
    assert ([problem.since for problem in status.health], status.health_past) == ([3], ())


def test_the_next_trainer_judges_what_was_before_it_and_says_nothing_twice(watch: Callable[..., HealthWatch]) -> None:
    first = watch()
    append_json_lines(first._folder.metrics, [numbers(0, 0.9), numbers(1, 0.7), numbers(2, 0.2), numbers(1, 0.1)])
    score = EvaluationScore(iteration=1, policy_version=1, sampled=0.5, num_prompts=8)
    append_json_lines(first._folder.evaluations, [score])
    first.begin(2)
    assert told(first) == [(1, ["reward_collapsed"])]
    judge = first._health
    assert isinstance(judge, BelowHalf)
    assert judge.seen == [0.9, 1, 0.1], "the last line of an iteration counts, and none from the first one on"
    second = watch()
    second.begin(2)
    assert told(second) == [(1, ["reward_collapsed"])]


def test_a_problem_that_begins_ends_a_job_that_asks_for_it(watch: Callable[..., HealthWatch]) -> None:
    made = watch(trainer__stop_on=["reward_collapsed"])
    made.begin(0)
    made.committed(numbers(0, 0.9))
    made.check()
    made.committed(numbers(1, 0.1))
    with pytest.raises(Unhealthy, match=r"^trainer.stop_on: reward collapsed since iteration 1: it is low \(wait\)"):
        made.check()


def test_other_rules_and_what_was_broken_before_a_resume_end_nothing(watch: Callable[..., HealthWatch]) -> None:
    other = watch(trainer__stop_on=["entropy_gone"])
    other.begin(0)
    other.committed(numbers(0, 0.1))
    other.check()
    append_json_lines(other._folder.metrics, [numbers(0, 0.1)])
    jobs, job_id = other._jobs, other._folder.job_id
    jobs.fail(job_id, "it is low")
    jobs.resume(job_id)
    resumed = watch(trainer__stop_on=["reward_collapsed"])
    resumed.begin(1)
    resumed.check()
    resumed.committed(numbers(1, 0.1))
    resumed.check()


def test_a_trainer_that_died_before_it_could_end_its_job_leaves_that_to_the_next(
    watch: Callable[..., HealthWatch],
) -> None:
    died = watch(trainer__stop_on=["reward_collapsed"])
    died.begin(0)
    append_json_lines(died._folder.metrics, [numbers(0, 0.1)])
    died.committed(numbers(0, 0.1))
    after = watch(trainer__stop_on=["reward_collapsed"])
    after.begin(1)
    with pytest.raises(Unhealthy, match="since iteration 0"):
        after.check()
