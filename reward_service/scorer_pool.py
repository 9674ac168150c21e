"""Scorer processes with a hard deadline per item: a scorer that hangs or dies costs its own item and nothing else.

    submit(rubric, items) ─▶ turns ─▶ lane 1 ═ worker process ─▶ result ─▶ Future of all results, in order
                               └────▶ lane N ═ worker process

A lane is a thread that owns one worker. Requests take turns item by item, so that a request of 4096 slow items does
not hold up one of 8. Past its deadline a worker is killed (SIGKILL, with its process group) and replaced.

Consumes:     rubrics that need isolation, with their items.
Waits for:    the worker's answer, at most `item_timeout_s`; a start or a warm-up at most `warm_up_timeout_s`.
Unblocked by: the answer, the worker's death, or the deadline.
Produces:     Scored, or Unscorable with reason timeout or crashed, or what the scorer itself refused.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from threading import Condition, Lock, Thread
from typing import TypeVar

from contracts.errors import Unavailable
from contracts.rewards import RewardComponent, RewardItem, Scored, Unscorable, UnscorableReason
from contracts.settings import StackSettings
from reward_service.scorer_process import ScorerProcess, WorkerDied, WorkerLate
from reward_service.scorers import rubric

Results = tuple[Scored | Unscorable, ...]

_Answer = TypeVar("_Answer", Scored | Unscorable, Unscorable | None)

log = logging.getLogger(__name__)


class ScorerPool:
    """Owns the lanes. Thread-safe. Starts at the first submission; `close` ends every process."""

    def __init__(
        self,
        *,
        num_workers: int | None = None,
        warm_up_timeout_s: float = StackSettings().scorer_start_s,
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        """`num_workers` None: one per usable core. `on_restart` is called for each worker that is replaced."""
        self.num_workers = num_workers or usable_cores()
        self._warm_up_timeout_s = warm_up_timeout_s
        self._on_restart = on_restart
        self._changed = Condition()
        self._turns: deque[_Work] = deque()
        self._lanes: list[_Lane] = []
        self._closed = False

    def submit(
        self, components: tuple[RewardComponent, ...], items: tuple[RewardItem, ...], *, item_timeout_s: float
    ) -> Future[Results]:
        """One result per item, in order; cancelling the future drops the items not yet begun. Raises Unavailable."""
        work = _Work(components, items, item_timeout_s)
        with self._changed:
            if self._closed:
                raise Unavailable("the scorer pool is closed")
            if not self._lanes:
                self._start_lanes()
            self._turns.append(work)
            self._changed.notify(len(items))
        return work.future

    @property
    def is_alive(self) -> bool:
        """A pool that nobody has used yet is alive; a closed one is not."""
        return not self._closed and all(lane.is_alive() for lane in self._lanes)

    def num_waiting_items(self) -> int:
        """Items that no worker has begun."""
        with self._changed:
            return sum(len(work.items) - work.num_begun for work in self._turns)

    def worker_pids(self) -> list[int]:
        """Of the processes that run now."""
        return [pid for lane in self._lanes if (pid := lane.worker_pid()) is not None]

    def close(self) -> None:
        """Kills the workers, fails what is not finished, and returns when no process is left."""
        with self._changed:
            self._closed = True
            unfinished = list(self._turns)
            self._turns.clear()
            self._changed.notify_all()
        for work in unfinished:
            work.fail(Unavailable("the scorer pool was closed"))
        for lane in self._lanes:
            lane.stop()
        for lane in self._lanes:
            lane.join()

    def next_turn(self) -> tuple[_Work, int] | None:
        """The oldest request's next item, and the request goes to the back; None when closed. Called by lanes."""
        with self._changed:
            while not self._closed:
                if not self._turns:
                    self._changed.wait()
                    continue
                work = self._turns.popleft()
                if work.future.cancelled():
                    continue
                index = work.num_begun
                work.num_begun += 1
                if work.num_begun < len(work.items):
                    self._turns.append(work)
                return work, index
        return None

    def _start_lanes(self) -> None:
        for number in range(1, self.num_workers + 1):
            lane = _Lane(
                name=f"scorer-lane-{number}",
                next_turn=self.next_turn,
                on_restart=self._on_restart,
                warm_up_timeout_s=self._warm_up_timeout_s,
            )
            self._lanes.append(lane)
            lane.start()
        log.info("%d scorer processes", self.num_workers)


class _Work:
    """One request on its way through the lanes."""

    def __init__(
        self, components: tuple[RewardComponent, ...], items: tuple[RewardItem, ...], item_timeout_s: float
    ) -> None:
        self.components = components
        self.items = items
        self.item_timeout_s = item_timeout_s
        self.future: Future[Results] = Future()
        self.num_begun = 0
        """Guarded by the pool's condition."""
        self.refusal: Unscorable | None = None
        """Why the rubric cannot be warmed up: the remaining items get it too, instead of waiting for it again."""
        self._results: dict[int, Scored | Unscorable] = {}
        self._lock = Lock()

    def deliver(self, index: int, result: Scored | Unscorable) -> None:
        with self._lock:
            self._results[index] = result
            complete = len(self._results) == len(self.items)
            if complete and not self.future.done() and self.future.set_running_or_notify_cancel():
                self.future.set_result(tuple(self._results[index] for index in range(len(self.items))))

    def fail(self, error: Exception) -> None:
        with self._lock:
            if not self.future.done() and self.future.set_running_or_notify_cancel():
                self.future.set_exception(error)


class _Lane(Thread):
    """Scores one item after the other on the worker that it owns.

    The worker is started by this thread, because Linux ends it together with the thread that started it.
    """

    def __init__(
        self,
        *,
        name: str,
        next_turn: Callable[[], tuple[_Work, int] | None],
        on_restart: Callable[[], None],
        warm_up_timeout_s: float,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._next_turn = next_turn
        self._on_restart = on_restart
        self._warm_up_timeout_s = warm_up_timeout_s
        self._process: ScorerProcess | None = None
        self._stopped = False
        self._lock = Lock()
        """Held to start, kill or reap the worker, so that `stop` never meets one that is half started or reaped."""

    def run(self) -> None:
        while (turn := self._next_turn()) is not None:
            work, index = turn
            try:
                work.deliver(index, self._result(work, work.items[index]))
            except Exception as error:  # our own fault, not a scorer's: the request learns it, the lane lives on
                log.exception("a scorer lane failed")
                work.fail(error)
                self._end_process()
        self._end_process()

    def stop(self) -> None:
        """From another thread: kills the worker, so that a wait for it ends now."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.kill()

    def worker_pid(self) -> int | None:
        with self._lock:
            return self._process.pid if self._process is not None else None

    def _result(self, work: _Work, item: RewardItem) -> Scored | Unscorable:
        components = work.components
        if work.refusal is None:
            work.refusal = self._attempt(components, lambda process: process.warm_up(components))
        if work.refusal is not None:
            return work.refusal
        return self._attempt(
            components, lambda process: process.score(components, item, item_timeout_s=work.item_timeout_s)
        )

    def _attempt(
        self, components: tuple[RewardComponent, ...], ask: Callable[[ScorerProcess], _Answer]
    ) -> _Answer | Unscorable:
        """What the worker answers, or why it could not; then the worker has already been replaced."""
        reason: UnscorableReason
        try:
            return ask(self._running_process())
        except WorkerLate as error:
            reason, detail = "timeout", str(error)
        except WorkerDied as error:
            reason, detail = "crashed", str(error)
        component = rubric.only_isolated_name(components)
        log.warning("%s%s; another process takes its place", f"{component}: " if component else "", detail)
        self._replace_process()
        return Unscorable(reason=reason, detail=detail, component=component)

    def _running_process(self) -> ScorerProcess:
        with self._lock:
            if self._stopped:
                raise WorkerDied("the scorer pool was closed")
            if self._process is None:
                self._process = ScorerProcess(warm_up_timeout_s=self._warm_up_timeout_s)
            return self._process

    def _replace_process(self) -> None:
        """The new one starts while the lane hands over its result and waits for its next turn."""
        self._end_process()
        with self._lock:
            if self._stopped:
                return
            self._process = ScorerProcess(warm_up_timeout_s=self._warm_up_timeout_s)
        self._on_restart()

    def _end_process(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.end()
                self._process = None


def usable_cores() -> int:
    """Cores that this process may run on, which in a container are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
