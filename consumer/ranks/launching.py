"""Starts a trainer's ranks as processes of their own, on this host or on several, and tells which one this is.

launcher  `launch` ──▶ rank 0: `sealed`, then `make_ranks` of assembly.py ── orders ──▶ the other ranks: `follow`

Each function imports what it needs: a launcher needs no model library, a rank no launcher.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from onbeat.base.process.launcher import importing

if TYPE_CHECKING:
    from broker.connection.client import Broker


def is_rank() -> bool:
    """Returns True in a process that a launcher has put among the ranks of a trainer, by torchrun's variable."""
    return "RANK" in os.environ


def launch(settings: StackSettings, broker: Broker, spec: JobSpec, job_id: str) -> int:
    """Starts `python -m consumer JOB_ID` once for each rank, by torch's launcher or, over hosts, by their consumers.

    Returns:
        The exit code of the trainer that the ranks are.

    Raises:
        InvalidInput: The job asks for ranks that can't be had here.
        Unavailable: A host or a process that the ranks need is gone.
    """
    if spec.trainer.over_hosts:
        from consumer.ranks.hosts.launcher import HostLauncher

        return HostLauncher(settings, broker, spec, job_id).run()
    from consumer.ranks.processes.launcher import launch_ranks

    broker.close()
    return launch_ranks(job_id, min(spec.trainer.world_size, settings.most_ranks))


def sealed(settings: StackSettings, spec: JobSpec) -> int:
    """Returns the number of rank 0's group of hosts, for the lease; 0 where one host has all ranks.

    Raises:
        InvalidInput: The launcher has started another number of ranks than the job asks for.
    """
    from consumer.ranks.processes.orders import own_seat

    world_size = str(min(spec.trainer.world_size, settings.most_ranks))
    if not spec.trainer.over_hosts and os.environ.get("WORLD_SIZE") != world_size:
        raise InvalidInput(
            f"there should be {world_size} ranks, the launcher started {os.environ.get('WORLD_SIZE')}",
            field="trainer.world_size",
            cure="start it by `python -m consumer`, which asks the job",
        )
    seat = own_seat()
    return seat.sealed if seat else 0


def follow(settings: StackSettings) -> int:
    """Carries out rank 0's orders in a rank other than 0, and returns its exit code.

    Raises:
        Unavailable: Rank 0 or the launcher is gone.
    """
    with importing():
        from consumer.ranks.processes.rank import follow as follow_orders

    return follow_orders(settings)
