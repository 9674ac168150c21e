"""The models of a process: loaded once, few at a time, freed with their jobs, computed one item after the other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from broker.stage_side import ClaimedItem
from contracts.errors import BatchFailed, DeadlineExceeded, EngineUnavailable, InvalidInput
from contracts.experience.columns import ColumnValues
from onbeat.stages.compute_service import MOST_ROWS, ComputeService
from onbeat.stages.served_stages import ServedStage
from tests.builders import rollout_batch
from tests.rooms.stages.stage_fakes import claimed_item, served_stage


class Shop:
    """Loads models that record what they compute, and in which order models come and go."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.errors: dict[str, BaseException] = {}
        """Raised by the model of a stage, or by its load, once."""
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def load(self, stage: ServedStage) -> ShopModel:
        self.log.append(f"load {stage.job_id}")
        if error := self.errors.pop(f"load {stage.job_id}", None):
            raise error
        return ShopModel(self, stage.job_id)


class ShopModel:
    def __init__(self, shop: Shop, name: str) -> None:
        self._shop = shop
        self._name = name

    def values(self, item: ClaimedItem) -> ColumnValues:
        self._shop.log.append(f"{self._name} {item.item}")
        self._shop.entered.set()
        assert self._shop.gate.wait(120.0)
        if error := self._shop.errors.pop(self._name, None):
            raise error
        return {"column": [b""]}

    def __del__(self) -> None:
        self._shop.log.append(f"free {self._name}")


def served(job_id: str = "a", kind: str = "reward_model", **changes: Any) -> ServedStage:
    return served_stage({"type": kind, "model": "m"}, job_id=job_id, **changes)


def item(number: int = 0) -> ClaimedItem:
    return claimed_item("reward_model", rollout_batch(), range(number, number + 1), {}, number=number)


def drive(scenario: Callable[[Shop, ComputeService], Awaitable[None]], *, most_models: int = 2) -> None:
    async def run() -> None:
        shop = Shop()
        service = ComputeService(shop.load, most_models=most_models)
        try:
            await scenario(shop, service)
        finally:
            shop.gate.set()
            await service.aclose()

    asyncio.run(run())


def test_a_model_is_loaded_once_and_its_items_go_through_one_after_the_other() -> None:
    async def scenario(shop: Shop, service: ComputeService) -> None:
        stage = served()
        assert service.num_free(stage) == 1, "the first shows whether its model loads"
        await asyncio.gather(*(service.values(stage, item(number)) for number in range(3)))
        assert shop.log == ["load a", "a 0", "a 1", "a 2"]

    drive(scenario)


def test_it_takes_nothing_while_it_computes_and_one_batch_at_a_time() -> None:
    async def scenario(shop: Shop, service: ComputeService) -> None:
        shop.gate.clear()
        work = asyncio.create_task(service.values(served(), item()))
        await asyncio.to_thread(shop.entered.wait, 20.0)
        assert (service.num_free(served()), service.is_busy) == (0, True)
        shop.gate.set()
        await work
        assert (service.num_free(served()), service.is_busy) == (MOST_ROWS, False)
        assert service.num_free(served("b")) == 1

    drive(scenario)


def test_a_thread_that_computes_what_is_not_needed_any_more_is_busy_until_it_is_through() -> None:
    async def scenario(shop: Shop, service: ComputeService) -> None:
        shop.gate.clear()
        work = asyncio.create_task(service.values(served(), item()))
        await asyncio.to_thread(shop.entered.wait, 20.0)
        work.cancel()
        await asyncio.wait({work})
        assert (service.num_free(served()), service.is_busy) == (0, True)
        shop.gate.set()
        assert await service.values(served(), item(1)) == {"column": [b""]}

    drive(scenario)


def test_beyond_its_most_models_the_one_of_longest_ago_is_freed_before_another_is_loaded() -> None:
    async def scenario(shop: Shop, service: ComputeService) -> None:
        for job_id in ("a", "b", "a", "c"):
            await service.values(served(job_id), item())
        assert shop.log[-3:] == ["free b", "load c", "c 0"]

    drive(scenario)


def test_models_of_ended_jobs_are_freed() -> None:
    async def scenario(shop: Shop, service: ComputeService) -> None:
        for job_id in ("a", "b"):
            await service.values(served(job_id), item())
        service.forget_all_but({"b"})
        await service.values(served("b"), item(1))
        assert shop.log[-2:] == ["free a", "b 1"]
        assert (service.num_free(served()), service.num_free(served("b"))) == (1, MOST_ROWS)

    drive(scenario)


def test_what_a_library_raises_is_a_failure_of_the_item_with_its_first_line() -> None:
    async def scenario(shop: Shop, service: ComputeService) -> None:
        shop.errors["a"] = RuntimeError("index out of range\nat ...")
        with pytest.raises(BatchFailed, match=r"^the model failed: RuntimeError: index out of range$"):
            await service.values(served(), item())
        assert await service.values(served(), item()) == {"column": [b""]}

    drive(scenario)


def test_a_model_that_does_not_load_is_tried_again_for_the_next_item() -> None:
    async def scenario(shop: Shop, service: ComputeService) -> None:
        shop.errors["load a"] = InvalidInput("no folder", field="stages.reward_model.model")
        with pytest.raises(InvalidInput, match="no folder"):
            await service.values(served(), item())
        assert await service.values(served(), item()) == {"column": [b""]}
        assert shop.log.count("load a") == 2

    drive(scenario)


def test_a_load_that_leaves_no_process_to_go_on_with_ends_the_worker_and_one_without_memory_is_the_models() -> None:
    async def scenario(shop: Shop, service: ComputeService) -> None:
        shop.errors["load a"] = SystemExit(1)
        ends = "loading the model of stage reward_model of a failed, and its process starts anew: SystemExit"
        with pytest.raises(EngineUnavailable, match=ends):
            await service.values(served(), item())
        shop.errors["load a"] = MemoryError("it is too large")
        refused = r"stages\.reward_model\.model: does not load here: MemoryError: it is too large"
        with pytest.raises(InvalidInput, match=refused):
            await service.values(served(), item())

    drive(scenario)


def test_a_computation_that_hangs_is_given_up_at_the_jobs_deadline_and_keeps_the_thread_busy() -> None:
    async def scenario(shop: Shop, service: ComputeService) -> None:
        shop.gate.clear()
        with pytest.raises(DeadlineExceeded, match=r"timeouts\.generation_s: stage reward_model of a is not done"):
            await service.values(served(timeouts__generation_s=0.1), item())
        assert service.is_busy

    drive(scenario)
