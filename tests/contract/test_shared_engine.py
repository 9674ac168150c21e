"""The transformers engine samples several batches at once: each has the bytes, and the errors, that it has alone."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from contracts.encoding.wire import encode
from contracts.engines import TransformersOptions
from contracts.errors import BatchFailed, EngineUnavailable
from contracts.rollouts import Completion, PromptBatch
from contracts.sampling import SamplingParams
from contracts.versions import WeightManifest
from producer.engine.growing_rows import GrowingBatch
from producer.engine.transformers import packed_products
from producer.engine.transformers.packed_products import Parts, Way
from producer.engine.transformers.row_independence import Verdict
from producer.engine.transformers.shared_decoding import SharedDecoding
from tests.builders import DEVICE, tiny_model_folder
from tests.contract.engine_rigs import Rig, scaled, transformers_rig, under

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU an engine samples one batch at a time")

ALONE = TransformersOptions(shared_sequences=1)
UNPACKED = TransformersOptions(packed_weights_mb=0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    tiny_model_folder(root, "qwen3", tied=True)
    return root


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """What an engine computes with: one thread, whatever the tests were started with; a test may ask for more."""
    chosen, before = getattr(request, "param", 1), torch.get_num_threads()
    monkeypatch.setattr("producer.engine.transformers.engine.STARTED_THREADS", chosen)
    yield chosen
    torch.set_num_threads(before)


@pytest.fixture
def rig(threads: int, folders: Path, tmp_path: Path) -> Iterator[Rig]:
    built = transformers_rig("qwen3", folders, tmp_path)
    yield built
    built.close()


def batches(manifest: WeightManifest) -> list[PromptBatch]:
    prompts = ([[5, 6, 7], [8]], [[4, 9, 10, 11, 12]], [[13, 5]] * 4)
    return [
        under(
            manifest,
            some,
            group_size=3,
            sampling=SamplingParams(max_new_tokens=5 + number, top_p=1.0 - number / 5),
            iteration=number,
        )
        for number, some in enumerate(prompts)
    ]


async def together(rig: Rig, asked: list[PromptBatch]) -> list[list[list[Completion]] | BaseException]:
    return await asyncio.gather(*map(rig.engine.generate, asked), return_exceptions=True)


def alone(rig: Rig, asked: list[PromptBatch]) -> list[list[list[Completion]] | BaseException]:
    return [rig.run(together(rig, [batch]))[0] for batch in asked]


def companies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows were held when each batch joined."""
    found: list[int] = []
    honest = SharedDecoding.join

    def noted(decoding: SharedDecoding, growing: GrowingBatch) -> None:
        found.append(len(decoding._rows))
        honest(decoding, growing)

    monkeypatch.setattr(SharedDecoding, "join", noted)
    return found


def test_batches_that_are_asked_for_at_once_share_steps_and_have_the_bytes_of_each_alone(
    rig: Rig, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = companies(monkeypatch)
    asked = batches(rig.load())
    assert rig.engine.max_concurrent_completions == TransformersOptions().shared_sequences > 1
    expected = alone(rig, asked)
    assert joined == [0, 0, 0]
    assert encode(rig.run(together(rig, asked))) == encode(expected)
    assert max(joined) > 0
    joined.clear()
    lone = transformers_rig("qwen3", folders, tmp_path / "alone", ALONE)
    lone.load()
    assert lone.engine.max_concurrent_completions == 1
    assert encode(lone.run(together(lone, asked))) == encode(expected)
    assert joined == [0, 0, 0]
    lone.close()


@pytest.mark.parametrize("threads", [2, 4], indirect=True)
def test_with_more_threads_batches_that_are_asked_for_at_once_have_the_bytes_of_each_alone(
    rig: Rig, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention cuts its rows by threads, on some kinds of CPU with other bits: there none joins another."""
    joined = companies(monkeypatch)
    asked = batches(rig.load())
    expected = alone(rig, asked)
    assert encode(rig.run(together(rig, asked))) == encode(expected)
    assert (max(joined) > 0) == (rig.engine.max_concurrent_completions > 1)


def test_a_batch_that_is_cancelled_in_company_leaves_and_the_others_go_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = batches(rig.load())
    expected = alone(rig, asked[1:])
    joined, reached, go_on = companies(monkeypatch), threading.Event(), threading.Event()
    honest = SharedDecoding.advance

    def gated(decoding: SharedDecoding) -> list[GrowingBatch]:
        if len(joined) == len(asked) and not reached.is_set():
            reached.set()
            go_on.wait(120.0)
        return honest(decoding)

    async def drop_the_first() -> list[list[list[Completion]] | BaseException]:
        first, *others = [asyncio.ensure_future(rig.engine.generate(batch)) for batch in asked]
        await asyncio.to_thread(reached.wait, 120.0)
        first.cancel()
        await asyncio.wait({first})
        go_on.set()
        return await asyncio.gather(*others)

    monkeypatch.setattr(SharedDecoding, "advance", gated)
    assert encode(rig.run(drop_the_first())) == encode(expected)


def test_a_batch_that_the_model_cannot_read_fails_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = batches(rig.load())
    expected = alone(rig, asked)
    unreadable = under(rig.load(), [[7]])
    honest = SharedDecoding.join

    def failing(decoding: SharedDecoding, growing: GrowingBatch) -> None:
        if growing.batch == unreadable:
            raise RuntimeError("out of memory")
        honest(decoding, growing)

    monkeypatch.setattr(SharedDecoding, "join", failing)
    *found, failure = rig.run(together(rig, [*asked, unreadable]))
    assert encode(found) == encode(expected)
    assert isinstance(failure, BatchFailed)
    assert "the engine failed" in str(failure)


def test_a_step_that_fails_in_company_is_repeated_by_each_batch_alone_and_only_the_guilty_one_fails(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = batches(rig.load())
    expected = alone(rig, asked[1:])
    honest = SharedDecoding.advance

    def failing(decoding: SharedDecoding) -> list[GrowingBatch]:
        if any(growing.batch == asked[0] for growing in decoding._rows.batches):
            raise RuntimeError("out of memory")
        return honest(decoding)

    monkeypatch.setattr(SharedDecoding, "advance", failing)
    failure, *found = rig.run(together(rig, asked))
    assert encode(found) == encode(expected)
    assert isinstance(failure, BatchFailed)
    assert "out of memory" in str(failure)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("an illegal memory access was encountered"),
        RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED: an illegal memory access was encountered"),
    ],
)
def test_a_gpu_that_is_lost_ends_the_engine_and_fails_no_batch(
    rig: Rig, error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that failed would count against its prompts; this engine ends, and another generator samples it."""
    asked = batches(rig.load())

    def lost(decoding: SharedDecoding) -> list[GrowingBatch]:
        raise error

    monkeypatch.setattr(SharedDecoding, "advance", lost)
    found = rig.run(together(rig, asked))
    assert [type(one) for one in found] == [EngineUnavailable] * len(asked)
    assert "an illegal memory access" in str(found[0])


def test_an_engine_that_is_closed_answers_every_batch_that_is_in_it(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = transformers_rig("qwen3", folders, tmp_path)
    asked = batches(rig.load())
    reached, go_on = threading.Event(), threading.Event()
    honest = SharedDecoding.advance

    def gated(decoding: SharedDecoding) -> list[GrowingBatch]:
        reached.set()
        go_on.wait(120.0)
        return honest(decoding)

    async def close() -> list[list[list[Completion]] | BaseException]:
        found = asyncio.ensure_future(together(rig, asked))
        await asyncio.to_thread(reached.wait, 120.0)
        closing = asyncio.ensure_future(rig.engine.aclose())
        await asyncio.sleep(0)
        go_on.set()
        await closing
        return await found

    monkeypatch.setattr(SharedDecoding, "advance", gated)
    answers = rig.run(close())
    assert all(isinstance(answer, BatchFailed) and "was given up" in str(answer) for answer in answers)


def test_where_rows_are_not_their_own_one_batch_is_sampled_at_a_time_and_a_line_says_so(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    honest = torch.nn.functional.linear

    def of_few_rows(inputs: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
        found = honest(inputs, *arguments)
        return found * (1.0 + 2e-7) if len(inputs) == 24 else found

    monkeypatch.setattr("producer.engine.transformers.lean_step.functional.linear", of_few_rows)
    joined = companies(monkeypatch)
    rig = transformers_rig("qwen3", folders, tmp_path)
    with caplog.at_level(logging.INFO):
        asked = batches(rig.load())
    assert [line for line in caplog.messages if line.startswith("one batch at a time: a row's bits among 24 rows")]
    assert rig.engine.max_concurrent_completions == 1
    expected = alone(rig, asked)
    assert encode(rig.run(together(rig, asked))) == encode(expected)
    assert set(joined) == {0}
    rig.close()


def test_another_number_of_threads_is_judged_anew_and_other_weights_are_not(
    rig: Rig, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[int] = []

    def noted(model: object, *, most_rows: int, most_packed_bytes: int) -> Verdict:
        judged.append(torch.get_num_threads())
        return Verdict(step=None, problem="for a test")

    monkeypatch.setattr("producer.engine.transformers.engine.judge", noted)
    rig.load()
    rig.load(1, scaled(rig.tensors, 0.5))
    for num_threads in (threads + 1, None, threads + 1):
        rig.run(rig.engine.wake(num_threads=num_threads))
    assert judged == [threads, threads + 1]


def packs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.nn.Linear, ...]]:
    """The layers of each product whose weights were packed, in turn."""
    found: list[tuple[torch.nn.Linear, ...]] = []
    honest = packed_products.pack

    def noted(way: Way, layers: tuple[torch.nn.Linear, ...]) -> tuple[Parts, torch.Tensor | None]:
        found.append(layers)
        return honest(way, layers)

    monkeypatch.setattr(packed_products, "pack", noted)
    return found


def test_weights_are_packed_once_a_version_and_the_old_ones_never_serve_a_new_version(
    rig: Rig, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = transformers_rig("qwen3", folders, tmp_path / "bare", UNPACKED)
    packed = packs(monkeypatch)
    answers = []
    for version, tensors in enumerate([rig.tensors, scaled(rig.tensors, 0.5), scaled(rig.tensors, 2.0)]):
        asked = batches(rig.load(version, tensors))
        bare.load(version, tensors)
        packed.clear()
        answers.append(encode(rig.run(together(rig, asked))))
        once = list(packed)
        assert len(set(once)) == len(once)
        assert encode(rig.run(together(rig, asked))) == answers[-1]
        assert packed == once, "the second time nothing is packed"
        assert encode(bare.run(together(bare, asked))) == answers[-1]
        assert packed == once, "without memory for it nothing is packed"
        assert bool(once) == torch.backends.mkl.is_available()
    assert len(set(answers)) == len(answers)
    bare.close()


def test_an_engine_that_sleeps_gives_its_packed_weights_back(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = batches(rig.load())
    packed = packs(monkeypatch)
    expected = encode(rig.run(together(rig, asked)))
    before = list(packed)
    rig.run(rig.engine.sleep())
    assert encode(rig.run(together(rig, asked))) == expected
    assert packed == before * 2


def test_other_threads_begin_with_the_weights_that_the_engine_has_by_then(rig: Rig, threads: int) -> None:
    def sampled(version: int, factor: float) -> bytes:
        return encode(rig.run(together(rig, batches(rig.load(version, scaled(rig.tensors, factor))))))

    first, second = sampled(0, 1.0), sampled(1, 0.5)
    rig.run(rig.engine.wake(num_threads=threads + 1))
    sampled(0, 1.0)
    rig.run(rig.engine.wake(num_threads=None))
    rig.load(1, scaled(rig.tensors, 0.5))
    rig.run(rig.engine.wake(num_threads=threads + 1))
    rig.run(rig.engine.wake(num_threads=None))
    assert sampled(1, 0.5) == second != first
