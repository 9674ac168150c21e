"""A job's health, judged on curves of real runs: one that is well stays silent, the others say what went wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from contracts.errors import InvalidInput
from contracts.events import IterationMetrics
from contracts.jobs import EvaluationScore, HealthProblem
from contracts.spec.trainer import HEALTH_RULES
from onbeat.loop.health.history import WINDOW
from onbeat.loop.health.rules import HEALTH_CHECKS, Health
from tests.builders import judged_spec
from tests.building.specs import SpecBuilder
from tests.contract.golden_files import iteration_metrics

CURVES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "curves.json").read_bytes())
"""Run → its numbers: the demo; the demo with a learning rate of 0.05; a job of lag 2 whose rate is too high for it."""
LAGGING = {"schedule": "delayed", "max_policy_lag": 2, "algorithm__correction": "tis"}
GROUP_SIZE = 8


@dataclass
class Run:
    """A recorded run, and what becomes of it where some of its numbers are others."""

    rows: list[IterationMetrics]
    scores: dict[int, EvaluationScore]

    @classmethod
    def of(cls, name: str) -> Run:
        recorded = CURVES[name]
        columns: dict[str, list[float]] = recorded["columns"]
        rows = [
            iteration_metrics(
                iteration=number,
                num_completions=recorded["num_completions"],
                **{column: values[number] for column, values in columns.items()},
            )
            for number in range(len(columns["reward_mean"]))
        ]
        scores = {
            iteration: EvaluationScore(
                iteration=iteration, policy_version=iteration, sampled=sampled, num_prompts=num_prompts
            )
            for iteration, sampled, num_prompts in recorded["scores"]
        }
        return cls(rows, scores)

    def changed(self, **changes: Callable[[IterationMetrics], object]) -> Run:
        """With other numbers, each made of its iteration."""
        return Run(
            [replace(row, **{name: change(row) for name, change in changes.items()}) for row in self.rows], self.scores
        )

    def lasting(self, num_iterations: int) -> Run:
        """The last iteration goes on and on."""
        last = self.rows[-1]
        more = range(len(self.rows), num_iterations)
        return Run([*self.rows, *(replace(last, iteration=number) for number in more)], self.scores)

    def told(self, **spec: Any) -> tuple[dict[str, int], tuple[HealthProblem, ...]]:
        """(rule → the iterations after which it was broken first, what is wrong at the end)."""
        health = Health(_spec(**spec))
        first: dict[str, int] = {}
        found: tuple[HealthProblem, ...] = ()
        for row in self.rows:
            if row.iteration in self.scores:
                health.score(self.scores[row.iteration])
            found = health.iteration(row)
            for problem in found:
                first.setdefault(problem.rule, problem.since)
        return first, found


_spec = SpecBuilder(rollout__group_size=GROUP_SIZE)


def test_every_rule_of_the_contract_has_its_place_in_the_table_and_a_cure() -> None:
    assert [check.name for check in HEALTH_CHECKS] == list(HEALTH_RULES)
    assert all(check.cure for check in HEALTH_CHECKS)


def test_a_run_that_learns_is_well_from_its_first_iteration_to_its_last() -> None:
    assert Run.of("healthy").told() == ({}, ())


def test_a_reward_that_went_to_nothing_in_its_first_iterations_is_told_to_the_end_of_a_thousand() -> None:
    first, found = Run.of("collapsed").lasting(1000).told()
    assert first["reward_collapsed"] == WINDOW
    (collapsed,) = [problem for problem in found if problem.rule == "reward_collapsed"]
    assert collapsed.problem == "0.00215 on average over 10 iterations, after 0.432 up to iteration 0"
    assert collapsed.in_words.startswith("reward collapsed since iteration 10: 0.00215")
    assert "optimizer.learning_rate" in collapsed.cure
    assert {problem.rule for problem in found} == {"reward_collapsed", "score_collapsed", "groups_equal"} | {
        "truncations_rising"
    }


def test_a_reward_that_recovers_is_well_again() -> None:
    run = Run.of("collapsed")
    healthy = Run.of("healthy").rows[-1]
    back = [replace(healthy, iteration=len(run.rows) + more) for more in range(2 * WINDOW)]
    first, found = Run([*run.rows, *back], {}).told()
    assert "reward_collapsed" in first
    assert found == ()


def test_a_held_out_score_that_falls_is_told_though_the_reward_rises() -> None:
    run = Run.of("healthy")
    last = len(run.rows) - 1
    fallen = EvaluationScore(iteration=last, policy_version=last, sampled=0.1, num_prompts=512)
    _, found = Run(run.rows, {**run.scores, last: fallen}).told()
    assert [problem.rule for problem in found] == ["score_collapsed"]
    assert found[0].problem.startswith("0.1 under version 149, after 0.441 under 0")


def test_a_lag_that_spoils_the_weights_is_told() -> None:
    first, found = Run.of("too large a lag").told(**LAGGING)
    assert first["lag_too_large"] < first["reward_collapsed"]
    assert {problem.rule for problem in found} >= {"reward_collapsed", "groups_equal"}


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("groups_equal", {"zero_advantage_share": lambda row: 1.0}),
        ("entropy_gone", {"entropy": lambda row: 0.4 / (1 + row.iteration) ** 2}),
        ("kl_high", {"loss_metrics": lambda row: {"kl_to_reference": 0.01 * row.iteration}}),
        ("gradient_dead", {"grad_norm": lambda row: 0.0}),
        ("mismatch_high", {"mismatch_k3": lambda row: 0.02}),
        ("truncations_rising", {"truncated_share": lambda row: row.iteration / 150}),
    ],
)
def test_one_number_that_goes_wrong_is_told_alone(
    rule: str, changes: dict[str, Callable[[IterationMetrics], object]]
) -> None:
    _, found = Run.of("healthy").changed(**changes).told(trainer__kl_alarm=0.5, algorithm__kl_coefficient=0.1)
    assert [problem.rule for problem in found] == [rule]


def test_alarms_of_ones_own_say_when_the_kl_is_high_and_the_entropy_gone() -> None:
    run = Run.of("healthy").changed(
        loss_metrics=lambda row: {"kl_to_reference": 0.2 + 0.01 * row.iteration}, entropy=lambda row: 0.3
    )
    spec = {"algorithm__kl_coefficient": 0.1, "trainer__kl_alarm": 0.5, "trainer__entropy_alarm": 0.31}
    first, found = run.told(**spec)
    # The mean of ten iterations first is above 0.5 where they are those from 26 to 35.
    assert first == {"entropy_gone": WINDOW - 1, "kl_high": 35}
    assert found[1].problem == "0.505 a token over 10 iterations, above trainer.kl_alarm of 0.5"
    assert run.told() == ({}, ())
    for options, problem in (
        ({"trainer__kl_alarm": 0.5}, "trainer.kl_alarm: has no effect"),
        ({"trainer__stop_on": ["kl_high"]}, "never gives: without kl_alarm"),
    ):
        with pytest.raises(InvalidInput, match=problem):
            judged_spec(**options)


def test_the_lag_of_long_responses_is_judged_by_their_length_where_weights_are_of_responses() -> None:
    def drifted(tokens: float) -> Run:
        return Run.of("healthy").changed(mismatch_k3=lambda row: 0.003, response_tokens_mean=lambda row: tokens)

    by_response = {**LAGGING, "algorithm__correction_level": "sequence"}
    assert drifted(50.0).told(**by_response) == ({}, ())
    _, found = drifted(1000.0).told(**by_response)
    assert [problem.rule for problem in found] == ["lag_too_large"]
    assert drifted(1000.0).told(**LAGGING) == ({}, ())


def test_a_job_that_has_solved_its_task_is_well() -> None:
    def solved(row: IterationMetrics) -> float:
        return float(row.iteration >= 100)

    run = Run.of("healthy").changed(
        reward_mean=lambda row: max(row.reward_mean, solved(row)),
        reward_std=lambda row: row.reward_std * (1 - solved(row)),
        zero_advantage_share=lambda row: max(row.zero_advantage_share, solved(row)),
        grad_norm=lambda row: row.grad_norm * (1 - solved(row)),
        entropy=lambda row: row.entropy * (1 - solved(row)),
    )
    assert run.told() == ({}, ())


def test_what_a_job_does_not_have_is_no_problem_of_it() -> None:
    equal = Run.of("healthy").changed(zero_advantage_share=lambda row: 1.0)
    assert equal.told(algorithm__advantage="gae") == ({}, ())
    silent = Run.of("healthy").changed(grad_norm=lambda row: 0.0)
    assert silent.told(trainer__external=True) == ({}, ())
    assert Run(Run.of("collapsed").rows[: WINDOW - 1], {}).told() == ({}, ())


def begun(num_iterations: int, **columns: float) -> Run:
    """The first iterations of a run that is well, with these numbers from its beginning on."""
    run = Run.of("healthy").changed(**{name: lambda row, value=value: value for name, value in columns.items()})
    return Run(run.rows[:num_iterations], {})


EQUAL = {"zero_advantage_share": 1.0, "reward_mean": 0.0, "reward_std": 0.0, "grad_norm": 0.0}
SHORT: dict[str, Any] = {"rollout__sampling": {"max_new_tokens": 12}, "iterations": 60}


@pytest.mark.parametrize(
    ("columns", "rule", "problem"),
    [
        (
            {"truncated_share": 1.0},
            "completions_cut",
            "100% of the completions reach rollout.sampling.max_new_tokens = 12, 100% in the first iterations",
        ),
        (
            {"num_unscorable": 1024},
            "completions_unscorable",
            "100% of the completions of 3 iterations have a stated score in place of their own",
        ),
    ],
)
def test_what_is_wrong_with_all_completions_from_the_beginning_is_told_after_the_first_iterations(
    columns: dict[str, float], rule: str, problem: str
) -> None:
    first, found = begun(3, **columns).told(**SHORT)
    assert first == {rule: 2}
    assert found[0].problem == problem
    assert begun(2, **columns).told(**SHORT) == ({}, ())
    first, _ = begun(2, **columns).told(**SHORT | {"iterations": 2})
    assert first == {rule: 1}, "a job of two iterations has no third one"
    first, _ = begun(60, **columns).told(**SHORT)
    assert first == {rule: 2}, "it is told once, and no rule that compares says it again"


def test_a_job_whose_completions_are_to_be_cut_and_one_that_cuts_few_are_well() -> None:
    forced = {"max_new_tokens": 12, "min_new_tokens": 12}
    assert begun(60, truncated_share=1.0).told(**SHORT | {"rollout__sampling": forced}) == ({}, ())
    assert begun(60, truncated_share=0.24, num_unscorable=100).told(**SHORT) == ({}, ())


@pytest.mark.parametrize(
    ("columns", "cure"),
    [
        ({"truncated_share": 1.0}, "raise rollout.sampling.max_new_tokens above 12 first"),
        ({"num_unscorable": 1024}, "let them be judged first: each audit record counts the reasons"),
        ({}, "take prompts of which some samples are right and some wrong"),
    ],
)
def test_groups_that_are_equal_from_the_beginning_have_the_cure_of_their_cause(
    columns: dict[str, float], cure: str
) -> None:
    _, found = begun(WINDOW, **EQUAL, **columns).told(**SHORT)
    (equal,) = [problem for problem in found if problem.rule == "groups_equal"]
    assert equal.cure.startswith(cure)


def test_a_mismatch_that_float32_can_not_have_is_told_after_the_first_iteration() -> None:
    first, found = begun(1, mismatch_k3=2e-5).told(**SHORT)
    assert first == {"mismatch_unusual": 0}
    assert found[0].problem == "K3 of 2e-05 a token, where engines that compute the same in float32 have about 1e-13"
    for well in ({"deterministic": False}, {"model__dtype": "bfloat16"}, LAGGING):
        assert begun(1, mismatch_k3=2e-5).told(**SHORT | well) == ({}, ())
    for rounded in ({"deterministic": False}, {"model__dtype": "bfloat16"}):
        first, found = begun(1, mismatch_k3=2e-2).told(**SHORT | rounded)
        assert first == {"mismatch_unusual": 0}
        assert found[0].problem == "K3 of 0.02 a token, where engines that round to 16 bits have at most 1e-3"
        quantized = {"trainer__mismatch_alarm": 0.1}
        assert begun(1, mismatch_k3=2e-2).told(**SHORT | rounded | quantized) == ({}, ()), "the spec expects so much"
    short = Health(_spec(**SHORT))
    for iteration, k3 in enumerate((2e-5, 1e-13, 1e-13)):
        short.iteration(iteration_metrics(iteration=iteration, mismatch_k3=k3))
    (past,) = short.past
    assert (past.rule, past.since, past.until) == ("mismatch_unusual", 0, 2), "a short job's end still names it"
    assert past.in_words.startswith("mismatch is unusual from iteration 0 until 2: K3 of 2e-05 a token, ")
    once = Run.of("healthy").changed(mismatch_k3=lambda row: 2e-5 if row.iteration == 7 else 1e-13)
    assert once.told() == ({}, ()), "a token that takes another expert once is no fault"
