"""`consumer.ranks.rank_processes.RankProcesses`: ranks on one host by torch's launcher, on several by their consumers.

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
    from consumer.ranks.base import Ranks


def launch(settings: StackSettings, broker: Broker, spec: JobSpec, job_id: str) -> int:
    if spec.trainer.over_hosts:
        from consumer.ranks.hosts.launcher import HostLauncher

        return HostLauncher(settings, broker, spec, job_id).run()
    from consumer.ranks.processes.launcher import launch_ranks

    broker.close()
    return launch_ranks(job_id, min(spec.trainer.world_size, settings.most_ranks))


def sealed(settings: StackSettings, spec: JobSpec) -> int:
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


def group(settings: StackSettings, spec: JobSpec) -> Ranks:
    from consumer.ranks.processes.group import make_group

    return make_group(settings, spec)


def follow(settings: StackSettings) -> int:
    with importing():
        from consumer.ranks.processes.rank import follow as follow_orders

    return follow_orders(settings)
