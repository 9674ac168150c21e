"""Who reaches a service, and who doesn't: what processes say of it, and what they learn from one another."""

from __future__ import annotations

import pytest

from broker.presence import compare, missed_by_all, tried_again
from contracts.encoding.wire import encode
from contracts.errors import RewardUnavailable
from contracts.monitor import GeneratorSeen, ServiceSeen
from onbeat.base.process.dependency import FORGOTTEN_S, JUDGE, REWARD_SERVICE, SHOWN_ANEW_S, Dependency
from tests.until import Clock

AWAY = ServiceSeen(name=REWARD_SERVICE, away_s=60.0, why="at http://r: no answer: ConnectError")


def there(answered_s: float) -> ServiceSeen:
    return ServiceSeen(name=REWARD_SERVICE, answered_s=answered_s)


def seen(generator_id: str, *services: ServiceSeen, seen_s: float = 2.0) -> GeneratorSeen:
    return GeneratorSeen(worker_id=generator_id, seen_s=seen_s, services=services)


async def unasked() -> None:
    raise AssertionError("no probe is made here")


def reward_service(clock: Clock) -> Dependency:
    return Dependency(REWARD_SERVICE, "http://r", probe=unasked, clock=clock)


def test_a_process_says_what_it_misses_since_when_and_when_the_others_answered() -> None:
    clock = Clock()
    away, judge, unknown = (
        Dependency(name, "http://r", probe=unasked, clock=clock) for name in (REWARD_SERVICE, JUDGE, "new")
    )
    away.answered()
    away.missed(RewardUnavailable("no answer:\nConnectError"))
    judge.answered()
    clock.now_s += 60.0
    assert [service.seen for service in (away, judge, unknown)] == [
        AWAY,
        ServiceSeen(name=JUDGE, answered_s=60.0),
        ServiceSeen(name="new"),
    ]


@pytest.mark.parametrize(
    ("seen_s", "answered_s", "is_reached"), [(2.0, 58.9, True), (2.0, 59.1, False), (9.0, 52.0, False)]
)
def test_a_process_that_alone_misses_a_service_learns_that_others_reach_it(
    seen_s: float, answered_s: float, is_reached: bool
) -> None:
    """It said 2 s ago that it has missed it for 60 s; a second more is left to two clocks."""
    service = reward_service(Clock())
    service.missed(RewardUnavailable("no answer"))
    for others in ([], [seen("other", AWAY)], [seen("other", ServiceSeen(name=JUDGE, answered_s=1.0))]):
        compare([service], "own", [seen("own", AWAY), *others])
        assert not service.others_reach, "no other has reached it since"
    compare([service], "own", [seen("own", AWAY), seen("other", there(answered_s), seen_s=seen_s)])
    assert service.others_reach is is_reached


def test_a_process_learns_that_another_misses_a_service_and_may_ask_after_it() -> None:
    service = reward_service(Clock())
    compare([service], "own", [seen("own"), seen("other", AWAY)])
    assert (service.others_miss, service.others_reach) == (True, False)
    compare([service], "own", [seen("own"), seen("other")])
    assert not service.others_miss


def test_only_what_all_miss_is_missed() -> None:
    later = ServiceSeen(name=REWARD_SERVICE, away_s=3.0, why="at http://q: it refuses this process with 401: who")
    words = "the reward service at http://r: no answer: ConnectError, for 60 s (as a says)"
    assert missed_by_all([seen("a", AWAY), seen("b", later)], [REWARD_SERVICE]) == words
    assert missed_by_all([seen("a", AWAY), seen("b")], [REWARD_SERVICE]) == ""
    assert missed_by_all([seen("a", AWAY), seen("b", there(1.0))], [REWARD_SERVICE]) == ""
    assert missed_by_all([seen("a", AWAY)], [JUDGE]) == ""
    assert missed_by_all([], [REWARD_SERVICE]) == ""


def test_what_is_asked_again_for_seconds_is_said_by_its_job_until_it_went_well_or_is_over() -> None:
    clock = Clock()
    service = reward_service(clock)
    service.answered()
    service.tried_again("job-1", "timeout in component plugin (raise a key)")
    assert b"tries_again" not in encode(service.seen), "of a moment nothing is said"
    clock.now_s += 6.0
    service.tried_again("job-1", "another text so soon is no news")
    live = [seen("quiet"), seen("a", service.seen)]
    words = "the reward service, which is asked again: timeout in component plugin (raise a key) (as a says)"
    assert tried_again(live, "job-1", [REWARD_SERVICE]) == words
    assert tried_again(live, "job-2", [REWARD_SERVICE]) == ""
    clock.now_s += SHOWN_ANEW_S
    service.tried_again("job-1", "another\ntext")
    assert service.seen.tries_again == {"job-1": "another text"}
    service.went_well("job-1")
    assert b"tries_again" not in encode(service.seen)
    for _ in range(2):
        service.tried_again("job-2", "left behind")
        clock.now_s += 6.0
    assert service.seen.tries_again == {"job-2": "left behind"}
    clock.now_s += FORGOTTEN_S
    assert b"tries_again" not in encode(service.seen), "the job has ended, or another process has the batch"
