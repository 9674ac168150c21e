"""Requests to sample a batch again: one generator at a time answers each, and no key of a job's fence ever moves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

import broker.replays as replays
from broker.connection.client import Broker, connect
from broker.job_store import JobStore
from broker.keys import REPLAYS, sealed_name
from broker.replays import Replays
from contracts.errors import ContractViolation, NotFound, Unavailable
from contracts.replays import ReplayState
from contracts.settings import StackSettings
from process.waiting import Waiting
from tests.builders import DIGEST, job_spec
from tests.every_key import every_key

OTHER = "f" * 64


@pytest.fixture
def broker(settings: StackSettings) -> Iterator[Broker]:
    made = connect(settings)
    made.redis.delete(everything(made))
    yield made
    made.redis.delete(everything(made))
    made.close()


@pytest.fixture
def job(broker: Broker) -> str:
    return JobStore(broker).create(job_spec())[0]


def everything(broker: Broker) -> str:
    """The hash of the requests."""
    return sealed_name(REPLAYS, broker.seal)


def dump(broker: Broker, job_id: str) -> dict[str, Any]:
    return {key: broker.redis.dump(key) for key in every_key(broker.job_keys(job_id))}


def test_a_request_is_answered_by_the_generator_that_holds_it(broker: Broker, job: str) -> None:
    asked, before = Replays(broker), dump(broker, job)
    assert asked.claim("g1", lease_s=30) is None
    first = asked.request(job, "1/train/0", recorded_digest=DIGEST)
    assert asked.request(job, "1/train/0", recorded_digest=DIGEST) == first, "while it waits, it is the same request"
    second = asked.request(job, "1/train/1", recorded_digest=DIGEST)
    held = asked.claim("g1", lease_s=30)
    assert held is not None
    assert held.replay_id == first.replay_id, "the oldest comes first"
    other = asked.claim("g2", lease_s=30)
    assert other is not None
    assert other.replay_id == second.replay_id
    assert asked.claim("g3", lease_s=30) is None
    assert asked.renew(held, lease_s=30)
    assert asked.done(held, digest=DIGEST)
    assert asked.done(other, digest=OTHER, reason="group 0, sample 1: token 2 is 7, recorded 9")
    same, differs = asked.get(first.replay_id), asked.get(second.replay_id)
    assert same is not None
    assert differs is not None
    assert (same.state, same.equal, same.generator_id, same.reason) == (ReplayState.DONE, True, "g1", "")
    assert (differs.state, differs.equal) == (ReplayState.DONE, False)
    assert "token 2 is 7" in differs.reason
    assert asked.request(job, "1/train/0", recorded_digest=DIGEST).replay_id != first.replay_id, "it may be asked again"
    assert dump(broker, job) == before


def test_a_lease_that_runs_out_goes_to_another_generator_and_the_late_answer_is_refused(
    broker: Broker, job: str
) -> None:
    asked = Replays(broker)
    request = asked.request(job, "1/train/0", recorded_digest=DIGEST)
    late = asked.claim("g1", lease_s=0.001)
    assert late is not None
    waiting, taken = Waiting("the lease to run out", deadline_s=10.0), None
    while (taken := asked.claim("g2", lease_s=30)) is None:
        waiting.poke()
        time.sleep(0.001)
    assert not asked.renew(late, lease_s=30)
    assert not asked.done(late, digest=OTHER)
    assert not asked.failed(late, "late")
    assert asked.done(taken, digest=DIGEST)
    found = asked.get(request.replay_id)
    assert found is not None
    assert (found.equal, found.generator_id) == (True, "g2")


def test_a_request_that_kills_its_generators_fails_and_one_that_is_left_alone_does_not(
    broker: Broker, job: str
) -> None:
    asked = Replays(broker)
    request = asked.request(job, "1/train/0", recorded_digest=DIGEST)
    for _ in range(2 * replays.MAX_ATTEMPTS):
        held = asked.claim("g1", lease_s=30)
        assert held is not None
        assert asked.left(held, "it needs another kind of engine")
    found = asked.get(request.replay_id)
    assert found is not None
    assert (found.state, found.reason) == (ReplayState.QUEUED, "it needs another kind of engine")
    assert asked.claim("g1", lease_s=30, left_alone=[request.replay_id]) is None
    deaths, waiting = 0, Waiting("the request to fail", deadline_s=10.0)
    while (found := asked.get(request.replay_id)) is not None and found.state is not ReplayState.FAILED:
        deaths += asked.claim("g1", lease_s=0.0) is not None
        waiting.poke()
        time.sleep(0.002)
    assert found is not None
    assert (deaths, found.reason) == (replays.MAX_ATTEMPTS, "its generators died, or hung, 3 times")


def test_requests_are_bounded_and_end_by_themselves(broker: Broker, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Replays(broker)
    monkeypatch.setattr(replays, "MAX_KEPT", 3)
    made = [asked.request(job, f"1/train/{index}", recorded_digest=DIGEST) for index in range(3)]
    with pytest.raises(Unavailable, match="3 replays wait already"):
        asked.request(job, "1/train/9", recorded_digest=DIGEST)
    held = asked.claim("g1", lease_s=30)
    assert held is not None
    asked.failed(held, "x" * 10_000 + "\ud800")
    asked.request(job, "1/train/9", recorded_digest=DIGEST)
    assert asked.get(made[0].replay_id) is None, "the oldest one that is over made room"
    assert broker.redis.pttl(everything(broker)) > 0
    monkeypatch.setattr(replays, "KEPT_S", 0.001)
    old = asked.request(job, "1/train/10", recorded_digest=DIGEST) if broker.redis.delete(everything(broker)) else None
    assert old is not None
    waiting = Waiting("it to be over", deadline_s=10.0)
    while (found := asked.get(old.replay_id)) is not None and found.state is not ReplayState.FAILED:
        waiting.poke()
    assert asked.claim("g1", lease_s=30) is None


def test_what_is_no_job_is_refused_and_what_is_no_entry_hides_no_other(broker: Broker, job: str) -> None:
    asked = Replays(broker)
    with pytest.raises(NotFound):
        asked.request("job-unknown", "1/train/0", recorded_digest=DIGEST)
    assert asked.get("replay-\ud800" * 100) is None
    broker.redis.hset(everything(broker), "replay-foreign", b"\xc1garbage")
    request = asked.request(job, "1/train/0", recorded_digest=DIGEST)
    held = asked.claim("g1", lease_s=30)
    assert held is not None
    assert held.replay_id == request.replay_id
    assert asked.get("replay-foreign") is None, "the next request has removed it"
    broker.redis.hset(everything(broker), "replay-foreign", b"\xc1garbage")
    with pytest.raises(ContractViolation):
        asked.get("replay-foreign")
