"""Sessions of many environments, spread over caged children: one that hangs, dies or lies costs itself.

    open, step, close ─▶ kind of environment ─┬▶ thread 1 ═ cage ═ child: its sessions, one call after the other
                         (and job)            └▶ thread N ═ cage ═ child

A kind is an environment with its parameters, of one job; no child holds two of them. A kind without sessions stays as
long as no other one needs its place.

Consumes:     asks of sessions, many in one call.
Waits for:    the children's results.
Unblocked by: a result, a child's death, or the deadline of a call of an environment.
Produces:     a result for each ask, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock

from contracts.encoding.wire import encode
from contracts.environments import service
from contracts.errors import InvalidInput, Unavailable
from contracts.settings import StackSettings, usable_cores
from onbeat.base.cage.printed import PrintLog
from reward_service.cages import Cages
from reward_service.player import registry
from reward_service.player.protocol import Loaded
from reward_service.playing.play_cage import PlayCage
from reward_service.playing.playing_thread import PlayingThread
from reward_service.playing.repeated_tasks import compared
from reward_service.playing.sessions import Advance, Ask, Begin, End, Session, Show
from reward_service.playing.shares import Shares

MAX_KINDS = 8
MAX_CAGES = 240
"""Each has a user of its own, of 256."""
MAX_WAITING = 2**17
"""Asks that wait in all threads; one more call is refused."""
NO_SESSION = service.Failure(reason="lost", detail="the reward service has no such session")


@dataclass(kw_only=True, eq=False)
class Kind:
    """The threads of one environment of one job."""

    threads: list[PlayingThread]

    @property
    def is_busy(self) -> bool:
        return any(thread.is_busy for thread in self.threads)

    def least_loaded(self, number: int) -> list[PlayingThread]:
        """Threads for that many new sessions: always the one that has the fewest."""
        heap = [(thread.num_sessions + thread.num_waiting, place) for place, thread in enumerate(self.threads)]
        heapq.heapify(heap)
        chosen: list[PlayingThread] = []
        for _ in range(number):
            load, place = heap[0]
            chosen.append(self.threads[place])
            heapq.heapreplace(heap, (load + 1, place))
        return chosen


class EnvironmentPool:
    """Owns kinds and sessions. Its methods are for one event loop; the children's threads call back from outside it."""

    def __init__(
        self,
        settings: StackSettings,
        *,
        on_restart: Callable[[], None] = lambda: None,
        on_result: Callable[[service.Result], None] = lambda result: None,
    ) -> None:
        """on_restart: called for each child that was lost. on_result: for each result of a child.

        Raises InvalidInput for an operator's part in an environment that can't be read.
        """
        self._settings = settings
        self.num_children = settings.environment_children or usable_cores()
        self._operators_parts = registry.operators_parts(settings)
        self.cages = Cages(
            "environments",
            memory_mb=settings.environment_memory_mb,
            network=settings.environment_network == "host",
            hidden=settings.own_folders,
            readable=settings.readable_in_cages,
            on_restart=on_restart,
        )
        self._on_result = on_result
        self._kinds: OrderedDict[bytes, Kind] = OrderedDict()
        self._sessions: dict[str, tuple[Session, PlayingThread]] = {}
        self._guards_sessions = Lock()
        self._shares = Shares(settings.environment_sessions)
        """The jobs' shares of the sessions."""
        self._closed = False

    @property
    def is_alive(self) -> bool:
        return not self._closed and all(thread.is_alive() for thread in self._threads())

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def num_waiting(self) -> int:
        return sum(thread.num_waiting for thread in self._threads())

    async def facts(self, table: service.EnvironmentTable) -> Loaded:
        """Raises Unavailable."""
        (loaded,) = await asyncio.wrap_future(self._kind(table, "").threads[0].facts())
        return loaded

    async def repeatability(self, request: service.RepeatabilityRequest) -> str:
        """Says what differs where tasks are played twice; "" where nothing does. Raises Unavailable."""
        if self._closed or len(self.cages.numbers) + 2 > MAX_CAGES:
            raise Unavailable("no process can be started for a repeatability check now")
        return await asyncio.to_thread(compared, request, lambda: self.new_cage(request.environment))

    async def observations(self, request: service.InitialObservationRequest) -> list[service.Result]:
        """Raises Unavailable."""
        kind = self._kind(request.environment, request.job_id)
        threads, limit_s = kind.least_loaded(len(request.tasks)), request.step_timeout_s
        asks = [
            Show(Session(session_id="", task=task, number=thread.next_number(), call_timeout_s=limit_s, idle_s=limit_s))
            for task, thread in zip(request.tasks, threads, strict=True)
        ]
        return await self._results_of(asks, threads)

    async def open(self, request: service.OpenRequest) -> list[service.Result]:
        """Begins sessions; one that has the id of another ends that one. Raises Unavailable, InvalidInput."""
        _no_twice([new.session_id for new in request.sessions])
        kind = self._kind(request.environment, request.job_id)
        self.close([new.session_id for new in request.sessions])
        if not self._shares.take(request.job_id, len(request.sessions)):
            raise Unavailable(
                f"{self.num_sessions} sessions are open, of {self._settings.environment_sessions} that may be, and of "
                "half of them where another job wants some",
                cure="start another reward service, or raise ONBEAT_ENVIRONMENT_SESSIONS",
            )
        threads = kind.least_loaded(len(request.sessions))
        asks = [self._begun(new, thread, request) for new, thread in zip(request.sessions, threads, strict=True)]
        return await self._results_of(asks, threads)

    async def step(self, steps: Sequence[service.Step]) -> list[service.Result]:
        """Raises Unavailable, InvalidInput."""
        _no_twice([step.session_id for step in steps])
        entries = [self._sessions.get(step.session_id) for step in steps]
        asks = [Advance(entry[0], step) for entry, step in zip(entries, steps, strict=True) if entry is not None]
        results = iter(await self._results_of(asks, [entry[1] for entry in entries if entry is not None]))
        return [NO_SESSION if entry is None else next(results) for entry in entries]

    def renew(self, session_ids: Sequence[str]) -> int:
        """Keeps them from being idle; returns how many there are."""
        entries = [self._sessions.get(session_id) for session_id in session_ids]
        open_entries = [entry for entry in entries if entry is not None]
        for session, _ in open_entries:
            session.used_s = time.monotonic()
        return len(open_entries)

    def close(self, session_ids: Sequence[str]) -> int:
        """Ends those that are open, soon; returns how many there were."""
        with self._guards_sessions:
            entries = [self._sessions.pop(session_id, None) for session_id in session_ids]
        open_entries = [entry for entry in entries if entry is not None]
        for session, _ in open_entries:
            self._shares.give_back(session.job_id, 1)
        by_thread: dict[PlayingThread, list[Ask]] = {}
        for session, thread in open_entries:
            by_thread.setdefault(thread, []).append(End(session))
        for thread, asks in by_thread.items():
            with contextlib.suppress(Unavailable):
                thread.ask(asks)
        return len(open_entries)

    def shut(self) -> None:
        """Kills the children, fails what is not finished, and returns when no process is left."""
        self._closed = True
        self.cages.end(self._threads())

    def new_cage(
        self, table: service.EnvironmentTable, on_printed: Callable[[str], None] = lambda printed: None
    ) -> PlayCage:
        """Makes a cage for the thread that calls, which will own it. on_printed: takes what the environment prints."""
        built_in = registry.built_in_environment(table)
        rules, on_empty = self.cages.one_more(**(built_in.limits if built_in else {}))
        has_part = built_in is not None and built_in.from_operator is not None
        return PlayCage(
            rules,
            environment=table,
            reply_bytes=self._settings.environment_reply_kb * 1024,
            start_timeout_s=self._settings.environment_start_s,
            operators_part=self._operators_parts[table.name](table) if has_part else None,
            on_empty=on_empty,
            on_printed=on_printed,
        )

    async def _results_of(self, asks: Sequence[Ask], threads: Sequence[PlayingThread]) -> list[service.Result]:
        """Results in order; cancelling it withdraws what isn't played yet."""
        if self.num_waiting() + len(asks) > MAX_WAITING:
            raise Unavailable(f"{self.num_waiting()} steps wait already", cure="start another reward service")
        places: dict[PlayingThread, list[int]] = {}
        for place, thread in enumerate(threads):
            places.setdefault(thread, []).append(place)
        futures = [asyncio.wrap_future(thread.ask([asks[place] for place in mine])) for thread, mine in places.items()]
        by_place: dict[int, service.Result] = {}
        for mine, results in zip(places.values(), await asyncio.gather(*futures), strict=True):
            by_place |= zip(mine, results, strict=True)
        return [by_place[place] for place in range(len(asks))]

    def _begun(self, new: service.NewSession, thread: PlayingThread, request: service.OpenRequest) -> Begin:
        session = Session(
            session_id=new.session_id,
            task=new.task,
            number=thread.next_number(),
            call_timeout_s=request.step_timeout_s,
            idle_s=request.idle_s,
            job_id=request.job_id,
        )
        with self._guards_sessions:
            self._sessions[new.session_id] = session, thread
        return Begin(session, new)

    def _forget(self, session: Session) -> None:
        """Called by threads."""
        with self._guards_sessions:
            entry = self._sessions.get(session.session_id)
            if entry is not None and entry[0] is session:
                del self._sessions[session.session_id]
                self._shares.give_back(session.job_id, 1)

    def _has_room(self) -> bool:
        return sum(thread.num_bytes for thread in self._threads()) <= self._settings.environment_kept_mb * 2**20

    def _threads(self) -> list[PlayingThread]:
        return [thread for kind in list(self._kinds.values()) for thread in kind.threads]

    def _kind(self, table: service.EnvironmentTable, job_id: str) -> Kind:
        """Returns the environment's threads for a job, which is made where there are none. Raises Unavailable."""
        if self._closed:
            raise Unavailable("the environment pool is closed")
        key = encode((table.name, sorted(table.params.items()), table.source, job_id))
        kind = self._kinds.get(key)
        if kind is None:
            self._make_room()
            kind = Kind(threads=[self._thread(table, number, job_id) for number in range(self.num_children)])
            self._kinds[key] = kind
        self._kinds.move_to_end(key)
        return kind

    def _thread(self, table: service.EnvironmentTable, number: int, job_id: str) -> PlayingThread:
        on_printed = partial(PrintLog().write, job_id or f"environment {table.name}")
        thread = PlayingThread(
            name=f"environment-{table.name[:32]}-{number + 1}",
            cages=self.cages,
            new_cage=lambda: self.new_cage(table, on_printed),
            on_result=self._on_result,
            forget=self._forget,
            has_room=self._has_room,
        )
        thread.start()
        return thread

    def _make_room(self) -> None:
        """Ends the kind that was asked longest ago, of those without sessions. Raises Unavailable where there is none.

        Its threads end by themselves: the caller doesn't wait for them.
        """
        most = max(1, min(MAX_KINDS, MAX_CAGES // self.num_children))
        while len(self._kinds) >= most:
            key = next((key for key, kind in self._kinds.items() if not kind.is_busy), None)
            if key is None:
                raise Unavailable(
                    f"{len(self._kinds)} environments have sessions, and no more fit in",
                    cure="start another reward service, or wait for a job's end",
                )
            for thread in self._kinds.pop(key).threads:
                thread.stop()


def _no_twice(names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise InvalidInput(f"`{twice}` is there twice", field="session_id", cure="one step of a session in a call")
