"""Caged scorer processes with a hard deadline per item: one that hangs or dies costs its own item and nothing else.

    score ─ linear-time rubric ─▶ scored in a thread
      └───▶ submit(rubric, items) ─▶ turns ─▶ thread 1 ═ cage ═ scorer process ─▶ results ─▶ Future of all, in order
                                     └────▶ thread N ═ cage ═ scorer process

A scoring thread (scoring_thread.py) has cages (scorer_cage.py) of its own. Requests take turns, half a second at a
time, so that one of 4096 items does not hold up one of 8; jobs have threads by the time that they used (turns.py), so
that one whose items take minutes does not hold up another. Past its deadline a scorer process is killed, with all that
it started.

Consumes:     rubrics that need isolation, with their items.
Waits for:    the scorer process's answer, at most `item_timeout_s`; a start or a warm-up at most `warm_up_timeout_s`.
Unblocked by: the answer, the scorer process's death, or the deadline.
Produces:     Scored, or Unscorable with reason timeout or crashed, or what the scorer itself refused.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Condition, Event
from typing import NamedTuple

from starlette.concurrency import run_in_threadpool

from contracts.errors import Unavailable
from contracts.rewards import (
    FormatReward,
    RewardItem,
    RewardRequest,
    RewardResponse,
    Scored,
    ScorerLosses,
    Unscorable,
)
from contracts.settings import StackSettings, usable_cores
from onbeat.base.process.ending import lasting_thread
from reward_service.cages import Cages
from reward_service.scorers import rubric
from reward_service.scoring.scorer_cage import ScorerCage
from reward_service.scoring.scoring_thread import Results, ScoringThread, Work
from reward_service.scoring.turns import Turns

DEFAULTS = StackSettings()
SELF_TEST = RewardRequest(
    components=(FormatReward(pattern="on.*beat"),), items=(RewardItem(prompt="", completion="on\nbeat", reference=""),)
)
LEAST_THREADS = 2
"""With a single one, the job that has it would have all of them."""
LOOK_S = 0.5
"""Between two looks for a turn that is to be taken back, or may begin by now."""
FIRST_CALL_S = 60.0
"""Longest first call of a plug-in in a fresh process, where its items have less: it may load a model then."""
SELF_TEST_TIMEOUT_S = 5.0
"""For a turn in the pool and the answer: a longer wait means that the pool is too busy for more work."""

MAX_LOSSES = 1024
"""Jobs of which lost processes are remembered."""

log = logging.getLogger(__name__)


class Loss(NamedTuple):
    """The scorer processes that a job has lost."""

    number: int
    at_s: float
    """Monotonic time of the last one."""
    last: Unscorable


class ScorerPool:
    """Owns the threads. Thread-safe. Starts at the first submission; `close` ends every process."""

    def __init__(
        self,
        *,
        num_threads: int | None = None,
        warm_up_timeout_s: float = DEFAULTS.scorer_start_s,
        memory_mb: int = DEFAULTS.scorer_memory_mb,
        network: bool = False,
        hidden: Sequence[str] = (),
        readable: Sequence[str] = (),
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        """`num_threads` None: one per usable core, and two at least. on_restart: called for each lost scorer process.

        memory_mb, network: what a scorer may have. hidden: folders that no scorer may read. readable: files and folders
        of the operator that it may read.
        """
        self.num_threads = num_threads or max(LEAST_THREADS, usable_cores())
        self._warm_up_timeout_s = warm_up_timeout_s
        self.cages = Cages(
            "rewards", memory_mb=memory_mb, network=network, hidden=hidden, readable=readable, on_restart=on_restart
        )
        self._changed = Condition()
        self._turns: Turns[Work] = Turns(self.num_threads)
        self._stopped = Event()
        self._losses: OrderedDict[str, Loss] = OrderedDict()
        """By job, the one that lost its last process longest ago first."""
        self._threads: list[ScoringThread] = []
        self._closed = False
        self._numbers = itertools.count()

    def submit(self, request: RewardRequest) -> Future[Results]:
        """Gives a result for each item that is asked for, in order; cancelling the future drops those not yet begun.

        Raises Unavailable.
        """
        with self._changed:
            if self._closed:
                raise Unavailable("the scorer pool is closed")
            if not self._threads:
                self._start_threads()
            owner = request.job_id or f"request {next(self._numbers)}"
            asks = [request.items[place] for place in request.places]
            work = Work(request=request, asks=asks, group_outcomes=[{} for _ in request.items], owner=owner)
            self._turns.add(work)
            self._changed.notify_all()
        return work.future

    @property
    def is_alive(self) -> bool:
        """Returns whether it may score: one that is unused yet may, a closed one may not."""
        return not self._closed and all(thread.is_alive() for thread in self._threads)

    def num_waiting_items(self) -> int:
        """Items that no scorer process has begun."""
        with self._changed:
            return sum(work.num_waiting for work in self._turns.waiting)

    def close(self) -> None:
        """Kills the scorer processes, fails what is not finished, and returns when no process is left."""
        with self._changed:
            self._closed = True
            self._stopped.set()
            unfinished = self._turns.waiting
            self._turns.clear()
            self._changed.notify_all()
        for work in unfinished:
            work.fail(Unavailable(self.cages.was_closed))
        self.cages.end(self._threads)

    def next_turn(self, thread: ScoringThread, stays_with: Work | None) -> tuple[Work, Sequence[int]] | None:
        """Items of a request that this thread scores next, the one to stay with if that may be; None when closed.

        Called by threads, whose last turn it ends.
        """
        with self._changed:
            self._turns.end(thread)
            if stays_with is not None and stays_with.sight == "begun":
                stays_with.sight = "done"
            if self._turns.waiting:
                self._changed.notify_all()
            while not self._closed:
                turn = self._turns.take(thread, stays_with)
                if turn is not None:
                    return turn
                # A request that may not begin now may later, without another change.
                self._changed.wait(LOOK_S if self._turns.waiting else None)
        return None

    def put_back(self, work: Work, places: Sequence[int], *, sees_groups: bool) -> None:
        """Lets items wait again that a thread has begun and not scored. sees_groups: the call for whole groups, too."""
        with self._changed:
            work.waiting.extendleft(reversed(places))
            if sees_groups:
                work.sight = "due"
            if not self._closed:
                self._turns.put_back(work)
            self._changed.notify_all()

    def losses(self, job_id: str) -> ScorerLosses:
        """Returns the losses of a job's scorer processes so far."""
        with self._changed:
            loss = self._losses.get(job_id)
        if loss is None:
            return ScorerLosses()
        return ScorerLosses(num_lost=loss.number, last_ago_s=time.monotonic() - loss.at_s, last=loss.last)

    def lost(self, owner: str, result: Unscorable) -> None:
        """Takes note of a scorer process that was lost. Called by threads."""
        with self._changed:
            number = 0
            if owner in self._losses:
                number = self._losses.pop(owner).number
            self._losses[owner] = Loss(number=number + 1, at_s=time.monotonic(), last=result)
            while len(self._losses) > MAX_LOSSES:
                self._losses.popitem(last=False)

    def _take_back_overdue(self) -> None:
        """Frees threads for jobs that others hold up, until the pool is closed; runs in a thread of its own."""
        while not self._stopped.wait(LOOK_S):
            with self._changed:
                overdue = self._turns.overdue()
            if overdue is not None:
                thread, turn = overdue
                assert isinstance(thread, ScoringThread)
                thread.give_up(turn.request)

    def _start_threads(self) -> None:
        for number in range(self.num_threads):
            thread = ScoringThread(
                name=f"scorer-thread-{number + 1}",
                cages=self.cages,
                new_cage=self._new_cage,
                next_turn=self.next_turn,
                put_back=self.put_back,
                on_loss=self.lost,
                first_call_s=min(FIRST_CALL_S, self._warm_up_timeout_s),
            )
            self._threads.append(thread)
            thread.start()
        lasting_thread("scorer-turns", self._take_back_overdue)
        log.info("%d scorer processes", self.num_threads)

    def _new_cage(self) -> ScorerCage:
        rules, on_empty = self.cages.one_more()
        return ScorerCage(rules, start_timeout_s=self._warm_up_timeout_s, on_empty=on_empty)


async def score(request: RewardRequest, pool: ScorerPool) -> RewardResponse:
    """Returns one result per item, in order. Cancelling it drops the items not yet begun. Raises Unavailable.

    A rubric with one component that needs isolation is scored in the pool as a whole.
    """
    if not rubric.needs_isolation(request.components):
        items = [request.items[place] for place in request.places]
        return await run_in_threadpool(
            lambda: RewardResponse(results=tuple(rubric.score_item(request.components, item) for item in items))
        )
    return RewardResponse(results=await asyncio.wrap_future(pool.submit(request)))


async def self_test(pool: ScorerPool) -> None:
    """Scores one item through the pool. Raises Unavailable that says what is wrong."""
    if not pool.is_alive:
        raise Unavailable("the scorer pool is not alive", cure="restart the reward service")
    try:
        response = await asyncio.wait_for(score(SELF_TEST, pool), SELF_TEST_TIMEOUT_S)
    except TimeoutError as error:
        waiting = pool.num_waiting_items()
        raise Unavailable(f"no scorer process took an item within {SELF_TEST_TIMEOUT_S:g} s, {waiting} wait") from error
    if response.results != (Scored(reward=1.0, breakdown={"format": 1.0}),):
        raise Unavailable(f"the self-test was scored as {response.results[0]}")
