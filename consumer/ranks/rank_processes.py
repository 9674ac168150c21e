"""Ranks that are processes of their own, on this host or on several: who starts them, and what makes this one of them.

launcher  `launch` ──▶ rank 0: `sealed`, `group` ── orders ──▶ the other ranks: `follow`
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from onbeat.base.process.entry_points import all_of

if TYPE_CHECKING:
    from broker.connection.client import Broker
    from consumer.ranks.base import Ranks

GROUP = "onbeat.ranks"
"""A group of entry points: its `processes` is a `RankProcesses`."""


class RankProcesses(Protocol):
    """A trainer's ranks as processes. Each raises InvalidInput, or Unavailable where one that it needs is gone."""

    def launch(self, settings: StackSettings, broker: Broker, spec: JobSpec, job_id: str) -> int:
        """Starts `python -m consumer JOB_ID` once for each rank; returns the exit code of the trainer that they are."""
        ...

    def sealed(self, settings: StackSettings, spec: JobSpec) -> int:
        """Returns the number of rank 0's group of hosts, for the lease; 0 where one host has all ranks."""
        ...

    def group(self, settings: StackSettings, spec: JobSpec) -> Ranks:
        """Loads rank 0's part of the model, and returns it together with the other ranks."""
        ...

    def follow(self, settings: StackSettings) -> int:
        """Carries out rank 0's orders, in each other rank; returns its exit code."""
        ...


def rank_processes(field: str = "trainer.world_size") -> RankProcesses:
    """field: of the spec, which asks for them. Raises InvalidInput where they are not installed."""
    offered = all_of(GROUP).get("processes")
    if offered is None:
        raise InvalidInput(
            "what trains with ranks of several processes isn't installed where the trainer runs",
            field=field,
            cure="install all of onbeat there, or let one process train",
        )
    return offered


def own_processes() -> RankProcesses | None:
    """What made this process a rank, by torchrun's variable; None where it is the only one."""
    return rank_processes() if "RANK" in os.environ else None
