"""Pure steps between an engine's completions and a RolloutBatch: reward items, groups, then the record (I1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from contracts.rewards import RewardItem, Scored
from contracts.rollouts import BatchTimings, Completion, PromptBatch, Rollout, RolloutBatch, RolloutGroup
from producer.engine.base import VerifiedWeights

T = TypeVar("T")


def reward_items(batch: PromptBatch, completions: Sequence[Completion], texts: Sequence[str]) -> list[RewardItem]:
    """[k·G] completions and their texts, prompt by prompt → [k·G] items."""
    sampled = list(zip(completions, texts, strict=True))
    return [
        RewardItem(
            prompt=prompt.text,
            completion=text,
            reference=prompt.reference,
            task_entry=prompt.task_entry,
            num_tokens=completion.num_tokens,
        )
        for prompt, group in zip(batch.prompts, _by_prompt(sampled, batch), strict=True)
        for completion, text in group
    ]


def rollout_groups(
    batch: PromptBatch,
    *,
    completions: Sequence[Completion],
    texts: Sequence[str],
    scored: Sequence[Scored],
    num_resamples: int = 0,
) -> list[RolloutGroup]:
    """[k·G] completions, texts and scores, prompt by prompt → [k] groups."""
    rollouts = [
        Rollout(
            completion=completion,
            text=text,
            reward=score.reward,
            reward_breakdown=score.breakdown,
            unscorable=score.unscorable,
        )
        for completion, text, score in zip(completions, texts, scored, strict=True)
    ]
    return [
        RolloutGroup(
            prompt_id=prompt.prompt_id,
            prompt_index=prompt.index,
            prompt_token_ids=prompt.token_ids,
            rollouts=tuple(group),
            num_resamples=num_resamples,
        )
        for prompt, group in zip(batch.prompts, _by_prompt(rollouts, batch), strict=True)
    ]


def rollout_batch(
    batch: PromptBatch,
    *,
    groups: Sequence[RolloutGroup],
    weights: VerifiedWeights,
    generator_id: str,
    attempt: int,
    rounds: Sequence[BatchTimings],
) -> RolloutBatch:
    """The batch that the fence checks, from its k groups and the times of each round of sampling.

    `weights` are those that the engine verified, not those that were asked for (I2).
    """
    return RolloutBatch(
        job_id=batch.job_id,
        batch_id=batch.batch_id,
        iteration=batch.iteration,
        purpose=batch.purpose,
        policy_version=weights.policy_version,
        weights_digest=weights.weights_digest,
        group_size=batch.group_size,
        generator_id=generator_id,
        attempt=attempt,
        timings=rounds[-1],
        earlier_rounds=tuple(rounds[:-1]),
        groups=tuple(groups),
    )


def _by_prompt(flat: Sequence[T], batch: PromptBatch) -> list[Sequence[T]]:
    """[k·G] → [k][G]."""
    size = batch.group_size
    return [flat[start : start + size] for start in range(0, len(flat), size)]
