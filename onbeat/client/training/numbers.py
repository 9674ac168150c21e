"""An iteration of an external trainer in numbers: what was sampled, and what the trainer says of itself."""

from __future__ import annotations

import math
import time
from collections import defaultdict

import numpy as np
from msgspec import UNSET, UnsetType

from contracts.encoding.arrays import unpack_float32
from contracts.events import IterationMetrics, TrajectoryMetrics
from contracts.rollouts import RolloutBatch


class SampledNumbers:
    """Sums over the training batches of an iteration; one thread adds, another reads once it has."""

    def __init__(self) -> None:
        self.num_batches = 0
        self._num_completions = 0
        self._num_groups = 0
        self._num_equal = 0
        self._num_truncated = 0
        self._num_resamples = 0
        self._num_unscorable = 0
        self._tokens: list[int] = []
        self._rewards: list[float] = []
        self._surprisal = 0.0
        self._scores: defaultdict[str, list[float]] = defaultdict(list)
        self._generation_s = 0.0
        self._started_s = time.time()

    def add(self, batch: RolloutBatch, rewards: np.ndarray) -> None:
        """rewards: float64[k·G], with what stages add."""
        self.num_batches += 1
        self._num_completions += batch.num_completions
        self._num_groups += len(batch.groups)
        in_groups = rewards.reshape(len(batch.groups), batch.group_size)
        self._num_equal += int((in_groups.min(axis=1) == in_groups.max(axis=1)).sum())
        self._rewards += rewards.tolist()
        self._generation_s += sum(one.generation_ended_s - one.generation_started_s for one in batch.rounds)
        for group in batch.groups:
            self._num_resamples += group.num_resamples
            for rollout in group.rollouts:
                self._tokens.append(rollout.completion.num_sampled)
                self._num_truncated += rollout.completion.finish_reason == "length"
                self._num_unscorable += bool(rollout.unscorable)
                self._surprisal -= math.fsum(unpack_float32(rollout.completion.generator_logprobs))
                for name, score in rollout.reward_breakdown.items():
                    self._scores[name].append(score)

    def metrics(
        self,
        iteration: int,
        *,
        trainer_epoch: int,
        loss: float,
        grad_norm: float,
        learning_rate: float,
        trajectories: TrajectoryMetrics | UnsetType = UNSET,
    ) -> IterationMetrics:
        """What isn't measured by an external trainer stands as in a job without it: 0.0."""
        num_tokens, wall_s = sum(self._tokens), time.time() - self._started_s
        rewards = np.array(self._rewards)
        return IterationMetrics(
            iteration=iteration,
            policy_version=iteration,
            trainer_epoch=trainer_epoch,
            num_batches=self.num_batches,
            num_completions=self._num_completions,
            num_tokens=num_tokens,
            reward_mean=math.fsum(self._rewards) / len(self._rewards),
            reward_std=float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0,
            reward_components={name: math.fsum(scores) / len(scores) for name, scores in sorted(self._scores.items())},
            zero_advantage_share=self._num_equal / self._num_groups,
            num_resamples=self._num_resamples,
            response_tokens_mean=num_tokens / self._num_completions,
            response_tokens_max=max(self._tokens),
            truncated_share=self._num_truncated / self._num_completions,
            num_unscorable=self._num_unscorable,
            loss=loss,
            clip_share=0.0,
            kl_to_reference=0.0,
            entropy=self._surprisal / num_tokens,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            mismatch_k3=0.0,
            mismatch_max=0.0,
            effective_sample_share=1.0,
            started_s=self._started_s,
            wall_s=wall_s,
            generation_s=self._generation_s,
            training_s=0.0,
            waiting_s=0.0,
            step_s=0.0,
            publish_s=0.0,
            tokens_per_s=num_tokens / wall_s,
            trajectories=trajectories,
        )
