"""Trajectories that tests share: turns that a model sampled, with an environment's observations between them."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import Any

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from contracts.encoding.arrays import pack_float32, pack_int32
from contracts.rollouts import Completion, Rollout, RolloutBatch, StopReason, Trajectory, Turn
from contracts.spec.job import JobSpec
from tests.builders import DIGEST, VOCABULARY, batch_of, job_spec

ENVIRONMENT: dict[str, Any] = {"name": "calculator", "max_turns": 3, "max_tokens": 64}
MAX_SAMPLED_TOKENS = 15
"""`environment_spec` allows three turns of five tokens."""


def environment_spec(**overrides: Any) -> JobSpec:
    """Returns `job_spec` of a job with an environment."""
    return job_spec(**({"environment": ENVIRONMENT} | overrides))


def played(
    turns: Sequence[Sequence[int]],
    observations: Sequence[Sequence[int]] = (),
    *,
    logprobs: Sequence[float] | None = None,
    turn_rewards: Sequence[float] = (),
    terminal: float = 0.0,
    stop: StopReason = "done",
    attempt: int = 1,
    metrics: dict[str, float] | None = None,
    anew: Collection[int] = (),
) -> Rollout:
    """A rollout of [n] turns with [n - 1] observations between them; its reward is the turns' and the terminal one.

    anew: the observations with which it begins anew."""
    tokens: list[int] = []
    spans: list[tuple[int, int]] = []
    seen: list[int | UnsetType] = [UNSET]
    for number, (turn, after) in enumerate(zip(turns, [*observations, []], strict=True)):
        spans.append((len(tokens), len(tokens) + len(turn)))
        seen.append(spans[-1][1] if number in anew else seen[-1])
        tokens += [*turn, *after]
    num_sampled = sum(map(len, turns))
    rewards = turn_rewards or [0.0] * len(turns)
    return Rollout(
        completion=Completion(
            token_ids=pack_int32(tokens),
            generator_logprobs=pack_float32(logprobs or [-1.0] * num_sampled),
            finish_reason="stop",
            trajectory=Trajectory(
                turns=tuple(
                    Turn(
                        start=start, end=end, finish_reason="stop", reward=reward, reply_digest=DIGEST, sees_from=begins
                    )
                    for (start, end), reward, begins in zip(spans, rewards, seen, strict=False)
                ),
                stop=stop,
                attempt=attempt,
                metrics=metrics or {},
            ),
        ),
        text="",
        reward=sum(rewards) + terminal,
        reward_breakdown={"exact": terminal},
    )


def as_one_turn(batch: RolloutBatch) -> RolloutBatch:
    """The batch with each completion as the trajectory of one turn."""

    def one(rollout: Rollout) -> Rollout:
        completion = rollout.completion
        turn = Turn(start=0, end=completion.num_tokens, finish_reason="stop", reward=0.0, reply_digest=DIGEST)
        return replace(
            rollout, completion=replace(completion, trajectory=Trajectory(turns=(turn,), stop="done", metrics={}))
        )

    groups = tuple(replace(group, rollouts=tuple(map(one, group.rollouts))) for group in batch.groups)
    return replace(batch, groups=groups)


def played_batch(
    *,
    seed: int = 0,
    num_groups: int = 2,
    group_size: int = 4,
    max_turns: int = 3,
    turn_tokens: tuple[int, int] = (1, 4),
    observation_tokens: tuple[int, int] = (1, 3),
    prompt_tokens: tuple[int, int] = (2, 6),
    logprobs: tuple[float, float] = (-5.0, -0.1),
    rewards: Sequence[float] = (0.0, 0.25, 1.0),
    anew: float = 0.0,
    **changes: Any,
) -> RolloutBatch:
    """A random valid batch of trajectories: lengths are drawn from the inclusive ranges, rewards from `rewards`.

    anew: the share of observations that begin anew."""
    draw, draw_anew = random.Random(seed), random.Random(seed)

    def tokens(bounds: tuple[int, int]) -> list[int]:
        return [draw.randrange(3, len(VOCABULARY)) for _ in range(draw.randint(*bounds))]

    def one() -> Rollout:
        turns = [tokens(turn_tokens) for _ in range(draw.randint(1, max_turns))]
        return played(
            turns,
            [tokens(observation_tokens) for _ in turns[1:]],
            logprobs=[draw.uniform(*logprobs) for turn in turns for _ in turn],
            turn_rewards=[draw.choice(rewards) for _ in turns],
            terminal=draw.choice(rewards),
            anew=[number for number in range(len(turns) - 1) if draw_anew.random() < anew],
        )

    groups = [(tokens(prompt_tokens), [one() for _ in range(group_size)]) for _ in range(num_groups)]
    return batch_of(groups, **changes)


def played_iteration(num_batches: int = 3) -> list[RolloutBatch]:
    """Random batches, and one of a group of equal rewards and of a group of one turn each beside long ones."""
    equal = [played([[9], [10, 11]], [[20, 21]], turn_rewards=[0.5, 0.5])] * 4
    mixed = [
        played([[12, 13]], terminal=1.0),
        played([[14], [15], [16, 17, 18]], [[19], [20, 21, 22, 23]], terminal=0.25),
        played([[24, 25, 26], [27]], [[28]], turn_rewards=[1.0, -0.5]),
        played([[29]]),
    ]
    last = batch_of([([5, 6, 7], equal), ([8, 9, 10, 11], mixed)], batch_id=f"0/train/{num_batches - 1}")
    return [*(played_batch(seed=60 + n, batch_id=f"0/train/{n}") for n in range(num_batches - 1)), last]
