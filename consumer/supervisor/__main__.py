"""`python -m consumer.supervisor`: a Celery worker that starts and supervises one trainer at a time.

Consumes:     active jobs, and Celery messages, which say that there is one.
Waits for:    messages; a thread of this process looks every LOOK_EVERY_S (look_out.py).
Unblocked by: gateways, the time, SIGTERM or SIGINT.
Produces:     trainer processes, and the end of jobs that no trainer can train.

Exit 0: it was asked to end. 1: its look at the jobs died, or Celery gave up. 2: a bad setting, a run root that cannot
be written, or no Redis. It imports no torch: trainers are processes of their own.
"""

from __future__ import annotations

import logging
import os
import sys

from celery import Celery, signals
from celery.apps.worker import Worker

import onbeat.process.own_packages  # noqa: F401  (first: it refuses packages of ours that are a stranger's)
from broker.celery_app import ENSURE_TRAINER, SWEEP, make_celery_app
from broker.connection.client import connect_within
from consumer.supervisor.log_relay import LogRelay
from consumer.supervisor.look_out import LookOut
from consumer.supervisor.reconciler import Reconciler
from consumer.supervisor.run_roots import RunRoots
from consumer.supervisor.sweeper import Sweeper
from consumer.supervisor.trainer_process import TrainerProcess, WorkerEnd
from contracts.errors import OnbeatError
from contracts.settings import StackSettings, settings_from
from onbeat.http_service.own_metrics import metrics_of
from onbeat.telemetry import logs

REDIS_PATIENCE_S = 2.0
QUIET_LOGGERS = ("celery.app.trace", "celery.worker.strategy", "celery.redirected")
"""Their info lines repeat every message."""

log = logging.getLogger(__name__)


def run(settings: StackSettings, *, trainer_module: str = "consumer") -> int:
    """Works until a signal, and returns the exit code. Raises OnbeatError where Redis does not answer or refuses."""
    roots = RunRoots(settings)
    roots.check()
    broker = connect_within(settings, patience_s=REDIS_PATIENCE_S)
    broker.check()
    worker_id = settings.process_id()
    relay = LogRelay(log_format=settings.log_format)
    trainer = TrainerProcess(settings.run_root_path, module=trainer_module, relay=relay)
    metrics = metrics_of(settings, lambda kinds: kinds.WorkerMetrics(lambda: trainer.is_running))
    reconciler = Reconciler(
        broker, trainer, roots=roots, worker_id=worker_id, trainer_start_s=settings.trainer_start_s, metrics=metrics
    )
    end = WorkerEnd(trainer)
    signals.worker_shutting_down.connect(lambda **_: end.begin(), weak=False)
    app = make_celery_app(settings)
    sweeper = Sweeper(broker, settings, metrics)
    look_out = LookOut(reconciler, sweeper)
    register_tasks(app, look_out, sweeper)
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
    look_out.start()
    try:
        worker.start()
    finally:
        look_out.stop()
        trainer.stop()
        broker.close()
    return 1 if look_out.died else int(worker.exitcode or 0)


def register_tasks(app: Celery, look_out: LookOut, sweeper: Sweeper) -> None:
    """Makes the app able to take each message."""

    def ensure_trainer(job_id: str) -> None:
        look_out.wake()

    def sweep() -> None:
        sweeper.begin()

    app.task(name=ENSURE_TRAINER)(ensure_trainer)
    app.task(name=SWEEP)(sweep)


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
