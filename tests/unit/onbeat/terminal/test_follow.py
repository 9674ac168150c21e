"""Following a job: a gateway's silence counts from the first call in vain."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

import onbeat.terminal.follow as follow_module
from contracts.errors import DeadlineExceeded, Unavailable
from contracts.jobs import JobState
from onbeat.terminal.follow import follow
from tests.unit.onbeat.terminal.test_output import STATUS

RUNNING, ENDED = replace(STATUS, state=JobState.RUNNING), replace(STATUS, state=JobState.SUCCEEDED)
AWAY, SLEEPS = (Unavailable("connection reset by peer", field="gateway") for _ in range(2))
SLEPT_S = 1.5


class Gateway:
    """Gives its answers in turn, and the last one from then on."""

    url = "http://gateway"

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def job(self, job_id: str) -> Any:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is SLEEPS:
            time.sleep(SLEPT_S)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def events(self, job_id: str) -> Iterator[Any]:
        return iter(())


class View:
    def event(self, event: object, progress: object) -> None: ...

    def refresh(self, progress: object) -> None: ...


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_module, "UNREACHABLE_S", SLEPT_S / 2)
    monkeypatch.setattr(follow_module, "STATUS_EVERY_S", 0.0)
    monkeypatch.setattr(follow_module, "TICK_S", 0.01)


def test_a_machine_that_slept_does_not_take_the_gateway_for_gone() -> None:
    """A call of before that meets a connection that is no more; the next one is answered."""
    gateway = Gateway(RUNNING, RUNNING, SLEEPS, ENDED)
    assert follow(gateway, "job", view=View()).status.state is JobState.SUCCEEDED  # type: ignore[arg-type]


def test_a_gateway_that_stays_away_ends_it() -> None:
    with pytest.raises(DeadlineExceeded, match="the gateway at http://gateway"):
        follow(Gateway(RUNNING, AWAY), "job", view=View())  # type: ignore[arg-type]
