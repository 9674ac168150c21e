"""The thread beside a trainer: what it sees is raised where it can be answered, or ends the process."""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import onbeat.loop.lease_keeper as lease_keeper
from contracts.errors import BrokerUnavailable, FencedOff, OnbeatError, Unavailable
from contracts.jobs import JobState
from onbeat.base.process.waiting import Waiting
from onbeat.loop.lease_keeper import Cancelled, LeaseKeeper, Stopped

SOON_S = 60.0
"""A deadline that only a keeper which never gets there reaches."""


class Side:
    """Renewals that the test answers, one by one."""

    def __init__(self) -> None:
        self.answers: queue.SimpleQueue[JobState | BaseException] = queue.SimpleQueue()

    def renew(self) -> JobState:
        answer = self.answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer


class Kept:
    def __init__(self, *, patience_s: float = math.inf) -> None:
        self.side = Side()
        self.ended: queue.SimpleQueue[Exception | str] = queue.SimpleQueue()
        self.keeper = LeaseKeeper(
            self.side,  # type: ignore[arg-type]
            lease_s=0.03,
            end_loading=self.ended.put,
            end_stuck=lambda silent_s: self.ended.put("stuck"),
            patience_s=patience_s,
            end_hung=lambda silent_s: self.ended.put("hung"),
        )

    def raises(self, kind: type[Exception], words: str = "") -> None:
        """Calls `check` once the thread has seen its answer."""
        waiting = Waiting(f"a {kind.__name__}", deadline_s=SOON_S)
        while (error := self._error()) is None:
            waiting.poke()
        assert isinstance(error, kind)
        assert words in str(error)

    def _error(self) -> Exception | None:
        try:
            self.keeper.check()
        except Exception as error:
            return error
        return None


@contextmanager
def keeping(*, loaded: bool = True, patience_s: float = math.inf) -> Iterator[Kept]:
    kept = Kept(patience_s=patience_s)
    if loaded:
        kept.keeper.loaded()
    kept.keeper.start()
    try:
        yield kept
    finally:
        kept.side.answers.put(FencedOff("the end of the test"))
        kept.keeper.close()


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (JobState.CANCELLING, Cancelled, ""),
        (JobState.CANCELLED, FencedOff, "the job is cancelled by now"),
        (FencedOff("epoch 3 is over"), FencedOff, "epoch 3"),
        (BrokerUnavailable("away"), Unavailable, "away"),
        (
            RuntimeError("can't start new thread"),
            Unavailable,
            "the thread that renews the lease has failed: RuntimeError: can't start",
        ),
        (ValueError("'lost' is not a valid JobState"), Unavailable, "is not a valid JobState"),
        (OnbeatError("as it is"), OnbeatError, "as it is"),
    ],
    ids=[
        "a cancel",
        "an end",
        "another trainer",
        "no Redis",
        "an error of nobody",
        "an answer of nobody",
        "of the tree",
    ],
)
def test_what_the_thread_meets_is_raised_in_the_trainer(
    answer: JobState | Exception, kind: type[Exception], words: str
) -> None:
    with keeping() as kept:
        kept.side.answers.put(JobState.RUNNING)
        kept.side.answers.put(answer)
        kept.raises(kind, words)
        assert kept.ended.empty(), "one that trains is not ended behind its back"


def stopped(kept: Kept) -> None:
    kept.keeper.request_stop()


def answered(answer: JobState | Exception) -> Callable[[Kept], None]:
    return lambda kept: kept.side.answers.put(answer)


@pytest.mark.parametrize(
    ("happens", "kind"),
    [
        (answered(JobState.CANCELLING), Cancelled),
        (answered(JobState.FAILED), FencedOff),
        (answered(BrokerUnavailable("away")), Unavailable),
        (stopped, Stopped),
    ],
    ids=["a cancel", "an end", "no Redis", "a signal"],
)
def test_a_trainer_that_loads_is_ended_by_the_thread(happens: Callable[[Kept], None], kind: type[Exception]) -> None:
    with keeping(loaded=False) as kept:
        happens(kept)
        assert isinstance(kept.ended.get(timeout=SOON_S), kind)


def test_what_came_while_it_loaded_is_raised_when_it_has() -> None:
    kept = Kept()
    kept.keeper.request_stop()
    with pytest.raises(Stopped):
        kept.keeper.loaded()


def test_a_pass_that_does_not_end_ends_the_process() -> None:
    with keeping() as kept, kept.keeper.training(longest_pass_s=0.3):
        assert kept.ended.get(timeout=SOON_S) == "stuck"


def test_a_loaded_trainer_that_makes_no_call_between_its_passes_is_ended() -> None:
    with keeping(patience_s=0.3) as kept:
        with kept.keeper.training(longest_pass_s=SOON_S):
            pass
        assert kept.ended.get(timeout=SOON_S) == "hung"


def test_one_that_loads_may_take_longer_than_that() -> None:
    with keeping(loaded=False, patience_s=0.3) as kept, pytest.raises(queue.Empty):
        kept.ended.get(timeout=1.0)


def test_one_that_loads_for_ever_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread's own looks are no sign of life."""
    monkeypatch.setattr(lease_keeper, "LONGEST_LOAD_S", 0.5)
    with keeping(loaded=False, patience_s=0.3) as kept:
        assert kept.ended.get(timeout=SOON_S) == "hung"


def test_what_comes_between_two_passes_may_take_longer_than_one() -> None:
    """A checkpoint, or a publication, also of a trainer that was asked to stop: it gets the time that it needs."""
    with keeping() as kept:
        with kept.keeper.training(longest_pass_s=0.1):
            pass
        kept.keeper.request_stop()
        with pytest.raises(queue.Empty):
            kept.ended.get(timeout=1.0)
