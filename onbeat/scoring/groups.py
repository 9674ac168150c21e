"""Completions become what the reward service scores, and with their scores the groups that are published.

Everything here is in the order of the batch: prompt by prompt, and the G samples of a prompt side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from contracts.rewards import RewardComponent, RewardItem, Scored, StatedReason, imports_plugins
from contracts.rollouts import Completion, PromptBatch, Rollout, RolloutGroup
from contracts.spec.environment import environment_name
from contracts.spec.job import JobSpec


def reward_items(
    components: tuple[RewardComponent, ...], batch: PromptBatch, completions: Sequence[Completion], texts: Sequence[str]
) -> list[RewardItem]:
    """[k·G] completions and their texts, prompt by prompt → [k·G] items for these components."""
    with_tokens = imports_plugins(components)
    prompts = [prompt for prompt in batch.prompts for _ in range(batch.group_size)]
    return [
        RewardItem(
            prompt=prompt.text,
            completion=text,
            reference=prompt.reference,
            task_entry=prompt.task_entry,
            metadata=prompt.metadata,
            source=prompt.source,
            num_tokens=completion.num_sampled,
            finish_reason=completion.finish_reason,
            token_ids=completion.token_ids if with_tokens else UNSET,
        )
        for prompt, completion, text in zip(prompts, completions, texts, strict=True)
    ]


def rollout_groups(
    batch: PromptBatch,
    spec: JobSpec,
    *,
    completions: Sequence[Completion],
    texts: Sequence[str],
    scored: Sequence[Scored],
    num_resamples: int = 0,
) -> list[RolloutGroup]:
    """[k·G] completions, texts and scores, prompt by prompt → [k] groups: for training with the texts that stages read,
    and with what the job states for a completion that was cut.
    """
    is_trained, played = batch.purpose == "train", spec.environments
    with_texts = is_trained and spec.stage_plan.carries_texts
    of_truncated = spec.algorithm.reward_of_truncated if is_trained else None
    sources = [prompt.source or "" for prompt in batch.prompts for _ in range(batch.group_size)]
    rollouts = [
        Rollout(
            completion=completion,
            text=text,
            reward=_reward(completion, score, of_truncated),
            reward_breakdown=score.breakdown,
            unscorable=_unscorable(completion, score, source if source in played else ""),
        )
        for completion, text, score, source in zip(completions, texts, scored, sources, strict=True)
    ]
    return [
        RolloutGroup(
            prompt_id=prompt.prompt_id,
            prompt_index=prompt.index,
            prompt_token_ids=prompt.token_ids,
            rollouts=tuple(rollouts[place * batch.group_size : (place + 1) * batch.group_size]),
            num_resamples=num_resamples,
            prompt_text=prompt.text if with_texts else UNSET,
            reference=prompt.reference if with_texts else UNSET,
            source=prompt.source,
        )
        for place, prompt in enumerate(batch.prompts)
    ]


def _reward(completion: Completion, score: Scored, of_truncated: float | None) -> float:
    """What the job's scorers gave, and what an environment gave turn by turn; or what is stated for what was cut."""
    if of_truncated is not None and completion.is_truncated:
        return of_truncated
    if completion.trajectory is UNSET:
        return score.reward
    return score.reward + completion.trajectory.reward


def _unscorable(completion: Completion, score: Scored, source: str) -> dict[str, StatedReason]:
    """What could not judge the completion: the environment, then scorers."""
    found: dict[str, StatedReason] = {**score.unscorable}
    if completion.trajectory is not UNSET and completion.trajectory.failure is not UNSET:
        found = {environment_name(source): completion.trajectory.failure, **found}
    return found
