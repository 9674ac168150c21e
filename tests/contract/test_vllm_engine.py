"""vLLM in the generator: what runs side by side, and how a generator notices that its engine core is gone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.errors import BatchFailed, EngineUnavailable
from contracts.rollouts import SamplingParams
from contracts.spec import ModelSpec
from tests.contract.engine_rigs import Rig, need_vllm, rig_of, scaled, under, vllm_folder, vllm_settings

PROMPTS = ([5, 6, 7], [8], [4, 9, 10])
LONG = SamplingParams(max_new_tokens=100)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    built = new_rig(tmp_path_factory.mktemp("vllm"))
    yield built
    built.close()


def new_rig(root: Path) -> Rig:
    need_vllm()
    from producer.engine.vllm import VllmEngine

    folder = vllm_folder(root, "llama")
    return rig_of("vllm llama", VllmEngine(ModelSpec(path="llama"), settings=vllm_settings(root)), folder, root)


def engine_core(rig: Rig) -> int:
    """Process number."""
    (process,) = rig.engine._llm.engine_core.resources.engine_manager.processes  # type: ignore[attr-defined]
    return process.pid


def test_a_load_waits_for_what_is_being_sampled_and_no_batch_starts_meanwhile(rig: Rig) -> None:
    first, second = rig.publish(0), rig.publish(1, scaled(rig.tensors, 0.5))

    async def load_in_the_middle() -> list:
        await rig.engine.load_weights(first)
        running = asyncio.ensure_future(rig.engine.generate(under(first, PROMPTS, group_size=8, sampling=LONG)))
        await asyncio.sleep(0)
        loading = asyncio.ensure_future(rig.engine.load_weights(second))
        await asyncio.sleep(0)
        with pytest.raises(BatchFailed, match="no verified weights"):
            await rig.engine.generate(under(first, PROMPTS))
        groups = await running
        await loading
        return groups

    groups = rig.run(load_in_the_middle())
    assert [len(group) for group in groups] == [8] * len(PROMPTS)
    assert rig.engine.policy_version is not None
    assert rig.engine.policy_version.policy_version == 1


def test_batches_are_sampled_side_by_side_and_a_cancelled_one_takes_none_with_it(rig: Rig) -> None:
    manifest = rig.load()

    async def three_at_once() -> list:
        batches = [
            asyncio.ensure_future(rig.engine.generate(under(manifest, PROMPTS, iteration=number, sampling=LONG)))
            for number in range(3)
        ]
        await asyncio.sleep(0)
        batches[1].cancel()
        return await asyncio.gather(*batches, return_exceptions=True)

    first, dropped, third = rig.run(three_at_once())
    assert isinstance(dropped, asyncio.CancelledError)
    for groups in (first, third):
        assert [len(group) for group in groups] == [2] * len(PROMPTS)
    assert first != third


def test_a_core_that_does_not_answer_ends_the_call_at_its_deadline(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = rig.load()
    monkeypatch.setattr(rig.engine, "_timeout_s", 0.5)
    os.kill(engine_core(rig), signal.SIGSTOP)
    try:
        with pytest.raises(EngineUnavailable, match="batch 0/train/0 is not done after"):
            rig.generate(manifest, PROMPTS)
    finally:
        os.kill(engine_core(rig), signal.SIGCONT)


def test_a_core_that_is_killed_ends_what_it_was_sampling_and_every_call_after(rig: Rig) -> None:
    """The last test of this module: nothing can be done with the engine afterwards."""
    manifest = rig.load()

    async def killed_in_the_middle() -> None:
        running = asyncio.ensure_future(rig.engine.generate(under(manifest, PROMPTS, group_size=64, sampling=LONG)))
        await asyncio.sleep(0)
        os.kill(engine_core(rig), signal.SIGKILL)
        await running

    # Not by its deadline, which has another message.
    with pytest.raises(EngineUnavailable, match="its engine core died"):
        rig.run(killed_in_the_middle())
    with pytest.raises(EngineUnavailable):
        rig.generate(manifest, PROMPTS)
    with pytest.raises(EngineUnavailable):
        rig.load(1)


def test_a_core_that_is_killed_while_it_loads_ends_the_load(tmp_path: Path) -> None:
    rig = new_rig(tmp_path)
    rig.load()
    manifest = rig.publish(1)

    async def killed_while_loading() -> None:
        os.kill(engine_core(rig), signal.SIGSTOP)
        loading = asyncio.ensure_future(rig.engine.load_weights(manifest))
        await asyncio.sleep(0)
        os.kill(engine_core(rig), signal.SIGKILL)
        await loading

    with pytest.raises(EngineUnavailable, match="its engine core died: loading version 1"):
        rig.run(killed_while_loading())
    rig.close()
