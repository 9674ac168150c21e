"""What a generator of one's own answers becomes completions, or is refused by its place."""

from __future__ import annotations

from typing import Any

import numpy as np
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
        (UNSET, "doesn't report which tokens top_k = 3 kept"),
        (kept[:2], r"samples\[0\]\[0\]: needs the kept ids of each of its 3 sampled tokens"),
        ([[9], [8], []], "the kept ids of token 7 are of no vocabulary, or without it"),
        ([[-1, 7], [8], []], "the kept ids of token 7 are of no vocabulary, or without it"),
    ):
        with pytest.raises(ContractViolation, match=problem):
            completions_of(asked, [[sample(kept_sets=wrong)]])
    for evaluation in (opened(), replace(asked, purpose="evaluation")):
        with pytest.raises(ContractViolation, match="says which tokens were kept"):
            completions_of(evaluation, [[sample(kept_sets=kept)]])


def test_routing_replay_says_the_experts_of_each_token_and_of_the_prompt_once() -> None:
    """Two prompts of 1 and 2 tokens, completions of 2 and 1, through 3 layers with 2 experts each."""
    batch = prompt_batch([[5], [6, 7]], group_size=2, routing_replay=True)
    experts = np.arange(6, dtype=np.uint8).reshape(1, 3, 2)
    fields: dict[str, Any] = {"trajectory": UNSET, "token_ids": [7, 8], "logprobs": [-1.0, -1.0], "routes": experts}
    short = fields | {"token_ids": [9], "logprobs": [-1.0], "routes": experts[:0]}
    groups = [
        [sample(**fields, prompt_routes=experts), sample(**short)],
        [sample(**fields, prompt_routes=np.repeat(experts, 2, axis=0)), sample(**fields)],
    ]
    completions = completions_of(batch, groups)
    assert [completion.routes for completion in completions] == [bytes(range(6)), b"", bytes(range(6)), bytes(range(6))]
    assert [completion.prompt_routes for completion in completions] == [
        bytes(range(6)),
        UNSET,
        bytes(range(6)) * 2,
        UNSET,
    ]
    for first, problem in (
        (sample(**fields), "the first completion of a group has its prompt's routes"),
        (
            sample(**short, prompt_routes=experts.astype(np.int64)),
            r"samples\[0\]\[0\]\.prompt_routes: int64.* are no experts",
        ),
        (sample(**(fields | {"routes": experts[:0]}), prompt_routes=experts), r"uint8\[0, 3, 2\] are no experts"),
        (sample(**fields, prompt_routes=experts[:, :2]), "4 bytes of routes are needed for each token but the last"),
        (sample(**(fields | {"routes": UNSET})), "doesn't say which experts its tokens went through"),
    ):
        with pytest.raises(ContractViolation, match=problem):
            completions_of(batch, [[first, groups[0][1]], groups[1]])
    with pytest.raises(ContractViolation, match="though nothing replays them"):
        completions_of(replace(batch, routing_replay=UNSET), groups)


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
