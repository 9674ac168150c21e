"""The models of this process: loaded on first use, kept while their jobs are active, used by one thread.

    values ─▶ thread ─▶ model of (job, stage): kept, or loaded ─▶ torch set up as the job's trainer has it ─▶ columns

One computation at a time has all of the process' compute threads. Which items stand behind each other changes none of
their values: each goes through by itself, and what an item holds together is a function of the spec (I7).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

from broker.stage_side import ClaimedItem
from contracts.errors import DeadlineExceeded, EngineUnavailable, InvalidInput, OnbeatError, kind_and_text
from contracts.experience.columns import ColumnValues
from onbeat.base.process.host_memory import give_free_memory_back
from onbeat.stages.served_stages import ServedStage, StageKey, field_of
from onbeat.work.failures import by_name, named_failure

log = logging.getLogger(__name__)

MOST_ROWS = 16
"""Items of a stage of unit "row" that are claimed together: a row is short, and asking for it takes time too."""


class StageModel(Protocol):
    """A loaded model. Only the service's thread calls it."""

    def values(self, item: ClaimedItem) -> ColumnValues:
        """Makes the stage's outputs. Raises BatchFailed, InvalidInput or ContractViolation."""
        ...


class ComputeService:
    """A StageService: models that compute in this process."""

    server = None

    def __init__(
        self,
        load: Callable[[ServedStage], StageModel],
        *,
        most_models: int,
        check: Callable[[ServedStage], object] = lambda stage: None,
        imports: Callable[[], None] = lambda: None,
    ) -> None:
        """load: blocks while it reads the model; raises InvalidInput that names the stage's model. check: looks for it
        without reading it. imports: the code that the first item needs."""
        self._load = load
        self._check = check
        self._imports = imports
        self._most_models = most_models
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._models: OrderedDict[StageKey, StageModel] = OrderedDict()
        """The one that was used longest ago comes first. Only the thread touches it."""
        self._proven: set[StageKey] = set()
        """Stages whose models have been loaded once."""
        self._jobs: frozenset[str] = frozenset()
        self._num_begun = 0
        self._turn = asyncio.Lock()
        self._newest: Future[Any] | None = None

    @property
    def is_busy(self) -> bool:
        """True while its thread computes, needed or not: the end of the process would wait for it."""
        return self._newest is not None and not self._newest.done()

    def num_free(self, stage: ServedStage) -> int:
        if self._num_begun or self.is_busy:
            return 0
        # The first item shows whether its model loads here: no others wait for that under their leases.
        if stage.node.unit == "row" and stage.key in self._proven:
            return MOST_ROWS
        return 1

    async def values(self, stage: ServedStage, item: ClaimedItem) -> ColumnValues:
        self._num_begun += 1
        try:
            async with self._turn:
                return await self._within_deadline(stage, item)
        finally:
            self._num_begun -= 1

    async def look(self, stage: ServedStage) -> None:
        self._newest = self._thread.submit(self._model_of, stage)
        await asyncio.wrap_future(self._newest)

    def forget_all_but(self, job_ids: Collection[str]) -> None:
        if frozenset(job_ids) != self._jobs:
            self._jobs = frozenset(job_ids)
            self._thread.submit(self._forget_ended, self._jobs)

    def check(self, stage: ServedStage) -> None:
        self._check(stage)

    def preload(self) -> None:
        self._newest = self._thread.submit(self._imports)

    async def aclose(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _within_deadline(self, stage: ServedStage, item: ClaimedItem) -> ColumnValues:
        deadline_s = stage.spec.timeouts.generation_s
        work: Future[ColumnValues] = self._thread.submit(self._compute, stage, item)
        self._newest = work
        try:
            async with asyncio.timeout(deadline_s):
                return await asyncio.wrap_future(work)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{stage} is not done with {item.batch_id} after {deadline_s:g} s",
                field="timeouts.generation_s",
                cure="raise it",
            ) from error

    def _compute(self, stage: ServedStage, item: ClaimedItem) -> ColumnValues:
        model = self._model_of(stage)
        return by_name(partial(model.values, item), what="the model")

    def _model_of(self, stage: ServedStage) -> StageModel:
        """Raises InvalidInput for a model that this process can't load: no item is the cause; and EngineUnavailable
        for what leaves no process to go on with.
        """
        model = self._models.pop(stage.key, None)
        if model is None:
            # Freed before the next one is read: both may not fit.
            while len(self._models) >= self._most_models:
                self._models.popitem(last=False)
                give_free_memory_back()
            log.info("loads the model of %s", stage)
            try:
                model = self._load(stage)
            except OnbeatError:
                raise
            except BaseException as error:
                failure = named_failure(error, what=f"loading the model of {stage}")
                if isinstance(failure, EngineUnavailable) and not isinstance(error, MemoryError):
                    raise failure from error
                problem = f"does not load here: {kind_and_text(error)}"
                raise InvalidInput(problem, field=field_of(stage, "model")) from error
            self._proven.add(stage.key)
        self._models[stage.key] = model
        return model

    def _forget_ended(self, job_ids: Collection[str]) -> None:
        self._proven = {key for key in self._proven if key[0] in job_ids}
        ended = [key for key in self._models if key[0] not in job_ids]
        for key in ended:
            del self._models[key]
        if ended:
            give_free_memory_back()
