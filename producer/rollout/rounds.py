"""Samples and scores the rounds of a batch. No broker: a claimed batch and one that is sampled again go the same way.

engine ─▶ detokenize ─▶ reward service ─┬─ every place has its group ─▶ the batch, as it is published
  ▲                                     │
  └── places of equal reward, where ────┘
      the job resamples
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from contracts.errors import BatchFailed
from contracts.rewards import Scored
from contracts.rollouts import BatchTimings, Completion, PromptBatch, RolloutBatch
from onbeat.base.process.crash_points import reach
from onbeat.scoring.groups import reward_items, rollout_groups
from onbeat.scoring.reward_client import RewardClient, tries_of
from producer.activity import Activity
from producer.rollout.sampled_batch import Generation, SampledBatch

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Samples and scores the rounds of batches: `complete` runs once for each batch, several at a time.

    A generator's Carrier and the replay of a recorded batch are its users.
    """

    generator_id: str
    rewards: RewardClient
    activity: Activity
    freed: Callable[[], None]
    """Called when a batch leaves the engine, and when it needs the engine's weights no more."""

    async def complete(self, batch: SampledBatch) -> RolloutBatch | None:
        """Samples and scores all rounds of a batch, whose first one the engine has already; None where it was dropped.

        The batch is under the weights that the engine verified, not those that were asked for (I2). Raises BatchFailed,
        RewardUnavailable or EnvironmentUnavailable.
        """
        while batch.generation is not None:
            if not await self._fill(batch, batch.generation):
                return None
            if batch.places.is_open:
                if batch.is_settled:
                    return None
                batch.sample(started_s=self.activity.now_s())
                log.debug("%s: resamples %d completions", batch.prompt_batch.batch_id, batch.num_sampling)
        prompts = batch.prompt_batch
        return RolloutBatch(
            job_id=prompts.job_id,
            batch_id=prompts.batch_id,
            iteration=prompts.iteration,
            purpose=prompts.purpose,
            policy_version=batch.weights.policy_version,
            weights_digest=batch.weights.weights_digest,
            group_size=prompts.group_size,
            generator_id=self.generator_id,
            attempt=batch.attempt,
            timings=batch.rounds[-1],
            earlier_rounds=tuple(batch.rounds[:-1]),
            groups=batch.places.groups,
        )

    async def _fill(self, batch: SampledBatch, generation: Generation) -> bool:
        """Samples and scores a round.

        Returns:
            False if the round was dropped, since the batch is not needed any more.

        Raises:
            BatchFailed: A completion, a turn or a score is missing: such a batch is failed, never published (I1, I6).
            RewardUnavailable: The reward service stays away.
            EnvironmentUnavailable: The environments' service stays away.
        """
        sub_batch = generation.sub_batch
        answer = generation.answer
        try:
            await asyncio.wait({answer})
            if answer.cancelled() and batch.is_settled:
                # The heartbeat cancelled it.
                return False
            if answer.cancelled():
                raise BatchFailed(f"batch {sub_batch.batch_id} was given up by its engine")
            completions = list(chain.from_iterable(answer.result()))
            reach("producer.after_generation")
        finally:
            answer.cancel()
            batch.generation = None
            self.freed()
        scoring_started_s = self.activity.now_s()
        num_tokens = 0 if sub_batch.is_given else sum(completion.num_sampled for completion in completions)
        self.activity.sampled(num_tokens, started_s=generation.started_s, ended_s=scoring_started_s)
        self.activity.went_on(batch.loaded.context_tokens)
        texts = batch.loaded.detokenizer(completions)
        scored = await self._score(batch, sub_batch, completions=completions, texts=texts)
        reach("producer.after_scoring")
        timings = BatchTimings(
            generation_started_s=generation.started_s,
            generation_ended_s=scoring_started_s,
            scoring_started_s=scoring_started_s,
            scoring_ended_s=self.activity.now_s(),
        )
        self.activity.observe("score", timings.scoring_ended_s - scoring_started_s)
        batch.rounds.append(timings)
        groups = rollout_groups(
            sub_batch,
            batch.spec,
            completions=completions,
            texts=texts,
            scored=scored,
            num_resamples=len(batch.rounds) - 1,
        )
        batch.places.fill(groups)
        self.freed()
        return True

    async def _score(
        self, batch: SampledBatch, sub_batch: PromptBatch, *, completions: list[Completion], texts: list[str]
    ) -> list[Scored]:
        spec = batch.spec
        if sub_batch.is_given:
            return [Scored(reward=0.0, breakdown={}) for _ in completions]
        return await self.rewards.score(
            spec.reward,
            reward_items(spec.reward.components, sub_batch, completions, texts),
            group_size=sub_batch.group_size,
            job_id=batch.prompt_batch.job_id,
            tries=tries_of(spec),
            dependency_s=spec.timeouts.dependency_s,
            is_needed=lambda: not batch.is_settled,
        )
