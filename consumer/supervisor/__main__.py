"""`python -m consumer.supervisor`: the worker, which starts and supervises one trainer at a time.

Consumes:     active jobs, and the changes of jobs, which say that there is one.
Waits for:    a change, at most LOOK_EVERY_S (look_out.py).
Unblocked by: gateways, the time, SIGTERM or SIGINT.
Produces:     trainer processes, and the end of jobs that no trainer can train.

Exit 0: it was asked to end. 1: its look at the jobs died. 2: a bad setting, a run root that cannot be written, or no
Redis. It imports no torch: trainers are processes of their own.
"""

from __future__ import annotations

import logging
import os
import signal
import sys

import onbeat.process.own_packages  # noqa: F401  (first: it refuses packages of ours that are a stranger's)
from broker.connection.client import connect_within
from broker.job_store import JobStore
from consumer.supervisor.log_relay import LogRelay
from consumer.supervisor.look_out import LookOut
from consumer.supervisor.reconciler import Reconciler, RunRoots
from consumer.supervisor.sweeper import Sweeper
from consumer.supervisor.trainer_process import TrainerProcess
from contracts.errors import OnbeatError
from contracts.settings import StackSettings, settings_from
from onbeat.http_service.own_metrics import metrics_of
from onbeat.telemetry import logs

REDIS_PATIENCE_S = 2.0

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
        broker=broker,
        trainer=trainer,
        roots=roots,
        worker_id=worker_id,
        trainer_start_s=settings.trainer_start_s,
        network=settings.network,
        metrics=metrics,
    )
    look_out = LookOut(reconciler, Sweeper(broker, settings, metrics), JobStore(broker))

    def end(*_: object) -> None:
        trainer.ask_to_end()
        look_out.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    log.info("consumer %s is ready for jobs", worker_id)
    try:
        look_out.run()
    except Exception:
        log.critical("the look at the jobs died: this worker ends", exc_info=True)
        return 1
    finally:
        trainer.stop()
        broker.close()
    return 0


def main() -> int:
    try:
        settings = settings_from(os.environ)
        logs.configure(settings, service="consumer")
        return run(settings)
    except OnbeatError as error:
        sys.stderr.write(f"consumer: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
