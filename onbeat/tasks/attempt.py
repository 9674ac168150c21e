"""An attempt at a task, in the child process of a worker: it is begun, kept alive, interrupted, and ended once.

    begin ─▶ work (main thread) ─▶ end: done, or failed with the reason
      │        ▲ Interrupted
      └▶ keeper (a thread): renews the lease with the progress, sees who asks it to end
             ├─ cancelled, or the lease is another's: interrupts the work
             └─ the work goes on for GRACE_S all the same: ends the task, then the process

Two signals interrupt the work, too: SIGTERM, after which the task is queued again and the attempt doesn't count, and
that of Celery's soft limit of time, after which the task has failed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Literal

from broker.connection.deadlines import within
from broker.task_store import Attempt, TaskStore
from contracts.errors import FencedOff, OnbeatError, Unavailable
from contracts.tasks.kinds import TaskState
from contracts.tasks.records import MAX_ATTEMPTS, TaskProgress, TaskResult
from onbeat.base.process.crash_points import reach

RENEW_EVERY_S = 3.0
GRACE_S = 4.0
"""How long an interrupted work may clean up; then its process ends where it is."""
END_WITHIN_S = 60.0
"""How long the end of a task is told to a Redis that is away; then the task is begun again, elsewhere."""
RETRY_S = 1.0

Why = Literal["cancelled", "stopped", "late", "lost"]
OF_SIGNALS: Mapping[int, Why] = {
    signal.SIGTERM: "stopped",
    signal.SIGUSR1: "late",
    signal.SIGUSR2: "lost",
}
"""Signal → why it interrupts, where the keeper has not said why before. SIGUSR1 is billiard's word for the soft limit:
its own handler raises an Exception, which a library's `except Exception` would swallow."""
CANCELLED = "it was asked to end"
STOPPED = "its worker was asked to end"
LATE = "it was not done within its limit of time"
log = logging.getLogger(__name__)


class Interrupted(BaseException):
    """The work is to end at once. It is no Exception: code that answers those must not take it for one."""

    def __init__(self, why: Why) -> None:
        super().__init__(why)
        self.why: Why = why


class Progress:
    """The progress of a work. The work adds and the keeper reads; fields that don't fit for a moment do no harm."""

    def __init__(self) -> None:
        self._files_done = self._files_total = self._bytes_done = self._bytes_total = 0

    def expect(self, *, files: int = 0, num_bytes: int = 0) -> None:
        """Adds to what is to be done."""
        self._files_total += files
        self._bytes_total += num_bytes

    def add(self, *, files: int = 0, num_bytes: int = 0) -> None:
        """Adds to what is done."""
        self._files_done += files
        self._bytes_done += num_bytes

    def record(self) -> TaskProgress:
        """Returns it as the task's record has it."""
        return TaskProgress(
            files_done=self._files_done,
            files_total=max(self._files_total, self._files_done),
            bytes_done=self._bytes_done,
            bytes_total=max(self._bytes_total, self._bytes_done),
        )


Work = Callable[[Attempt, Progress], TaskResult]
"""The work of a kind of task. It may be run twice, also at the same time: each part of it is safe to repeat."""


class RunningAttempt:
    """An attempt that this process runs. One at a time: it owns the process' signals."""

    def __init__(self, store: TaskStore, attempt: Attempt) -> None:
        self._store = store
        self._attempt = attempt
        self._progress = Progress()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        """Held while a thread ends the task: the work's, or the keeper that ends the process."""
        self._why: Why | None = None
        self._interrupted_s = float("inf")
        self._is_working = False
        """True: a signal may raise Interrupted. It is so once, and in the work alone."""

    def run(self, work: Work) -> str:
        """Works, and ends the task in its record. Returns the task that waits next in its queue, or ""."""
        attempt = self._attempt
        if attempt.is_exhausted:
            return self._end(TaskState.FAILED, reason=f"its worker has ended {MAX_ATTEMPTS} times while it ran")
        with self._interrupted_by_signals():
            threading.Thread(target=self._keep, name="keeper", daemon=True).start()
            try:
                result = self._do(work)
            except Interrupted as error:
                return self._end_interrupted(error.why)
            except Unavailable as error:
                reason = str(error)
                return self._tell(lambda: self._store.retry(attempt, reason=reason, progress=self._record()))
            except OnbeatError as error:
                return self._end(TaskState.FAILED, reason=str(error))
            except BaseException as error:  # SystemExit of a library, asyncio's CancelledError and the like too
                log.exception("task %s (%s) died", attempt.task_id, attempt.kind.value)
                return self._end(TaskState.FAILED, reason=f"{type(error).__name__}: {error}")
            return self._end(TaskState.DONE, result=result)

    def _do(self, work: Work) -> TaskResult:
        """Works. A signal raises Interrupted in here, and nowhere else."""
        try:
            self._is_working = True
            if self._why is not None:  # a signal came before
                raise Interrupted(self._why)
            reach("tasks.begun")
            result = work(self._attempt, self._progress)
            reach("tasks.worked")
            return result
        finally:
            self._is_working = False

    def _record(self) -> TaskProgress:
        return self._progress.record()

    def _end(self, state: TaskState, *, reason: str = "", result: TaskResult | None = None) -> str:
        log.info(
            "task %s (%s) is %s%s",
            self._attempt.task_id,
            self._attempt.kind.value,
            state.value,
            reason and f": {reason}",
        )
        return self._tell(
            lambda: self._store.end(self._attempt, state, progress=self._record(), reason=reason, result=result)
        )

    def _end_interrupted(self, why: Why) -> str:
        if why == "cancelled":
            return self._end(TaskState.CANCELLED, reason=CANCELLED)
        if why == "late":
            return self._end(TaskState.FAILED, reason=LATE)
        if why == "stopped":
            log.info("task %s is queued again: this worker ends", self._attempt.task_id)
            return self._tell(lambda: self._store.give_back(self._attempt, reason=STOPPED, progress=self._record()))
        self._ended.set()
        return ""

    def _tell(self, tell: Callable[[], str]) -> str:
        """Tells Redis how the task ended, once, within END_WITHIN_S."""
        within_s = GRACE_S if self._why else END_WITHIN_S
        with self._lock:
            until_s = time.monotonic() + within_s
            try:
                while True:
                    try:
                        with within(until_s - time.monotonic()):
                            return tell()
                    except Unavailable as error:
                        if time.monotonic() >= until_s:
                            log.error("the end of %s could not be reported: %s", self._attempt.task_id, error)
                            return ""
                        time.sleep(RETRY_S)
            except FencedOff as error:
                log.warning("%s", error)
                return ""
            finally:
                self._ended.set()

    def _keep(self) -> None:
        while not self._ended.wait(RENEW_EVERY_S if self._why is None else 0.2):
            if time.monotonic() - self._interrupted_s >= GRACE_S:
                self._end_process()
            if self._why is not None:
                continue
            try:
                if self._store.renew(self._attempt, self._record()):
                    self._interrupt("cancelled")
            except FencedOff as error:
                # The main thread may have ended the task meanwhile.
                if not self._lock.locked() and not self._ended.is_set():
                    log.warning("%s", error)
                    self._interrupt("lost")
            except OnbeatError as error:
                log.warning("the lease of %s is not renewed: %s", self._attempt.task_id, error)
            except Exception:
                # This thread also ends a work that doesn't answer: it goes on.
                log.exception("the lease of %s is not renewed", self._attempt.task_id)

    def _end_process(self) -> None:
        """Ends this process in the keeper's thread: the work doesn't answer. Its scratch files go with the next run."""
        if not self._lock.acquire(blocking=False):
            return
        log.warning("task %s does not answer: its process ends", self._attempt.task_id)
        with contextlib.suppress(OnbeatError):
            if self._why == "cancelled":
                self._store.end(self._attempt, TaskState.CANCELLED, progress=self._record(), reason=CANCELLED)
            elif self._why == "late":
                self._store.end(self._attempt, TaskState.FAILED, progress=self._record(), reason=LATE)
            elif self._why == "stopped":
                self._store.give_back(self._attempt, reason=STOPPED, progress=self._record())
        logging.shutdown()
        os._exit(1)

    def _interrupt(self, why: Why) -> None:
        """Has the main thread raise Interrupted; a first reason stays."""
        if self._why is None:
            self._why, self._interrupted_s = why, time.monotonic()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)

    @contextlib.contextmanager
    def _interrupted_by_signals(self) -> Iterator[None]:
        def interrupt(number: int, _: FrameType | None) -> None:
            if self._why is None:
                self._why, self._interrupted_s = OF_SIGNALS[number], time.monotonic()
            if self._is_working:
                # Once: what comes later must interrupt neither the work's own clean-up nor the end of the task.
                self._is_working = False
                raise Interrupted(self._why)

        before = {number: signal.signal(number, interrupt) for number in OF_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
