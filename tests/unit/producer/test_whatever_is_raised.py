"""Whatever is raised around an engine, each claimed batch ends with a reason, or the generator ends to start anew."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import EngineUnavailable
from contracts.rollouts import Completion
from contracts.versions import WeightShard
from tests.any_exception import ALL, OF_A_BATCH, OF_THE_ENGINE
from tests.fakes import LoggedEngine
from tests.unit.producer.test_generator import Stack

Make = Callable[[], BaseException]
NAMES = {"ExceptionGroup": "KeyError: 'layers'", "StopIteration": "StopIteration"}
"""Kind → what names it in a reason, where that isn't the kind itself."""


def raiser(make: Make) -> Callable[..., Any]:
    def raises(*_: object, **__: object) -> Any:
        raise make()

    return raises


def in_the_engine(stack: Stack, make: Make, patched: pytest.MonkeyPatch) -> None:
    patched.setattr(LoggedEngine, "_sampled", raiser(make))


def in_the_detokenizer(stack: Stack, make: Make, patched: pytest.MonkeyPatch) -> None:
    def spells(completions: Sequence[Completion]) -> list[str]:
        raise make()

    stack.model.make_detokenizer = lambda model: spells


def in_scoring(stack: Stack, make: Make, patched: pytest.MonkeyPatch) -> None:
    async def score(*_: object, **__: object) -> Any:
        raise make()

    patched.setattr(stack.rewards, "score", score)


OF_A_CLAIM = {"engine": in_the_engine, "detokenizer": in_the_detokenizer, "scoring": in_scoring}


def in_a_load(stack: Stack, make: Make, patched: pytest.MonkeyPatch) -> None:
    patched.setattr(LoggedEngine, "_load", raiser(make))


def in_making_the_engine(stack: Stack, make: Make, patched: pytest.MonkeyPatch) -> None:
    stack.model.make_engine = raiser(make)


def in_making_the_detokenizer(stack: Stack, make: Make, patched: pytest.MonkeyPatch) -> None:
    stack.model.make_detokenizer = raiser(make)


OF_A_LOAD = {"load": in_a_load, "engine": in_making_the_engine, "detokenizer": in_making_the_detokenizer}


@pytest.mark.parametrize("place", OF_A_CLAIM)
@pytest.mark.parametrize("kind", OF_A_BATCH)
async def test_an_exception_at_a_batch_fails_it_by_name_and_the_generator_goes_on(
    stack: Stack, kind: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = stack.add_job(num_batches=2)
    OF_A_CLAIM[place](stack, OF_A_BATCH[kind], monkeypatch)
    async with stack.running():
        await stack.changes.until(lambda: len(side.failed) == 2)
    assert sorted(batch_id for batch_id, _ in side.failed) == ["0/train/0", "0/train/1"]
    assert all(NAMES.get(kind, kind) in reason for _, reason in side.failed)
    assert (side.published, side.released) == ([], [])


@pytest.mark.parametrize("place", OF_A_CLAIM)
@pytest.mark.parametrize("kind", OF_THE_ENGINE)
async def test_what_leaves_no_process_to_go_on_with_ends_the_generator_by_an_error_of_ours(
    stack: Stack, kind: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SystemExit(0) among them: a process that ended with it would look as if it had been stopped."""
    stack.add_job(num_batches=1)
    OF_A_CLAIM[place](stack, OF_THE_ENGINE[kind], monkeypatch)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with asyncio.timeout(120.0):
            await stack.generator.run()
    assert caught.group_contains(EngineUnavailable, match="starts anew")


@pytest.mark.parametrize("place", OF_A_LOAD)
@pytest.mark.parametrize("kind", OF_A_BATCH)
async def test_a_generator_that_can_not_load_a_job_gives_its_batch_back_and_says_why_it_leaves_it_alone(
    stack: Stack, kind: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch isn't the cause, so that no attempt counts; the trainer says whom it waits for, and why."""
    side = stack.add_job(num_batches=1)
    OF_A_LOAD[place](stack, OF_A_BATCH[kind], monkeypatch)
    name = NAMES.get(kind, kind)
    async with stack.running():
        await stack.changes.until(lambda: bool(side.released))
        await stack.changes.until(lambda: name in stack.jobs.beats[-1].leaves_alone.get("job", ""))
    assert name in side.released[0][1]
    assert side.failed == []


@pytest.mark.parametrize("place", OF_A_LOAD)
@pytest.mark.parametrize("kind", OF_THE_ENGINE)
async def test_a_generator_that_dies_as_it_loads_gives_the_batch_back_first(
    stack: Stack, kind: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = stack.add_job(num_batches=1)
    OF_A_LOAD[place](stack, OF_THE_ENGINE[kind], monkeypatch)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with asyncio.timeout(120.0):
            await stack.generator.run()
    assert caught.group_contains(EngineUnavailable, match="starts anew")
    assert [batch_id for batch_id, _ in side.released] == ["0/train/0"]


@pytest.mark.parametrize("kind", OF_A_BATCH)
async def test_a_job_whose_kind_of_engine_can_not_be_told_is_left_alone_and_others_are_served(
    stack: Stack, kind: str
) -> None:
    honest = stack.generator._jobs.fingerprint
    strange, ordinary = stack.add_job("strange", num_batches=1, seed=1), stack.add_job("ordinary", num_batches=1)

    def fingerprint(spec: Any) -> str:
        if spec.seed == 1:
            raise OF_A_BATCH[kind]()
        return honest(spec)

    stack.generator._jobs.fingerprint = fingerprint
    async with stack.running():
        await stack.changes.until(lambda: len(ordinary.published) == 1)
        await stack.changes.until(lambda: "strange" in stack.jobs.beats[-1].leaves_alone)
    assert NAMES.get(kind, kind) in stack.jobs.beats[-1].leaves_alone["strange"]
    assert strange.claimed == []


@pytest.mark.parametrize("kind", ["AttributeError", "StopIteration", "TimeoutError"])
async def test_a_file_that_can_not_be_read_ahead_is_read_with_its_version(
    stack: Stack, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = stack.add_job(num_batches=1)
    honest, tries = LoggedEngine.load_weights, []

    async def load_weights(engine: LoggedEngine, weights: Any) -> None:
        if isinstance(weights, WeightShard):
            tries.append(weights)
            raise OF_A_BATCH[kind]()
        await honest(engine, weights)

    monkeypatch.setattr(LoggedEngine, "load_weights", load_weights)
    async with stack.running():
        await stack.changes.until(lambda: len(side.published) == 1)
        path = "job/weights/.v000001.0123456789ab/a.safetensors"
        side.shards = [WeightShard(policy_version=1, path=path, name="a.safetensors", num_bytes=8)]
        await stack.changes.until(lambda: bool(tries))
        side.add(*stack.work("job", 0, version=1))
        await stack.changes.until(lambda: len(side.published) == 2)
    assert side.failed == side.released == []


@pytest.mark.parametrize("kind", ALL)
async def test_a_version_that_can_not_be_received_beside_a_batch_is_named_or_ends_the_generator(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = Stack(tmp_path)
    side = stack.add_job(num_batches=1, schedule="delayed", max_policy_lag=1, algorithm__correction="tis")
    tries: list[str] = []

    async def receive_weights(*_: object, **__: object) -> bool:
        tries.append(kind)
        raise ALL[kind]()

    monkeypatch.setattr(LoggedEngine, "receive_weights", receive_weights)

    async def serve() -> None:
        async with stack.running():
            await stack.changes.until(lambda: len(side.published) == 1)
            side.announce(*(stack.work("job", 0, version=version)[1] for version in (0, 1)))
            await stack.changes.until(lambda: bool(tries))
            side.add(*stack.work("job", 0, version=1))
            await stack.changes.until(lambda: len(side.published) == 2)

    if kind in OF_A_BATCH:
        await serve()
        assert side.failed == side.released == []
    else:
        with pytest.raises(BaseExceptionGroup) as caught:
            await serve()
        assert caught.group_contains(EngineUnavailable, match="starts anew")
