"""What a generator of one's own answers becomes completions, or is refused by its place."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from contracts.errors import ContractViolation
from contracts.rollouts import PromptBatch, PromptTask
from onbeat.client.samples import Sample, completions_of
from tests.builders import DIGEST, kept_ids, prompt_batch
from tests.trajectories import played

PLAYED = played([[7, 8], [9]], [[4, 4]], logprobs=[-0.5, -1.0, -1.5]).completion


def opened() -> PromptBatch:
    """A batch of one prompt that an environment opened."""
    batch = prompt_batch([[5]], group_size=1)
    task = PromptTask(task="{}", seed=7, observation_digest=DIGEST)
    return replace(batch, prompts=(replace(batch.prompts[0], environment=task),))


def sample(**changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "token_ids": [7, 8, 4, 4, 9],
        "logprobs": [-0.5, -1.0, -1.5],
        "text": "",
        "finish_reason": "stop",
        "trajectory": PLAYED.trajectory,
    }
    return Sample(**(fields | changes))


def test_a_trajectory_has_a_log_prob_for_each_token_that_was_sampled() -> None:
    assert completions_of(opened(), [[sample()]]) == [PLAYED]
    with pytest.raises(ContractViolation, match=r"samples\[0\]\[0\]: needs a finite log-prob for each of its 3 tokens"):
        completions_of(opened(), [[sample(logprobs=[-1.0] * 5)]])


def test_truncated_sampling_says_what_each_sampled_token_was_drawn_from() -> None:
    asked = replace(opened(), sampling=replace(opened().sampling, top_k=3))
    kept = [[9, 7, 1], [8], []]
    (made,) = completions_of(asked, [[sample(kept_sets=kept)]])
    assert made.kept_sets is not UNSET
    assert kept_ids(made.kept_sets) == [[1, 7, 9], [8], []]
    for wrong, problem in (
        (UNSET, "doesn't say which tokens top_k = 3 kept"),
        (kept[:2], r"samples\[0\]\[0\]: needs the kept ids of each of its 3 sampled tokens"),
        ([[9], [8], []], "the kept ids of token 7 are of no vocabulary, or without it"),
        ([[-1, 7], [8], []], "the kept ids of token 7 are of no vocabulary, or without it"),
    ):
        with pytest.raises(ContractViolation, match=problem):
            completions_of(asked, [[sample(kept_sets=wrong)]])
    for evaluation in (opened(), replace(asked, purpose="evaluation")):
        with pytest.raises(ContractViolation, match="says which tokens were kept"):
            completions_of(evaluation, [[sample(kept_sets=kept)]])


def test_a_trajectory_is_asked_for_by_a_prompt_that_an_environment_opened_and_by_no_other() -> None:
    with pytest.raises(ContractViolation, match="is no trajectory, though an environment opened the prompt"):
        completions_of(opened(), [[sample(trajectory=UNSET, logprobs=[-1.0] * 5)]])
    with pytest.raises(ContractViolation, match="is a trajectory, though no environment opened the prompt"):
        completions_of(prompt_batch([[5]], group_size=1), [[sample()]])
    longest = played([[7] * 6])
    with pytest.raises(ContractViolation, match="has a turn of 6 tokens, sampling ends at 5"):
        completions_of(
            opened(), [[sample(token_ids=[7] * 6, logprobs=[-1.0] * 6, trajectory=longest.completion.trajectory)]]
        )
