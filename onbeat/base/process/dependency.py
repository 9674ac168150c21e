"""A service that batches need, and that may be away: who asks it outlasts that, and says since when and why.

    ask ─┬─ answer ────────────────────────────────────▶ there
      ▲  ├─ Unavailable ─▶ away ─ back-off ─┐
      │  └─ in doubt ─ does a probe reach it? ─ yes ──▶ raised: what was asked may be the cause
      └──────── a probe or another reached it ◀┘ past deadline_s, or not needed here: raised

What is asked again, though the service is there, is remembered by its job (`tried_again`): a heartbeat tells it, once
it lasts for seconds, and the job's status shows it with the cure.

An attempt belongs to a batch only where the batch can be the cause (I6). A service that no process reaches is waited
for; one that others reach makes this process the cause, which gives back what it holds.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import TypeVar

from msgspec import UNSET

from contracts.errors import MOST_CHARACTERS, Unavailable
from contracts.monitor import ServiceSeen
from onbeat.base.process.waiting import backoff, wait_for

log = logging.getLogger(__name__)

BACKOFF_BASE_S = 0.5
BACKOFF_CAP_S = 5.0
"""A wait ends with the first answer that anything in this process gets, a probe's too."""
PROBE_EVERY_S = 2.0
SLOW_S = 10.0
"""A request that takes longer is asked after: its service may hang."""

SHOWN_AFTER_S = 5.0
"""A call that is tried again for less time is not shown."""
SHOWN_ANEW_S = 30.0
"""A reason that changes is shown again no sooner: a line each time would say nothing new."""
FORGOTTEN_S = 120.0
"""A call that was not tried again for so long is over, or another process has its work."""

REWARD_SERVICE = "reward service"
"""The service that every batch needs until it is published: it scores, and it plays."""
JUDGE = "judge"

A = TypeVar("A")
Probe = Callable[[], Awaitable[object]]
"""Makes the cheapest request that shows whether this process is served. Raises Unavailable where it isn't."""


@dataclass
class Retry:
    """Work that a process tries again for one job. Dependency creates and changes it."""

    since_s: float
    last_s: float
    why: str
    """In words, with the cure; those of `why_since_s`."""
    why_since_s: float


@dataclass
class Dependency:
    """A service as this process meets it: reached, or away since when and why.

    The process creates it at its start; calls of the service and its prober change it; `/readyz` and heartbeats read
    it. Only the event loop's thread touches it.
    """

    name: str
    """The same in every process."""
    where: str
    """Its address as this process has it, for people."""
    _: KW_ONLY
    probe: Probe
    jitter: Callable[[], float] = random.random
    clock: Callable[[], float] = time.monotonic
    others_reach: bool = False
    """True: another process reached it since this one does not."""
    others_miss: bool = False
    """True: another process waits for it."""
    _problem: Unavailable | None = None
    _away_since_s: float = 0.0
    _answered_s: float | None = None
    _asked_s: dict[int, float] = field(default_factory=dict)
    """When each request in the air was sent."""
    _num_asked: int = 0
    _retries: dict[str, Retry] = field(default_factory=dict)
    """By job."""
    _moved: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it answers, and when it is known that others reach it; cleared by who waits."""

    @property
    def is_away(self) -> bool:
        return self._problem is not None

    @property
    def seen(self) -> ServiceSeen:
        """Returns what this process reports of the service."""
        retries = self._shown_retries() or UNSET
        if self.is_away:
            away_s = self.clock() - self._away_since_s
            return ServiceSeen(name=self.name, away_s=away_s, why=self.why, tries_again=retries)
        answered_s = None if self._answered_s is None else self.clock() - self._answered_s
        return ServiceSeen(name=self.name, answered_s=answered_s, tries_again=retries)

    def tried_again(self, job_id: str, why: str) -> None:
        """Notes that a request of a job is tried again, until `went_well`.

        Args:
            job_id: The job.
            why: The reason in words, with the cure.
        """
        now_s = self.clock()
        why = " ".join(why.split())[:MOST_CHARACTERS]
        retry = self._retries.setdefault(job_id, Retry(since_s=now_s, last_s=now_s, why=why, why_since_s=now_s))
        retry.last_s = now_s
        if now_s - retry.why_since_s >= SHOWN_ANEW_S:
            retry.why = why
            retry.why_since_s = now_s

    def went_well(self, job_id: str) -> None:
        """Takes note that nothing is asked again for a job any more."""
        self._retries.pop(job_id, None)

    def _shown_retries(self) -> dict[str, str]:
        now_s = self.clock()
        self._retries = {job: retry for job, retry in self._retries.items() if now_s - retry.last_s < FORGOTTEN_S}
        return {job: retry.why for job, retry in self._retries.items() if now_s - retry.since_s >= SHOWN_AFTER_S}

    @property
    def why(self) -> str:
        """Where it is, and what is wrong with it; "" while nothing is."""
        if self._problem:
            return f"at {self.where}: {' '.join(str(self._problem).split())[:300]}"
        return ""

    def answered(self) -> None:
        """Takes note of an answer: a request that waits is made again."""
        if self.is_away:
            log.info("the %s is back after %.0f s", self.name, self.seen.away_s)
        self._problem = None
        self.others_reach = False
        self._answered_s = self.clock()
        self._moved.set()

    def missed(self, problem: Unavailable) -> None:
        """Takes note of a request without an answer."""
        if not self.is_away:
            self._away_since_s = self.clock()
            log.warning("this process can't reach the %s, and tries again until it can: %s", self.name, problem)
        self._problem = problem

    def reached_by_others(self) -> None:
        """Takes note that another process reached it while this one doesn't: this one is the cause."""
        if self.is_away and not self.others_reach:
            self.others_reach = True
            log.warning(
                "other processes reach the %s, and this one does not, %s: check its network and settings",
                self.name,
                self.why,
            )
            self._moved.set()

    async def is_reached(self) -> bool:
        """Probes the service, and returns True where the probe reaches it."""
        try:
            await self.probe()
        except Unavailable as problem:
            self.missed(problem)
            return False
        self.answered()
        return True

    async def outlast(
        self, ask: Callable[[], Awaitable[A]], *, deadline_s: float, is_needed: Callable[[], bool] = lambda: True
    ) -> A:
        """Answers what `ask` does, which is called until it does.

        Raises its Unavailable after deadline_s, or once the answer isn't needed here: others reach the service, or
        `is_needed` says so. Raises one that is in doubt at once where the service answers a probe.
        """
        ends_s = self.clock() + deadline_s
        pauses = backoff(base_s=BACKOFF_BASE_S, cap_s=BACKOFF_CAP_S, jitter=self.jitter)
        while True:
            self._moved.clear()
            try:
                answer = await self._timed(ask)
            except Unavailable as problem:
                if problem.is_doubtful and await self.is_reached():
                    raise
                if problem.is_doubtful:
                    problem.is_doubtful = False  # it is away for everything
                self.missed(problem)
                left_s = ends_s - self.clock()
                if left_s <= 0.0 or self.others_reach or not is_needed():
                    raise
                await wait_for(self._moved, min(left_s, next(pauses)))
            else:
                self.answered()
                return answer

    async def look(self) -> None:
        """Asks after it where it is away, slow, or missed by another process."""
        is_slow = any(self.clock() - asked_s > SLOW_S for asked_s in self._asked_s.values())
        if self.is_away or is_slow or self.others_miss:
            await self.is_reached()

    async def _timed(self, ask: Callable[[], Awaitable[A]]) -> A:
        self._num_asked += 1
        number = self._num_asked
        self._asked_s[number] = self.clock()
        try:
            return await ask()
        finally:
            del self._asked_s[number]
