"""Pure steps between an engine's completions and a RolloutBatch: reward items, then groups (I1)."""

from __future__ import annotations

from collections.abc import Sequence

from contracts.rewards import RewardItem, Scored
from contracts.rollouts import Completion, PromptBatch, Rollout, RolloutGroup


def reward_items(batch: PromptBatch, completions: Sequence[Completion], texts: Sequence[str]) -> list[RewardItem]:
    """[k·G] completions and their texts, prompt by prompt → [k·G] items."""
    prompts = [prompt for prompt in batch.prompts for _ in range(batch.group_size)]
    return [
        RewardItem(
            prompt=prompt.text,
            completion=text,
            reference=prompt.reference,
            task_entry=prompt.task_entry,
            num_tokens=completion.num_tokens,
        )
        for prompt, completion, text in zip(prompts, completions, texts, strict=True)
    ]


def rollout_groups(
    batch: PromptBatch,
    *,
    completions: Sequence[Completion],
    texts: Sequence[str],
    scored: Sequence[Scored],
    num_resamples: int,
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
            rollouts=tuple(rollouts[place * batch.group_size : (place + 1) * batch.group_size]),
            num_resamples=num_resamples,
        )
        for place, prompt in enumerate(batch.prompts)
    ]
