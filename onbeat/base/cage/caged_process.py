"""The service's side of one cage: start it, have a fresh child forked, end it, and say what it died of."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from contracts.encoding.wire import decode, encode, encode_json
from contracts.errors import ContractViolation
from onbeat.base.cage.cage import CageRules
from onbeat.base.cage.frames import Frames, Gone, Late
from onbeat.base.cage.nursery import Order, Report

REAP_TIMEOUT_S = 5.0
"""A killed process that is still not gone is stuck in the kernel; its owner goes on without it."""
MAX_REPORT_BYTES = 64 * 1024
START = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop())
from {module} import main
main(int(sys.argv[1]), sys.argv[2])
"""


class ChildLate(Exception):
    """Says that no answer came by the deadline; the child may still be busy and must be ended."""


class ChildDied(Exception):
    """Says that the child is gone, or sent no answer; it must be ended."""


class CagedProcess:
    """Keeps one child at a time, and is used by one thread.

    After ChildLate or ChildDied only `end` may follow, or `fresh_child` where `is_alive`.
    The thread that makes it must stay alive: Linux ends a child together with the thread that started it.
    """

    module: str
    """Its `main(control, rules)` runs `onbeat.base.cage.nursery.main`."""
    noun: str
    """The name of the child in a message: "the scorer's process"."""
    hash_seed: int | None = None
    """With it the texts of all such processes have equal hashes."""

    def __init__(
        self, rules: CageRules, *, start_timeout_s: float, on_empty: Callable[[], None] = lambda: None
    ) -> None:
        """Returns as soon as the process exists; the first order waits for its start.

        Args:
            rules: The cage's rules.
            start_timeout_s: The longest that the nursery's start, or its imports, may take, in seconds.
            on_empty: Called by `end` where nothing is left in the cage.
        """
        ours, theirs = socket.socketpair()
        code = START.format(module=self.module)
        alone = ["-I"] if self.hash_seed is None else ["-s", "-P"]
        with theirs:
            # What this process imports from: with an empty environment, and alone, Python wouldn't find it.
            import_path = json.dumps([os.path.abspath(entry) for entry in sys.path])
            self._process = subprocess.Popen(
                [sys.executable, *alone, "-c", code, str(theirs.fileno()), encode_json(rules).decode(), import_path],
                # From the first instruction on: what a process was started with stays readable in /proc.
                env={} if self.hash_seed is None else {"PYTHONHASHSEED": str(self.hash_seed)},
                cwd=rules.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.importing = f"importing {self.noun} took more than {start_timeout_s:g} s"
        self._on_empty = on_empty
        self._orders = Frames(ours, max_bytes=MAX_REPORT_BYTES)
        self._start_timeout_s = start_timeout_s
        self.child: Frames | None = None
        """The socket to the child; None where there is none."""
        self.missing: tuple[str, ...] | None = None
        """Locks that this cage doesn't have; None before its start was waited for."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def start_ends_s(self) -> float:
        """Returns the deadline of a start, or of imports, that begin now, on the clock of `time.monotonic`."""
        return time.monotonic() + self._start_timeout_s

    def prepare(self, payload: bytes, *, deadline_s: float) -> bytes:
        """Orders the nursery to do its slow imports, and returns its answer."""
        self.wait_for_start()
        return self._order(Order(what="prepare", payload=payload), deadline_s, self.importing).payload

    def fresh_child(self, *, max_bytes: int) -> Frames:
        """Ends the child, if there is one, and has the nursery fork the next.

        Args:
            max_bytes: The longest answer that is received from the child.

        Returns:
            The socket to the child.

        Raises:
            ChildDied: The nursery is gone.
        """
        self.wait_for_start()
        self._close_child()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._orders.send_handle(encode(Order(what="child")), theirs.fileno())
            except Gone as error:
                ours.close()
                raise self.death() from error
        self.child = Frames(ours, max_bytes=max_bytes)
        return self.child

    @contextlib.contextmanager
    def heard(self, doing: str, *, death: Callable[[], ChildDied] | None = None) -> Iterator[None]:
        """Turns the errors of a block that talks to the child into ChildLate and ChildDied with their cause in words.

        Args:
            doing: The work that took too long, for the message.
            death: Finds out what the other side died of; None asks the nursery about the child.

        Raises:
            ChildLate: The deadline passed.
            ChildDied: The other side is gone, or sent no answer.
        """
        try:
            yield
        except Late as error:
            raise ChildLate(f"{doing}; its process was killed") from error
        except (Gone, ContractViolation) as error:
            if error.args:
                raise ChildDied(f"{self.noun}'s process sent what is no answer: {error}") from error
            raise (death or self.child_death)() from error

    def end_child(self) -> int | None:
        """Kills the child with all that it started, and waits for it; its exit code, None if unknown."""
        self._close_child()
        try:
            doing = "ending a child"
            return self._order(Order(what="end_child"), time.monotonic() + REAP_TIMEOUT_S, doing).exit_code
        except (ChildDied, ChildLate):
            self.kill()
            return None

    def child_death(self) -> ChildDied:
        """Ends the child, which has closed its socket, and says what it died of."""
        code = self.end_child()
        return self.death() if code is None else ChildDied(self._of_what(code))

    def death(self) -> ChildDied:
        """Says what the whole cage died of."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_TIMEOUT_S)
        code = self._process.returncode
        if code is None:
            return ChildDied(f"{self.noun}'s process closed its socket")
        return ChildDied(self._of_what(code))

    def kill(self) -> None:
        """Signals the keeper to end the whole cage; does not wait."""
        self._process.terminate()

    def end(self) -> None:
        """Ends the cage, and reaps it."""
        self._close_child()
        if self.is_alive and self.missing is not None:
            self.end_child()
        self.kill()
        try:
            self._process.wait(REAP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(REAP_TIMEOUT_S)
        self._orders.close()
        if self._process.returncode not in (None, -signal.SIGKILL):  # else its keeper didn't end what it kept
            self._on_empty()

    def wait_for_start(self) -> None:
        """Raises ChildLate, ChildDied."""
        if self.missing is None:
            doing = f"its start took more than {self._start_timeout_s:g} s"
            self.missing = self._report(self.start_ends_s(), doing).missing

    def _close_child(self) -> None:
        if self.child is not None:
            self.child.close()
            self.child = None

    def _order(self, order: Order, deadline_s: float, doing: str) -> Report:
        with self.heard(doing, death=self.death):
            self._orders.send(encode(order), deadline_s=deadline_s)
        return self._report(deadline_s, doing)

    def _report(self, deadline_s: float, doing: str) -> Report:
        with self.heard(doing, death=self.death):
            return decode(self._orders.receive(deadline_s=deadline_s), Report)

    def _of_what(self, code: int) -> str:
        if code < 0:
            known = {number.value: number.name for number in signal.Signals}
            return f"{self.noun}'s process died of {known.get(-code, f'signal {-code}')}"
        return f"{self.noun}'s process ended with exit code {code}"
