"""Keeps the trainer's lease alive beside the training, and notices what the trainer must react to."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass

from broker.trainer_side import TrainerSide
from contracts.errors import FencedOff, OnbeatError, Unavailable, kind_and_text
from contracts.jobs import JobState

log = logging.getLogger(__name__)

LAST_WORDS_S = 5.0
"""A trainer that ends gives its lease back within this time, or lets it run out: Redis may be away."""
LOOK_S = 0.25
LONGEST_LOAD_S = 3600.0
"""A trainer that loads for longer than this, and than `patience_s`, hangs: at a dead mount, for instance."""


class Cancelled(Exception):
    """The job was asked to end."""


class Stopped(Exception):
    """This process was asked to end; the job goes on in another one."""


@dataclass(eq=False)
class LeaseKeeper:
    """Two threads: one renews the lease after each third of it, or second, so that a cancel is soon noticed; the other
    ends a process that can't end itself.

    A trainer that trains calls `check` between micro-batches: what the first thread saw is raised there, where it can
    be answered. One that loads a model makes no such calls for minutes: until it says `loaded`, the second ends it. So
    it does where a pass doesn't come back to its next `check` within `training`, and what lies between passes not
    within `patience_s`.
    """

    side: TrainerSide
    _: KW_ONLY
    lease_s: float
    end_loading: Callable[[Exception], None] = lambda why: None
    """Ends a process that loads; takes what `check` would raise."""
    end_stuck: Callable[[float], None] = lambda silent_s: None
    """Ends one whose pass doesn't end; takes the seconds for which it didn't call `check`."""
    patience_s: float = math.inf
    """Longest that a trainer that has loaded doesn't call `check` outside of its passes."""
    end_hung: Callable[[float], None] = lambda silent_s: None
    """Ends one that doesn't; takes the seconds."""

    def __post_init__(self) -> None:
        self._interval_s = min(self.lease_s / 3, 1.0)
        self._checked_s = time.monotonic()
        self._limit = (max(self.patience_s, LONGEST_LOAD_S), self.end_hung)
        """Seconds without a `check`, and what ends the process past them: one tuple, so that both are of one moment."""
        self._state = JobState.RUNNING
        self._error: OnbeatError | None = None
        self._loading = threading.Lock()
        """The thread holds it while it ends the process, so that `loaded` doesn't return then."""
        self._is_loading = True
        self._closing = threading.Event()
        self.is_stop_requested = False
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for work, name in ((self._renew, "trainer lease"), (self._watch, "trainer end"))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def request_stop(self) -> None:
        """Makes `check` raise Stopped from now on; a signal handler may call it, also one that interrupts another."""
        self.is_stop_requested = True

    def loaded(self) -> None:
        """Says that the trainer calls `check` often enough from now on. Raises what that raises."""
        with self._loading:
            self._is_loading = False
        self.check()
        self._limit = (self.patience_s, self.end_hung)

    def check(self, *, is_sign: bool = True) -> None:
        """Raises what `check_lease` does, Stopped, or Cancelled. is_sign: the trainer calls it, so it isn't stuck."""
        self.check_lease(is_sign=is_sign)
        if self.is_stop_requested:
            raise Stopped
        if self._state is JobState.CANCELLING:
            raise Cancelled

    @contextmanager
    def training(self, *, longest_pass_s: float) -> Iterator[None]:
        """Has the process ended where it is in here, and neither leaves nor calls `check`, for longest_pass_s (I8)."""
        between = self._limit
        self._checked_s = time.monotonic()
        self._limit = (longest_pass_s, self.end_stuck)
        try:
            yield
        finally:
            self._checked_s = time.monotonic()
            self._limit = between

    def check_lease(self, *, is_sign: bool = True) -> None:
        """Raises what ended the renewals (FencedOff, Unavailable), and FencedOff where the job ended without it."""
        if is_sign:
            self._checked_s = time.monotonic()
        if self._error is not None:
            raise self._error
        if self._state.is_final:
            raise FencedOff(f"the job is {self._state.value} by now", field="state")

    def close(self) -> None:
        self._closing.set()
        self._threads[0].join(timeout=LAST_WORDS_S)

    def _renew(self) -> None:
        while self._error is None and not self._closing.wait(self._interval_s):
            try:
                self._state = self.side.renew()
            except OnbeatError as error:
                log.warning("the trainer's lease: %s", error)
                self._error = error
            except BaseException as error:
                # Without its keeper a trainer would go on until another one takes its job.
                log.exception("the thread that renews the trainer's lease has failed")
                self._error = Unavailable(
                    f"the thread that renews the lease has failed: {kind_and_text(error)}", field="lease"
                )

    def _watch(self) -> None:
        try:
            self._end_in_time()
        except BaseException as error:
            # Without it nothing would end a trainer that loads for ever, or hangs in a pass.
            log.exception("the thread that ends a hung trainer has failed")
            self._error = Unavailable(
                f"the thread that ends a hung trainer has failed: {kind_and_text(error)}", field="lease"
            )

    def _end_in_time(self) -> None:
        while not self._closing.wait(LOOK_S):
            self._end_if_loading()
            # In the other order than they are set above: a new limit never meets an old time.
            longest_s, end = self._limit
            if (silent_s := time.monotonic() - self._checked_s) > longest_s:
                end(silent_s)
                return

    def _end_if_loading(self) -> None:
        with self._loading:
            if not self._is_loading:
                return
            try:
                self.check(is_sign=False)
            except (OnbeatError, Stopped, Cancelled) as why:
                self.end_loading(why)
