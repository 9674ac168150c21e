"""Whatever is raised in an engine's thread, each request is answered by name: of its batch, or of the engine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from contracts.encoding.wire import encode
from contracts.errors import BatchFailed, EngineUnavailable, OnbeatError
from contracts.rollouts import Completion, PromptBatch
from contracts.sampling import SamplingParams
from contracts.versions import WeightManifest
from onbeat.weights.held_versions import HeldVersions
from producer.engine.growing_rows import GrowingBatch, HeldRows
from producer.engine.transformers import decoding, shared_decoding
from producer.engine.transformers.decode_loop import DecodeLoop
from producer.engine.transformers.engine import TransformersEngine
from tests.any_exception import ALL, OF_A_BATCH, OF_THE_ENGINE
from tests.builders import DEVICE, tiny_model_folder
from tests.contract.engine_rigs import Rig, transformers_rig, under

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="what a thread answers is the same on any device")

ANSWERED_S = 120.0
"""A request without an answer would wait for ever."""
Answer = list[list[Completion]] | BaseException


class Engines:
    """An engine at a time; one that has ended makes way for another."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._numbers = itertools.count()
        self._rig: Rig | None = None
        tiny_model_folder(root, "qwen3", tied=True)

    def rig(self) -> Rig:
        if self._rig is None:
            self._rig = transformers_rig("qwen3", self._root, self._root / f"runs-{next(self._numbers)}")
        return self._rig

    def close(self) -> None:
        if self._rig is not None:
            self._rig.close()
            self._rig = None


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp("engines"))
    yield made
    made.close()


def batches(manifest: WeightManifest) -> list[PromptBatch]:
    """Three batches, of which the second is the one at which something is raised."""
    return [
        under(manifest, prompts, group_size=2, sampling=SamplingParams(max_new_tokens=4), iteration=number)
        for number, prompts in enumerate([[[5, 6, 7]], [[8]], [[4, 9]]])
    ]


def answers(rig: Rig, asked: list[PromptBatch]) -> list[Answer]:
    async def ask() -> list[Answer]:
        async with asyncio.timeout(ANSWERED_S):
            return await asyncio.gather(*map(rig.engine.generate, asked), return_exceptions=True)

    return rig.run(ask())


Raising = Callable[[pytest.MonkeyPatch, PromptBatch, Callable[[], BaseException]], None]
"""Makes the engine raise such an exception at a place, at each try of a batch."""


def at_joining(patched: pytest.MonkeyPatch, guilty: PromptBatch, make: Callable[[], BaseException]) -> None:
    honest = shared_decoding.SharedDecoding.join

    def join(rows: shared_decoding.SharedDecoding, growing: GrowingBatch) -> None:
        if growing.batch == guilty:
            raise make()
        honest(rows, growing)

    patched.setattr(shared_decoding.SharedDecoding, "join", join)


def at_a_prefill(patched: pytest.MonkeyPatch, guilty: PromptBatch, make: Callable[[], BaseException]) -> None:
    honest = shared_decoding.SharedDecoding._prefilled

    def prefilled(rows: shared_decoding.SharedDecoding, batch: PromptBatch) -> Any:
        if batch == guilty:
            raise make()
        return honest(rows, batch)

    patched.setattr(shared_decoding.SharedDecoding, "_prefilled", prefilled)


def at_a_step(patched: pytest.MonkeyPatch, guilty: PromptBatch, make: Callable[[], BaseException]) -> None:
    honest = shared_decoding.SharedDecoding.advance

    def advance(rows: shared_decoding.SharedDecoding) -> list[GrowingBatch]:
        if any(growing.batch == guilty for growing in rows._rows.batches):
            raise make()
        return honest(rows)

    patched.setattr(shared_decoding.SharedDecoding, "advance", advance)


def at_a_draw(patched: pytest.MonkeyPatch, guilty: PromptBatch, make: Callable[[], BaseException]) -> None:
    honest = HeldRows.append

    def append(rows: HeldRows, *arguments: Any) -> Any:
        if any(growing.batch == guilty for growing in rows.batches):
            raise make()
        return honest(rows, *arguments)

    patched.setattr(HeldRows, "append", append)


PLACES = {"joining": at_joining, "a prefill": at_a_prefill, "a step": at_a_step, "a draw": at_a_draw}


@pytest.mark.parametrize("place", PLACES)
def test_what_a_batch_may_be_the_cause_of_fails_that_batch_by_name_and_the_others_have_their_bytes(
    engines: Engines, place: str
) -> None:
    rig = engines.rig()
    asked = batches(rig.load())
    expected = answers(rig, asked)
    for kind, make in OF_A_BATCH.items():
        with pytest.MonkeyPatch.context() as patched:
            PLACES[place](patched, asked[1], make)
            first, failure, last = answers(rig, asked)
        assert isinstance(failure, BatchFailed), kind
        assert failure.problem.startswith(f"batch {asked[1].batch_id}: the engine failed: "), kind
        assert (kind if kind != "ExceptionGroup" else "KeyError: 'layers'") in str(failure)
        assert encode([first, last]) == encode([expected[0], expected[2]]), kind
    assert encode(answers(rig, asked)) == encode(expected), "the engine is as good as ever"


@pytest.mark.parametrize("place", PLACES)
def test_what_leaves_no_engine_ends_it_for_every_request_those_that_come_later_too(
    engines: Engines, place: str
) -> None:
    for kind, make in OF_THE_ENGINE.items():
        engines.close()
        rig = engines.rig()
        asked = batches(rig.load())
        with pytest.MonkeyPatch.context() as patched:
            PLACES[place](patched, asked[1], make)
            failures = answers(rig, asked)
        later = answers(rig, asked[:1])
        # One that was done before the engine came to the guilty batch has its answer.
        assert [type(answer) for answer in (failures[1], *later)] == [EngineUnavailable] * 2, kind
        assert all(isinstance(answer, (list, EngineUnavailable)) for answer in failures), kind
        assert (kind if kind != "BaseExceptionGroup" else "starts anew") in str(failures[1])
    engines.close()


@pytest.mark.parametrize("kind", ALL)
def test_an_engine_that_can_not_let_its_rows_go_answers_all_the_same(engines: Engines, kind: str) -> None:
    """The handler of an error may raise itself: nothing may wait for what it didn't come to."""
    engines.close()
    rig = engines.rig()
    asked = batches(rig.load())

    def raising(*_: object) -> Any:
        raise ALL[kind]()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shared_decoding.SharedDecoding, "advance", raising)
        patched.setattr(shared_decoding.SharedDecoding, "reset", raising)
        failures = answers(rig, asked)
    assert [type(failure) for failure in failures] == [EngineUnavailable] * 3
    engines.close()


def test_an_engine_whose_thread_can_not_begin_answers_by_name(engines: Engines) -> None:
    engines.close()
    rig = engines.rig()
    asked = batches(rig.load())

    def raising(_loop: DecodeLoop) -> None:
        raise OSError("no thread is left")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DecodeLoop, "_admit", raising)
        failures = answers(rig, asked)
    assert [type(failure) for failure in failures] == [EngineUnavailable] * 3
    assert "OSError: no thread is left" in str(failures[0])
    engines.close()


@pytest.mark.parametrize("place", ["a read", "the self-test"])
def test_a_load_that_raises_anything_is_an_error_by_name(engines: Engines, place: str) -> None:
    rig = engines.rig()
    manifest = rig.load()
    for kind, make in ALL.items():

        def raising(*_: object, make: Callable[[], BaseException] = make) -> Any:
            raise make()

        async def load() -> None:
            async with asyncio.timeout(ANSWERED_S):
                await rig.engine.load_weights(manifest)

        with pytest.MonkeyPatch.context() as patched:
            of_place = (HeldVersions, "load") if place == "a read" else (TransformersEngine, "_judge")
            patched.setattr(*of_place, raising)
            with pytest.raises(OnbeatError) as caught:
                rig.run(load())
        assert type(caught.value) is (EngineUnavailable if kind in OF_THE_ENGINE else BatchFailed), kind
        assert manifest.directory in str(caught.value)
        assert rig.engine.policy_version is None
    asked = batches(rig.load())
    assert not [answer for answer in answers(rig, asked) if isinstance(answer, BaseException)]


def test_a_model_whose_cache_can_not_be_repeated_fails_its_batches_and_not_its_trainer_s_hour(
    engines: Engines,
) -> None:
    """As the caches of linear attention were: the request was lost, and the generator beat on."""
    engines.close()
    rig = engines.rig()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("producer.engine.transformers.row_independence.has_experts", lambda model: True)
        patched.delattr(decoding.RoomLayer, "batch_repeat_interleave")
        patched.setattr("transformers.cache_utils.DynamicLayer.batch_repeat_interleave", property(), raising=False)
        failures = answers(rig, batches(rig.load()))
    assert [type(failure) for failure in failures] == [BatchFailed] * 3
    assert "AttributeError" in str(failures[0])
    engines.close()
