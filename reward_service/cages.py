"""The parts of a pool: its threads, and the cages that each of them owns.

    asks ─▶ thread ═ cage ═ child ─▶ results ─▶ Future of all, in order

Scoring and playing have one each. Its cages are numbered, so that no two have a user in common, and are in one folder,
under the operator's rules.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import tempfile
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field
from threading import Lock, Thread
from typing import Any, Generic, Literal, TypeVar

from contracts.errors import kind_and_text
from onbeat.base.cage.cage import CageRules, own_slot
from onbeat.base.cage.caged_process import CagedProcess, ChildDied
from onbeat.base.process.ending import end_process

log = logging.getLogger(__name__)

SAID = {"rewards": ("scorer", "ONBEAT_SCORER_NETWORK"), "environments": ("environment", "ONBEAT_ENVIRONMENT_NETWORK")}
"""Service → what messages call what is in its cages, and the setting that gives it the network."""

A = TypeVar("A")
R = TypeVar("R")


@dataclass(eq=False)
class Cages:
    """Thread-safe: the pool's threads ask for the rules of the cages that they start."""

    service: Literal["rewards", "environments"]
    _: KW_ONLY
    memory_mb: int
    """The memory that each cage may have, in MB. `network` says whether each has the network."""
    network: bool
    hidden: Sequence[str]
    """Folders that none may read."""
    readable: Sequence[str]
    """Files and folders of the operator that each may read."""
    on_restart: Callable[[], None]
    """Called by threads for each child that was lost."""

    def __post_init__(self) -> None:
        self._hidden = tuple(self.hidden)
        self.was_closed = f"the {SAID[self.service][0]} pool was closed"
        self.numbers: set[int] = set()
        """The cages that live."""
        self.folder = ""
        self._guard = Lock()
        self.missing: tuple[str, ...] | None = None
        """Locks that they lack on this platform; None before the first one has started."""

    def one_more(self, **limits: Any) -> tuple[CageRules, Callable[[], None]]:
        """Returns its rules, and what its owner calls when nothing is left in it. limits: beside the pool's own."""
        with self._guard:
            if not self.folder:
                self.folder = tempfile.mkdtemp(prefix=f"onbeat-{self.service}-")
                os.chmod(self.folder, 0o555)
            number = next(number for number in itertools.count() if number not in self.numbers)
            self.numbers.add(number)
        rules = CageRules(
            folder=self.folder,
            memory_mb=self.memory_mb,
            network=self.network,
            hidden=self._hidden,
            readable=tuple(self.readable),
            home=os.path.expanduser("~"),
            service=self.service,
            service_slot=own_slot(),
            number=number,
            **limits,
        )
        return rules, lambda: self.numbers.discard(number)

    def say_what_is_missing(self, missing: tuple[str, ...]) -> None:
        """Writes a log line, the first time."""
        with self._guard:
            if self.missing is not None:
                return
            self.missing = missing
        noun, setting = SAID[self.service]
        network = f", but for the network ({setting})" if self.network else ""
        if missing:
            locks = "; ".join(missing)
            log.warning("%ss are caged as far as this platform allows; missing: %s%s", noun, locks, network)
        else:
            log.info("%ss are caged%s", noun, network)

    def end(self, threads: Sequence[CageThread[Any, Any]]) -> None:
        """Kills what is in them, and returns when no process is left. threads: all of the pool's."""
        for thread in threads:
            thread.stop()
        for thread in threads:
            thread.join()
        if self.folder:
            with contextlib.suppress(OSError):
                os.rmdir(self.folder)


@dataclass(kw_only=True, eq=False)
class Asked(Generic[A, R]):
    """A request on its way through threads, with a result for each of its asks; without asks it has a single one."""

    asks: Sequence[A]
    cage_key: str = ""
    """The key of the thread's cage that it needs."""
    future: Future[tuple[R, ...]] = field(default_factory=Future)
    _results: dict[int, R] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def deliver(self, place: int, result: R) -> None:
        with self._lock:
            self._results[place] = result
            if len(self._results) >= len(self.asks) and self._is_open():
                self.future.set_result(tuple(self._results[place] for place in sorted(self._results)))

    def fail(self, error: Exception) -> None:
        with self._lock:
            if self._is_open():
                self.future.set_exception(error)

    def _is_open(self) -> bool:
        return not self.future.done() and self.future.set_running_or_notify_cancel()


W = TypeVar("W", bound=Asked[Any, Any])
C = TypeVar("C", bound=CagedProcess)


class CageThread(Thread, ABC, Generic[W, C]):
    """Cages are started by this thread, because Linux ends them together with the thread that started them."""

    def __init__(self, *, name: str, cages: Cages, new_cage: Callable[[], C]) -> None:
        """cages: the pool's. new_cage: starts one by their rules."""
        super().__init__(name=name, daemon=True)
        self._of_pool = cages
        self._new_cage = new_cage
        self._cages: OrderedDict[str, C] = OrderedDict()
        self._stopped = False
        self._guards_cages = Lock()
        """Held to start, kill or give up a cage, so that `stop` never meets one that is half started or reaped."""

    @abstractmethod
    def _next(self) -> tuple[W, Sequence[int]] | None:
        """A request, and the places of those of its asks that this thread is to answer; None where the thread ends."""

    @abstractmethod
    def _answer(self, work: W, places: Sequence[int]) -> None:
        """Delivers a result for each."""

    def run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            # What waits for this thread, and what comes, would have no answer.
            end_process(f"thread {self.name}", error)

    def _serve(self) -> None:
        while (turn := self._next()) is not None:
            work, places = turn
            try:
                self._answer(work, places)
            except BaseException as error:  # our own fault, not a child's: the request learns it, the thread lives on
                log.exception("thread %s failed", self.name)
                # asyncio can't carry a StopIteration, and takes a CancelledError for a client that has gone.
                work.fail(RuntimeError(f"thread {self.name} failed: {kind_and_text(error)}"))
                self._end(work.cage_key)
        for key in list(self._cages):
            self._end(key)

    def stop(self) -> None:
        """Kills the cages, so that a wait for one ends now; another thread calls it."""
        with self._guards_cages:
            self._stopped = True
            for cage in self._cages.values():
                cage.kill()

    def pids(self) -> list[int]:
        """Returns the keepers of its cages; whatever is in a cage ends with its keeper."""
        with self._guards_cages:
            return [cage.pid for cage in self._cages.values()]

    def _cage(self, key: str) -> C:
        """Returns the cage of that key, which is started where there is none. Raises ChildDied once it was stopped."""
        with self._guards_cages:
            if self._stopped:
                raise ChildDied(self._of_pool.was_closed)
            if key not in self._cages:
                self._cages[key] = self._new_cage()
            self._cages.move_to_end(key)
            return self._cages[key]

    def _end(self, key: str) -> None:
        with self._guards_cages:
            cage = self._cages.pop(key, None)
        if cage is not None:
            cage.end()
