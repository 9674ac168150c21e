"""The thread that plays the sessions of one environment, in a cage that it owns, one call after the other."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Condition
from typing import TypeVar

from contracts.environments.service import EnvironmentFacts, Failure, FailureReason, Result
from contracts.errors import Unavailable
from onbeat.base.cage.caged_process import ChildDied, ChildLate
from onbeat.base.process.crash_points import reach
from reward_service.cages import Asked, Cages, CageThread
from reward_service.player.protocol import Loaded, Play
from reward_service.playing.play_cage import Interrupted, PlayCage
from reward_service.playing.sessions import ENDED, Ask, Begin, End, Session

SWEEP_S = 1.0
"""How often idle sessions are looked for."""
QUICK_S = 0.05
"""Plays that took no longer together are sent twice as many at a time."""
FIRST_AT_ONCE, MOST_AT_ONCE = 16, 1024
MAX_BYTES_AT_ONCE = 32 * 1024 * 1024
SESSIONS_OF_A_CHILD = 4096
"""Begun in one child, before a fresh one takes its place when it has none left: what they leak goes with it."""
LOSSES_ALONE = 2
"""A play that is lost so often, with no other beside it, is what costs the child its life."""
MOST_LOST_ALONE = 8
"""Sessions in a row that are lost so: then nothing can be played."""

log = logging.getLogger(__name__)

T = TypeVar("T", bound="Call | _Facts")


class Call(Asked[Ask, Result]):
    """The share of an HTTP call that a thread answers."""


class _Facts(Asked[Ask, Loaded]):
    """Asks for a loaded child, and nothing of a session."""


class PlayingThread(CageThread[Call | _Facts, PlayCage]):
    """Has one cage, and answers one call after the other."""

    def __init__(
        self,
        *,
        name: str,
        cages: Cages,
        new_cage: Callable[[], PlayCage],
        on_result: Callable[[Result], None],
        forget: Callable[[Session], None],
        has_room: Callable[[], bool],
    ) -> None:
        """forget: told of each session that is over. has_room: whether the service may keep more than it does."""
        super().__init__(name=name, cages=cages, new_cage=new_cage)
        self._on_result = on_result
        self._forget = forget
        self._has_room = has_room
        self._changed = Condition()
        self._calls: deque[Call | _Facts] = deque()
        self._sessions: set[Session] = set()
        self._numbers = itertools.count()
        self._num_begun = 0
        self.num_bytes = 0
        """Kept of its sessions, as of the last sweep."""
        self._at_once = FIRST_AT_ONCE
        self._swept_s = time.monotonic()
        self._facts = EnvironmentFacts(deterministic=False, version="")

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def num_waiting(self) -> int:
        return sum(len(call.asks) for call in list(self._calls))

    @property
    def is_busy(self) -> bool:
        with self._changed:
            return bool(self._calls or self._sessions)

    def next_number(self) -> int:
        return next(self._numbers)

    def ask(self, asks: Sequence[Ask]) -> Future[tuple[Result, ...]]:
        """Raises Unavailable."""
        return self._waiting(Call(asks=asks)).future

    def facts(self) -> Future[tuple[Loaded, ...]]:
        """Asks for a loaded child, and nothing else. Raises Unavailable."""
        return self._waiting(_Facts(asks=())).future

    def _waiting(self, call: T) -> T:
        with self._changed:
            if self._stopped:
                raise Unavailable("the environment pool is closed")
            self._calls.append(call)
            self._changed.notify()
        return call

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            unfinished = list(self._calls)
            self._calls.clear()
            self._changed.notify()
        for call in unfinished:
            call.fail(Unavailable(self._of_pool.was_closed))
        super().stop()

    def _next(self) -> tuple[Call | _Facts, Sequence[int]] | None:
        """Returns the oldest call, which stays in the queue while it is answered. It sweeps meanwhile."""
        while True:
            with self._changed:
                if self._stopped:
                    return None
                if time.monotonic() - self._swept_s < SWEEP_S:
                    if self._calls:
                        return self._calls[0], range(len(self._calls[0].asks))
                    self._changed.wait(SWEEP_S if self._sessions else None)
                    continue
            self._sweep()

    def _answer(self, work: Call | _Facts, places: Sequence[int]) -> None:
        try:
            if isinstance(work, Call):
                self._play(work, deque(places))
            elif not work.future.done():
                work.deliver(0, self._ready())
        finally:
            with self._changed:
                if self._calls and self._calls[0] is work:
                    self._calls.popleft()

    def _play(self, call: Call, places: deque[int]) -> None:
        num_losses = num_lost_alone = 0
        while places:
            if call.future.done():
                self._withdraw(call, places)
                return
            loaded = self._ready()
            if loaded.failure is not None:
                self._refuse(call, places, loaded.failure)
                return
            before = len(places)
            lost = self._play_some(call, places)
            if lost is None or len(places) < before:
                num_losses = num_lost_alone = 0
                continue
            num_losses += 1
            self._at_once = 1
            if num_losses >= LOSSES_ALONE + 1:
                num_losses, num_lost_alone = 1, num_lost_alone + 1
                self._settle(call, places.popleft(), lost.failure)
                if num_lost_alone > MOST_LOST_ALONE:
                    self._refuse(call, places, lost.failure)

    def _withdraw(self, call: Call, places: deque[int]) -> None:
        """The caller is gone: what it began and what isn't played yet has no use."""
        for place in places:
            ask = call.asks[place]
            if isinstance(ask, Begin):
                ask.session.fail(ENDED)
                self._drop(ask.session)

    def _refuse(self, call: Call, places: deque[int], failure: Failure) -> None:
        while places:
            self._settle(call, places.popleft(), failure)

    def _play_some(self, call: Call, places: deque[int]) -> Interrupted | None:
        """Plays the next few asks of a call; how the child was lost over it. What wasn't played is put back."""
        chosen, plays, limits = self._choose(call, places)
        if not plays:
            return None
        started_s = time.monotonic()
        num_played = 0
        reach("environment.before_play")
        try:
            for result in self._cages[call.cage_key].play(plays, call_timeout_s=limits):
                if num_played == len(plays) - 1:
                    reach("environment.after_play")  # the call's answer goes out with its last result
                self._settle(call, chosen[num_played], result)
                num_played += 1
        except Interrupted as lost:
            self._lose_child()
            reach("environment.lost_child")
            if lost.at is not None or lost.failure.reason != "crashed":
                log.warning("%s; its other sessions go on in another process", lost.failure.detail)
                self._of_pool.on_restart()
            for number in range(len(plays) - 1, num_played - 1, -1):
                if number == lost.at:
                    self._settle(call, chosen[number], lost.failure)
                else:
                    places.appendleft(chosen[number])
            return lost
        is_quick = time.monotonic() - started_s < QUICK_S
        self._at_once = min(2 * self._at_once, MOST_AT_ONCE) if is_quick else max(1, self._at_once // 2)
        return None

    def _choose(self, call: Call, places: deque[int]) -> tuple[list[int], list[Play], list[float]]:
        chosen: list[int] = []
        plays: list[Play] = []
        limits: list[float] = []
        num_bytes = 0
        has_room = self._has_room()
        while places and len(plays) < self._at_once and num_bytes < MAX_BYTES_AT_ONCE:
            place = places.popleft()
            ask = call.asks[place]
            if not has_room and not isinstance(ask, End):
                failure = Failure(reason="oversize", detail="the reward service keeps as much as it may")
                self._settle(call, place, failure)
                continue
            prepared = ask.prepare(deterministic=self._facts.deterministic)
            if not isinstance(prepared, Play):
                self._answer_at_once(call, place, prepared)
                continue
            if prepared.task is not None:
                self._sessions.add(ask.session)
                self._num_begun += 1
            num_bytes += ask.session.num_bytes + (len(prepared.message.content) if prepared.message else 0)
            chosen.append(place)
            plays.append(prepared)
            limits.append(ask.session.call_timeout_s)
        return chosen, plays, limits

    def _answer_at_once(self, call: Call, place: int, result: Result) -> None:
        ask = call.asks[place]
        ask.session.used_s = time.monotonic()
        if isinstance(ask, End):
            self._drop(ask.session)
        call.deliver(place, result)

    def _settle(self, call: Call, place: int, result: Result) -> None:
        ask = call.asks[place]
        ask.settle(result)
        ask.session.used_s = time.monotonic()
        if ask.is_last(result):
            self._drop(ask.session)
        self._on_result(result)
        call.deliver(place, result)

    def _drop(self, session: Session) -> None:
        self._sessions.discard(session)
        self._forget(session)

    def _ready(self) -> Loaded:
        """Returns the facts of a child that plays this environment, started if need be, or why there can be none."""
        cage = self._cages.get("")
        if cage is not None and cage.child is not None:
            is_playing = any(session.is_in_child for session in self._sessions)
            is_stale = self._num_begun >= SESSIONS_OF_A_CHILD and not is_playing
            if not is_stale:
                return Loaded(facts=self._facts)
        self._num_begun = 0
        try:
            if cage is not None and not cage.is_alive:
                self._end("")
            cage = self._cage("")
            loaded = cage.start_child()
        except (ChildLate, ChildDied) as error:
            self._end("")
            reason: FailureReason = "timeout" if isinstance(error, ChildLate) else "crashed"
            return Loaded(failure=Failure(reason=reason, detail=str(error)))
        self._of_pool.say_what_is_missing(cage.missing or ())
        if loaded.facts is not None:
            self._facts = loaded.facts
        return loaded

    def _lose_child(self) -> None:
        """The child is gone: sessions of a deterministic environment begin again when they are asked for next."""
        for session in self._sessions:
            session.is_in_child = False

    def _sweep(self) -> None:
        """Ends the sessions that were asked nothing for long: their generator is gone."""
        now_s = time.monotonic()
        self._swept_s = now_s
        self.num_bytes = sum(session.num_bytes for session in self._sessions)
        with self._changed:
            waiting = {ask.session for call in self._calls for ask in call.asks}
        idle = [session for session in self._sessions - waiting if now_s - session.used_s > session.idle_s]
        if idle:
            log.info("%d sessions were idle for too long and are ended", len(idle))
            with self._changed:
                self._calls.append(Call(asks=[End(session) for session in idle]))
        for session in idle:
            self._forget(session)

    def _end(self, key: str) -> None:
        self._lose_child()
        super()._end(key)
