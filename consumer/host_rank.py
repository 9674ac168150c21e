"""`python -m consumer.host_rank JOB_ID`: a rank of several hosts, until it is a rank as any other.

    started ── imports what it needs ──▶ waits for its seat ──▶ has gloo at its host's address ──▶ consumer/__main__.py

By an interface's name gloo takes its first address, of whichever network: it would add over one that is public, or that
the other hosts don't reach.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

import onbeat.base.process.own_packages  # noqa: F401  (first: it refuses packages of ours that are a stranger's)
from consumer.__main__ import end, main
from consumer.ranks.hosts.network import ADDRESS
from onbeat.base.process.launcher import importing

if TYPE_CHECKING:
    from torch.distributed import ProcessGroupGloo, Store  # pyright: ignore[reportPrivateImportUsage]

GLOO_HERE = "gloo_here"


def gloo_here(store: Store, rank: int, num_ranks: int, timeout: timedelta) -> ProcessGroupGloo:
    """gloo as torch makes it, but at this host's address."""
    from torch.distributed import ProcessGroupGloo  # pyright: ignore[reportPrivateImportUsage]

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname=os.environ[ADDRESS])]
    return ProcessGroupGloo(store, rank, num_ranks, options)


def take_seat() -> None:
    """Waits until it is told which rank it is."""
    with importing():
        from torch.distributed import Backend  # pyright: ignore[reportPrivateImportUsage]

        import consumer.trainer.job_run  # noqa: F401
        from consumer.ranks.processes.orders import OWN_GLOO, own_seat
    seat = own_seat()
    assert seat is not None
    os.environ |= seat.environment | {OWN_GLOO: GLOO_HERE}
    Backend.register_backend(GLOO_HERE, gloo_here, devices=["cpu"])


if __name__ == "__main__":
    take_seat()
    end(main(sys.argv[1:]))
