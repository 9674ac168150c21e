"""A thread between two calls: whom it ends, and whom it answers."""

from __future__ import annotations

import time

from contracts.environments.messages import Message
from contracts.environments.service import Step, Task
from reward_service.cages import Cages
from reward_service.playing.play_cage import PlayCage
from reward_service.playing.playing_thread import PlayingThread
from reward_service.playing.sessions import Advance, End, Session

LONG_AGO_S = 100.0


def no_cage() -> PlayCage:
    raise AssertionError("nothing is played here")


def thread_not_started(forgotten: list[Session]) -> PlayingThread:
    return PlayingThread(
        name="thread",
        cages=Cages("environments", memory_mb=64, network=False, hidden=(), readable=(), on_restart=lambda: None),
        new_cage=no_cage,
        on_result=lambda result: None,
        forget=forgotten.append,
        has_room=lambda: True,
    )


def session_of(thread: PlayingThread, name: str, *, idle_s: float) -> Session:
    session = Session(
        session_id=name,
        task=Task(task="{}", seed=0),
        number=thread.next_number(),
        call_timeout_s=1.0,
        idle_s=idle_s,
        history=[],
        used_s=time.monotonic() - LONG_AGO_S,
    )
    thread._sessions.add(session)
    return session


def test_idle_sessions_end_however_many_calls_wait_and_one_that_is_asked_for_is_not_idle() -> None:
    forgotten: list[Session] = []
    thread = thread_not_started(forgotten)
    idle, asked = (session_of(thread, name, idle_s=LONG_AGO_S / 2) for name in ("idle", "asked"))
    session_of(thread, "in use", idle_s=2 * LONG_AGO_S)
    thread.ask([Advance(asked, Step(session_id="asked", turn=0, message=Message(role="assistant")))])
    thread._sweep()
    assert forgotten == [idle]
    assert [list(call.asks) for call in list(thread._calls)[1:]] == [[End(idle)]]


def test_a_caller_of_facts_that_is_gone_costs_the_thread_nothing() -> None:
    thread = thread_not_started([])
    assert thread.facts().cancel()
    thread._answer(thread._calls[0], ())
