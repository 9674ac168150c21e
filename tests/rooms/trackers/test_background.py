"""What holds for every tracker: each point once, and no failure of its library reaches training."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec
import pytest

from consumer.trackers.background import BackgroundTracker, Trackers, iteration_values
from contracts.errors import InvalidInput
from contracts.events import IterationMetrics
from contracts.jobs import EvaluationScore
from tests.builders import job_spec, judged_spec
from tests.contract.golden_files import iteration_metrics


class Remembering:
    """A tracker that keeps what it is given."""

    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float]]] = []
        self.is_closed = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.points.append((step, dict(values)))

    def close(self) -> None:
        self.is_closed = True


class Failing(Remembering):
    def log(self, step: int, values: Mapping[str, float]) -> None:
        raise ConnectionError("the server is away")


def metrics(iteration: int, *, reward: float = 0.5) -> IterationMetrics:
    return msgspec.structs.replace(iteration_metrics(), iteration=iteration, reward_mean=reward)


def score(iteration: int) -> EvaluationScore:
    return EvaluationScore(iteration=iteration, policy_version=iteration, sampled=0.25, greedy=0.75, num_prompts=8)


def test_every_number_of_an_iteration_is_a_value() -> None:
    values = iteration_values(metrics(3))
    assert values["reward_components/exact"] == 0.5
    assert (values["reward_mean"], values["response_tokens_max"], values["entropy"]) == (0.5, 6.0, 0.0)
    assert all(isinstance(value, float) for value in values.values())
    assert not {"iteration", "trainer_epoch", "updates", "mfu"} & set(values)
    assert iteration_values(msgspec.structs.replace(metrics(3), mfu=0.5))["mfu"] == 0.5


def test_a_lag_is_a_mean_and_a_count_for_each_step_of_it_and_a_job_without_one_has_none() -> None:
    lagging = iteration_values(msgspec.structs.replace(metrics(3), lag_counts=(1, 3, 0), lag_mean=0.75))
    of_lag = {"lag_mean": 0.75, "lag_counts/0": 1.0, "lag_counts/1": 3.0, "lag_counts/2": 0.0}
    assert lagging == iteration_values(metrics(3)) | of_lag
    assert not any(name.startswith("lag") for name in iteration_values(metrics(3)))


def test_a_replayed_iteration_is_logged_once() -> None:
    tracker = Remembering()
    trackers = Trackers({"fake": lambda: tracker}, last_iteration=1, last_evaluation=0)
    for iteration in (1, 2, 2, 3):
        trackers.iteration(metrics(iteration))
    trackers.evaluation(score(0))
    trackers.evaluation(score(4))
    trackers.close()
    assert [step for step, _ in tracker.points] == [2, 3, 4]
    assert tracker.points[-1][1] == {"evaluation/sampled": 0.25, "evaluation/greedy": 0.75}
    assert tracker.is_closed


def test_a_tracker_that_fails_is_one_warning_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    tracker = Remembering()
    trackers = Trackers({"broken": Failing, "fake": lambda: tracker})
    with caplog.at_level(logging.WARNING):
        for iteration in range(3):
            trackers.iteration(metrics(iteration))
        trackers.close()
    assert [record.getMessage() for record in caplog.records] == [
        "tracker broken has failed, and gets no more numbers: ConnectionError: the server is away"
    ]
    assert [step for step, _ in tracker.points] == [0, 1, 2]


def test_a_tracker_that_cannot_start_is_a_warning_too(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Remembering:
        raise OSError("no space left")

    with caplog.at_level(logging.WARNING):
        tracker = BackgroundTracker("broken", make)
        tracker.close()
    assert "tracker broken has failed, and gets no more numbers: OSError: no space left" in caplog.text


def test_a_tracker_is_named_once() -> None:
    with pytest.raises(InvalidInput, match="trackers: has the same name twice"):
        judged_spec(trackers=["wandb", "wandb"])
    with pytest.raises(InvalidInput, match="trackers"):
        job_spec(trackers=["comet"])
