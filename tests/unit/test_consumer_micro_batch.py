"""Rollout batch → tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from consumer.micro_batch import make_micro_batch, rows_that_teach
from tests.builders import batch_of, rollout

BATCH = batch_of(
    [
        ([5, 6], [rollout([1, 2, 3], 1.0, logprobs=[-0.5, -1.0, -1.5])]),
        ([7], [rollout([4], 0.0, logprobs=[-2.0])]),
    ]
)
ADVANTAGES = np.array([[0.5], [-0.5]])


def test_prompts_are_padded_left_and_responses_right() -> None:
    micro_batch = make_micro_batch(BATCH, advantages=ADVANTAGES)
    assert micro_batch.input_ids.tolist() == [[5, 6, 1, 2], [0, 7, 4, 0]]
    assert micro_batch.attention_mask.tolist() == [[1, 1, 1, 1], [0, 1, 1, 0]]
    assert micro_batch.position_ids.tolist() == [[0, 1, 2, 3], [0, 0, 1, 1]]
    assert micro_batch.response_ids.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert micro_batch.loss_mask.tolist() == [[True, True, True], [True, False, False]]
    assert micro_batch.generator_logprobs.tolist() == [[-0.5, -1.0, -1.5], [-2.0, 0.0, 0.0]]
    assert micro_batch.advantages.tolist() == [0.5, -0.5]
    assert micro_batch.group_index.tolist() == [0, 1]
    assert micro_batch.prompts_are_padded
    assert micro_batch.input_ids.dtype == torch.int64


def test_padding_shrinks_to_the_chosen_rows() -> None:
    micro_batch = make_micro_batch(BATCH, advantages=ADVANTAGES, rows=np.array([1]))
    assert micro_batch.input_ids.tolist() == [[7]]
    assert micro_batch.response_ids.tolist() == [[4]]
    assert micro_batch.group_index.tolist() == [1]
    assert not micro_batch.prompts_are_padded


def test_a_micro_batch_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        make_micro_batch(BATCH, advantages=ADVANTAGES, rows=np.array([], dtype=np.int64))


def test_rows_of_zero_advantage_teach_only_under_a_kl_term() -> None:
    advantages = np.array([[0.0, 0.0], [-0.7, 0.7]])
    assert rows_that_teach(advantages, every_row=False).tolist() == [2, 3]
    assert rows_that_teach(advantages, every_row=True).tolist() == [0, 1, 2, 3]
