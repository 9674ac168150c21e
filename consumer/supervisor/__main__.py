"""`python -m consumer.supervisor`: a Celery worker that starts and supervises one trainer at a time.

Consumes:     Celery messages that name a job, and the beat's.
Waits for:    messages; the beat, a thread of this process, sends one every RECONCILE_EVERY_S.
Unblocked by: gateways, the beat, SIGTERM or SIGINT.
Produces:     trainer processes, and the end of jobs that no trainer can train.

Exit 0: it was asked to end. 1: the beat died, or Celery gave up. 2: a bad setting, a run root that cannot be written,
or no Redis. It imports no torch: trainers are processes of their own.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import uuid
from typing import TYPE_CHECKING

from celery import Celery, signals
from celery.apps.worker import Worker
from celery.beat import ScheduleEntry, Scheduler, SchedulingError, Service

import process.own_packages  # noqa: F401  (first: it refuses packages of ours that are a stranger's)
from broker.celery_app import make_celery_app
from broker.connection.client import connect_within
from consumer.supervisor.log_relay import LogRelay
from consumer.supervisor.reconciler import Reconciler, register_tasks
from consumer.supervisor.run_roots import RunRoots
from consumer.supervisor.sweeper import Sweeper
from consumer.supervisor.trainer_process import TrainerProcess
from consumer.supervisor.worker_end import WorkerEnd
from contracts.errors import OnbeatError, Unavailable
from contracts.settings import StackSettings, settings_from
from telemetry import logs

if TYPE_CHECKING:
    from telemetry.metrics import WorkerMetrics

REDIS_PATIENCE_S = 2.0
QUIET_LOGGERS = ("celery.beat", "celery.app.trace", "celery.worker.strategy", "celery.redirected")
"""Their info lines repeat every message; a reconciliation comes every two seconds."""

log = logging.getLogger(__name__)


class BriefScheduler(Scheduler):
    """Keeps its entries in memory, since they are due soon after a start; logs a line, not a stack, while Redis is
    away."""

    def apply_entry(self, entry: ScheduleEntry, producer: object = None) -> None:
        try:
            self.apply_async(entry, producer=producer, advance=False)
        except SchedulingError as error:
            log.warning("the beat goes on: %s", error)


class BeatThread(threading.Thread):
    """Celery's beat inside this process. As a child process it would outlive a killed worker."""

    def __init__(self, app: Celery) -> None:
        super().__init__(name="beat", daemon=True)
        self._app = app
        self._service = Service(app, max_interval=1, scheduler_cls=BriefScheduler, remote_control=False)
        self.died = False
        self._stopping = False

    def run(self) -> None:
        self._app.set_current()
        try:
            self._service.start()
        finally:
            if not self._stopping:
                log.critical("the beat died: this worker ends")
                self.died = True
                os.kill(os.getpid(), signal.SIGTERM)

    def stop(self) -> None:
        """Returns without waiting: a beat that waits for Redis ends with the process."""
        self._stopping = True
        self._service.stop()


def run(settings: StackSettings, *, trainer_module: str = "consumer") -> int:
    """Works until a signal, and returns the exit code. Raises OnbeatError where Redis does not answer or refuses."""
    roots = RunRoots(settings)
    roots.check()
    broker = connect_within(settings, patience_s=REDIS_PATIENCE_S)
    worker_id = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    relay = LogRelay(log_format=settings.log_format)
    trainer = TrainerProcess(settings.run_root_path, module=trainer_module, relay=relay)
    metrics = metrics_of(settings, trainer)
    reconciler = Reconciler(
        broker,
        trainer,
        roots=roots,
        worker_id=worker_id,
        trainer_start_s=settings.trainer_start_s,
        metrics=metrics,
    )
    end = WorkerEnd(trainer)
    signals.worker_shutting_down.connect(lambda **_: end.begin(), weak=False)
    app = make_celery_app(settings)
    register_tasks(app, reconciler, Sweeper(broker, settings, metrics))
    beat = BeatThread(app)
    worker = Worker(
        app=app,
        hostname=f"consumer@{worker_id}",
        pool="solo",
        concurrency=1,
        quiet=True,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
    )
    signals.worker_ready.connect(lambda **_: log.info("consumer %s is ready for jobs", worker_id), weak=False)
    beat.start()
    try:
        worker.start()
    finally:
        beat.stop()
        _close(reconciler, trainer)
        broker.close()
    return 1 if beat.died else int(worker.exitcode or 0)


def metrics_of(settings: StackSettings, trainer: TrainerProcess) -> WorkerMetrics | None:
    """Serves this process's metrics from now on, where a port is set. Raises InvalidInput."""
    if not settings.metrics_port:
        return None
    from http_service.metrics_server import serve_metrics
    from telemetry.metrics import WorkerMetrics

    metrics = WorkerMetrics(lambda: trainer.is_running)
    serve_metrics(settings, metrics.exposition)
    return metrics


def _close(reconciler: Reconciler, trainer: TrainerProcess) -> None:
    try:
        reconciler.close()
    except Unavailable as error:
        log.warning("ended without telling the broker: %s", error)
    finally:
        trainer.stop()


@signals.setup_logging.connect
def _keep_our_logging(**_: object) -> None:
    """A receiver is how Celery is told to leave the log handlers alone."""


def main() -> int:
    try:
        settings = settings_from(os.environ)
        logs.configure(settings, service="consumer")
        for name in QUIET_LOGGERS:
            logging.getLogger(name).setLevel(logging.WARNING)
        return run(settings)
    except OnbeatError as error:
        sys.stderr.write(f"consumer: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
