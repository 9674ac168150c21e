"""Caged scorer processes with a hard deadline per item: one that hangs or dies costs its own item and nothing else.

    score ─ linear-time rubric ─▶ scored in a thread
      └───▶ submit(rubric, items) ─▶ turns ─▶ lane 1 ═ cage ═ scorer process ─▶ results ─▶ Future of all, in order
                                     └────▶ lane N ═ cage ═ scorer process

A lane (lane.py) is a thread with cages (scorer_cage.py) of its own. Requests take turns, half a second at a time, so
that one of 4096 items does not hold up one of 8. Past its deadline a scorer process is killed with all that it started.

Consumes:     rubrics that need isolation, with their items.
Waits for:    the scorer process's answer, at most `item_timeout_s`; a start or a warm-up at most `warm_up_timeout_s`.
Unblocked by: the answer, the scorer process's death, or the deadline.
Produces:     Scored, or Unscorable with reason timeout or crashed, or what the scorer itself refused.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Condition

from starlette.concurrency import run_in_threadpool

from contracts.errors import Unavailable
from contracts.rewards import FormatReward, RewardItem, RewardRequest, RewardResponse, Scored
from contracts.settings import StackSettings, usable_cores
from reward_service.cages import Cages
from reward_service.scorers import rubric
from reward_service.scoring.lane import Lane, Results, Work
from reward_service.scoring.scorer_cage import ScorerCage

DEFAULTS = StackSettings()
SELF_TEST = RewardRequest(
    components=(FormatReward(pattern="on.*beat"),), items=(RewardItem(prompt="", completion="on\nbeat", reference=""),)
)
SELF_TEST_TIMEOUT_S = 5.0
"""For a turn in the pool and the answer: a longer wait means that the pool is too busy for more work."""

log = logging.getLogger(__name__)


class ScorerPool:
    """Owns the lanes. Thread-safe. Starts at the first submission; `close` ends every process."""

    def __init__(
        self,
        *,
        num_lanes: int | None = None,
        warm_up_timeout_s: float = DEFAULTS.scorer_start_s,
        memory_mb: int = DEFAULTS.scorer_memory_mb,
        network: bool = False,
        hidden: Sequence[str] = (),
        readable: Sequence[str] = (),
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        """`num_lanes` None: one per usable core. `on_restart` is called for each scorer process that was lost.

        memory_mb, network: what a scorer may have. hidden: folders that no scorer may read. readable: files and folders
        of the operator that it may read.
        """
        self.num_lanes = num_lanes or usable_cores()
        self._warm_up_timeout_s = warm_up_timeout_s
        self.cages = Cages(
            "rewards", memory_mb=memory_mb, network=network, hidden=hidden, readable=readable, on_restart=on_restart
        )
        self._changed = Condition()
        self._turns: deque[Work] = deque()
        self._lanes: list[Lane] = []
        self._closed = False
        self._numbers = itertools.count()

    def submit(self, request: RewardRequest) -> Future[Results]:
        """Gives a result for each item that is asked for, in order; cancelling the future drops those not yet begun.

        Raises Unavailable.
        """
        with self._changed:
            if self._closed:
                raise Unavailable("the scorer pool is closed")
            if not self._lanes:
                self._start_lanes()
            owner = request.job_id or f"request {next(self._numbers)}"
            asks = [request.items[place] for place in request.places]
            work = Work(request=request, asks=asks, given=[{} for _ in request.items], owner=owner)
            self._turns.append(work)
            self._changed.notify(len(asks))
        return work.future

    @property
    def is_alive(self) -> bool:
        """Whether it may score: one that is unused yet may, a closed one may not."""
        return not self._closed and all(lane.is_alive() for lane in self._lanes)

    def num_waiting_items(self) -> int:
        """Items that no scorer process has begun."""
        with self._changed:
            return sum(work.num_waiting for work in self._turns)

    def close(self) -> None:
        """Kills the scorer processes, fails what is not finished, and returns when no process is left."""
        with self._changed:
            self._closed = True
            unfinished = list(self._turns)
            self._turns.clear()
            self._changed.notify_all()
        for work in unfinished:
            work.fail(Unavailable(self.cages.was_closed))
        self.cages.end(self._lanes)

    def next_turn(self, stays_with: Work | None) -> tuple[Work, Sequence[int]] | None:
        """Items of the request to stay with, else of the one that waits longest; None when closed. Called by lanes."""
        with self._changed:
            if stays_with is not None and stays_with.sight == "begun":
                stays_with.sight = "done"
                self._changed.notify_all()
            while not self._closed:
                if stays_with not in self._turns:
                    stays_with = None
                work = stays_with or next((one for one in self._turns if one.is_open), None)
                if work is None:
                    self._changed.wait()
                    continue
                if work.future.done():
                    self._turns.remove(work)
                    continue
                if work.sight == "due":
                    work.sight = "begun"
                    return work, ()
                places = work.take(work.num_waiting // (2 * self.num_lanes))
                if work is not stays_with or not work.num_waiting:
                    self._turns.remove(work)
                    if work.num_waiting:
                        self._turns.append(work)
                return work, places
        return None

    def _start_lanes(self) -> None:
        for number in range(self.num_lanes):
            lane = Lane(
                name=f"scorer-lane-{number + 1}", cages=self.cages, new_cage=self._new_cage, next_turn=self.next_turn
            )
            self._lanes.append(lane)
            lane.start()
        log.info("%d scorer processes", self.num_lanes)

    def _new_cage(self) -> ScorerCage:
        rules, on_empty = self.cages.one_more()
        return ScorerCage(rules, start_timeout_s=self._warm_up_timeout_s, on_empty=on_empty)


async def score(request: RewardRequest, pool: ScorerPool) -> RewardResponse:
    """Returns one result per item, in order. Cancelling it drops the items not yet begun. Raises Unavailable.

    A rubric with one component that needs isolation is scored in the pool as a whole.
    """
    if not rubric.needs_isolation(request.components):
        asked = [request.items[place] for place in request.places]
        return await run_in_threadpool(
            lambda: RewardResponse(results=tuple(rubric.score_item(request.components, item) for item in asked))
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
