"""The life of tasks as a walk over the real functions: several workers, lost messages, deaths, and steps of time.

Time is moved by moving what Redis holds of it: leases and when a task is due. After each step:

- a task has one live attempt at most, and no attempt that was taken for dead changes its record;
- a task that has ended stays as it ended;
- no task is begun more than MAX_ATTEMPTS times without being given back;
- every task that is open is among those that `due` finds again, in its time.

At the end whatever is open is worked off, by `due` alone: each task ends.
"""

from __future__ import annotations

import os
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from broker import keys
from broker.connection.client import Broker, connect
from broker.task_store import Attempt, TaskStore
from contracts.errors import Conflict, FencedOff
from contracts.settings import StackSettings
from contracts.tasks.kinds import TaskKind, TaskState
from contracts.tasks.records import MAX_ATTEMPTS, TaskArguments, TaskResult, TaskStatus
from onbeat.stack.redis import EmbeddedRedis

WORKERS = ("one", "two", "three")
KINDS = (TaskKind.VERIFY, TaskKind.EXPORT)
EXAMPLES = 300 if os.environ.get("CHAOS_LONG") else 25
STEPS = 40


@dataclass
class Known:
    """What the walk knows of a task."""

    live: Attempt | None = None
    """The attempt whose lease lives."""
    worker: str = ""
    dead: list[Attempt] = field(default_factory=list)
    """Attempts that another has followed, or that have ended."""
    counted: int = 0
    """Attempts that count."""
    ended: TaskStatus | None = None
    is_cancelling: bool = False


class TaskWalk(RuleBasedStateMachine):
    """A walk; `broker` is set by the test."""

    broker: ClassVar[Broker]
    tasks = Bundle("tasks")

    @initialize()
    def begin(self) -> None:
        """Has no task of another walk be in the way."""
        redis = self.broker.redis
        for key in (keys.TASKS, keys.OPEN_TASKS, "onbeat:task_names", keys.TASK_COUNTS):
            redis.delete(key)
        self.store = TaskStore(self.broker)
        self.known: dict[str, Known] = {}
        self.ends: Counter[str] = Counter()

    @rule(target=tasks, kind=st.sampled_from(KINDS))
    def create(self, kind: TaskKind) -> str:
        task, is_new = self.store.create(kind, TaskArguments(), who=uuid.uuid4().hex)
        assert is_new
        self.known[task] = Known()
        return task

    @rule(task=tasks, worker=st.sampled_from(WORKERS))
    def a_message_comes(self, task: str, worker: str) -> None:
        """Doubled, late, or of a task that has ended: the record decides."""
        known = self.known[task]
        queue = self.store.status(task).queue
        of_worker = [name for name, other in self.known.items() if other.live and other.worker == worker]
        is_busy = queue in [self.queue_of(name) for name in of_worker]
        attempt = self.store.begin(task, worker=worker)
        if known.ended or known.live or is_busy:
            assert attempt is None
            return
        assert attempt is not None
        assert attempt.is_exhausted == (known.counted == MAX_ATTEMPTS)
        known.live, known.worker = attempt, worker
        known.counted = min(MAX_ATTEMPTS, known.counted + 1)
        if attempt.is_exhausted:
            self.end_as(task, TaskState.FAILED)

    @precondition(lambda self: any(known.live for known in self.known.values()))
    @rule(data=st.data(), state=st.sampled_from([TaskState.DONE, TaskState.FAILED]))
    def an_attempt_ends(self, data: st.DataObject, state: TaskState) -> None:
        self.end_as(data.draw(st.sampled_from(self.running())), state)

    @precondition(lambda self: any(known.live for known in self.known.values()))
    @rule(data=st.data(), counts=st.booleans())
    def an_attempt_is_given_back(self, data: st.DataObject, counts: bool) -> None:
        """Its worker was asked to end, or it met what may pass."""
        task = data.draw(st.sampled_from(self.running()))
        known = self.known[task]
        assert known.live
        if counts:
            self.store.retry(known.live, reason="a store is away")
        else:
            self.store.give_back(known.live, reason="its worker was asked to end")
        is_last = counts and known.live.number >= MAX_ATTEMPTS
        self.over(task)
        if not counts:
            known.counted -= 1
        if is_last:
            self.ended(task, TaskState.FAILED)
        elif known.is_cancelling:
            self.ended(task, TaskState.CANCELLED)

    @precondition(lambda self: any(known.live for known in self.known.values()))
    @rule(data=st.data())
    def an_attempt_dies(self, data: st.DataObject) -> None:
        """Its process was killed, and its lease has run out."""
        task = data.draw(st.sampled_from(self.running()))
        self.broker.redis.hset(keys.task(task), "lease_until", 0)
        self.broker.redis.zadd(keys.OPEN_TASKS, {task: 0})
        self.over(task)

    @precondition(lambda self: any(known.live for known in self.known.values()))
    @rule(data=st.data())
    def an_attempt_lives(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(self.running()))
        known = self.known[task]
        assert known.live
        assert self.store.renew(known.live, self.store.status(task).progress) == known.is_cancelling

    @precondition(lambda self: any(known.dead for known in self.known.values()))
    @rule(data=st.data(), state=st.sampled_from([TaskState.DONE, TaskState.FAILED, TaskState.CANCELLED, None]))
    def one_that_was_taken_for_dead_speaks(self, data: st.DataObject, state: TaskState | None) -> None:
        """It is told so, and changes nothing, unless all that had happened is that its lease ran out."""
        task = data.draw(st.sampled_from([task for task, known in self.known.items() if known.dead]))
        known = self.known[task]
        attempt = data.draw(st.sampled_from(known.dead))
        before = self.store.status(task)
        if not known.ended and known.live is None and before.state is TaskState.RUNNING and attempt is known.dead[-1]:
            return  # no other attempt has begun: it may go on
        speak = self.store.renew if state is None else self.store.end
        with pytest.raises(FencedOff):
            speak(attempt, before.progress if state is None else state)  # type: ignore[operator]
        assert self.store.status(task) == before

    @rule(task=tasks)
    def it_is_cancelled(self, task: str) -> None:
        known = self.known[task]
        if known.ended and known.ended.state is not TaskState.CANCELLED:
            with pytest.raises(Conflict):
                self.store.cancel(task, by="a key")
            return
        self.store.cancel(task, by="a key")
        if known.live:
            known.is_cancelling = True
        elif not known.ended:
            self.ended(task, TaskState.CANCELLED)

    @rule()
    def a_look_finds_what_is_due(self) -> None:
        """The look finds tasks whose message may be lost; none whose attempt lives, or that has ended."""
        redis = self.broker.redis
        waiting = [task for task, known in self.known.items() if not known.ended and not known.live]
        is_running = {task.task_id for task in self.store.open() if task.state is TaskState.RUNNING}
        cancelled = [task for task in waiting if self.known[task].is_cancelling and task in is_running]
        if waiting:
            redis.zadd(keys.OPEN_TASKS, dict.fromkeys(waiting, 0))
        due = self.store.due()
        assert {task for task, _ in due} == set(waiting) - set(cancelled)
        assert all(queue == self.queue_of(task) for task, queue in due)
        for task in cancelled:
            self.ended(task, TaskState.CANCELLED)
        assert self.store.due() == []

    @invariant()
    def what_ended_stays(self) -> None:
        for task, known in self.known.items():
            if known.ended:
                assert self.store.status(task) == known.ended

    @invariant()
    def attempts_are_as_many_as_count(self) -> None:
        for task, known in self.known.items():
            assert self.store.status(task).attempts == known.counted <= MAX_ATTEMPTS

    @invariant()
    def every_open_task_is_among_those_that_are_found_again(self) -> None:
        stored: Any = self.broker.redis.zrange(keys.OPEN_TASKS, 0, -1)
        names = {name.decode() for name in stored}
        assert names == {task for task, known in self.known.items() if not known.ended}

    @invariant()
    def each_end_is_counted_once(self) -> None:
        counts = {key: number for key, number in self.store.counts().items() if key[0] != "ms"}
        assert sum(counts.values()) == sum(self.ends.values())

    def teardown(self) -> None:
        """Works off what is open, as workers do that hear of it by the look alone; some die each time."""
        if not hasattr(self, "known"):
            return
        for _ in range(2 * (MAX_ATTEMPTS + 2)):
            redis = self.broker.redis
            for task in self.running():
                redis.hset(keys.task(task), "lease_until", 0)
                self.over(task)
            if is_open := [task for task, known in self.known.items() if not known.ended]:
                redis.zadd(keys.OPEN_TASKS, dict.fromkeys(is_open, 0))
            for task, _ in self.store.due():
                attempt = self.store.begin(task, worker=f"worker of {task}")
                assert attempt is not None
                if attempt.is_exhausted:
                    self.store.end(attempt, TaskState.FAILED)
                else:
                    redis.hset(keys.task(task), "lease_until", 0)
            for task in is_open:
                if self.store.status(task).state.is_final:
                    self.known[task].ended = self.store.status(task)
        assert all(known.ended for known in self.known.values())
        assert self.store.open() == []

    def running(self) -> list[str]:
        return [task for task, known in self.known.items() if known.live]

    def queue_of(self, task: str) -> str:
        return self.store.status(task).queue

    def end_as(self, task: str, state: TaskState) -> None:
        known = self.known[task]
        assert known.live
        self.store.end(known.live, state, result=TaskResult(num_jobs=1) if state is TaskState.DONE else None)
        self.over(task)
        self.ended(task, state)

    def over(self, task: str) -> None:
        known = self.known[task]
        if known.live:
            known.dead.append(known.live)
        known.live, known.worker = None, ""

    def ended(self, task: str, state: TaskState) -> None:
        self.known[task].ended = self.store.status(task)
        assert self.store.status(task).state is state
        self.ends[state.value] += 1


@pytest.fixture
def own_broker(server: EmbeddedRedis) -> Iterator[Broker]:
    """A server of the walks' own: they remove the records of the one before."""
    broker = connect(StackSettings(redis_url=server.url))
    yield broker
    broker.close()


def test_walks_through_the_life_of_tasks_end_every_task_and_never_run_two_attempts(own_broker: Broker) -> None:
    TaskWalk.broker = own_broker
    run_state_machine_as_test(
        TaskWalk,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
