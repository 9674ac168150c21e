"""The score of the held-out prompts from the evaluation batches of one iteration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from contracts.jobs import EvaluationScore
from contracts.rollouts import PromptBatch, RolloutBatch


def evaluation_score(expected: Sequence[PromptBatch], arrived: Mapping[str, RolloutBatch]) -> EvaluationScore | None:
    """Mean reward of the sampled and of the greedy batches; None where the iteration has no (complete) evaluation.

    `expected` are the iteration's evaluation batches; an abandoned one leaves its prompts out of the mean.
    """
    sampled = [arrived[b.batch_id] for b in expected if b.sampling.temperature > 0.0 and b.batch_id in arrived]
    greedy = [arrived[b.batch_id] for b in expected if b.sampling.temperature == 0.0 and b.batch_id in arrived]
    if not sampled:
        return None
    return EvaluationScore(
        iteration=expected[0].iteration,
        policy_version=expected[0].policy_version,
        sampled=_mean_reward(sampled),
        greedy=_mean_reward(greedy) if greedy else None,
        num_prompts=sum(len(batch.groups) for batch in sampled),
    )


def _mean_reward(batches: Sequence[RolloutBatch]) -> float:
    rewards = [rollout.reward for batch in batches for group in batch.groups for rollout in group.rollouts]
    return math.fsum(rewards) / len(rewards)
