"""Starts the ranks of a trainer by torch's elastic launcher, and ends with them.

A rank that dies takes the others along: the job goes on in another group, under a new epoch. All listen on loopback.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from contracts.jobs import TrainerExit
from onbeat.base.process.ending import LAUNCHER_END_S, RANKS_END_S, Ending
from onbeat.base.process.launcher import LAUNCHER_PID

HOST = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
RENDEZVOUS_S = 120
STOP_GRACE_S = int(RANKS_END_S)
"""The launcher ends its ranks itself, in whole seconds."""

log = logging.getLogger(__name__)


def launch_ranks(job_id: str, world_size: int) -> int:
    """Runs `python -m consumer JOB_ID` once for each rank; returns the exit code of the trainer that they make up."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    store = _store_on_loopback()
    os.environ[LAUNCHER_PID] = str(os.getpid())
    # torch has handlers for the signals, which raise SignalException.
    ending = Ending(LAUNCHER_END_S, exit_code=TrainerExit.STOPPED)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, ending.listening():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world_size,
            run_id=job_id,
            # Other backends keep their state pickled in the store.
            rdzv_backend="static",
            rdzv_endpoint=f"{HOST}:{store.port}",
            rdzv_configs={"rank": 0, "timeout": RENDEZVOUS_S},
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            shutdown_timeout=STOP_GRACE_S,
        )
        try:
            elastic_launch(config, sys.executable)("-m", "consumer", job_id)
        except ChildFailedError as error:
            return _exit_code({rank: failure.exitcode for rank, failure in error.failures.items()})
        except SignalException:
            log.info("the ranks were stopped")
    return TrainerExit.DONE


def _store_on_loopback() -> TCPStore:
    """Opens the launcher's store in its place: the launcher's own would listen on every interface, on a given port."""
    listening = socket.create_server((HOST, 0), backlog=128)
    port = listening.getsockname()[1]
    return TCPStore(
        HOST, port, is_master=True, multi_tenant=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def _exit_code(codes: dict[int, int]) -> int:
    """Rank 0's code decides what becomes of the job; another rank only dies.

    codes: rank → exit code, negative for a signal.
    """
    for rank, code in sorted(codes.items()):
        if code not in (0, -signal.SIGTERM):
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            log.log(logging.INFO if rank == 0 else logging.ERROR, "rank %d %s, and the others with it", rank, how)
    return codes[0] if codes.get(0, 0) > 0 else TrainerExit.DIED
