"""What is published of a prompt batch: groups in its order, with texts only where a stage of the job reads them."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from contracts.rewards import ExactReward, PluginReward, Scored
from contracts.rollouts import RolloutGroup
from onbeat.scoring.groups import reward_items, rollout_groups
from tests.builders import completion, job_spec, prompt_batch

JUDGE = {"type": "llm_judge", "model": "m", "prompt": "{prompt} {completion}"}


def groups(**changes: Any) -> list[RolloutGroup]:
    return rollout_groups(
        prompt_batch([[5, 6], [7]]),
        job_spec(**changes),
        completions=[completion([number]) for number in range(3, 7)],
        texts=list("abcd"),
        scored=[Scored(reward=float(number), breakdown={"exact": 1.0}) for number in range(4)],
    )


def test_the_samples_of_a_prompt_stand_side_by_side_with_their_rewards() -> None:
    first, second = groups()
    assert [[one.text for one in group.rollouts] for group in (first, second)] == [["a", "b"], ["c", "d"]]
    assert [one.reward for one in second.rollouts] == [2.0, 3.0]


def test_what_was_cut_has_the_stated_reward_and_keeps_its_scores_in_sight() -> None:
    cut, whole = replace(completion([3]), finish_reason="length"), completion([4])
    (group,) = rollout_groups(
        prompt_batch([[5, 6]]),
        job_spec(algorithm__on_truncated="penalise", algorithm__truncated_reward=-0.5),
        completions=[cut, whole],
        texts=["a", "b"],
        scored=[Scored(reward=1.0, breakdown={"exact": 1.0})] * 2,
    )
    assert [one.reward for one in group.rollouts] == [-0.5, 1.0]
    assert [one.reward_breakdown for one in group.rollouts] == [{"exact": 1.0}] * 2
    assert not group.has_equal_rewards


def test_prompt_and_reference_travel_as_texts_only_where_they_are_read() -> None:
    assert [(group.prompt_text, group.reference) for group in groups()] == [(UNSET, UNSET)] * 2
    assert [(group.prompt_text, group.reference) for group in groups(deterministic=False, stages=[JUDGE])] == [
        ("prompt 0", "0"),
        ("prompt 1", "1"),
    ]


def test_the_tokens_of_a_completion_travel_only_to_a_function_of_the_users() -> None:
    completions, exact = [completion([number, 9]) for number in range(4)], ExactReward()
    for components, tokens in ((exact,), UNSET), ((exact, PluginReward(entry_point="mine")), completions[3].token_ids):
        item = reward_items(components, prompt_batch([[5, 6], [7]]), completions, list("abcd"))[3]
        assert (item.prompt, item.completion, item.finish_reason, item.token_ids) == ("prompt 1", "d", "stop", tokens)
