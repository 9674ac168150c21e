"""What a worker holds: each claim by itself, whatever a server has forgotten."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from broker.leases import Renewal
from contracts.errors import BrokerUnavailable
from contracts.monitor import WorkerSeen
from onbeat.work import heartbeat
from onbeat.work.heartbeat import PRESENCE_S, Heartbeat, Leases

NUM_BEATS = 20


class Side:
    """One job's, which answers what it is set to; without an answer it is away."""

    def __init__(self) -> None:
        self.answer: Renewal[str] | None = Renewal()
        self.renewed: list[list[str]] = []

    def renew(self, claims: Sequence[str], /) -> Renewal[str]:
        if self.answer is None:
            raise BrokerUnavailable("connection refused")
        self.renewed.append(list(claims))
        return self.answer


def test_leases_are_renewed_by_job_and_what_lapsed_is_held_until_it_is_ended() -> None:
    leases: Leases[str] = Leases()
    one, other = Side(), Side()
    first, second, third = "first", "second", "third"
    leases.hold(one, first, lease_s=6.0, name="a")
    leases.hold(one, second, lease_s=3.0, name="b")
    leases.hold(other, third, lease_s=60.0, name="c")
    assert (leases.pause_s, str(leases), list(leases)) == (1.0, "a, b, c", [first, second, third])
    one.answer, other.answer = Renewal(lost=(first,)), Renewal(settled=(third,))
    lapsed = leases.renew()
    assert (lapsed.lost, lapsed.settled, len(leases)) == ((first,), (third,), 3)
    assert (leases.end(first), leases.end(first)) == ("a", None)
    leases.renew([second])
    assert (one.renewed, other.renewed) == ([[first, second], [second]], [[third]])
    leases.end(second)
    assert leases.pause_s == PRESENCE_S


def test_a_lease_that_ends_before_the_next_beat_brings_it_forward() -> None:
    unused: Any = dict.fromkeys(("worker_id", "calls", "board", "seen", "let_go", "copies", "services"))
    quiet: Heartbeat[str] = Heartbeat(leases=Leases(), **unused)
    quiet._due_s = time.monotonic() + PRESENCE_S
    for lease_s, is_early in ((60.0, False), (0.3, True)):
        quiet.leases.hold(Side(), "claim", lease_s=lease_s, name="a")
        quiet.look_at_new_claim()
        assert quiet.changed.is_set() is is_early


class EverNews:
    """A board behind each of whose signs of life there is something new to say, until there were enough."""

    def __init__(self) -> None:
        self.changed, self.enough = asyncio.Event(), asyncio.Event()
        self.num_beats = 0

    def beat(self, worker: WorkerSeen, /) -> None:
        self.num_beats += 1
        (self.changed if self.num_beats < NUM_BEATS else self.enough).set()

    def live(self) -> list[WorkerSeen]:
        return []


@pytest.mark.parametrize(("lease_s", "num_renewals"), [(1800.0, 1), (0.0, NUM_BEATS - 1)])
async def test_news_is_said_without_a_renewal_that_is_not_due_and_keeps_none_away_that_is(
    lease_s: float, num_renewals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "PRESENCE_S", 600.0)
    leases, side, board = Leases[str](), Side(), EverNews()
    leases.hold(side, "a claim", lease_s=lease_s, name="a")

    async def calls(call: Callable[..., Any], *arguments: Any) -> Any:
        await asyncio.sleep(0)
        return call(*arguments)

    parts: Any = {"calls": calls, "board": board, "leases": leases, "changed": board.changed}
    seen = WorkerSeen(worker_id="w")
    told: Any = {"worker_id": "w", "seen": lambda: seen, "let_go": lambda _: None, "copies": list, "services": []}
    beating = asyncio.create_task(Heartbeat(**parts, **told).run())
    await board.enough.wait()
    beating.cancel()
    assert len(side.renewed) == num_renewals


def test_a_renewal_that_a_server_does_not_answer_forgets_nothing_that_another_job_was_told() -> None:
    leases: Leases[str] = Leases()
    one, other = Side(), Side()
    leases.hold(one, "first", lease_s=6.0, name="a")
    leases.hold(other, "second", lease_s=6.0, name="b")
    one.answer, other.answer = Renewal(lost=("first",)), None
    with pytest.raises(BrokerUnavailable):
        leases.renew()
    other.answer = Renewal()
    assert leases.renew().lost == ("first",)


def test_a_claim_that_a_restarted_server_gives_out_again_is_held_beside_the_first() -> None:
    leases: Leases[tuple[str, ...]] = Leases()
    first, again = (tuple(name.split()) for name in ("0/train/0", "0/train/0"))
    assert first == again
    assert first is not again
    side = Side()
    for one in (first, again):
        leases.hold(side, one, lease_s=6.0, name="0/train/0")  # pyright: ignore[reportArgumentType]
    leases.end(first)
    assert [one is again for one in leases] == [True]
