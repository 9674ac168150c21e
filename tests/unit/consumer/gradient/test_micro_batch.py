"""Rollout batch → tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from consumer.gradient.micro_batch import Packing, make_micro_batch, rows_that_teach, split_rows
from consumer.model.inputs import CachedInputs, PackedInputs, PaddedInputs
from tests.builders import batch_of, rollout

BATCH = batch_of(
    [([5, 6], [rollout([1, 2, 3], 1.0, logprobs=[-0.5, -1.0, -1.5])]), ([7], [rollout([4], 0.0, logprobs=[-2.0])])]
)
ADVANTAGES = np.array([[0.5], [-0.5]])


def test_prompts_are_padded_left_and_responses_right() -> None:
    micro_batch = make_micro_batch(BATCH, advantages=ADVANTAGES)
    inputs = micro_batch.inputs
    assert isinstance(inputs, PaddedInputs)
    assert inputs.input_ids.tolist() == [[5, 6, 1, 2], [0, 7, 0, 0]]
    assert inputs.attention_mask.tolist() == [[1, 1, 1, 1], [0, 1, 0, 0]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3], [0, 0, 0, 0]]
    assert inputs.predicting.tolist() == [[1, 2, 3], [5, 0, 0]]
    assert inputs.prompts_are_padded
    assert inputs.input_ids.dtype == torch.int64
    assert micro_batch.response_ids.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert micro_batch.loss_mask.tolist() == [[True, True, True], [True, False, False]]
    assert micro_batch.generator_logprobs.tolist() == [[-0.5, -1.0, -1.5], [-2.0, 0.0, 0.0]]
    assert micro_batch.advantages.tolist() == [0.5, -0.5]


def test_padding_shrinks_to_the_chosen_rows() -> None:
    micro_batch = make_micro_batch(BATCH, advantages=ADVANTAGES, rows=np.array([1]))
    inputs = micro_batch.inputs
    assert isinstance(inputs, PaddedInputs)
    assert inputs.input_ids.tolist() == [[7]]
    assert not inputs.prompts_are_padded
    assert micro_batch.response_ids.tolist() == [[4]]


def test_a_packed_prompt_stands_once_before_the_chosen_responses_of_its_group() -> None:
    groups = [
        ([5, 6], [rollout([1, 2, 3], 1.0), rollout([7, 8], 0.0), rollout([4, 9], 0.0)]),
        ([7], [rollout([4], 0.0), rollout([1], 0.0), rollout([2, 3], 0.0)]),
    ]
    micro_batch = make_micro_batch(
        batch_of(groups), advantages=np.zeros((2, 3)), rows=np.array([0, 2, 3, 5]), packing="shared_prompt"
    )
    inputs = micro_batch.inputs
    assert isinstance(inputs, PackedInputs)
    assert inputs.input_ids.tolist() == [[5, 6, 1, 2, 4, 7, 2]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 2, 0, 1]]
    assert inputs.predicting.tolist() == [[1, 2, 3], [1, 4, 0], [5, 0, 0], [5, 6, 0]]
    assert [(group.prompt_tokens, group.response_tokens) for group in inputs.groups] == [(2, (2, 1)), (1, (0, 1))]
    assert micro_batch.response_ids.tolist() == [[1, 2, 3], [4, 9, 0], [4, 0, 0], [2, 3, 0]]


def test_by_the_cache_prompts_of_a_length_stand_together_before_their_responses() -> None:
    groups = [
        ([5, 6], [rollout([1, 2, 3], 1.0), rollout([7, 8], 0.0), rollout([4, 9, 3, 3], 0.0)]),
        ([7], [rollout([4], 0.0), rollout([1], 0.0), rollout([2, 3], 0.0)]),
        ([8, 9], [rollout([6], 0.0), rollout([1, 2], 0.0), rollout([2], 0.0)]),
    ]
    micro_batch = make_micro_batch(
        batch_of(groups), advantages=np.zeros((3, 3)), rows=np.array([0, 2, 3, 5, 6, 7]), packing="prompt_cache"
    )
    inputs = micro_batch.inputs
    assert isinstance(inputs, CachedInputs)
    short, long = inputs.parts
    assert short.prompt_ids.tolist() == [[7]]
    # One token more than it has: fewer than two would be taken for a generator's step.
    assert short.response_ids.tolist() == [[2, 0]]
    assert long.prompt_ids.tolist() == [[5, 6], [8, 9]]
    assert long.response_ids.tolist() == [[1, 2, 0], [4, 9, 3], [1, 0, 0]]
    assert long.prompt_of_response.tolist() == [0, 0, 1]
    assert inputs.input_ids.tolist() == [7, 2, 0, 5, 6, 8, 9, 1, 2, 0, 4, 9, 3, 1, 0, 0]
    assert inputs.position_ids.tolist() == [0, 1, 1, 0, 1, 0, 1, 2, 3, 4, 2, 3, 4, 2, 3, 4]
    assert inputs.predicting.tolist() == [
        [4, 7, 8, 0],
        [4, 10, 11, 12],
        [0, 0, 0, 0],
        [0, 1, 0, 0],
        [6, 0, 0, 0],
        [6, 13, 0, 0],
    ]


def test_by_the_cache_responses_of_one_token_need_no_pass_behind_their_prompt() -> None:
    groups = [([5, 6], [rollout([1], 1.0), rollout([2], 0.0)])]
    inputs = make_micro_batch(batch_of(groups), advantages=np.zeros((1, 2)), packing="prompt_cache").inputs
    assert isinstance(inputs, CachedInputs)
    (part,) = inputs.parts
    assert part.response_ids.shape == (0, 0)
    assert inputs.input_ids.tolist() == [5, 6]
    assert inputs.predicting.tolist() == [[1], [1]]


@pytest.mark.parametrize(
    ("packing", "max_tokens", "expected"),
    [
        ("padded", 1000, [[0, 1, 2, 3, 4, 5]]),
        ("padded", 10, [[0, 1], [2], [3, 4], [5]]),
        ("padded", 1, [[0], [1], [2], [3], [4], [5]]),
        ("shared_prompt", 1000, [[0, 1, 2, 3, 4, 5]]),
        # The first group takes 2 + 2 + 1 + 4 tokens, the second 3 + 0 + 0 + 1.
        ("shared_prompt", 13, [[0, 1, 2, 3, 4, 5]]),
        ("shared_prompt", 12, [[0, 1, 2], [3, 4, 5]]),
        ("shared_prompt", 8, [[0, 1], [2], [3, 4, 5]]),
        ("shared_prompt", 1, [[0], [1], [2], [3], [4], [5]]),
        # The first group takes 2 + 3 * 4 tokens, the second 3 + 3 * 1.
        ("prompt_cache", 20, [[0, 1, 2, 3, 4, 5]]),
        ("prompt_cache", 19, [[0, 1, 2], [3, 4, 5]]),
        # Rows 0 and 1 take 2 + 2 * 2, and with row 2 more than 13; that takes 2 + 4, which leaves room for the second.
        ("prompt_cache", 13, [[0, 1], [2, 3, 4, 5]]),
        ("prompt_cache", 8, [[0, 1], [2], [3, 4, 5]]),
        ("prompt_cache", 1, [[0], [1], [2], [3], [4], [5]]),
    ],
)
def test_passes_hold_no_more_than_the_limit_and_split_a_group_only_where_they_must(
    packing: Packing, max_tokens: int, expected: list[list[int]]
) -> None:
    groups = [
        ([5, 6], [rollout([1] * 3, 1.0), rollout([1] * 2, 0.0), rollout([1] * 5, 0.0)]),
        ([7, 8, 9], [rollout([4], 0.0), rollout([1], 0.0), rollout([2, 3], 0.0)]),
    ]
    parts = split_rows(batch_of(groups), np.arange(6), packing=packing, max_tokens=max_tokens)
    assert [part.tolist() for part in parts] == expected


def test_a_micro_batch_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        make_micro_batch(BATCH, advantages=ADVANTAGES, rows=np.array([], dtype=np.int64))


def test_rows_of_zero_advantage_teach_only_under_a_kl_term() -> None:
    advantages = np.array([[0.0, 0.0], [-0.7, 0.7]])
    assert rows_that_teach(advantages, every_row=False).tolist() == [2, 3]
    assert rows_that_teach(advantages, every_row=True).tolist() == [0, 1, 2, 3]
