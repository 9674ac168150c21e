"""`python -m consumer JOB_ID`: one trainer for one job, until the job ends or SIGTERM.

    one rank     this process is the trainer
    more ranks   this process is their launcher, which starts this program for each (consumer/ranks/launching.py)
    more hosts   this process offers its host, and is the launcher of the ranks here

Exit codes: `contracts.jobs.TrainerExit`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from typing import NoReturn

from msgspec.structs import replace

import onbeat.base.process.own_packages  # noqa: F401  (first: it refuses packages of ours that are a stranger's)
from broker.connection.client import connect
from broker.job_store import JobStore
from consumer.ranks import launching
from consumer.trainer.repeated_fault import ends_job, line_of
from contracts.errors import OnbeatError, Unavailable
from contracts.jobs import TrainerExit
from contracts.settings import PREFIX, StackSettings, settings_from
from onbeat.base.process import crash_points
from onbeat.base.process.launcher import NUMERIC_THREADS, end_with_parent, importing
from onbeat.base.telemetry.container_name import named
from onbeat.base.telemetry.logs import configure

COMPUTING = ("passes ", "rank 0")
"""Beginnings of the names of threads that train batches."""

log = logging.getLogger(__name__)


def run(settings: StackSettings, job_id: str) -> int:
    """Runs what this process is, and returns its exit code. Raises OnbeatError before the job's lease is held.

    What foreign code raises before then (a library that can't be imported, the launcher's own) ends this trainer, and
    the job where the trainer before ended by the same words.
    """
    rank = os.environ.get("RANK")
    if rank is not None:
        end_with_parent(signal.SIGTERM if rank == "0" else signal.SIGKILL)
    if rank is not None and rank != "0":
        return launching.follow(settings)
    broker = connect(settings, patience_s=settings.broker_timeout_s)
    try:
        spec = JobStore(broker).spec(job_id)
        world_size = min(spec.trainer.world_size, settings.most_ranks)
        if spec.schedule_rule.takes_turns:
            settings = with_all_cores(settings, world_size)
        if rank is None and (spec.trainer.over_hosts or world_size > 1):
            return launching.launch(settings, broker, spec, job_id)
        with importing():
            from consumer.trainer.job_run import train
    except OnbeatError:
        raise
    except BaseException as error:
        # Foreign code may raise anything. By its name the next trainer tells a fault that repeats from an accident.
        line = line_of(error)
        log.critical("this trainer ends by an error that no code of Onbeat raised: %s", line, exc_info=error)
        has_failed = ends_job(JobStore(connect(settings)), job_id, line)
        return TrainerExit.FAILED if has_failed else TrainerExit.DIED
    # What foreign code raises from here on, the trainer itself compares with the one before it.
    return train(settings, broker, spec, job_id)


def with_all_cores(settings: StackSettings, world_size: int) -> StackSettings:
    """The settings of a rank whose generators are idle while it computes.

    Numeric libraries that this process loads from here on, and its ranks, read the number from the environment.
    """
    threads = settings.colocated_threads_each(world_size)
    os.environ |= dict.fromkeys((*NUMERIC_THREADS, f"{PREFIX}THREADS"), str(threads))
    return replace(settings, threads=threads)


def main(arguments: list[str]) -> int:
    rank = os.environ.get("RANK", "0")
    service = "trainer" if rank == "0" else f"trainer {rank}"
    configure(StackSettings(), service=service)
    if len(arguments) != 1:
        log.error("one argument is needed: the job id")
        return TrainerExit.FAILED
    try:
        settings = named(settings_from(os.environ), part=service)
        configure(settings, service=service)
        crash_points.arm(settings.crash_at)
        return run(settings, arguments[0])
    except OnbeatError as error:
        log.error("%s", error)
        if isinstance(error, Unavailable):
            return TrainerExit.DIED
        return TrainerExit.FAILED


def end(code: int) -> NoReturn:
    """Ends the process with a code. Python's own end would abort a thread that is in a pass, and the process with it:
    torch's C++ frames let no thread be unwound."""
    if any(thread.name.startswith(COMPUTING) for thread in threading.enumerate()):
        logging.shutdown()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    end(main(sys.argv[1:]))
