"""A worker of tasks: Celery's, with a pool of processes, one for each queue, and one task a process.

    Celery's message ─▶ main ─▶ child: RunningAttempt ─▶ work of the kind
    every LOOK_S ─▶ main: sign of life; messages again for tasks that no worker has begun, or whose worker is gone
    SIGTERM ─▶ main reads no message more; children give their tasks back ─▶ exit, within END_S whatever main waits for

Everything that waits in the main process is bounded: it runs between Celery's reads, and its event loop stands still
meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any

import psutil
from billiard.util import get_logger as billiard_logger
from celery import bootsteps, signals
from celery.apps.worker import Worker, install_worker_term_handler
from celery.platforms import SecurityWarning

from broker.connection.client import Broker, connect, connect_within
from broker.presence import TaskPresence
from broker.task_store import Attempt, TaskStore
from contracts.errors import OnbeatError
from contracts.monitor import TaskWorkerSeen
from contracts.settings import StackSettings
from contracts.tasks.kinds import TaskQueue, TaskState, queue_of_host
from contracts.tasks.records import TaskResult
from onbeat.base.metrics.process_metrics import metrics_of
from onbeat.base.process import crash_points
from onbeat.base.process.crash_points import reach
from onbeat.base.process.launcher import end_with_parent
from onbeat.base.telemetry import logs
from onbeat.tasks.attempt import Progress, RunningAttempt
from onbeat.tasks.events import send_events
from onbeat.tasks.messages import TASK_NAMES, TaskMessages, check_address, make_celery_app
from onbeat.tasks.works import work_of

LOOK_S = 3.0
LOOK_PATIENCE_S = 2.0
"""How long the look waits for Redis: Celery's loop stands still meanwhile."""
REPLACE_S = 0.2
"""How soon a child that has ended is replaced. Celery looks when the pipe to it breaks, at which it may not have ended
quite, and then every five seconds: a queue would do one task in five seconds."""
CHILD_PATIENCE_S = 5.0
END_S = 10.0
"""Longest that the process takes to end from its SIGTERM on, whatever Redis or a name server does."""
CLOSE_S = 3.0
"""How long the main process may take once its children have ended: all that it has left is to say goodbye."""
QUIET_LOGGERS = ("multiprocessing", "celery.worker.strategy", "celery.app.trace")
"""They say at each message that it is there, and how long it took to see that there is nothing to begin."""
ENDING = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
POLL_S = 0.1
HARD_LIMIT_S = 60.0
"""Time between a soft limit, which the task answers, and the hard one, at which its process is killed."""
FILES_LIMIT_S = 6 * 3600.0
CLOCK_LIMIT_S = 600.0
OOM_SCORE = 1000
"""Where memory is short the kernel ends a task first: it is begun again, and no job waits for it."""

log = logging.getLogger(__name__)


def soft_limits(settings: StackSettings) -> dict[TaskQueue, float]:
    """Returns how long a task of each queue may take, in seconds; then it has failed."""
    return {
        TaskQueue.CHECK: settings.verify_timeout_s,
        TaskQueue.FILES: FILES_LIMIT_S,
        TaskQueue.CLOCK: CLOCK_LIMIT_S,
    }


def queues_of(settings: StackSettings, names: Sequence[TaskQueue]) -> tuple[str, ...]:
    """Returns the queues that a worker of this host takes from.

    Where hosts share no run root, files of this host are reached from here alone: they have a queue of their own.
    """
    queues = [name.value for name in names]
    if settings.objects and TaskQueue.FILES in names:
        queues.append(queue_of_host(TaskQueue.FILES, socket.gethostname()))
    return tuple(queues)


def run_worker(settings: StackSettings, names: Sequence[TaskQueue]) -> int:
    """Works until a signal, and returns the exit code. Raises OnbeatError where Redis does not answer or refuses."""
    broker = connect_within(settings, patience_s=LOOK_PATIENCE_S)
    broker.check()
    check_address(settings)
    queues = queues_of(settings, names)
    worker_id = settings.process_id("tasks")
    metrics_of(settings, "tasks")
    app = make_celery_app(settings, queues)

    def run_task(task_id: str) -> None:
        run_in_child(settings, worker_id, task_id)

    for queue, soft_s in soft_limits(settings).items():
        hard_s = soft_s + HARD_LIMIT_S
        app.task(run_task, name=TASK_NAMES[queue], soft_time_limit=soft_s, time_limit=hard_s)
    if settings.task_events:
        send_events(app)
    look = Look(broker, settings, worker_id=worker_id, queues=queues)
    steps: Any = app.steps
    steps["consumer"].add(look.step())
    # Celery would set up logs of its own, where this signal has no receiver.
    signals.setup_logging.connect(_keep_logs, weak=False)
    signals.worker_process_init.connect(_begin_child, weak=False)
    log.info("worker of tasks %s takes from %s", worker_id, ", ".join(queues))
    with warnings.catch_warnings():
        # Its warning of a superuser is about pickle, which no message of ours has.
        warnings.simplefilter("ignore", SecurityWarning)
        worker = CeleryWorker(
            app=app,
            pool="prefork",
            concurrency=len(queues),
            without_heartbeat=True,
            without_gossip=True,
            without_mingle=True,
            # Its banner would stand between lines of JSON.
            quiet=True,
            # The name stands in Celery's own log alone.
            hostname=worker_id,
            loglevel=logging.getLogger().level,
        )
    worker.start()
    look.leave()
    return int(worker.exitcode or 0)


class CeleryWorker(Worker):
    """Celery's worker, less what it does to its process: a SIGHUP that starts the command anew, a title, a debugger."""

    def install_platform_tweaks(self, worker: Any) -> None:
        """Answers each signal that asks for the end in the same way."""
        for name in ENDING:
            install_worker_term_handler(worker, sig=name, verbose=False)
        WorkerEnd().watch()

    def set_process_status(self, info: str) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Leaves the title as it is: operators look for `onbeat.tasks`."""


def _keep_logs(**_: Any) -> None:
    """Leaves the logs as onbeat.base.telemetry.logs has made them: that it is connected tells Celery so."""
    # billiard's keeps its lines from the root, and without a handler they come as they are.
    billiard_logger().propagate = True
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)


def _begin_child(**_: Any) -> None:
    """Prepares a child of the pool, once it is forked: it ends with its main process, and before anything else where
    memory is short."""
    signal.set_wakeup_fd(-1)  # its signals are not those of the main process
    end_with_parent(signal.SIGKILL)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # no Linux
        file.write(str(OOM_SCORE))


def run_in_child(settings: StackSettings, worker_id: str, task_id: str) -> None:
    """Runs a task in this process, unless its record says that there is nothing to begin."""
    logs.configure(settings, service="tasks")
    crash_points.arm(settings.crash_at)
    # Connections of the main process are not this one's.
    broker = connect(settings, patience_s=CHILD_PATIENCE_S)
    try:
        store = TaskStore(broker)
        attempt = store.begin(task_id, worker=worker_id)
        if attempt is None:
            return
        log.info("task %s (%s) of %s is begun, attempt %d", task_id, attempt.kind.value, attempt.who, attempt.number)

        def work(attempt: Attempt, progress: Progress) -> TaskResult:
            # Found here: a kind that isn't known, or can't be imported, has failed with that reason.
            return work_of(attempt.kind, broker, settings)(attempt, progress)

        following = RunningAttempt(store, attempt).run(work)
        reach("tasks.ended")
        if following:
            TaskMessages(settings).send(following, store.status(following).queue)
    except OnbeatError as error:
        # The record stands; the look finds it again.
        log.warning("this worker can't begin %s now, and tries again: %s", task_id, error)
    finally:
        broker.close()


class Look:
    """The main process' look at the records, between Celery's reads."""

    def __init__(self, broker: Broker, settings: StackSettings, *, worker_id: str, queues: Sequence[str]) -> None:
        self._store = TaskStore(broker)
        self._presence = TaskPresence(broker)
        self._messages = TaskMessages(settings)
        self._worker_id = worker_id
        self._queues = tuple(queues)

    def step(self) -> type[bootsteps.StartStopStep]:
        """Returns the step of Celery's start by which the look is had again and again."""
        look = self

        class LookStep(bootsteps.StartStopStep):
            requires = ("celery.worker.consumer.tasks:Tasks",)
            timers: tuple[Any, ...] = ()

            def start(self, parent: Any) -> None:
                look.look()
                self.timers = (
                    parent.timer.call_repeatedly(LOOK_S, look.look),
                    parent.timer.call_repeatedly(REPLACE_S, parent.pool.maintain_pool),
                )

            def stop(self, parent: Any) -> None:
                for timer in self.timers:
                    timer.cancel()
                self.timers = ()

        return LookStep

    def look(self) -> None:
        """Says that this worker lives, and sends messages again. A server that is away costs one look.

        It runs in Celery's loop, which any error would end.
        """
        try:
            self._say_alive()
            self._send_again()
        except OnbeatError as error:
            log.warning("this worker can't read the tasks now, and tries again: %s", error)
        except Exception:
            # Celery's loop must go on: the next look comes by the clock.
            log.exception("this worker can't read the tasks, and tries again")

    def _say_alive(self) -> None:
        tasks = [task for task in self._store.open() if task.state is TaskState.RUNNING]
        running = tuple(task.task_id for task in tasks if task.worker == self._worker_id)
        self._presence.beat(
            TaskWorkerSeen(worker_id=self._worker_id, host=socket.gethostname(), queues=self._queues, running=running)
        )

    def _send_again(self) -> None:
        for task_id, queue in self._store.due():
            log.info("task %s is to be begun from %s", task_id, queue)
            if not self._messages.send(task_id, queue):
                # Others would wait as long for the same server; the next look but a few finds them again.
                return

    def leave(self) -> None:
        """Says that this worker ends."""
        with contextlib.suppress(OnbeatError):
            self._presence.leave(self._worker_id)


class WorkerEnd:
    """The end of a worker, which waits for no server: Celery's own waits for its tasks, and for Redis to come back.

    It is begun by a signal's number in a pipe, which Python writes at once. A handler would run when the main thread is
    back from what it waits for; one that asks a name server may not be for minutes.
    """

    def watch(self) -> None:
        """Begins at the first signal of ENDING. To be called in the main thread, once its handlers are there."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._run, args=(reader,), name="worker end", daemon=True).start()

    def _run(self, reader: int) -> None:
        try:
            self._end_all(reader)
        except BaseException:
            # Celery's own end may wait for ever: this one comes, whatever the look at the children meets.
            log.exception("the end of this worker failed")
        logging.shutdown()
        os._exit(0)

    def _end_all(self, reader: int) -> None:
        """Ends the children once a signal of ENDING has come, and returns when this process is to end."""
        ending = {signal.Signals[name] for name in ENDING}
        while not ending.intersection(os.read(reader, 64)):
            pass
        until_s = time.monotonic() + END_S
        terminated: set[int] = set()
        while time.monotonic() < until_s:
            # Children alone, not theirs: what a work has started is that work's to end. Celery may still start one.
            children = psutil.Process().children()
            for child in children:
                if child.pid not in terminated:
                    terminated.add(child.pid)
                    with contextlib.suppress(psutil.Error):
                        child.terminate()
            if not [child for child in children if _lives(child)]:
                until_s = min(until_s, time.monotonic() + CLOSE_S)
            time.sleep(POLL_S)
        log.warning("Celery doesn't stop in time, so this process ends")
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
