"""The first difference between a batch that was sampled again and its record, in words."""

from __future__ import annotations

from collections.abc import Iterator

from contracts.encoding.arrays import unpack_float32, unpack_int32
from contracts.rollouts import Completion, Rollout, RolloutBatch


def first_difference(recorded: RolloutBatch, now: RolloutBatch) -> str:
    """Names the first group and sample that differ, and the difference; "" where both were sampled and scored alike."""
    return next(_differences(recorded, now), "")


def _differences(recorded: RolloutBatch, now: RolloutBatch) -> Iterator[str]:
    if (recorded.policy_version, recorded.weights_digest) != (now.policy_version, now.weights_digest):
        yield f"it was sampled with version {recorded.policy_version}, now with version {now.policy_version}"
    if len(recorded.groups) != len(now.groups):
        yield f"it has {len(now.groups)} groups, the record {len(recorded.groups)}"
    for place, (before, after) in enumerate(zip(recorded.groups, now.groups, strict=False)):
        if (before.prompt_id, before.num_resamples) != (after.prompt_id, after.num_resamples):
            yield (
                f"group {place} is of {after.prompt_id} after {after.num_resamples} resamples, the record's of "
                f"{before.prompt_id} after {before.num_resamples}"
            )
        for sample, (old, new) in enumerate(zip(before.rollouts, after.rollouts, strict=False)):
            if old != new:
                yield f"group {place}, sample {sample}: {_of_rollout(old, new)}"
        if before != after:
            yield f"group {place} differs in what was asked"


def _of_rollout(old: Rollout, new: Rollout) -> str:
    return (
        _of_tokens(old.completion, new.completion)
        or _of_logprobs(old.completion, new.completion)
        or _of_turns(old.completion, new.completion)
        or _of_rewards(old, new)
        or "its text, or what stands beside its reward"
    )


def _of_tokens(old: Completion, new: Completion) -> str:
    before = unpack_int32(old.token_ids)
    after = unpack_int32(new.token_ids)
    for at, (old_token, new_token) in enumerate(zip(before, after, strict=False)):
        if old_token != new_token:
            return f"token {at} is {new_token}, recorded {old_token}"
    if len(before) != len(after):
        return f"{len(after)} tokens, recorded {len(before)}"
    return ""


def _of_logprobs(old: Completion, new: Completion) -> str:
    if old.generator_logprobs == new.generator_logprobs:
        return ""
    before = unpack_float32(old.generator_logprobs)
    after = unpack_float32(new.generator_logprobs)
    pairs = enumerate(zip(before, after, strict=False))
    # Bytes differ, so a value does; equal values of other bits (a NaN, -0.0) are reported as the first one.
    at = next((at for at, (old_value, new_value) in pairs if old_value != new_value), 0)
    return f"the log-prob of sampled token {at} is {after[at]!r}, recorded {before[at]!r}"


def _of_turns(old: Completion, new: Completion) -> str:
    if old == new:
        return ""
    if old.kept_sets != new.kept_sets:
        return "the tokens that truncated sampling kept"
    if (old.routes, old.prompt_routes) != (new.routes, new.prompt_routes):
        return "the experts that its tokens went through"
    if old.finish_reason != new.finish_reason:
        return f"it ended by {new.finish_reason}, recorded {old.finish_reason}"
    return "the turns of its trajectory, their rewards, or what the environment replied"


def _of_rewards(old: Rollout, new: Rollout) -> str:
    if old.reward_breakdown == new.reward_breakdown and old.reward == new.reward:
        return ""
    names = sorted(old.reward_breakdown.keys() | new.reward_breakdown.keys())
    parts = [
        f"{name} is {new.reward_breakdown.get(name)!r}, recorded {old.reward_breakdown.get(name)!r}"
        for name in names
        if old.reward_breakdown.get(name) != new.reward_breakdown.get(name)
    ]
    return f"reward {new.reward!r}, recorded {old.reward!r}" + (f" ({parts[0]})" if parts else "")
