"""Tasks: their records, which are what is true of them, and the clock that starts some of them.

    create ─▶ queued ──begin──▶ running ──end──▶ done | failed | cancelled
                ▲                  │
                └── due, give_back ┘  its worker is gone, or was asked to end

A record is found again whatever becomes of Celery's message: `due` answers the tasks whose message may be lost. Only
the newest attempt of a task renews and ends it (`turn`); one whose lease ran out is refused, and changes nothing.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from redis import exceptions

from broker import keys
from broker.connection.client import Broker
from broker.connection.server_errors import passes
from broker.ledger import read_of
from broker.presence import TaskPresence
from contracts.encoding.wire import changed, decode, encode
from contracts.errors import Conflict, ContractViolation, FencedOff, NotFound, Unavailable
from contracts.events import TaskChanged
from contracts.tasks.kinds import TASK_ID, TaskKind, TaskQueue, TaskState
from contracts.tasks.records import (
    MAX_ATTEMPTS,
    MAX_REASON_CHARS,
    MAX_RESULT_BYTES,
    ClockEntry,
    ClockReport,
    QueueSeen,
    TaskArguments,
    TaskProgress,
    TaskResult,
    TaskStatus,
)

MAX_WAITING = 100
"""Tasks that wait in one queue; beyond them a new one is refused."""
MAX_KEPT = 1000
"""Records that are kept, those of ended tasks too."""
MAX_DUE = 100
LEASE_S = 15.0
"""How long an attempt counts as alive without a renewal; it renews every three seconds."""
CLOCK = "the clock"
"""The name of who asks for the tasks of the clock's entries. No key can have it: it has a space."""
RETRY_AFTER_S = 30
NO_PROGRESS = TaskProgress()

log = logging.getLogger(__name__)


def check_task_id(task_id: str) -> str:
    """Returns the id. Raises NotFound: another form is no task's, and would make another key."""
    if not TASK_ID.fullmatch(task_id):
        raise NotFound(f"`{task_id[:80]!a}` is no task's id", field="task_id", cure="`onbeat jobs --tasks` lists them")
    return task_id


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """An attempt at a task, as `TaskStore.begin` gives it to a worker."""

    task_id: str
    turn: int
    """Its number; no other attempt of the task has it."""
    number: int
    """The number of the attempt, from 1 to MAX_ATTEMPTS."""
    kind: TaskKind
    who: str
    arguments: TaskArguments
    is_exhausted: bool = False
    """The attempts are used up: it is begun to be ended as failed."""


class TaskStore:
    """Every task of the stack. Thread-safe.

    The gateway creates one to create, show and cancel tasks; workers of tasks and the clock, to begin and end them.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._redis: Any = broker.redis

    def create(
        self,
        kind: TaskKind,
        arguments: TaskArguments,
        *,
        who: str,
        queue: str = "",
        entry: ClockEntry | None = None,
    ) -> tuple[str, bool]:
        """Creates a task; who sends its message is told the id.

        Args:
            kind: What it does.
            arguments: What it is asked for. The same kind, asked for by the same person with the same arguments, is the
                same task while it is open.
            who: The name of the key that asks.
            queue: The queue of one host; "" takes that of the kind.
            entry: The clock's entry that it is a run of.

        Returns:
            The task's id, and True if it is new. "" where the entry was run in this period already.

        Raises:
            Unavailable: MAX_WAITING tasks wait in the queue.
        """
        task_id = f"task-{uuid.uuid4().hex[:12]}"
        event = b""  # a task of no job has no watchers
        if arguments.job_id:
            event = self._event(task_id, kind, TaskState.QUEUED, who)
        name, interval_ms, phase_ms = _period(entry)
        outcome, answer = self._broker.run(
            "create_task",
            encode(arguments),
            event,
            job=arguments.job_id,
            task_id=task_id,
            kind=kind.value,
            queue=queue or kind.queue.value,
            who=who,
            entry=name,
            interval_ms=interval_ms,
            phase_ms=phase_ms,
            max_waiting=MAX_WAITING,
            max_kept=MAX_KEPT,
        )
        if outcome == b"early":
            return "", False
        if outcome == b"full":
            error = Unavailable(
                f"{answer} tasks wait in the queue {queue or kind.queue.value}",
                field=kind.value,
                cure="wait until some are done, start another worker of tasks, or cancel some: `onbeat jobs --tasks`",
            )
            error.retry_after_s = RETRY_AFTER_S
            raise error
        return answer.decode(), outcome == b"created"

    def status(self, task_id: str) -> TaskStatus:
        """Reads a task. Raises NotFound, also for a task whose record was removed: the newest MAX_KEPT stay."""
        with self._broker.call():
            fields: dict[bytes, bytes] = self._redis.hgetall(keys.task(check_task_id(task_id)))
        if b"state" not in fields:
            raise _unknown(task_id)
        return _status(task_id, fields)

    def newest(self, limit: int, *, where: Callable[[TaskStatus], bool] = lambda _: True) -> list[TaskStatus]:
        """Returns at most so many of the tasks that `where` takes, newest first."""
        with self._broker.call():
            ids = [name.decode(errors="replace") for name in self._redis.zrevrange(keys.TASKS, 0, -1)]
        return [status for status in self._statuses(ids) if where(status)][:limit]

    def open(self) -> list[TaskStatus]:
        """Returns the tasks that are queued or running, oldest first."""
        with self._broker.call():
            ids = [name.decode(errors="replace") for name in self._redis.zrange(keys.OPEN_TASKS, 0, -1)]
        return sorted(self._statuses(ids), key=lambda status: (status.created_s, status.task_id))

    def cancel(self, task_id: str, *, by: str) -> TaskStatus:
        """Ends a task that waits, and has one that runs end soon. Repeating it changes nothing.

        Raises:
            NotFound: There is no such task.
            Conflict: It has ended otherwise.
        """
        before = self.status(task_id)
        reason = f"cancelled by {by}"
        job_id = before.arguments.job_id
        event = b""  # a task of no job has no watchers
        if job_id:
            event = self._event(task_id, before.kind, TaskState.CANCELLED, by, reason)
        outcome, *rest = self._broker.run("cancel_task", event, job=job_id, task_id=task_id, reason=reason)
        if outcome == b"ended" and rest[0].decode() != TaskState.CANCELLED.value:
            raise Conflict(f"a task that is {rest[0].decode()} cannot be cancelled", field="state")
        return self.status(task_id)

    def begin(self, task_id: str, *, worker: str) -> Attempt | None:
        """Takes a task for a worker; None where there is nothing to begin.

        That is a task that has ended, that another worker runs, or that waits until this worker is done with another
        one of its queue. worker: the id of the process.
        """
        outcome, *rest = self._broker.run(
            "begin_task",
            task_id=check_task_id(task_id),
            worker=worker,
            lease_ms=int(LEASE_S * 1000),
            max_attempts=MAX_ATTEMPTS,
        )
        if outcome not in (b"begun", b"exhausted"):
            return None
        turn, number, kind, _, who, arguments = rest
        try:
            with read_of(task_id):
                return Attempt(
                    task_id=task_id,
                    turn=turn,
                    number=number,
                    kind=TaskKind(kind.decode()),
                    who=who.decode(errors="replace"),
                    arguments=decode(arguments, TaskArguments),
                    is_exhausted=outcome == b"exhausted",
                )
        except ContractViolation as error:
            # Of another Onbeat, or damaged: it would be begun again for ever.
            self._fail_unreadable(task_id, turn, str(error))
            return None

    def _fail_unreadable(self, task_id: str, turn: int, reason: str) -> None:
        log.warning("fails %s: %s", task_id, reason)
        self._broker.run(
            "end_task",
            encode(NO_PROGRESS),
            b"",
            b"",
            job="",
            task_id=task_id,
            turn=turn,
            state=TaskState.FAILED.value,
            reason=reason[:MAX_REASON_CHARS],
            uncounted=False,
        )

    def renew(self, attempt: Attempt, progress: TaskProgress) -> bool:
        """Returns True where the task was asked to end. Raises FencedOff where another attempt has taken its place."""
        outcome, *rest = self._broker.run(
            "renew_task", encode(progress), task_id=attempt.task_id, turn=attempt.turn, lease_ms=int(LEASE_S * 1000)
        )
        if outcome == b"lost":
            raise FencedOff(f"attempt {attempt.number} of {attempt.task_id} is over: its lease ran out", field="turn")
        return bool(rest[0])

    def end(
        self,
        attempt: Attempt,
        state: TaskState,
        *,
        progress: TaskProgress = NO_PROGRESS,
        result: TaskResult | None = None,
        reason: str = "",
    ) -> str:
        """Ends a task, tells its job's watchers, and returns the task that waits next in its queue, or "".

        Raises FencedOff where another attempt has taken its place.
        """
        body = b"" if result is None else encode(result)
        if len(body) > MAX_RESULT_BYTES:
            state = TaskState.FAILED
            body = b""
            reason = f"its result has more than {MAX_RESULT_BYTES} bytes"
        reason = reason[:MAX_REASON_CHARS]
        job_id = attempt.arguments.job_id
        event = b""  # a task of no job has no watchers
        if job_id:
            event = self._event(attempt.task_id, attempt.kind, state, attempt.who, reason)
        return self._end(attempt, state.value, reason, progress, body, event)

    def give_back(self, attempt: Attempt, *, reason: str, progress: TaskProgress = NO_PROGRESS) -> str:
        """Queues a task again whose worker was asked to end: the attempt doesn't count. As `end` otherwise."""
        return self._end(attempt, TaskState.QUEUED.value, reason, progress, b"", b"", uncounted=True)

    def retry(self, attempt: Attempt, *, reason: str, progress: TaskProgress = NO_PROGRESS) -> str:
        """Queues a task again that met what may pass, such as a store that is away. The attempt counts.

        As `end` otherwise; the last attempt fails.
        """
        if attempt.number >= MAX_ATTEMPTS:
            return self.end(attempt, TaskState.FAILED, progress=progress, reason=reason)
        return self._end(attempt, TaskState.QUEUED.value, reason[:MAX_REASON_CHARS], progress, b"", b"")

    def due(self) -> list[tuple[str, str]]:
        """Returns (task, queue) of the tasks that no worker has begun for a while, and of those whose worker is gone.

        The caller sends their messages again; no other caller is answered the same tasks for a while.
        """
        _, *rest = self._broker.run("due_tasks", most=MAX_DUE)
        words = [word.decode() for word in rest]
        return list(zip(words[::2], words[1::2], strict=True))

    def counts(self) -> dict[tuple[str, str], int]:
        """Returns how many tasks have ended: (state, kind) → number; ("ms", kind) → milliseconds together."""
        with self._broker.call():
            stored: dict[bytes, bytes] = self._redis.hgetall(keys.TASK_COUNTS)
        counts: dict[tuple[str, str], int] = {}
        for name, value in stored.items():
            state, _, kind = name.decode(errors="replace").partition(" ")
            if value.lstrip(b"-").isdigit():
                counts[state, kind] = int(value)
        return counts

    def queues(self) -> list[QueueSeen]:
        """Returns every queue that has tasks, or that a live worker takes from, and those of the kinds."""
        live = TaskPresence(self._broker).live()
        tasks = self.open()
        names = {queue.value for queue in TaskQueue} | {task.queue for task in tasks}
        names |= {queue for worker in live for queue in worker.queues}
        now_s = self._broker.now_s()
        seen: list[QueueSeen] = []
        for name in sorted(names):
            waiting = [task.created_s for task in tasks if task.queue == name and task.state is TaskState.QUEUED]
            seen.append(
                QueueSeen(
                    queue=name,
                    waiting=len(waiting),
                    running=sum(task.queue == name and task.state is TaskState.RUNNING for task in tasks),
                    oldest_s=max(0.0, now_s - min(waiting)) if waiting else 0.0,
                    workers=sum(name in worker.queues for worker in live),
                )
            )
        return seen

    def hold_clock(self, owner: str, entries: Sequence[ClockEntry], *, lease_s: float) -> bool:
        """Returns True while the clock is the owner's: of several that stand next to each other, one ticks.

        An entry that is new is known from now on (`known_s`), also to the next holder.
        """
        known = self._known_entries()
        now_s = self._broker.now_s()
        dated = [changed(entry, known_s=known.get(entry.name) or now_s) for entry in entries]
        names = {entry.name: True for entry in entries}
        lease_ms = int(lease_s * 1000)
        _, is_held = self._broker.run("hold_clock", encode(dated), owner=owner, lease_ms=lease_ms, names=names)
        return bool(is_held)

    def _known_entries(self) -> dict[str, float]:
        """Returns since when the clock has each of its entries; nothing where another Onbeat has written them."""
        try:
            return {entry.name: entry.known_s for entry in self.clock().entries}
        except ContractViolation as error:
            log.warning("the entries of the clock are written anew: %s", error)
            return {}

    def place(self, entry: str) -> str:
        """Returns how far an entry's work has come, in its own words; "" before the first run."""
        with self._broker.call():
            value: bytes | None = self._redis.hget(keys.CLOCK, f"place {entry}")
        return (value or b"").decode(errors="replace")

    def set_place(self, entry: str, place: str) -> None:
        """Keeps how far an entry's work has come."""
        self._broker.write("HSET", "clock", f"place {entry}", place)

    def clock(self) -> ClockReport:
        """Returns what the clock starts, when each ran last, and whose it is."""
        with self._broker.call():
            fields: dict[bytes, bytes] = self._redis.hgetall(keys.CLOCK)
        with read_of("onbeat:clock"):
            entries: tuple[ClockEntry, ...] = ()
            if b"entries" in fields:
                entries = decode(fields[b"entries"], tuple[ClockEntry, ...])
            lease_s = int(fields.get(b"lease_until", b"0")) / 1000 - self._broker.now_s()
            return ClockReport(
                entries=tuple(_as_run(entry, fields) for entry in entries),
                holder=fields.get(b"owner", b"").decode() if lease_s > 0 else "",
                lease_s=max(0.0, lease_s),
            )

    def _statuses(self, ids: Sequence[str]) -> list[TaskStatus]:
        """Returns the tasks whose records are there, and can be read: a damaged one hides no other."""
        ids = [task_id for task_id in ids if TASK_ID.fullmatch(task_id)]
        with self._broker.call():
            pipe: Any = self._redis.pipeline(transaction=False)
            for task_id in ids:
                pipe.hgetall(keys.task(task_id))
            answers = pipe.execute(raise_on_error=False) if ids else []
        return [status for task_id, fields in zip(ids, answers, strict=True) for status in _readable(task_id, fields)]

    def _end(
        self,
        attempt: Attempt,
        state: str,
        reason: str,
        progress: TaskProgress,
        result: bytes,
        event: bytes,
        *,
        uncounted: bool = False,
    ) -> str:
        outcome, *rest = self._broker.run(
            "end_task",
            encode(progress),
            result,
            event,
            job=attempt.arguments.job_id,
            task_id=attempt.task_id,
            turn=attempt.turn,
            state=state,
            reason=reason,
            uncounted=uncounted,
        )
        if outcome == b"lost":
            raise FencedOff(f"attempt {attempt.number} of {attempt.task_id} is over: its lease ran out", field="turn")
        return rest[0].decode()

    @staticmethod
    def _event(task_id: str, kind: TaskKind, state: TaskState, by: str, reason: str = "") -> bytes:
        event = TaskChanged(at_s=time.time(), task_id=task_id, kind=kind, state=state, by=by, reason=reason[:500])
        return encode(event)


def _period(entry: ClockEntry | None) -> tuple[str, int, int]:
    """Returns (name, interval in ms, phase in ms) of the clock's entry; of None those of a task that no clock starts.

    The script divides by the interval, so that it is at least 1.
    """
    if entry is None:
        return "", 1, 0
    return entry.name, int(entry.interval_s * 1000), int(entry.phase_s * 1000)


def _unknown(task_id: str) -> NotFound:
    return NotFound(
        f"there is no task {task_id}; of ended ones the newest {MAX_KEPT} are kept",
        field="task_id",
        cure="`onbeat jobs --tasks` lists them",
    )


def _readable(task_id: str, answer: dict[bytes, bytes] | Exception) -> list[TaskStatus]:
    """Returns the status in a list; none of a record that is gone or damaged. Raises redis-py's errors of a server that
    is away."""
    if isinstance(answer, Exception):
        if not isinstance(answer, exceptions.ResponseError) or passes(answer):
            raise answer
        log.warning("%s can't be read and is ignored: %s", task_id, answer)
        return []
    if b"state" not in answer:
        return []
    try:
        return [_status(task_id, answer)]
    except ContractViolation as error:
        log.warning("%s can't be read and is ignored: %s", task_id, error)
        return []


def _status(task_id: str, fields: dict[bytes, bytes]) -> TaskStatus:
    def text(name: bytes) -> str:
        return fields.get(name, b"").decode(errors="replace")

    def seconds(name: bytes) -> float:
        return int(fields.get(name) or 0) / 1000

    with read_of(task_id):
        state = TaskState(text(b"state"))
        progress = TaskProgress()
        if fields.get(b"progress"):
            progress = decode(fields[b"progress"], TaskProgress)
        result = None
        if fields.get(b"result"):
            result = decode(fields[b"result"], TaskResult)
        return TaskStatus(
            task_id=task_id,
            kind=TaskKind(text(b"kind")),
            queue=text(b"queue"),
            state=state,
            reason=text(b"reason"),
            arguments=decode(fields[b"arguments"], TaskArguments),
            who=text(b"who"),
            created_s=seconds(b"created_ms"),
            started_s=seconds(b"started_ms"),
            ended_s=seconds(b"ended_ms"),
            attempts=int(fields.get(b"attempts") or 0),
            worker=text(b"worker"),
            is_cancelling=fields.get(b"cancel") == b"1" and not state.is_final,
            progress=progress,
            result=result,
        )


def _as_run(entry: ClockEntry, fields: dict[bytes, bytes]) -> ClockEntry:
    """Returns the entry with the times of its runs, as the hash of the clock has them."""

    def seconds(name: str) -> float:
        return int(fields.get(f"{name} {entry.name}".encode()) or 0) / 1000

    last_s = seconds("last")
    next_s = 0.0  # an entry that never ran is due at once
    if last_s:
        period = (last_s - entry.phase_s) // entry.interval_s
        next_s = (period + 1) * entry.interval_s + entry.phase_s
    return changed(
        entry,
        last_s=last_s,
        done_s=seconds("done"),
        next_s=next_s,
        last_task=fields.get(f"task {entry.name}".encode(), b"").decode(errors="replace"),
    )
