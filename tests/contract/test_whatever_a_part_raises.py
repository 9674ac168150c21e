"""Whatever is raised in a thread or a task that others wait for, they are answered by name, or its process ends."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

import reward_service.cages as cages_module
from consumer.ranks.hosts.launcher import Gone, Membership
from consumer.ranks.processes.rank import Rank
from consumer.ranks.threads import Passes, ThreadedRank
from consumer.trackers.background import BackgroundTracker
from contracts.errors import BatchFailed, EngineUnavailable, InvalidInput, OnbeatError, Unavailable
from contracts.jobs import JobState
from onbeat.base.process import ending
from onbeat.base.process.waiting import Waiting
from onbeat.loop.lease_keeper import LeaseKeeper
from onbeat.stages.compute_service import ComputeService
from onbeat.stages.served_stages import ServedStage
from producer.engine.base import VerifiedWeights
from producer.engine.batching import BatchingEngine
from producer.engine.http.openai import OpenaiEngine
from producer.engine.vllm.engine import VllmEngine
from producer.served_model import LoadedModel
from reward_service.cages import Asked, Cages, CageThread
from tests.any_exception import ALL, OF_A_BATCH, OF_THE_ENGINE
from tests.builders import job_spec, prompt_batch, rollout_batch
from tests.rooms.stages.stage_fakes import claimed_item, served_stage
from tests.rooms.stages.test_worker import TEACHER
from tests.rooms.stages.test_worker import Stack as StageStack

SOON_S = 60.0
"""A deadline that only a part reaches whose callers have no answer."""
NAMES = {"ExceptionGroup": "KeyError: 'layers'", "BaseExceptionGroup": "ValueError: a mask"}
"""Kind → what names it, where that isn't the kind itself."""


def name_of(kind: str) -> str:
    return NAMES.get(kind, kind)


def until(is_so: Callable[[], bool], what: str) -> None:
    waiting = Waiting(what, deadline_s=SOON_S)
    while not is_so():
        waiting.poke()
        time.sleep(0.01)


def raised_by(work: Callable[[], object]) -> BaseException | None:
    try:
        work()
    except BaseException as error:
        return error
    return None


# Engines in other processes


class _CoreDied(Exception):
    pass


def engine_of(kind: type[BatchingEngine], error: BaseException) -> LoadedModel:
    """An engine without its server: what it is asked raises."""

    class Raising(kind):  # type: ignore[misc, valid-type]
        @property
        def _context_tokens(self) -> int:
            return 64

        @property
        def _vocabulary_tokens(self) -> int:
            return 64

        async def _sample(self, batch: object) -> Any:
            raise error

        async def _replace_weights(self, manifest: object) -> Any:
            raise error

    engine: Any = Raising.__new__(Raising)
    engine._timeout_s = engine._max_sequences = SOON_S
    engine._llm = SimpleNamespace(errored=False)
    engine._dead = (_CoreDied,)
    batch = prompt_batch([[1, 2]])
    engine._verified_weights = VerifiedWeights(policy_version=batch.policy_version, weights_digest=batch.weights_digest)
    return LoadedModel(model=Any, deterministic=False, engine=engine, detokenizer=Any)  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", [VllmEngine, OpenaiEngine])
@pytest.mark.parametrize("kind", ALL)
def test_what_an_engine_in_another_process_meets_fails_its_batch_by_name_or_ends_the_generator(
    kind: str, engine: type[BatchingEngine]
) -> None:
    loaded = engine_of(engine, ALL[kind]())
    expected = EngineUnavailable if kind in OF_THE_ENGINE else BatchFailed
    with pytest.raises(expected) as caught:
        asyncio.run(loaded.generate(prompt_batch([[1, 2]]), deadline_s=SOON_S))
    assert name_of(kind) in str(caught.value)
    assert bool(caught.value.foreign)


@pytest.mark.parametrize("engine", [VllmEngine, OpenaiEngine])
@pytest.mark.parametrize("kind", ALL)
def test_what_such_an_engine_meets_as_it_loads_is_an_error_by_name(kind: str, engine: type[BatchingEngine]) -> None:
    loaded = engine_of(engine, ALL[kind]())
    weights: Any = SimpleNamespace(policy_version=3)

    async def load() -> None:
        async with loaded.within(SOON_S, "loading version 3"):
            await loaded.engine.load_weights(weights)

    with pytest.raises(OnbeatError, match="loading version 3") as caught:
        asyncio.run(load())
    assert name_of(kind) in str(caught.value)
    assert loaded.engine.policy_version is None


# Stages


class Model:
    def __init__(self, error: BaseException) -> None:
        self._error = error

    def values(self, item: object) -> Any:
        raise self._error


def computed(load: Callable[[ServedStage], Any]) -> BaseException | None:
    async def compute() -> None:
        service = ComputeService(load, most_models=1)
        item = claimed_item("reward_model", rollout_batch(), range(1), {}, number=0)
        try:
            async with asyncio.timeout(SOON_S):
                await service.values(served_stage({"type": "reward_model", "model": "m"}), item)
        finally:
            await service.aclose()

    return raised_by(lambda: asyncio.run(compute()))


@pytest.mark.parametrize("kind", ALL)
def test_what_a_stage_s_model_raises_fails_its_item_by_name_or_ends_the_worker(kind: str) -> None:
    error = computed(lambda stage: Model(ALL[kind]()))
    assert type(error) is (EngineUnavailable if kind in OF_THE_ENGINE else BatchFailed)
    assert name_of(kind) in str(error)


@pytest.mark.parametrize("kind", ALL)
def test_what_the_load_of_a_stage_s_model_raises_is_said_by_name_and_no_item_is_the_cause(kind: str) -> None:
    def load(stage: ServedStage) -> Any:
        raise ALL[kind]()

    error = computed(load)
    assert type(error) is (EngineUnavailable if kind in OF_THE_ENGINE and kind != "MemoryError" else InvalidInput)
    assert name_of(kind) in str(error)


@pytest.mark.parametrize("kind", ALL)
async def test_what_a_stage_s_service_raises_fails_its_item_by_name_or_ends_the_worker(kind: str) -> None:
    stack = StageStack()
    side = stack.add_job(TEACHER)
    stack.models.errors["teacher", "0/train/0", 0] = ALL[kind]()  # type: ignore[assignment]
    side.add(("teacher", "0/train/0", 0))
    if kind in OF_A_BATCH:
        async with stack.running():
            await stack.changes.until(lambda: bool(side.failed))
    else:
        with pytest.raises(BaseExceptionGroup) as caught:
            async with asyncio.timeout(SOON_S):
                await stack.worker.run()
        assert caught.group_contains(EngineUnavailable, match="starts anew")
    ((place, reason),) = side.failed
    assert place == ("teacher", "0/train/0", 0)
    assert name_of(kind) in reason


@pytest.mark.parametrize("kind", OF_THE_ENGINE)
@pytest.mark.parametrize("part", ["_serve", "heartbeat"])
async def test_a_part_of_a_worker_that_ends_by_what_is_no_error_ends_the_worker(
    kind: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A TaskGroup takes a CancelledError for a task that was to end: the worker would beat on, and do nothing."""
    stack = StageStack()

    async def ends(*_: object) -> None:
        raise OF_THE_ENGINE[kind]()

    monkeypatch.setattr(*((stack.worker, "_serve") if part == "_serve" else (stack.worker._heartbeat, "run")), ends)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with asyncio.timeout(SOON_S):
            await stack.worker.run()
    assert caught.group_contains((OnbeatError, MemoryError))


async def test_a_part_of_a_worker_that_returns_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = StageStack()

    async def returns() -> None:
        return None

    monkeypatch.setattr(stack.worker._heartbeat, "run", returns)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with asyncio.timeout(SOON_S):
            await stack.worker.run()
    assert caught.group_contains(OnbeatError, match="of this worker ended by itself")


# The reward service


class AnsweringThread(CageThread[Asked[int, int], Any]):
    """Answers what the test hands it, by what the test says."""

    def __init__(self, turns: Sequence[Callable[[], Any]], answer: Callable[[Asked[int, int]], None]) -> None:
        super().__init__(name="thread-1", cages=_cages(), new_cage=lambda: pytest.fail("no cage is needed"))
        self._turns = list(turns)
        self._say = answer

    def _next(self) -> tuple[Asked[int, int], Sequence[int]] | None:
        return self._turns.pop(0)() if self._turns else None

    def _answer(self, work: Asked[int, int], places: Sequence[int]) -> None:
        self._say(work)


def _cages() -> Cages:
    return Cages("rewards", memory_mb=64, network=False, hidden=(), readable=(), on_restart=lambda: None)


@pytest.mark.parametrize("kind", ALL)
def test_a_cage_thread_that_fails_at_a_request_answers_it_by_name_and_serves_the_next(kind: str) -> None:
    first: Asked[int, int] = Asked(asks=[1])
    second: Asked[int, int] = Asked(asks=[2])

    def answer(work: Asked[int, int]) -> None:
        if work is first:
            raise ALL[kind]()
        work.deliver(0, 7)

    thread = AnsweringThread([lambda: (first, [0]), lambda: (second, [0])], answer)
    thread.start()
    error = first.future.exception(timeout=SOON_S)
    assert isinstance(error, RuntimeError)
    assert str(error).startswith("thread thread-1 failed: ")
    assert name_of(kind) in str(error)
    assert second.future.result(timeout=SOON_S) == (7,)


@pytest.mark.parametrize("kind", ALL)
def test_a_cage_thread_that_can_not_go_on_ends_its_process(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[str, BaseException]] = []
    monkeypatch.setattr(cages_module, "end_process", lambda part, error: ended.append((part, error)))

    def raises() -> Any:
        raise ALL[kind]()

    thread = AnsweringThread([raises], lambda work: None)
    thread.start()
    thread.join(SOON_S)
    ((part, error),) = ended
    assert part == "thread thread-1"
    assert type(error) is type(ALL[kind]())


@pytest.mark.parametrize("kind", ALL)
def test_a_thread_that_lasts_ends_its_process_where_it_dies(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    signals: list[int] = []
    monkeypatch.setattr(ending.os, "kill", lambda pid, number: signals.append(number))

    def raises() -> None:
        raise ALL[kind]()

    ending.lasting_thread("a look", raises).join(SOON_S)
    assert signals == [ending.signal.SIGTERM]


# The trainer


@pytest.mark.parametrize("kind", ALL)
def test_a_lease_that_can_not_be_renewed_any_more_is_said_at_the_trainer_s_next_check(kind: str) -> None:
    def renew() -> JobState:
        raise ALL[kind]()

    keeper = LeaseKeeper(SimpleNamespace(renew=renew), lease_s=0.03)  # type: ignore[arg-type]
    keeper.loaded()
    keeper.start()
    until(lambda: raised_by(keeper.check) is not None, "the keeper's error")
    error = raised_by(keeper.check)
    keeper.close()
    assert isinstance(error, Unavailable)
    assert name_of(kind) in str(error)


@pytest.mark.parametrize("kind", ALL)
def test_what_ends_a_hanging_trainer_says_so_where_it_dies_itself(kind: str) -> None:
    def end(silent_s: float) -> None:
        raise ALL[kind]()

    side: Any = SimpleNamespace(renew=lambda: JobState.RUNNING)
    keeper = LeaseKeeper(side, lease_s=60.0, end_stuck=end)
    keeper.loaded()
    with keeper.training(longest_pass_s=0.01):
        keeper.start()
        keeper._threads[1].join(SOON_S)
    error = raised_by(keeper.check)
    keeper.close()
    assert isinstance(error, Unavailable)
    assert name_of(kind) in str(error)


class Learner:
    """Trains as the test says."""

    def __init__(self, error: BaseException) -> None:
        self.spec = job_spec()
        self.policy = SimpleNamespace(passes=None)
        self._error = error

    def train(self, batch: object) -> Any:
        raise self._error


@pytest.mark.parametrize("kind", ALL)
def test_what_a_pass_raises_in_a_thread_is_raised_where_the_trainer_waits(kind: str) -> None:
    learner: Any = Learner(ALL[kind]())
    rank = ThreadedRank(learner, [], Passes(while_sampled=1, then=1))
    batch = rollout_batch()
    error = raised_by(lambda: rank.train(batch, wait_s=SOON_S))
    rank.close()
    assert type(error) is type(ALL[kind]())


@pytest.mark.parametrize("kind", ALL)
def test_what_a_rank_raises_goes_to_rank_0_by_name(kind: str) -> None:
    from consumer.ranks.processes import orders

    answers: list[Any] = []
    coming: list[Any] = [orders.TrainBatch(batch=rollout_batch()), orders.End()]
    exchange: Any = SimpleNamespace(next_order=lambda _: coming.pop(0), answer=answers.append, newest_order=1)
    learner: Any = Learner(ALL[kind]())
    learner.place = SimpleNamespace(rank=1, world_size=2)
    Rank(exchange, learner, patience_s=SOON_S).run()
    (failed,) = answers
    error = failed.error()
    assert type(error) is Unavailable
    assert name_of(kind) in str(error)
    assert str(error).startswith("rank 1: died: ")


@pytest.mark.parametrize("kind", ALL)
def test_a_host_whose_lease_can_not_be_renewed_says_why_before_the_lease_is_over(kind: str) -> None:
    def renew(*_: object) -> Any:
        raise ALL[kind]()

    side: Any = SimpleNamespace(renew=renew, leave=lambda *_: None)
    group: Any = SimpleNamespace(lease_ms=600_000, formed=1, members=())
    membership = Membership(side, group, host="a")
    until(lambda: raised_by(membership.check) is not None, "the reason")
    error = raised_by(membership.check)
    assert isinstance(error, Gone)
    assert name_of(kind) in str(error)
    membership.close("the end of the test")


@pytest.mark.parametrize("kind", ALL)
def test_a_tracker_that_raises_is_off_by_name_and_nothing_waits_for_it(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Raising:
        def log(self, step: int, values: Mapping[str, float]) -> None:
            raise ALL[kind]()

        def close(self) -> None:
            pytest.fail("it is off")

    tracker = BackgroundTracker("mine", Raising)
    tracker.log(0, {"reward": 1.0})
    tracker.close()
    assert f"tracker mine has failed, and gets no more numbers: {name_of(kind)}" in caplog.text
    assert not [thread for thread in threading.enumerate() if thread.name == "tracker-mine"]
