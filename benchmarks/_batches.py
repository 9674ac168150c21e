"""Prompt and rollout batches of a given size."""

from __future__ import annotations

import os
from collections.abc import Sequence

from msgspec.structs import replace

from contracts.encoding.arrays import pack_float32, pack_int32
from contracts.rollouts import BatchTimings, Completion, Prompt, PromptBatch, Rollout, RolloutBatch, RolloutGroup
from contracts.sampling import SamplingParams
from contracts.versions import WeightFile, WeightManifest

DIGEST = "ab" * 32
GROUP_SIZE = 8
RESPONSE_TOKENS = 512
RESPONSE_CHARS = 1400


def one_group(*, prompt_tokens: int, response_lengths: Sequence[int], num_ids: int = 500) -> RolloutBatch:
    """One group; token ids are below num_ids and different in each response, every second one is right."""
    group_size = len(response_lengths)
    rollouts = tuple(
        Rollout(
            completion=Completion(
                token_ids=pack_int32((7 * row + 3 * at) % num_ids for at in range(length)),
                generator_logprobs=pack_float32([-1.0 - row / group_size] * length),
                finish_reason="length",
            ),
            text="",
            reward=float(row % 2),
            reward_breakdown={"exact": float(row % 2)},
        )
        for row, length in enumerate(response_lengths)
    )
    group = RolloutGroup(
        prompt_id="train/0",
        prompt_index=0,
        prompt_token_ids=pack_int32(at % num_ids for at in range(prompt_tokens)),
        rollouts=rollouts,
    )
    return replace(rollout_batch(1), groups=(group,), group_size=group_size)


def rollout_batch(num_groups: int) -> RolloutBatch:
    """k groups of 8 responses of 512 tokens: about 45 KB a group."""
    tokens = pack_int32(range(RESPONSE_TOKENS))
    completion = Completion(token_ids=tokens, generator_logprobs=os.urandom(len(tokens)), finish_reason="length")
    rollout = Rollout(completion=completion, text="x" * RESPONSE_CHARS, reward=1.0, reward_breakdown={"exact": 1.0})
    groups = tuple(
        RolloutGroup(
            prompt_id=f"train/{index}",
            prompt_index=index,
            prompt_token_ids=pack_int32(range(64)),
            rollouts=(rollout,) * GROUP_SIZE,
        )
        for index in range(num_groups)
    )
    return RolloutBatch(
        job_id="bench",
        batch_id="0/train/0",
        iteration=0,
        purpose="train",
        policy_version=0,
        weights_digest=DIGEST,
        group_size=GROUP_SIZE,
        generator_id="g",
        attempt=1,
        timings=BatchTimings(
            generation_started_s=0.0, generation_ended_s=1.0, scoring_started_s=1.0, scoring_ended_s=2.0
        ),
        groups=groups,
    )


def prompt_batch(job_id: str, iteration: int, index: int, num_groups: int) -> PromptBatch:
    return PromptBatch(
        job_id=job_id,
        batch_id=f"{iteration}/train/{index}",
        iteration=iteration,
        purpose="train",
        policy_version=iteration,
        weights_digest=DIGEST,
        group_size=GROUP_SIZE,
        sampling=SamplingParams(max_new_tokens=RESPONSE_TOKENS),
        seed=0,
        prompts=tuple(
            Prompt(prompt_id=f"train/{at}", index=at, token_ids=pack_int32(range(64)), text="x" * 200, reference="1")
            for at in range(num_groups)
        ),
    )


def batch_under(version: WeightManifest, *, group_size: int, max_new_tokens: int) -> PromptBatch:
    """One short prompt, sampled by the version that a generator really loaded."""
    return replace(
        prompt_batch(version.job_id, version.policy_version, 0, num_groups=1),
        weights_digest=version.weights_digest,
        group_size=group_size,
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        prompts=(Prompt(prompt_id="0", index=0, token_ids=pack_int32([5]), text="5", reference="5"),),
    )


def manifest(version: int) -> WeightManifest:
    return WeightManifest(
        policy_version=version,
        weights_digest=DIGEST,
        dtype="float32",
        directory=f"bench/v{version}",
        files=(WeightFile(name="model.safetensors", num_bytes=1),),
    )
