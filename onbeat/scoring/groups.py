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
    """Makes the items that scorers are sent.

    Args:
        components: The rubric's components.
        batch: The batch.
        completions: [k·G], prompt by prompt.
        texts: [k·G], their texts.

    Returns:
        [k·G] items.
    """
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
    """Makes the groups of a batch: for training with the texts that stages read, and with the job's stated reward for
    completions that were cut.

    Args:
        batch: The batch.
        spec: The job.
        completions: [k·G], prompt by prompt.
        texts: [k·G], their texts.
        scored: [k·G], their scores.
        num_resamples: How often the prompts were sampled before.

    Returns:
        [k] groups.
    """
    is_trained = batch.purpose == "train"
    played = spec.environments
    with_texts = is_trained and spec.stage_graph.carries_texts
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
    """Returns a completion's reward: the scorers' and the environment's together, or the stated one where it was cut.

    Args:
        completion: The completion.
        score: The scorers' result.
        of_truncated: The reward that the spec states for truncated completions; None where it states none.
    """
    if of_truncated is not None and completion.is_truncated:
        return of_truncated
    if completion.trajectory is UNSET:
        return score.reward
    return score.reward + completion.trajectory.reward


def _unscorable(completion: Completion, score: Scored, source: str) -> dict[str, StatedReason]:
    """Names what could not judge the completion, each with its reason: the environment first, then scorers."""
    reasons: dict[str, StatedReason] = {**score.unscorable}
    if completion.trajectory is not UNSET and completion.trajectory.failure is not UNSET:
        reasons = {environment_name(source): completion.trajectory.failure, **reasons}
    return reasons
