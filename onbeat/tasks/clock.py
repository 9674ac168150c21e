"""`python -m onbeat.tasks.clock`: Celery's beat, which starts what is to be done again and again.

    every TICK_S ─▶ lease of the clock ─ another has it ─▶ nothing
                        └ ours ─▶ entries that are due ─▶ a task each, once a period ─▶ Celery's message

Consumes:     the settings, the signs of life of workers of tasks, and when each entry ran last.
Waits for:    its next tick.
Unblocked by: the time.
Produces:     tasks: their records and messages, in Redis; nothing on disk.

Entries and when they ran stand in Redis: a clock that was away, or whose Redis was, runs each entry once when it is
back, however many periods have passed. Several clocks may stand beside each other: one has the lease, and a period of
an entry is run once, whichever clock asks. An entry whose task of the period before is still open gets no other one.

Exit 0: it was asked to end. 2: a bad setting, or no Redis.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any, NamedTuple

from celery.beat import Scheduler, Service

import onbeat.base.process.own_packages  # noqa: F401  (first: it refuses packages of ours that are a stranger's)
from broker.connection.client import Broker, connect_within
from broker.presence import TaskPresence
from broker.task_store import CLOCK, TaskStore
from contracts.errors import OnbeatError, Unavailable
from contracts.settings import DAY_S, StackSettings, settings_from
from contracts.tasks.kinds import OF_HOST, TaskKind, TaskQueue
from contracts.tasks.records import ClockEntry, TaskArguments
from onbeat.base.metrics.process_metrics import ProcessMetrics, metrics_of
from onbeat.base.process.ending import end_in_time
from onbeat.base.telemetry import logs
from onbeat.base.telemetry.container_name import named
from onbeat.tasks.messages import TaskMessages, make_celery_app

TICK_S = 2.0
LEASE_S = 10.0
"""How long a clock that died keeps another one from ticking."""
PATIENCE_S = 2.0
"""How long a call waits for Redis."""
END_S = 10.0
"""Longest that the clock takes to end from its SIGTERM on, whatever Redis does."""
MINUTE_S = 60.0
VERIFY_EVERY_S = 600.0
"""How often tasks `verify` are created for some of the kept jobs, while a round goes on."""
BACKUP_AT_S = 3 * 3600.0
"""3:00 UTC."""
CLEAR_AT_S = 4 * 3600.0
"""4:00 UTC."""
MAX_HOSTS = 256
"""Hosts with a run root of their own whose files a task removes."""

log = logging.getLogger(__name__)


class Entry(NamedTuple):
    """An entry of the clock, and the queue that its tasks wait in."""

    entry: ClockEntry
    queue: str


def entries_of(settings: StackSettings, live_queues: Iterable[str] = ()) -> list[Entry]:
    """Returns what the clock of a stack starts.

    Args:
        settings: The stack's.
        live_queues: The queues that live workers of tasks take from. Where hosts share no run root, the files of each
            are removed by tasks of its own queue.
    """
    entries = [_entry("forget", TaskKind.FORGET, MINUTE_S)]
    if settings.objects:
        hosts = sorted({queue for queue in live_queues if queue.startswith(f"{TaskQueue.FILES.value}{OF_HOST}")})
        if len(hosts) > MAX_HOSTS:
            log.error(
                "%d hosts have files of ended jobs, and only %d are swept: let hosts share a run root",
                len(hosts),
                MAX_HOSTS,
            )
        for queue in hosts[:MAX_HOSTS]:
            entries.append(
                _entry(
                    f"remove_files{OF_HOST}{queue.partition(OF_HOST)[2]}", TaskKind.REMOVE_FILES, MINUTE_S, queue=queue
                )
            )
        entries.append(_entry("clear_objects", TaskKind.CLEAR_OBJECTS, DAY_S, phase_s=CLEAR_AT_S))
    else:
        entries.append(_entry("remove_files", TaskKind.REMOVE_FILES, MINUTE_S))
    if settings.verify_kept_days:
        entries.append(_entry("verify_kept", TaskKind.VERIFY_KEPT, VERIFY_EVERY_S))
    if settings.backup_root:
        entries.append(_entry("backup", TaskKind.BACKUP, DAY_S, phase_s=BACKUP_AT_S))
    return entries


def _entry(name: str, kind: TaskKind, interval_s: float, *, phase_s: float = 0.0, queue: str = "") -> Entry:
    entry = ClockEntry(name=name, kind=kind, interval_s=interval_s, phase_s=phase_s)
    return Entry(entry, queue or kind.queue.value)


class Clock:
    """A clock of a stack, which may have several."""

    def __init__(
        self, broker: Broker, settings: StackSettings, messages: TaskMessages, metrics: ProcessMetrics | None = None
    ) -> None:
        self._broker = broker
        self._settings = settings
        self._store = TaskStore(broker)
        self._presence = TaskPresence(broker)
        self._messages = messages
        self._metrics = metrics or ProcessMetrics("clock")
        self._owner = settings.process_id("clock")
        self._entries: list[ClockEntry] = []
        self._stopping = False

    def stop(self) -> None:
        """Has a tick that goes on end after its current entry. A signal handler may call it."""
        self._stopping = True

    def tick(self) -> float:
        """Creates the tasks that are due, and returns the seconds until the next tick.

        A server that is away, or refuses, ends the tick alone.
        """
        try:
            queues = {queue for worker in self._presence.live() for queue in worker.queues}
            entries = entries_of(self._settings, queues)
            self._entries = [entry for entry, _ in entries]
            is_ours = self._store.hold_clock(self._owner, self._entries, lease_s=LEASE_S)
            self._metrics.set("holds_lease", float(is_ours))
            if is_ours:
                self._run_due(entries)
            self._metrics.set("ticked", time.time())
        except OnbeatError as error:
            log.warning("the clock can't start tasks now: %s", error)
        return TICK_S

    def leave(self) -> None:
        """Lets another clock have the lease at once, where Redis answers."""
        try:
            if self._store.clock().holder == self._owner:
                self._store.hold_clock(self._owner, self._entries, lease_s=0.001)
        except OnbeatError as error:
            log.info("the clock can't give its lease back, which runs out by itself: %s", error)

    def _run_due(self, entries: list[Entry]) -> None:
        now_s = self._broker.now_s()
        has_run = {run.name for run in self._store.clock().entries if run.last_s <= now_s < run.next_s}
        for entry, queue in entries:
            if entry.name not in has_run and not self._stopping:
                self._run(entry, queue)

    def _run(self, entry: ClockEntry, queue: str) -> None:
        try:
            task_id, is_new = self._store.create(entry.kind, TaskArguments(), who=CLOCK, queue=queue, entry=entry)
        except Unavailable as error:
            # Full, or away. It is tried at the next tick: the period counts as run once there is a task.
            log.warning("the clock's %s is not started now: %s", entry.name, error)
            return
        if is_new:
            log.info("the clock's %s is task %s", entry.name, task_id)
            self._messages.send(task_id, queue)


class ClockScheduler(Scheduler):
    """The scheduler that Celery's beat asks at each of its turns.

    It has no file: what it would keep there stands in Redis.
    """

    def __init__(self, *arguments: Any, clock: Clock, **options: Any) -> None:
        self._clock = clock
        super().__init__(*arguments, **options)

    def setup_schedule(self) -> None:
        """Nothing: entries and their times stand in Redis."""

    def tick(self, *_: Any, **__: Any) -> float:
        """Runs one tick of the clock."""
        return self._clock.tick()


def run_clock(settings: StackSettings) -> int:
    """Ticks until a signal, and returns the exit code. Raises OnbeatError where Redis does not answer or refuses."""
    ending = end_in_time(END_S)
    broker = connect_within(settings, patience_s=PATIENCE_S)
    broker.check()
    clock = Clock(broker, settings, TaskMessages(settings), metrics_of(settings, "clock"))
    scheduler = functools.partial(ClockScheduler, clock=clock)
    service = Service(make_celery_app(settings), max_interval=TICK_S, scheduler_cls=scheduler)

    def end(_: int, __: FrameType | None) -> None:
        ending.begin()
        clock.stop()
        service.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    log.info("this process runs the clock")
    service.start()
    clock.leave()
    broker.close()
    return 0


def main() -> int:
    """Returns the exit code."""
    try:
        settings = named(settings_from(os.environ))
        logs.configure(settings, service="clock")
        return run_clock(settings)
    except OnbeatError as error:
        sys.stderr.write(f"clock: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
