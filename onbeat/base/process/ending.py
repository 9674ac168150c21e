"""The end of a process that was asked to end: one deadline for all of it, whatever the process waits for (I8).

    SIGTERM ─▶ the process's own handler: it claims nothing more, saves, gives back, says its last words ─▶ its exit
       └─────▶ a thread: on_request at once ──────────────── within_s later ─▶ at_last, exit

A host that shuts down stops everything at once, Redis among it. Each wait of a process has a deadline of its own, and
they add up: a call of Redis, the work in hand, the last words, a library's threads, which Python joins at its exit. So
the whole has one as well, below the time after which a process is killed by what stops it.

    gateway, reward service, producer, stage worker, consumer   END_S
    the launcher of a trainer's ranks                           LAUNCHER_END_S   its consumer says how it ended
    these ranks                                                 RANKS_END_S      then their launcher kills them
    a trainer, which may be the first of the ranks              TRAINER_END_S    a checkpoint is written in this time
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

from onbeat.base.process.signals import exit_cleanly_on_signals

END_S = 14.0
"""From the first SIGTERM or SIGINT to the end of a process that an operator stops. The graces of docker-compose.yml and
Kubernetes are longer, and 15 s are promised (docs/operate.md)."""
LAUNCHER_END_S = 13.0
RANKS_END_S = 12.0
TRAINER_END_S = 11.0
CALL_S = 4.0
"""Longest call of Redis of a trainer that was asked to end: a server that syncs its file every second confirms a
checkpoint's commit within two."""
LAST_ACT_S = 1.0
"""The time of all acts at the deadline together: they may hang as well, at a full pipe of the log."""

log = logging.getLogger(__name__)


class Ending:
    """Ends this process at the latest within_s after it was asked to end.

    Python runs a signal handler in the main thread, between two of its instructions: never while that thread waits in a
    library, for a name that no server resolves or a rank that is gone. So a thread reads the signals, too.
    """

    def __init__(
        self,
        within_s: float = END_S,
        *,
        exit_code: int = 0,
        on_request: Callable[[], None] = lambda: None,
        at_last: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts the thread that waits for requests; `listen` has it take signals, too.

        Args:
            within_s: Seconds from the first request to the deadline.
            exit_code: The exit code at the deadline.
            on_request: Called once, in the thread, with the first request.
            at_last: Called in another thread at the deadline, and not waited for longer than LAST_ACT_S.
        """
        self._within_s = within_s
        self._exit_code = exit_code
        self._on_request = on_request
        self._at_last = at_last
        self._requests, self._requesting = socket.socketpair()
        self._requesting.setblocking(False)
        threading.Thread(target=self._run, name="end of the process", daemon=True).start()

    def begin(self) -> None:
        """Takes a request to end; only the first one counts. Any thread and any signal handler may call it."""
        with contextlib.suppress(OSError):  # a full buffer holds a request already
            self._requesting.send(bytes([signal.SIGTERM]))

    def listen(self) -> int:
        """Takes each SIGTERM and SIGINT for a request, where it has a handler; for the main thread.

        An event loop that is given handlers takes the signals over: they call `begin`. Returns the descriptor that the
        signals were written to before, -1 for none.
        """
        return signal.set_wakeup_fd(self._requesting.fileno(), warn_on_full_buffer=False)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Does so inside of the block. A process that was not asked to end in there goes on without a deadline.

        In another thread than the main one, which gets no signals, only `begin` is a request.
        """
        is_main = threading.current_thread() is threading.main_thread()
        before = self.listen() if is_main else -1
        try:
            yield
        finally:
            if is_main:
                signal.set_wakeup_fd(before)
            self._requesting.close()

    def _run(self) -> None:
        if not self._is_requested():
            return
        deadline_s = time.monotonic() + self._within_s - LAST_ACT_S
        try:
            self._on_request()
        except BaseException:
            # The process ends in time, whatever this meets.
            log.exception("a step before the end of this process failed")
        time.sleep(max(0.0, deadline_s - time.monotonic()))
        acting = threading.Thread(target=self._act_last, name="last act", daemon=True)
        acting.start()
        acting.join(LAST_ACT_S)
        os._exit(self._exit_code)

    def _is_requested(self) -> bool:
        """Waits for a request; False where none can come any more."""
        while numbers := self._requests.recv(64):  # each byte is the number of a signal, of any that has a handler
            if {signal.SIGTERM, signal.SIGINT}.intersection(numbers):
                return True
        return False

    def _act_last(self) -> None:
        log.warning("this process ends now: what it still waited for didn't come within %.0f s", self._within_s)
        try:
            self._at_last()
        finally:
            logging.shutdown()


def end_in_time(within_s: float = END_S, *, at_last: Callable[[], None] = lambda: None) -> Ending:
    """Has SIGTERM and SIGINT end this process with code 0, at the latest within_s seconds after the first of them.

    A service calls it first of all, in its main thread: until it has handlers of its own the signals raise SystemExit
    there. The first process of a container would not even notice a signal that has no handler.
    """
    exit_cleanly_on_signals()
    ending = Ending(within_s, at_last=at_last)
    ending.listen()
    return ending


def end_process(part: str, error: BaseException) -> None:
    """Has this process end as by SIGTERM, since a part of it has died that others wait for. Any thread may call it.

    A part that died without a word would leave its process alive and of no use: it beats, it answers that it is
    healthy, and a request that needs that part has no answer. The supervisor of the process starts it anew.

    Args:
        part: Names it in the log, as "the look at the jobs' files".
        error: What it died of.
    """
    log.critical("%s has failed, so this process ends", part, exc_info=error)
    os.kill(os.getpid(), signal.SIGTERM)


def lasting_thread(part: str, work: Callable[[], None]) -> threading.Thread:
    """Starts a daemon thread that works until `work` returns; whatever `work` raises ends the process."""

    def run() -> None:
        try:
            work()
        except BaseException as error:
            # A process without this part would live on and do only half of its work.
            end_process(part, error)

    thread = threading.Thread(target=run, name=part, daemon=True)
    thread.start()
    return thread
