"""The thread that follows one job, and keeps the stack that it has started for it.

    options ─▶ EmbeddedStack ─▶ submit ─▶ follow, with `tick` ─▶ audit.json ─▶ stop
    gateway ───────────────▶ submit ─▶ follow

A stack's processes end with the thread that started them, so this thread starts, ticks and stops it. It is no daemon:
when the program's main thread has ended, however it did, it cancels the job and stops the stack, and Python waits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from contracts.errors import DeadlineExceeded, OnbeatError
from contracts.events import JobEvent
from contracts.run_folder import RunFolder
from onbeat.base.process.waiting import Waiting
from onbeat.client.gateway import GatewayClient
from onbeat.client.progress import JobProgress
from onbeat.commands.exports.audit_file import write_audit
from onbeat.stack.access import GatewayAccess
from onbeat.stack.options import StackOptions
from onbeat.stack.stack import EmbeddedStack
from onbeat.terminal.follow import follow

CANCEL_DEADLINE_S = 20.0
"""A trainer that is asked to end writes a checkpoint first."""
END_DEADLINE_S = 120.0
"""Above what a cancelled job and the graces of all services take together."""

log = logging.getLogger(__name__)


class Driver(threading.Thread):
    """A `JobView`; `news` is notified of whatever it learns."""

    def __init__(self, find: Callable[[GatewayClient], str], at: StackOptions | GatewayAccess) -> None:
        """find: submits the job, or names one that is there; its id. at: the stack to start, or a gateway's address."""
        super().__init__(name="onbeat-run", daemon=isinstance(at, GatewayAccess))
        self.at = at
        self.news = threading.Condition()
        self.gateway: GatewayAccess | None = at if isinstance(at, GatewayAccess) else None
        """None before the stack is there."""
        self.progress: JobProgress | None = None
        """From the moment the job is there."""
        self.events: list[JobEvent] = []
        self.error: BaseException | None = None
        self.is_over = False
        self._find = find
        self._stack: EmbeddedStack | None = None
        self._ending = threading.Event()
        self._cancel = threading.Event()
        self._cancelling: Waiting | None = None

    def run(self) -> None:
        try:
            if isinstance(self.at, StackOptions):
                self._on_stack(self.at)
            else:
                self._at_gateway(self.at.url, self.at.key)
        except BaseException as error:
            self.error = error  # the program raises it where it waits
        finally:
            with self.news:
                self.gateway = None if isinstance(self.at, StackOptions) else self.gateway
                self.is_over = True
                self.news.notify_all()

    def end(self) -> None:
        """Has the thread end: a stack's own job is cancelled and the stack stopped, a gateway's job goes on."""
        self._ending.set()
        if self._stack is not None:
            self._stack.give_up_start()
        if self.is_alive():
            self.join(END_DEADLINE_S)

    def wait_for(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        """Waits for news that make it so, or for the thread's end; whether one of them came."""
        with self.news:
            return self.news.wait_for(lambda: self.is_over or is_so(), timeout_s)

    def leave_if_over(self) -> None:
        """Ends the thread's wait for a fetch from the hub, where the program wants no job any more."""
        if self._ending.is_set() or not threading.main_thread().is_alive():
            raise _Left("what it names was being fetched")

    def cancel(self) -> None:
        """Has a stack's own job cancelled; the thread goes on to the job's end."""
        self._cancel.set()

    def event(self, event: JobEvent, progress: JobProgress) -> None:
        self.events.append(event)

    def refresh(self, progress: JobProgress) -> None:
        with self.news:
            self.progress = progress
            self.news.notify_all()

    def _at_gateway(self, url: str, key: str) -> None:
        with GatewayClient(url, key) as client, suppress(_Left):
            self._follow(client, self._leave_if_asked)

    def _on_stack(self, options: StackOptions) -> None:
        stack = self._stack = EmbeddedStack(options)
        try:
            if self._ending.is_set():
                return
            stack.start()
            self.gateway = GatewayAccess(url=stack.gateway_url, key=stack.api_key, run_root=str(options.run_root))
            with GatewayClient(stack.gateway_url, stack.api_key) as client:
                self._run_job(client, stack, options)
        finally:
            stack.stop()

    def _run_job(self, client: GatewayClient, stack: EmbeddedStack, options: StackOptions) -> None:
        def tick() -> None:
            stack.tick()
            self._cancel_if_asked(client)

        try:
            status = self._follow(client, tick).status
        except _Left as late:
            log.warning("%s: stopping without it", late)
            return
        folder = RunFolder(options.run_root.resolve(), status.job_id)
        if folder.path.is_dir():  # a job that was cancelled before its trainer started has none
            write_audit(folder, status, client.audit(status.job_id))

    def _follow(self, client: GatewayClient, tick: Callable[[], None]) -> JobProgress:
        job_id = self._find(client)
        self.refresh(JobProgress(client.job(job_id)))
        return follow(client, job_id, view=self, tick=tick)

    def _leave_if_asked(self) -> None:
        if self._ending.is_set():
            raise _Left

    def _cancel_if_asked(self, client: GatewayClient) -> None:
        """Raises _Left where the stack is to stop, and the cancelled job doesn't end."""
        is_ending = self._ending.is_set() or not threading.main_thread().is_alive()
        if self._cancelling is None and (is_ending or self._cancel.is_set()):
            assert self.progress is not None
            job_id = self.progress.status.job_id
            self._cancelling = Waiting(f"{job_id} to be cancelled", deadline_s=CANCEL_DEADLINE_S)
            try:
                client.cancel(job_id)
            except OnbeatError as error:
                log.warning("could not cancel: %s", error)
        if self._cancelling is not None and is_ending:
            try:
                self._cancelling.poke()
            except DeadlineExceeded as error:
                raise _Left(str(error)) from error


class _Left(Exception):
    """The program wants no more news of the job: of a gateway's, or of one that is cancelled and doesn't end."""
