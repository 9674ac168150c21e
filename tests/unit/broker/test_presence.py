"""Who reaches a service, and who doesn't: what processes say of it, and what they learn from one another."""

from __future__ import annotations

from broker.presence import MISSES, REACHES, GeneratorInfo, compare, missed_by_all, services_info
from contracts.errors import RewardUnavailable
from onbeat.process.dependency import JUDGE, REWARD_SERVICE, Dependency
from tests.until import Clock

AWAY = {MISSES: "reward service for 60.0 s at http://r: no answer: ConnectError", REACHES: ""}


def seen(generator_id: str, info: dict[str, str], *, seen_s: float = 1000.0) -> GeneratorInfo:
    return GeneratorInfo(worker_id=generator_id, seen_s=seen_s, info=info)


async def unasked() -> None:
    raise AssertionError("no probe is made here")


def reward_service(clock: Clock) -> Dependency:
    return Dependency(REWARD_SERVICE, "http://r", probe=unasked, clock=clock)


def test_a_process_says_what_it_misses_since_when_and_when_the_others_answered() -> None:
    clock = Clock()
    away, there = reward_service(clock), Dependency(JUDGE, "http://j", probe=unasked, clock=clock)
    away.missed(RewardUnavailable("no answer:\nConnectError"))
    there.answered()
    clock.now_s += 60.0
    said = services_info([away, there])
    assert said == AWAY | {REACHES: "judge 60.0 s ago"}


def test_a_process_that_alone_misses_a_service_learns_that_others_reach_it() -> None:
    service = reward_service(Clock())
    service.missed(RewardUnavailable("no answer"))
    for reached in ("", "reward service 59.5 s ago", "nonsense", "reward service 1.0 s ago\x00"):
        compare([service], "own", [seen("own", AWAY), seen("other", {REACHES: reached})])
        assert not service.others_reach, "no other has reached it since"
    compare([service], "own", [seen("own", AWAY), seen("other", AWAY | {REACHES: "reward service 1.0 s ago"})])
    assert service.others_reach


def test_a_process_learns_that_another_misses_a_service_and_may_ask_after_it() -> None:
    service = reward_service(Clock())
    compare([service], "own", [seen("own", {}), seen("other", AWAY)])
    assert (service.others_miss, service.others_reach) == (True, False)
    compare([service], "own", [seen("own", {}), seen("other", {})])
    assert not service.others_miss


def test_only_what_all_miss_is_missed_and_what_is_no_word_of_ours_counts_as_none() -> None:
    later = {MISSES: "reward service for 3.0 s at http://q: it refuses this process with 401: who"}
    words = "the reward service at http://r: no answer: ConnectError, for 60 s (as a says)"
    assert missed_by_all([seen("a", AWAY), seen("b", later)], [REWARD_SERVICE]) == words
    assert missed_by_all([seen("a", AWAY), seen("b", {})], [REWARD_SERVICE]) == ""
    assert missed_by_all([seen("a", AWAY)], [JUDGE]) == ""
    assert missed_by_all([], [REWARD_SERVICE]) == ""
    for junk in ("reward service", "reward service for -1.0 s at", f"reward service for 1.0 s {'x' * 5000}"):
        assert missed_by_all([seen("a", {MISSES: junk})], [REWARD_SERVICE]) == ""
