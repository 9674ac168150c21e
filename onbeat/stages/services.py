"""The seam between the worker and the services that make columns."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Protocol

from broker.stage_side import ClaimedItem
from contracts.encoding.arrays import pack_float32
from contracts.errors import CompletionUnjudged
from contracts.experience.columns import ColumnValues
from contracts.spec.stages import JudgingStage
from onbeat.base.process.dependency import Dependency
from onbeat.stages.served_stages import ServedStage

log = logging.getLogger(__name__)


class StageService(Protocol):
    """Makes the columns of items, some at a time."""

    @property
    def server(self) -> Dependency | None:
        """A server that it asks, which may be away."""
        ...

    @property
    def is_busy(self) -> bool:
        """True while a thread of its own computes, also what is not needed any more: Python's end would wait for it."""
        ...

    def check(self, stage: ServedStage) -> None:
        """Raises InvalidInput that names what this host lacks for the stage, and the cure; reads no model."""
        ...

    def preload(self) -> None:
        """Begins what its first item would wait for; returns at once."""
        ...

    def num_free(self, stage: ServedStage) -> int:
        """How many items of the stage it takes now. What it can't begin at once is left to other workers."""
        ...

    async def values(self, stage: ServedStage, item: ClaimedItem) -> ColumnValues:
        """Makes the stage's outputs for the item; an item counts as begun with the call.

        Raises BatchFailed or ContractViolation for an item that fails, InvalidInput or Unavailable where this process
        can't make it, whatever the item, and DeadlineExceeded where the process can't go on (I8).
        """
        ...

    async def look(self, stage: ServedStage) -> None:
        """Tries, without an item, what it could not do for the stage. Raises InvalidInput or Unavailable again."""
        ...

    def forget_all_but(self, job_ids: Collection[str]) -> None:
        """Frees what it keeps for jobs that have ended."""
        ...

    async def aclose(self) -> None:
        """Ends what it runs, without waiting for a computation."""
        ...


Services = Mapping[str, StageService]
"""Kind of stage → what serves it."""


Values = Callable[[ServedStage, ClaimedItem], Awaitable[ColumnValues]]


async def judged_values(values: Values, stage: ServedStage, item: ClaimedItem) -> ColumnValues:
    """Returns the columns of an item. values: makes those of a completion that can be judged.

    An attempt whose worker died says nothing of the completion, so all times that it can't be judged are in one claim.
    Raises what `values` raises; CompletionUnjudged where the spec states no score.
    """
    judge = stage.stage
    if not isinstance(judge, JudgingStage) or judge.stated_score is None:
        return await values(stage, item)
    num_failures = 0
    while True:
        try:
            return {**await values(stage, item), judge.failure_column: [b""] * len(item.rows)}
        except CompletionUnjudged as error:
            num_failures += 1
            log.info("%s: %s (%s), %d times", item, error, error.reason, num_failures)
            if error.lasts or num_failures >= judge.max_attempts:
                scores = {name: [pack_float32([judge.stated_score])] for name in judge.reward_weights}
                return {**scores, judge.failure_column: [error.reason.encode()]}
