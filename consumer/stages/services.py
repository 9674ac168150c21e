"""The seam between the worker and what makes columns, which packages offer as entry points of a group."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from broker.stage_side import ClaimedItem
from consumer.stages.served_stages import ServedStage
from contracts.experience.columns import ColumnValues
from contracts.settings import StackSettings
from onbeat.process.dependency import Dependency
from onbeat.process.entry_points import all_of

GROUP = "onbeat.stages"
"""A group of entry points: functions of the settings that return Services. They raise InvalidInput for a setting."""


class StageService(Protocol):
    """Makes the columns of items, some at a time."""

    @property
    def server(self) -> Dependency | None:
        """A server that it asks, which may be away."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether a thread of its own computes, also what is not needed any more: Python's end would wait for it."""
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


def make_services(settings: StackSettings) -> Services:
    """The services of this process by the kinds of stages. Raises InvalidInput that names a setting."""
    services: dict[str, StageService] = {}
    for make in all_of(GROUP).values():
        services |= make(settings)
    return services
