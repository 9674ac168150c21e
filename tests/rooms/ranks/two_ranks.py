"""A test's own function as two ranks: processes that find each other by torchrun's variables, and talk over gloo."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch.distributed as dist

from onbeat.stack.ports import free_port

IMPORTED = [
    *("torch.distributed", "consumer.gradient.assembly", "consumer.ranks.processes.rank", "tests.builders"),
    "transformers.models.qwen3.modeling_qwen3",
]
"""What ranks need: they are forked from a process that has it."""
BeRank = Callable[[int, Path], None]
"""Rank and folder; of a module's top level, so that another process can import it."""


def run_two_ranks(be_rank: BeRank, folder: Path, *, deadline_s: float = 300.0) -> None:
    """Returns when both have ended well; fails where one has not, or takes longer."""
    port, context = free_port(), multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    both = context.Barrier(2)
    processes = [
        context.Process(target=_start, args=(be_rank, rank, port, folder, both), daemon=True) for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(deadline_s)
        assert process.exitcode == 0


def _start(be_rank: BeRank, rank: int, port: int, folder: Path, both: Barrier) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    be_rank(rank, folder)
    both.wait(240.0)  # with rank 0 the store ends, which the other may still read
    dist.destroy_process_group()
