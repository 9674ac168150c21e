"""`python -m consumer.supervisor`: the worker, which starts and supervises one trainer at a time.

Consumes:     active jobs, and the changes of jobs, which say that there is one.
Waits for:    a change, at most LOOK_EVERY_S.
Unblocked by: gateways, the time, SIGTERM or SIGINT.
Produces:     trainer processes, and the end of jobs that no trainer can train.

It ends at the latest END_S after the signal, whatever it waits for (onbeat/base/process/ending.py); a trainer that
still runs then is killed.

Exit 0: it was asked to end. 1: its look at the jobs died. 2: a bad setting, a run root that cannot be written, or no
Redis. It imports no torch: trainers are processes of their own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable

import onbeat.base.process.own_packages  # noqa: F401  (first: it refuses packages of ours that are a stranger's)
from broker.connection.client import connect_within
from broker.job_store import JobStore
from consumer.supervisor.reconciler import Reconciler, RunRoots
from consumer.supervisor.trainer_process import TrainerProcess
from contracts.errors import OnbeatError, Unavailable
from contracts.settings import StackSettings, settings_from
from onbeat.base.metrics.process_metrics import metrics_of
from onbeat.base.process.ending import end_in_time
from onbeat.base.telemetry import logs
from onbeat.base.telemetry.container_name import named

LOOK_EVERY_S = 2.0
LISTEN_S = 10.0
REDIS_PATIENCE_S = 2.0

log = logging.getLogger(__name__)


class LookOut:
    """The worker's look at its jobs: at once where a job has changed, and every other second.

    No change need be heard of: what is true stands in the job store and the fence, and a Redis that is away, or has
    lost its last writes, costs two seconds. It runs in the main thread, which starts the trainer: the kernel ends a
    trainer whose starter's thread is gone.
    """

    def __init__(self, reconciler: Reconciler, jobs: JobStore) -> None:
        self._reconciler = reconciler
        self._jobs = jobs
        self._wakes = queue.SimpleQueue[None]()  # no Event: a handler that interrupts its wait would wait for its lock
        self._stopping = False

    def stop(self) -> None:
        """Lets `run` return once the trainer that runs here has ended. A signal handler may call it."""
        self._stopping = True
        self._wakes.put(None)

    def run(self) -> None:
        """Looks until `stop`."""
        threading.Thread(target=self._listen, name="changes", daemon=True).start()
        while not self._stopping:
            self._unless_away(self._reconciler.reconcile)
            with contextlib.suppress(queue.Empty):
                self._wakes.get(timeout=LOOK_EVERY_S)
                while True:
                    self._wakes.get_nowait()
        self._unless_away(self._reconciler.close)

    def _listen(self) -> None:
        newest = "0"
        while not self._stopping:
            try:
                change = self._jobs.wait_for_changes(newest, LISTEN_S)
            except Unavailable:
                time.sleep(LOOK_EVERY_S)
                continue
            except Exception:
                # The look goes by the time as well: it is only later.
                log.exception("this consumer can't subscribe to changes of jobs now, and reads the list at intervals")
                time.sleep(LOOK_EVERY_S)
                continue
            if change != newest:
                self._wakes.put(None)
            newest = change

    @staticmethod
    def _unless_away(work: Callable[[], None]) -> None:
        """Does some work, and logs where Redis is away: that ends the look, not the worker, whose next comes soon."""
        try:
            work()
        except Unavailable as error:
            log.warning("this consumer can't read the list of jobs now, and tries again: %s", error)


def run(settings: StackSettings, *, trainer_module: str = "consumer") -> int:
    """Works until a signal, and returns the exit code. Raises OnbeatError where Redis does not answer or refuses."""
    trainer = TrainerProcess(settings.run_root_path, module=trainer_module)
    ending = end_in_time(at_last=trainer.kill)
    roots = RunRoots(settings)
    roots.check()
    broker = connect_within(settings, patience_s=REDIS_PATIENCE_S)
    broker.check()
    worker_id = settings.process_id()
    metrics = metrics_of(settings, "worker")
    metrics.ask("running", lambda: float(trainer.is_running))
    reconciler = Reconciler(
        broker=broker,
        trainer=trainer,
        roots=roots,
        worker_id=worker_id,
        trainer_start_s=settings.trainer_start_s,
        network=settings.network,
        metrics=metrics,
    )
    look_out = LookOut(reconciler, JobStore(broker))

    def end(*_: object) -> None:
        ending.begin()
        trainer.ask_to_end()
        look_out.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    log.info("consumer %s is ready for jobs", worker_id)
    try:
        look_out.run()
    except Exception:
        # A worker that looks after no job must not seem alive: its stack starts another one.
        log.critical("checking for jobs failed; this consumer stops", exc_info=True)
        return 1
    finally:
        trainer.stop()
        broker.close()
    return 0


def main() -> int:
    try:
        settings = named(settings_from(os.environ))
        logs.configure(settings, service="consumer")
        return run(settings)
    except OnbeatError as error:
        sys.stderr.write(f"consumer: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
