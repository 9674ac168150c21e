"""A batch that was sampled again and is another says the first thing that is, in words."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from contracts.encoding.arrays import pack_float32
from contracts.rollouts import Rollout, RolloutBatch
from onbeat.replay.difference import first_difference
from tests.builders import batch_of, rollout

ROLLOUT = rollout([4, 5, 6], 1.0, logprobs=[-0.5, -0.25, -1.0])


def batch_with(second: Rollout, **changes: Any) -> RolloutBatch:
    return batch_of([([3], [ROLLOUT, second]), ([3], [ROLLOUT, ROLLOUT])], **changes)


def test_who_sampled_it_when_is_no_difference() -> None:
    assert first_difference(batch_with(ROLLOUT), batch_with(ROLLOUT, generator_id="other", attempt=3)) == ""


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (rollout([4, 7, 6], 1.0), "token 1 is 7, recorded 5"),
        (rollout([4, 5], 1.0), "2 tokens, recorded 3"),
        (rollout([4, 5, 6], 1.0, logprobs=[-0.5, -0.125, -1.0]), "the log-prob of sampled token 1 is -0.125"),
        (replace(ROLLOUT, completion=replace(ROLLOUT.completion, finish_reason="length")), "it ended by length"),
        (
            replace(ROLLOUT, completion=replace(ROLLOUT.completion, kept_sets=b"\x05\x00\x00\x00")),
            "the tokens that truncated sampling kept",
        ),
        (rollout([4, 5, 6], 0.5, logprobs=[-0.5, -0.25, -1.0]), "reward 0.5, recorded 1.0 (exact is 0.5, recorded"),
        (replace(ROLLOUT, text="other"), "its text"),
    ],
)
def test_the_first_difference_is_named_with_its_place(changed: Rollout, words: str) -> None:
    found = first_difference(batch_with(ROLLOUT), batch_with(changed))
    assert found.startswith("group 0, sample 1: ")
    assert words in found


def test_another_version_or_another_prompt_is_named_first() -> None:
    assert "now with version 1" in first_difference(batch_with(ROLLOUT), batch_with(ROLLOUT, policy_version=1))
    recorded = batch_with(ROLLOUT)
    other = replace(recorded, groups=(replace(recorded.groups[0], num_resamples=1), recorded.groups[1]))
    assert "after 1 resamples" in first_difference(recorded, other)


def test_minus_zero_and_a_log_prob_that_is_no_number_are_compared_by_their_bits() -> None:
    plus, minus, nan = (
        replace(ROLLOUT, completion=replace(ROLLOUT.completion, generator_logprobs=pack_float32([value, -1.0, -1.0])))
        for value in (0.0, -0.0, float("nan"))
    )
    assert "log-prob" in first_difference(batch_with(plus), batch_with(minus))
    assert first_difference(batch_with(nan), batch_with(nan)) == ""
