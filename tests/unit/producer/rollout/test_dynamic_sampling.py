"""Prompts whose completions all have the same reward give their places to reserves, inside one batch."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from contracts.encoding.arrays import pack_int32
from contracts.errors import BatchFailed
from contracts.rollouts import Prompt, PromptBatch, RolloutBatch, RolloutGroup, batch_digest
from onbeat.work import worker
from producer.rollout.sampled_batch import Places
from tests.builders import prompt_batch, rollout
from tests.unit.producer.test_generator import Stack

RESERVES = (("c", "d"), ("e", "f"))
"""The reserves of the prompts `a` and `b`, attempt by attempt."""


def prompt(name: str, index: int) -> Prompt:
    return Prompt(prompt_id=name, index=index, token_ids=pack_int32([3 + index]), text=name, reference="")


def with_reserves(batch: PromptBatch, reserves: tuple[tuple[str, str], ...] = RESERVES) -> PromptBatch:
    names = [("a", "b"), *reserves]
    rows = [tuple(prompt(name, 2 * row + place) for place, name in enumerate(two)) for row, two in enumerate(names)]
    return replace(batch, prompts=rows[0], reserves=tuple(rows[1:]))


def add(stack: Stack, number: int = 0, *, version: int = 0, reserves: tuple[tuple[str, str], ...] = RESERVES) -> None:
    batch, manifest = stack.work("job", number, version=version)
    stack.sides["job"].add(with_reserves(batch, reserves), manifest)


def asked(stack: Stack) -> list[str]:
    """The prompts of each request to the reward service, in order."""
    return ["".join(dict.fromkeys(item.prompt for item in items)) for items in stack.rewards.requests]


def held(batch: RolloutBatch) -> list[tuple[str, int, int]]:
    return [(group.prompt_id, group.prompt_index, group.num_resamples) for group in batch.groups]


def groups(batch: PromptBatch, *, equal: str) -> list[RolloutGroup]:
    return [
        RolloutGroup(
            prompt_id=one.prompt_id,
            prompt_index=one.index,
            prompt_token_ids=one.token_ids,
            rollouts=(rollout([7], 0.5), rollout([8], 0.5 if one.text in equal else 1.0)),
        )
        for one in batch.prompts
    ]


def test_only_places_of_equal_reward_stay_open_and_the_last_reserve_ends_it() -> None:
    places = Places(with_reserves(prompt_batch([[5], [6]])))
    rounds = []
    for may_go_on in (True, True, False):
        rounds.append(places.take_round())
        assert places.may_go_on is may_go_on
        places.fill(groups(rounds[-1], equal="ace"))
    assert [[one.text for one in batch.prompts] for batch in rounds] == [["a", "b"], ["c"], ["e"]]
    assert all(batch.reserves == () and batch.batch_id == "0/train/0" for batch in rounds)
    assert not places.is_open
    assert [group.prompt_id for group in places.groups] == ["e", "b"]


@pytest.mark.parametrize("reserves", [RESERVES, ()])
def test_without_equal_rewards_or_without_reserves_one_round_is_all(reserves: tuple[tuple[str, str], ...]) -> None:
    places = Places(with_reserves(prompt_batch([[5], [6]]), reserves))
    places.fill(groups(places.take_round(), equal="" if reserves else "ab"))
    assert not places.is_open
    assert [group.prompt_id for group in places.groups] == ["a", "b"]


async def test_a_batch_is_published_once_every_place_has_a_group_that_teaches_or_no_reserve(stack: Stack) -> None:
    side = stack.add_job()
    stack.rewards.equal_prompts = {"a", "c", "e"}
    add(stack)
    async with stack.running():
        await stack.changes.until(lambda: len(side.published) == 1)
    batch = side.published[0]
    assert asked(stack) == ["ab", "c", "e"]
    assert held(batch) == [("e", 4, 2), ("b", 1, 0)]
    assert [group.has_equal_rewards for group in batch.groups] == [True, False]
    times = [
        moment
        for one in batch.rounds
        for moment in (one.generation_started_s, one.generation_ended_s, one.scoring_started_s, one.scoring_ended_s)
    ]
    assert len(times) == 12
    assert times == sorted(times)


async def test_two_generators_make_the_same_batch_whatever_else_they_sample(tmp_path: Path) -> None:
    """One generator samples several batches at once and has other work, the other has only this batch (I7)."""
    digests: list[str] = []

    async def sample(stack: Stack) -> None:
        side = stack.add_job()
        stack.rewards.equal_prompts = {"a", "b", "d"}
        stack.shop.capacity = 1 + 99 * len(digests)
        for number in range(1 + 2 * len(digests)):
            add(stack, number)
        async with stack.running():
            await stack.changes.until(lambda: len(side.published) == len(side.claimed) == 1 + 2 * len(digests))
        batch = next(one for one in side.published if one.batch_id == "0/train/0")
        assert held(batch) == [("c", 2, 1), ("f", 5, 2)]
        digests.append(batch_digest(batch))

    for name in ("alone", "busy"):
        await sample(Stack(tmp_path / name))
    assert digests[0] == digests[1]


async def test_the_next_batch_is_sampled_while_the_first_one_is_scored(stack: Stack) -> None:
    side = stack.add_job()
    stack.rewards.equal_prompts = {"a"}
    stack.rewards.gate.clear()
    add(stack)
    add(stack, 1)
    async with stack.running():
        await stack.changes.until(lambda: asked(stack) == ["ab", "ab"])
        stack.rewards.gate.set()
        await stack.changes.until(lambda: len(side.published) == 2)
    assert asked(stack) == ["ab", "ab", "c", "c"]


async def test_weights_stay_until_no_batch_can_come_back_to_the_engine(stack: Stack) -> None:
    side = stack.add_job(timeouts__generator_lease_s=0.03)
    stack.rewards.equal_prompts = {"a"}
    stack.rewards.gate.clear()
    add(stack)
    side.add(*stack.work("job", 0, version=1))
    async with stack.running():
        await stack.changes.until(lambda: len(side.claimed) == 2 and len(stack.rewards.requests) == 1)
        await side.beats()
        assert sorted(side.renewed[-1]) == ["0/train/0", "1/train/0"]
        assert "load 1" not in stack.shop.log
        stack.rewards.gate.set()
        await stack.changes.until(lambda: len(side.published) == 2)
    assert stack.shop.log[1:-1] == [
        "load 0",
        "generate job 0/train/0",
        "generate job 0/train/0",
        "load 1",
        "generate job 1/train/0",
    ]
    assert [batch.policy_version for batch in side.published] == [0, 1]


async def test_a_colocated_job_s_engine_sleeps_only_when_no_batch_can_come_back_to_it(stack: Stack) -> None:
    side = stack.add_job(schedule="colocated")
    stack.rewards.equal_prompts = {"a"}
    stack.rewards.gate.clear()
    add(stack)
    async with stack.running():
        await stack.changes.until(lambda: len(stack.rewards.requests) == 1)
        stack.rewards.gate.set()
        await stack.changes.until(lambda: len(side.published) == 1 and "sleep" in stack.shop.log)
    generations = ["generate job 0/train/0"] * 2
    assert stack.shop.log[1:-1] == ["load 0", *generations, "sleep"]


async def test_a_batch_that_is_settled_between_two_rounds_is_sampled_no_further_and_frees_the_weights(
    monkeypatch: pytest.MonkeyPatch, stack: Stack
) -> None:
    # The serve loop learns that the weights are free; it doesn't find out when it looks at them next.
    monkeypatch.setattr(worker, "LOG_AFTER_S", 600.0)
    side = stack.add_job(timeouts__generator_lease_s=0.03)
    stack.rewards.equal_prompts = {"a"}
    stack.rewards.gate.clear()
    add(stack)
    add(stack, version=1)
    async with stack.running():
        await stack.changes.until(lambda: len(side.claimed) == 2 and len(stack.rewards.requests) == 1)
        side.settled.add("0/train/0")
        await stack.changes.until(lambda: asked(stack) == ["ab", "ab"])
        stack.rewards.gate.set()
        await stack.changes.until(lambda: len(side.published) == 1)
    assert stack.shop.log.count("generate job 0/train/0") == 1
    assert (side.published[0].policy_version, side.failed, side.refused) == (1, [], [])


async def test_a_batch_whose_lease_went_to_another_between_two_rounds_is_finished(stack: Stack) -> None:
    side = stack.add_job(timeouts__generator_lease_s=0.03)
    stack.rewards.equal_prompts = {"a"}
    stack.rewards.gate.clear()
    add(stack)
    async with stack.running():
        await stack.changes.until(lambda: len(side.renewed) >= 2 and len(stack.rewards.requests) == 1)
        side.lost.add("0/train/0")
        await stack.changes.until(lambda: side.renewed[-1] == ["0/train/0"])
        stack.rewards.gate.set()
        await stack.changes.until(lambda: len(side.published) == 1)
    assert held(side.published[0]) == [("c", 2, 1), ("b", 1, 0)]


async def test_a_later_round_without_scores_fails_the_whole_batch(stack: Stack) -> None:
    side = stack.add_job()
    stack.rewards.equal_prompts = {"a"}
    stack.rewards.gate.clear()
    add(stack)
    async with stack.running():
        await stack.changes.until(lambda: asked(stack) == ["ab"])
        stack.shop.gates["0/train/0"] = asyncio.Event()
        stack.rewards.gate.set()
        await stack.changes.until(lambda: stack.shop.log.count("generate job 0/train/0") == 2)
        stack.rewards.errors.append(BatchFailed("2 completions: timeout"))
        stack.shop.gates["0/train/0"].set()
        await stack.changes.until(lambda: len(side.failed) == 1)
    assert (side.failed, side.published) == ([("0/train/0", "2 completions: timeout")], [])
