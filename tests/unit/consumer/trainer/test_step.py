"""The steps of an iteration, with ranks and a publisher that the test plays: what comes before a weight moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from consumer.gradient.advantages.estimators import batch_rewards
from consumer.gradient.cost import TrainingCost
from consumer.gradient.learner import OptimizerStep, Trained
from consumer.gradient.statistics import BatchStats, Mismatch
from consumer.trainer.iteration import Iteration
from consumer.trainer.step import step
from contracts.errors import BatchFailed, ContractViolation, TrainingDiverged
from contracts.events import MismatchAlarm
from contracts.schedule import Schedule
from onbeat.loop.window import AskedIteration, Window
from tests.builders import DIGEST, job_spec, rollout_batch

SETTLED = "the version that is committed"


def gathered(*, number: int = 0, k3_sum: float = 0.0, largest: float = 0.5, num_batches: int = 1) -> Iteration:
    iteration = Iteration(
        AskedIteration(number=number, weights_digest=DIGEST, batches=(), samplers={number: DIGEST}),
        trainer_epoch=1,
        boundary=None,
    )
    for index in range(num_batches):
        iteration.record(trained(f"0/train/{index}", k3_sum=k3_sum, largest=largest))
    return iteration


def trained(batch_id: str, *, k3_sum: float = 0.0, largest: float = 0.5) -> Trained:
    batch = rollout_batch(batch_id=batch_id)
    mismatch = Mismatch(num_tokens=10, k3_sum=k3_sum, largest=largest, rho_sum=10.0, rho_square_sum=10.0)
    stats = dataclasses.replace(BatchStats.of(batch, batch_rewards(batch)), mismatch=mismatch)
    return Trained(stats=stats, rank=0, started_s=1.0, ended_s=2.0)


class Played:
    """A held job, its ranks, its publisher and the publication; `said` has what was asked of them, in order."""

    def __init__(self, **spec: Any) -> None:
        self.spec = job_spec(**spec)
        schedule = Schedule(self.spec.schedule, self.spec.max_policy_lag)
        self.window = Window(schedule, None, last_iteration=4)  # type: ignore[arg-type]
        self.horizons: dict[int, int] = {}
        self.peak_flops = 0.0
        self.layout = object()
        self.settled: str | None = SETTLED
        self.side = self.ranks = self.weights = self.probes = self
        self.learner = SimpleNamespace(accumulator=self)
        self.added: tuple[int, ...] | None = None
        self.keeper = SimpleNamespace(check_lease=lambda: None, training=lambda **_: nullcontext())
        self.said: list[str] = []
        self.told: list[object] = []

    def begin(self, layout: object, *, policy_version: int) -> Played:
        assert self.settled is None
        self.said.append(f"began version {policy_version}")
        return self

    def __enter__(self) -> Played:
        return self

    def __exit__(self, *_: object) -> None: ...

    def finish(self) -> str:
        self.said.append("finished")
        return "made"

    def measure(self, policy_version: int) -> None:
        self.said.append(f"measured version {policy_version}")

    def with_probe(self, made: str) -> str:
        return made

    def renew(self) -> None:
        self.said.append("renewed")

    def publish_weights(self, made: object, *, oldest_kept: int) -> None:
        self.said.append(f"announced, kept from {oldest_kept}")

    def step(self, step: OptimizerStep, publication: object) -> float:
        self.said.append("last step, published" if step.is_last and publication else "step")
        return 1.0

    def train_again(self, check: Callable[[], None], mini_batch: int = 0) -> list[Trained]:
        self.said.append(f"trained part {mini_batch} again")
        return [trained(f"0/train/{mini_batch}")]

    def tell(self, event: object) -> None:
        self.told.append(event)


def test_a_version_is_written_by_the_last_step_and_named_under_a_lease_that_was_renewed() -> None:
    held: Any = Played(algorithm__updates_per_iteration=2)
    stepped = step(held, gathered())
    assert held.said == [
        "began version 1",
        "step",
        "trained part 0 again",
        "last step, published",
        "measured version 1",
        "renewed",
        "finished",
        "announced, kept from 0",
    ]
    assert (stepped.manifest, stepped.metrics.iteration, len(stepped.metrics.updates)) == ("made", 0, 2)
    assert held.settled is None


def test_where_the_operations_of_one_batch_are_unknown_the_iteration_has_no_mfu_and_the_rest_is_reported() -> None:
    for last, is_known in ((1e9, True), (None, False)):
        held: Any = Played()
        held.peak_flops = 1e12
        iteration = gathered(num_batches=2)
        for number, flops in enumerate((1e9, last)):
            cost = TrainingCost(num_tokens=4, flops=flops)
            iteration.stats[number] = dataclasses.replace(iteration.stats[number], cost=cost)
        metrics = step(held, iteration).metrics
        assert (metrics.mfu is not None, metrics.trained_tokens) == (is_known, 8)


def test_each_mini_batch_has_a_step_and_one_whose_batches_are_dead_has_none() -> None:
    held: Any = Played(algorithm__mini_batches=4)
    iteration = gathered(num_batches=3)
    del iteration.stats[1]
    stepped = step(held, iteration)
    assert held.said[1:-4] == ["step", "trained part 2 again", "last step, published"]
    assert len(stepped.metrics.updates) == 2
    assert stepped.scaling.count == sum(one.num_tokens for one in iteration.stats)


def test_the_sums_of_an_iteration_held_what_was_trained_for_it_or_nothing_is_announced() -> None:
    held: Any = Played(algorithm__updates_per_iteration=2)
    held.added = (1, 0)
    iteration = gathered(num_batches=2)
    iteration.stats[0] = dataclasses.replace(iteration.stats[0], trained_rows=(0,))
    held.train_again = lambda *_: []
    step(held, iteration)
    assert iteration.in_sums == (2, 0)
    for added, problem in (((2, 0), "held batch 0 2 times"), ((0, 0), "held batch 0 0 times"), ((1, 1), "batch 1 1")):
        held.added, held.settled, held.said = added, None, []
        with pytest.raises(ContractViolation, match=problem):
            step(held, iteration)
        assert "finished" not in held.said


def test_the_versions_that_the_open_iteration_was_sampled_with_stay_announced_until_its_commit() -> None:
    held: Any = Played(schedule="delayed", max_policy_lag=2, algorithm__correction="tis")
    step(held, gathered(number=3))
    assert held.said[-1] == "announced, kept from 1"


def test_an_iteration_without_a_training_batch_fails_while_the_committed_version_can_be_saved() -> None:
    held: Any = Played()
    iteration = gathered(num_batches=0)
    iteration.abandoned["0/train/0"] = "reward `right` raised KeyError"
    words = "^reward `right` raised KeyError; so every training batch of iteration 0 is dead$"
    with pytest.raises(BatchFailed, match=words):
        step(held, iteration)
    assert (held.settled, held.said) == (SETTLED, [])


def test_the_cause_of_a_dead_iteration_is_that_of_a_training_batch_and_none_is_made_up() -> None:
    iteration = gathered(num_batches=0)
    assert str(iteration.all_dead()) == "every training batch of iteration 0 is dead"
    iteration.abandoned["0/evaluation/0"] = "the judge is away"
    iteration.abandoned["0/train/1"] = "reward `right` raised KeyError"
    iteration.abandoned["0/train/0"] = "reward `right` raised ValueError"
    expected = "reward `right` raised KeyError; so every training batch of iteration 0 is dead"
    assert str(iteration.all_dead()) == expected


def test_log_probs_that_differ_fail_the_job_before_a_weight_moves_or_are_told_as_the_spec_says() -> None:
    failing: Any = Played(trainer__on_mismatch="fail")
    with pytest.raises(TrainingDiverged, match="differ by a mean K3 of 1 a token"):
        step(failing, gathered(k3_sum=10.0))
    assert (failing.settled, failing.said) == (SETTLED, [])
    warned: Any = Played()
    step(warned, gathered(k3_sum=10.0))
    for held in (failing, warned):
        assert [type(event) for event in held.told] == [MismatchAlarm]


def test_as_sampled_any_difference_fails_the_job_also_one_far_below_the_alarm_of_the_spec() -> None:
    asked: dict[str, Any] = {"trainer__packing": "as_sampled", "trainer__on_mismatch": "fail"}
    forged: Any = Played(**asked)
    with pytest.raises(TrainingDiverged, match="differ by a mean K3 of"):
        step(forged, gathered(k3_sum=1e-12, largest=1e-6))
    assert (forged.settled, forged.said) == (SETTLED, [])
    honest: Any = Played(**asked)
    step(honest, gathered(k3_sum=0.0, largest=0.0))
    assert honest.told == []
