"""A test's own function as two ranks: processes that find each other by torchrun's variables, and talk over gloo.

`python two_ranks.py MODULE FUNCTION FOLDER CHANGES` is one of them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist

from onbeat.base.process.launcher import with_own_packages
from onbeat.stack.ports import free_port
from tests.forked import ForkedChild
from tests.until import until

BeRank = Callable[..., None]
"""Rank and folder, and changes by name; of a module's top level, so that another process can import it."""
ENDED = "ended-{rank}"
"""The file of a rank that has done its part."""


def run_two_ranks(be_rank: BeRank, folder: Path, *, deadline_s: float = 300.0, **changes: Any) -> None:
    """Returns when both have ended well; fails where one has not, or takes longer.

    changes: keyword arguments of the function, as JSON has them.
    """
    words = (be_rank.__module__, be_rank.__name__, str(folder), json.dumps(changes))
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        ForkedChild(
            f"rank {rank}",
            command=(sys.executable, __file__, *words),
            environment=with_own_packages(os.environ | {"OMP_NUM_THREADS": "1", "RANK": str(rank)} | place),
            log_path=folder / f"rank-{rank}.log",
        )
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            assert process.wait(deadline_s), process.tail(40)
            assert process.exit_code == 0, process.tail(40)
    finally:
        for process in ranks:
            process.kill()


def main(module: str, function: str, folder: Path, changes: dict[str, Any]) -> None:
    rank = int(os.environ["RANK"])
    getattr(import_module(module), function)(rank, folder, **changes)
    (folder / ENDED.format(rank=rank)).touch()
    # With rank 0 the store ends, which the other may still read.
    ended = [folder / ENDED.format(rank=other) for other in range(2)]
    until(lambda: all(path.exists() for path in ended), "both ranks to end", deadline_s=240.0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4]))
