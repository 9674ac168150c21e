"""What a spec says of itself, and words and numbers that are refused where they are read."""

from __future__ import annotations

import pytest

from contracts.encoding.wire import Record, convert
from contracts.errors import ContractViolation, InvalidInput
from contracts.jobs import JobState
from contracts.rewards import ExactReward, Scored, with_on_unscorable
from contracts.settings import settings_from
from tests.builders import job_spec
from tests.refusals import refusal_of


def test_held_out_prompts_are_sampled_before_after_and_each_n_iterations_where_there_are_any() -> None:
    spec = job_spec(iterations=5, evaluation__num_prompts=4, evaluation__every_iterations=2)
    assert [spec.evaluates(iteration) for iteration in range(6)] == [True, False, True, False, True, True]
    without = job_spec(iterations=5, evaluation__num_prompts=0, evaluation__every_iterations=2)
    assert not any(without.evaluates(iteration) for iteration in range(6))
    assert (spec.last_iteration, without.last_iteration) == (5, 4)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_is_an_error(reward: float) -> None:
    with pytest.raises(ContractViolation, match="finite"):
        Scored(reward=reward, breakdown={})


class OfAState(Record, frozen=True, kw_only=True):
    state: JobState


def test_a_word_that_is_none_of_a_kind_is_refused_with_those_that_are() -> None:
    with pytest.raises(InvalidInput, match="succeeded"):
        convert({"state": "paused"}, OfAState)


class StatesInAList(Record, frozen=True, kw_only=True):
    states: tuple[JobState, ...]


def test_a_word_in_a_list_is_refused_with_those_that_there_are() -> None:
    with refusal_of("states[0]") as refusal:
        convert({"states": ["queud"]}, StatesInAList)
    assert (refusal.value.cure or "").startswith("did you mean queued? One of queued, running, ")


def test_a_score_is_stated_for_components_of_the_rubric_alone() -> None:
    rubric = (ExactReward(),)
    assert with_on_unscorable(rubric, {"exact": 0.5}) == (ExactReward(on_unscorable=0.5),)
    with refusal_of("on_unscorable"):
        with_on_unscorable(rubric, {"exact": 0.5, "length": 0.5})


@pytest.mark.parametrize("variable", ["ONBEAT_LOG_FORMAT", "ONBEAT_DEVICE"])
def test_a_setting_that_is_none_of_its_words_is_refused_by_its_variable(variable: str) -> None:
    with pytest.raises(InvalidInput, match=f"{variable}: .* \\(one of "):
        settings_from({variable: "other"})
