"""What is said of a trainer's hosts: by a job that waits for them, and by a host whose clock is off."""

from __future__ import annotations

import logging
import secrets
import signal

import pytest

from broker.connection.client import Broker
from broker.hosts_side import HostGroup, HostKind, HostsSide
from broker.job_store import JobStore
from broker.monitor import job_status
from consumer.ranks.hosts.launcher import HostLauncher, clocks_apart
from contracts.jobs import JobState, TrainerExit
from contracts.settings import StackSettings
from tests.building.specs import SpecBuilder

KIND = HostKind(code="code", torch="2.0", device="cpu", cpu="cpu")
LEASE_MS = 60_000


spec = SpecBuilder(trainer__hosts={"least": 2, "most": 3}, weights={"transport": "redis"})


def formed_by(side: HostsSide, *, lease_ms: int = LEASE_MS) -> HostGroup:
    about = HostGroup(
        **{"number": 0, "formed": 0, "sealed": 0, "members": (), "refused": (), "reason": ""},
        **{
            "least": 2,
            "most": 3,
            "lease_ms": lease_ms,
            "kind": KIND,
            "address": "10.0.0.1 1",
            "key": secrets.token_hex(32),
        },
    )
    is_formed, group = side.form(about)
    assert is_formed
    return group


def test_a_job_says_which_hosts_it_waits_for_and_which_were_refused(broker: Broker) -> None:
    job_id, _ = JobStore(broker).create(spec())
    first, second, third = (HostsSide(broker, job_id, host=name, ranks=1) for name in ("a", "b", "c"))

    def reason() -> str:
        return job_status(broker, job_id).reason

    assert reason() == "waits for 2 hosts, and none offers its ranks: start consumers with ONBEAT_NETWORK"
    group = formed_by(first)
    assert reason() == "waits for 2 hosts, 1 are there (offered: a; refused: none)"
    second.join(HostKind(code="code", torch="2.1", device="cpu", cpu="cpu"))
    assert reason() == "waits for 2 hosts, 1 are there (offered: a; refused: b: it has another torch)"
    third.join(KIND)
    first.seal(group.formed)
    assert reason() == "waits for the ranks of 2 hosts"
    first.leave(group.formed, "it was asked to end")
    assert reason() == "waits for 2 hosts, 0 are there (offered: none; refused: b: it has another torch)"


def test_hosts_whose_lease_is_over_are_none_that_a_job_waits_for(broker: Broker) -> None:
    job_id, _ = JobStore(broker).create(spec())
    formed_by(HostsSide(broker, job_id, host="a", ranks=1), lease_ms=1)
    while "1 are there" in (reason := job_status(broker, job_id).reason):
        pass
    assert reason == "waits for 2 hosts, 0 are there (offered: none; refused: none)"


def test_a_host_says_in_one_line_that_its_clock_is_off(
    broker: Broker, settings: StackSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = JobStore(broker)
    job_id, _ = jobs.create(spec())
    jobs.move(job_id, JobState.CANCELLED)
    now_s = broker.now_s()
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(broker, "now_s", lambda: now_s - 3600.0)
    own = StackSettings(redis_url=settings.redis_url, network="lo")
    with caplog.at_level(logging.WARNING):
        assert HostLauncher(own, broker, spec(), job_id).run() == TrainerExit.DONE
    [line] = [one.getMessage() for one in caplog.records if "clock" in one.getMessage()]
    assert line.startswith("this host's clock is 3600.")
    assert "s ahead of Redis': leases go by Redis'" in line


@pytest.mark.parametrize(("ahead_s", "says"), [(0.5, ""), (-0.5, ""), (-2.0, "2.0 s behind Redis'")])
def test_clocks_that_are_a_second_apart_are_told_and_closer_ones_are_not(ahead_s: float, says: str) -> None:
    told = clocks_apart(ahead_s)
    assert says in told
    assert bool(told) == bool(says)
