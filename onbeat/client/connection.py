"""How a process of one's own reaches a stack: as the Redis user of its role, with the settings of the stack.

    redis_url=…                 given in the program
    ONBEAT_REDIS_URL, ONBEAT_…  the environment, as every process of the stack has it
    <run_dir>/stack.json        of a running `onbeat up`, for its owner: what the stack gives its own processes

The first of them that says where Redis is counts; ONBEAT_ variables count beside an address that is given.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psutil
from msgspec.structs import replace

from broker.connection.client import Broker, connect_within
from broker.connection.deadlines import within
from broker.connection.server_errors import LACKS_FUNCTIONS
from broker.job_store import JobStore
from contracts import errors
from contracts.jobs import JobState
from contracts.settings import StackSettings, settings_from
from contracts.spec.job import JobSpec
from onbeat.stack.access import read_stack_file, run_root_from

T = TypeVar("T")
log = logging.getLogger(__name__)

FULL_PAUSE_S = 0.5
OTHER_VERSION = "install the version of Onbeat that the stack runs"


def client_settings(
    role: str, *, redis_url: str = "", run_dir: str | Path | None = None, settings: StackSettings | None = None
) -> StackSettings:
    """Returns the settings by which this process reaches the stack.

    Args:
        role: A user of Redis, of broker/connection/roles.py.
        redis_url: The address of that user; it goes before every other source.
        run_dir: The run folder of the `onbeat up` whose stack is meant; it goes before the environment's.
        settings: The settings to begin with, in place of the environment's.

    Raises:
        InvalidInput: No source has an address; the error says where it was looked for.
    """
    base = settings or settings_from(os.environ)
    if redis_url:
        return replace(base, redis_url=redis_url)
    if base.redis_url and run_dir is None:
        return base
    root = run_root_from(os.environ, Path(run_dir) if run_dir is not None else None)
    stack = read_stack_file(root)
    if stack is None or role not in stack.roles or not psutil.pid_exists(stack.pid):
        raise errors.InvalidInput(
            f"is not set, and no running stack in {root} provides it",
            field="ONBEAT_REDIS_URL",
            cure=f"give the address of the Redis user `{role}`, or run_dir= of a running `onbeat up`",
        )
    return settings_from(stack.roles[role])


class JobConnection:
    """A job over a connection of its own, with a thread that keeps the leases of what this process holds."""

    def __init__(self, settings: StackSettings, job_id: str, *, what: str) -> None:
        """Raises NotFound for a job that isn't there, InvalidInput, DeadlineExceeded where Redis stays away."""
        self.settings = settings
        self.job_id = job_id
        self.process_id = settings.process_id(what)
        self.broker: Broker = connect_within(settings, patience_s=settings.broker_timeout_s)
        self.jobs = JobStore(self.broker)
        try:
            with speaking_the_same():
                self.spec: JobSpec = self.jobs.spec(job_id)
        except BaseException:
            self.broker.close()
            raise
        self._beat: Beat | None = None

    def keep(self, work: Callable[[], None], *, every_s: float) -> None:
        """Does the work now, and again and again beside the caller until `close`."""
        work()
        self._beat = Beat(work, every_s=every_s)
        self._beat.start()

    def check(self) -> None:
        """Raises what ended the heartbeat, and JobEnded where the job needs nothing more."""
        if self._beat is not None:
            self._beat.check()
        state = self.jobs.state(self.job_id)
        if state.is_final or state is JobState.CANCELLING:
            raise job_ended(self.job_id, state)

    def until_room(self, work: Callable[[], T]) -> T:
        """Does a write that Redis refuses while it is full, for ONBEAT_BROKER_FULL_TIMEOUT_S. Raises BrokerFull."""
        ends_s = time.monotonic() + self.settings.broker_full_timeout_s
        while True:
            try:
                with known_functions():
                    return work()
            except errors.BrokerFull:
                if time.monotonic() >= ends_s:
                    raise
                self.check()
                time.sleep(FULL_PAUSE_S)

    def close(self, leave: Callable[[], None]) -> None:
        """Ends the heartbeat and says goodbye; a server that is away forgets this process by itself."""
        if self._beat is not None:
            self._beat.close()
        try:
            with within(1.0):
                leave()
        except errors.OnbeatError as error:
            log.debug("this client couldn't sign off, and is forgotten once its heartbeat is old: %s", error)
        self.broker.break_off()
        self.broker.close()


@contextmanager
def connected(
    job_id: str,
    *,
    role: str,
    what: str,
    redis_url: str = "",
    run_dir: str | Path | None = None,
    settings: StackSettings | None = None,
) -> Iterator[JobConnection]:
    """Yields a connection that the body takes over; it is closed where the body raises.

    Args:
        job_id: The job.
        role: As for `client_settings`, like `redis_url`, `run_dir` and `settings`.
        what: The kind of this process, which its id begins with.
    """
    process_settings = client_settings(role, redis_url=redis_url, run_dir=run_dir, settings=settings)
    connection = JobConnection(process_settings, job_id, what=what)
    try:
        yield connection
    except BaseException:
        connection.close(lambda: None)
        raise


class Beat(threading.Thread):
    """Work that is repeated beside the caller. A server that is away for one beat is asked again at the next."""

    def __init__(self, work: Callable[[], None], *, every_s: float) -> None:
        super().__init__(name="onbeat client", daemon=True)
        self._work = work
        self._every_s = every_s
        self._closing = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        while not self._closing.wait(self._every_s):
            try:
                self._work()
            except errors.Unavailable as error:
                log.warning("the heartbeat can't reach Redis: %s", error)
            except BaseException as error:
                # The program that holds the job raises it at its next call.
                log.error("the heartbeat ended: %s", errors.kind_and_text(error))
                self._error = error
                return

    def check(self) -> None:
        """Raises what it died of."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._closing.set()
        self.join(timeout=5.0)


@contextmanager
def known_functions() -> Iterator[None]:
    """Says of a server without the functions of this version that this process and the stack don't fit together."""
    try:
        yield
    except errors.BrokerUnavailable as error:
        if LACKS_FUNCTIONS not in error.problem:
            raise
        raise errors.ContractViolation(
            "the stack has other functions than this process", field="onbeat.client", cure=OTHER_VERSION
        ) from error


@contextmanager
def speaking_the_same() -> Iterator[None]:
    """`known_functions`, and the same of what this process reads and can't decode."""
    try:
        with known_functions():
            yield
    except errors.ContractViolation as error:
        if error.cure == OTHER_VERSION:
            raise
        raise errors.ContractViolation(
            f"a record of the stack can't be read: {error}", field="onbeat.client", cure=OTHER_VERSION
        ) from error


def job_ended(job_id: str, state: JobState) -> errors.JobEnded:
    ends = "is being cancelled" if state is JobState.CANCELLING else f"has {state.value}"
    if state is JobState.CANCELLED:
        ends = "was cancelled"
    cure = "nothing more of it is needed; `onbeat resume` queues it"
    return errors.JobEnded(f"{job_id} {ends}", field="job_id", cure=cure)
