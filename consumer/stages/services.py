"""The seam between the worker and what makes columns: one service for the models of this process, one for a judge."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from broker.stage_side import ClaimedItem
from consumer.stages.served_stages import ServedStage
from contracts.experience.columns import ColumnValues


class StageService(Protocol):
    """Makes the columns of items, some at a time."""

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
