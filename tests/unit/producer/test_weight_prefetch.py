"""The next version comes while a batch is sampled: a batch finds it ready, and a bad one is left to the batch."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from contracts.errors import BrokerUnavailable
from contracts.versions import WeightManifest
from tests.fakes import FakeSide, LoggedEngine, fake_version
from tests.unit.producer.test_generator import Stack

DELAYED = {"schedule": "delayed", "max_policy_lag": 1, "algorithm__correction": "none"}
BOUNDED = {**DELAYED, "schedule": "bounded", "max_policy_lag": 3, "deterministic": False}


def busy(stack: Stack, **spec: Any) -> FakeSide:
    """A generator that samples a batch of version 0 until its gate opens."""
    side = stack.add_job(**spec)
    side.add(*stack.work("job", 0))
    stack.shop.gates["0/train/0"] = asyncio.Event()
    return side


def versions(stack: Stack, *numbers: int) -> list[WeightManifest]:
    return [fake_version(stack.run_root, "job", number) for number in numbers]


def ready(stack: Stack) -> list[int]:
    loaded = stack.generator._model.loaded
    return sorted(one.policy_version for one in loaded.engine.ready_versions) if loaded else []


def identity(manifest: WeightManifest) -> tuple[int, str]:
    return manifest.policy_version, manifest.weights_digest


async def test_the_next_version_is_received_while_a_batch_is_sampled_and_the_claim_says_so(
    tmp_path: Path, stack: Stack
) -> None:
    side = busy(stack, **DELAYED)
    first, second = versions(stack, 0, 1)
    side.announce(first, second)
    async with stack.running():
        await stack.changes.until(lambda: ready(stack) == [0, 1])
        assert side.published == []
        (tmp_path / second.directory / second.files[0].name).unlink()
        batch, _ = stack.work("job", 1, version=1)
        (tmp_path / second.directory / second.files[0].name).unlink()
        side.add(batch, second)
        stack.shop.gates["0/train/0"].set()
        await stack.changes.until(lambda: len(side.published) == 2)
    assert side.held == [None, identity(second)]
    assert [batch.policy_version for batch in side.published] == [0, 1]
    assert (side.failed, stack.shop.log.count("receive 1")) == ([], 1)


async def test_a_batch_of_an_older_version_of_the_window_is_sampled_from_memory(tmp_path: Path, stack: Stack) -> None:
    side = busy(stack, **DELAYED)
    manifests = versions(stack, 0, 1)
    side.announce(*manifests)
    async with stack.running():
        await stack.changes.until(lambda: ready(stack) == [0, 1])
        work = [stack.work("job", number, version=version) for number, version in ((1, 1), (2, 0), (3, 1))]
        for manifest in manifests:
            (tmp_path / manifest.directory / manifest.files[0].name).unlink()
        for one in work:
            side.add(*one)
        stack.shop.gates["0/train/0"].set()
        await stack.changes.until(lambda: len(side.published) == 4)
    assert [batch.policy_version for batch in side.published] == [0, 1, 0, 1]
    assert side.failed == []


async def test_a_version_that_cannot_be_read_is_left_to_the_batch_that_asks_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stack: Stack
) -> None:
    side = busy(stack, **DELAYED)
    first, second = versions(stack, 0, 1)
    path = tmp_path / second.directory / second.files[0].name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    side.announce(first, second)
    async with stack.running():
        await stack.changes.until(lambda: "a batch that asks for it loads it again" in caplog.text)
        assert ready(stack) == [0]
        assert all(beat.rejected_weights == "" for beat in stack.jobs.beats), "it may be out of the window"
        path.write_bytes(whole)
        batch, _ = stack.work("job", 1, version=1)
        side.add(batch, second)
        stack.shop.gates["0/train/0"].set()
        await stack.changes.until(lambda: len(side.published) == 2)
    assert caplog.text.count("a batch that asks for it loads it again") == 1, "it is not tried again and again"
    assert side.failed == []


async def test_a_version_in_a_redis_that_is_away_for_a_moment_is_received_when_it_answers(
    monkeypatch: pytest.MonkeyPatch, stack: Stack
) -> None:
    """Its chunks are read by the engine, whose calls nothing repeats."""
    receive, outages = LoggedEngine.receive_weights, [BrokerUnavailable("connection refused")]

    async def away_at_first(engine: LoggedEngine, announced: Any, shards: Any = (), *, num_versions: int) -> bool:
        if num_versions > 1 and outages:
            raise outages.pop()
        return await receive(engine, announced, shards, num_versions=num_versions)

    monkeypatch.setattr(LoggedEngine, "receive_weights", away_at_first)
    side = busy(stack, **DELAYED)
    side.announce(*versions(stack, 0, 1))
    async with stack.running():
        await stack.changes.until(lambda: ready(stack) == [0, 1])
        stack.shop.gates["0/train/0"].set()
        await stack.changes.until(lambda: len(side.published) == 1)
    assert (outages, side.failed) == ([], [])


async def test_a_number_that_was_taken_back_is_received_again_under_its_new_digest(stack: Stack) -> None:
    side = busy(stack, **DELAYED)
    first, second = versions(stack, 0, 1)
    (third,) = versions(stack, 2)
    # What version 1 becomes after a rewind: other bytes, in the same folder.
    again = replace(third, policy_version=1)
    side.announce(first, second)
    async with stack.running():
        await stack.changes.until(lambda: ready(stack) == [0, 1])
        side.announce(first, again)
        await stack.changes.until(lambda: stack.shop.log.count("receive 1") == 2)
        stack.shop.gates["0/train/0"].set()
        batch, _ = stack.work("job", 1, version=2)
        side.add(batch, third)
        await stack.changes.until(lambda: len(side.claimed) == 2)
    assert side.held == [None, identity(again)]


async def test_under_bounded_only_the_newest_version_is_received(stack: Stack) -> None:
    side = busy(stack, **BOUNDED)
    manifests = versions(stack, 0, 1, 2, 3)
    side.announce(*manifests)
    async with stack.running():
        await stack.changes.until(lambda: ready(stack) == [0, 3])
        side.add(*stack.work("job", 1, version=3))
        stack.shop.gates["0/train/0"].set()
        await stack.changes.until(lambda: len(side.published) == 2)
    assert side.held == [None, identity(manifests[3])]


async def test_the_versions_of_a_job_that_ended_are_let_go(stack: Stack) -> None:
    side = busy(stack, **DELAYED)
    side.announce(*versions(stack, 0, 1))
    async with stack.running():
        await stack.changes.until(lambda: ready(stack) == [0, 1])
        stack.jobs.active.remove("job")
        stack.shop.gates["0/train/0"].set()
        async with asyncio.timeout(120.0):
            while ready(stack) != [0]:
                await asyncio.sleep(0)


async def test_beside_another_job_nothing_is_received(stack: Stack) -> None:
    side = busy(stack, **DELAYED)
    side.announce(*versions(stack, 0, 1))
    other = stack.add_job("other")
    async with stack.running():
        await stack.changes.until(lambda: len(side.claimed) == 1)
        stack.shop.gates["0/train/0"].set()
        other.add(*stack.work("other", 0))
        await stack.changes.until(lambda: len(other.published) == 1)
    assert [event for event in stack.shop.log if event.startswith("receive")] == []


async def test_a_job_without_a_lag_receives_nothing_and_says_nothing_of_what_is_held(stack: Stack) -> None:
    side = busy(stack)
    side.add(*stack.work("job", 1))
    side.announce(*versions(stack, 0, 1))
    async with stack.running():
        await stack.changes.until(lambda: len(side.claimed) == 1)
        stack.shop.gates["0/train/0"].set()
        await stack.changes.until(lambda: len(side.published) == 2)
    assert side.held == [None, None]
    assert ready(stack) == []
    assert [event for event in stack.shop.log if event.startswith("receive")] == []
