"""A host's launcher: which host it is, whom it joins, and ranks that listen where they should and end with it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
import torch
from msgspec.structs import replace

from broker.hosts_side import HostKind, HostsSide
from broker.monitor import job_status
from consumer.ranks.hosts import launcher
from consumer.ranks.hosts.launcher import Gone, HostLauncher, Membership, expected_s, kind_of_host
from contracts.errors import Unavailable
from contracts.jobs import JobState, TrainerExit
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from onbeat.base.process import processor
from tests.builders import job_spec
from tests.chaos.short_job import short_job, until
from tests.integration.test_hosts import KIND, formed_by
from tests.pipeline import Pipeline, wait_for_exit

CPUINFO = "model name : Some CPU\nflags : fpu avx avx2 {}\n"


def on_one_host(**hosts: int) -> JobSpec:
    return short_job(trainer__hosts={"least": 1, "most": 1} | hosts, weights={"transport": "redis"})


def lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def listening(process: psutil.Process) -> list[str]:
    """The addresses at which it listens, with their ports."""
    found = [one for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    return [f"{one.laddr.ip} {one.laddr.port}" for one in found]


def test_ranks_listen_at_their_hosts_address_alone_and_end_with_a_launcher_that_is_killed(pipeline: Pipeline) -> None:
    job_id, _ = pipeline.jobs.create(on_one_host(ranks=2))
    # The first address of this interface is another one, of IPv4.
    child = pipeline.start(f"consumer-{job_id}", job_id, network="::1/128")
    leader = psutil.Process(child.pid)
    until(lambda: len([one for one in leader.children() if listening(one)]) == 2, "two ranks that have met")
    ranks = leader.children()
    assert all(told.startswith("::1 ") for one in (leader, *ranks) for told in listening(one))
    _, group = HostsSide(pipeline.broker, job_id, host="", ranks=0).look()
    assert listening(leader) == [group.address], "it is bound, and told as the kernel chose it"
    os.kill(leader.pid, signal.SIGKILL)
    assert wait_for_exit(child) == -signal.SIGKILL
    until(lambda: not any(map(lives, ranks)), "the end of the ranks")


def test_an_interface_that_is_not_here_is_one_line_with_those_that_are(pipeline: Pipeline) -> None:
    job_id, _ = pipeline.jobs.create(on_one_host())
    child = pipeline.start(f"consumer-{job_id}", job_id, network="eth99")
    assert wait_for_exit(child) == TrainerExit.FAILED
    (line,) = child.tail().splitlines()
    assert "ONBEAT_NETWORK: `eth99` is no interface or range with an address here" in line
    assert "lo (127.0.0.1)" in line
    assert pipeline.jobs.state(job_id) is JobState.QUEUED, "another host may have one"


@pytest.mark.parametrize(("start_s", "waits_s"), [(4.0, 20.0), (15.0, 45.0), (40.0, 60.0), (-3600.0, 20.0)])
def test_a_leader_whose_own_start_was_slow_waits_longer_for_a_host_that_starts(start_s: float, waits_s: float) -> None:
    assert expected_s(start_s, 60.0) == waits_s


def test_a_host_is_told_by_what_its_bits_depend_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text(CPUINFO.format("fma"))
    code = tmp_path / "broker" / "a.py"
    code.parent.mkdir()
    code.write_text("A = 1\n")
    monkeypatch.setattr(processor, "CPU_INFO", cpu_info)
    monkeypatch.setattr(launcher, "HOME", tmp_path)
    settings = StackSettings(threads=2)
    here = kind_of_host(settings)
    assert here == kind_of_host(settings)

    def differs(**told: int) -> list[str]:
        other = kind_of_host(StackSettings(**{"threads": 2} | told))
        return [name for name in HostKind.__struct_fields__ if getattr(other, name) != getattr(here, name)]

    assert differs(threads=3) == ["device"]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.0")
        assert differs() == ["torch"]
    cpu_info.write_text(CPUINFO.format("fma avx512f"))
    assert differs() == ["cpu"]
    cpu_info.write_text(CPUINFO.format("fma"))
    code.write_text("A = 2\n")
    assert differs() == ["code"]


def test_a_host_that_does_not_reach_the_leader_is_named_and_joins_once_it_does(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = job_spec(trainer__hosts={"least": 2, "most": 3}, weights={"transport": "redis"})
    job_id, _ = pipeline.jobs.create(spec)
    formed_by(HostsSide(pipeline.broker, job_id, host="a", ranks=1))
    reached = threading.Event()
    monkeypatch.setattr(launcher, "answers", lambda *_: reached.is_set())
    monkeypatch.setattr(launcher, "kind_of_host", lambda _: KIND)
    host = HostLauncher(StackSettings(network="lo", name="b"), pipeline.broker, spec, job_id)
    entered: list[Membership | int] = []
    entering = threading.Thread(target=lambda: entered.append(host._entered(contextlib.ExitStack())), daemon=True)
    entering.start()

    def reason() -> str:
        return re.sub("b-[0-9a-f]{8}", "b", job_status(pipeline.broker, job_id).reason)

    until(lambda: "b" in reason().partition("refused: ")[2], "the host to be refused")
    assert reason() == "waits for 2 hosts, 1 are there (offered: a; refused: b: it cannot reach the first host)"
    reached.set()
    entering.join(300.0)
    assert reason() == "waits for 2 hosts, 2 are there (offered: a, b; refused: none)"
    (membership,) = entered
    assert isinstance(membership, Membership)
    membership.close("the test is over")


def test_hosts_that_are_too_few_are_named_with_those_that_were_refused_and_the_job_fails_with_that_line(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = {"least": 2, "most": 3, "wait_s": 4.0}
    spec = job_spec(trainer__hosts=hosts, weights={"transport": "redis"}, timeouts__max_trainer_starts=1)
    job_id, _ = pipeline.jobs.create(spec)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(launcher.WaitingRanks, "fill", lambda _: None)
    monkeypatch.setattr(launcher, "kind_of_host", lambda _: KIND)
    host = HostLauncher(StackSettings(network="lo", name="a"), pipeline.broker, spec, job_id)
    codes: list[int] = []
    running = threading.Thread(target=lambda: codes.append(host.run()), daemon=True)
    running.start()
    others = [HostsSide(pipeline.broker, job_id, host=name, ranks=1) for name in ("b", "c")]

    def are_refused() -> bool:
        kinds = replace(KIND, torch="another"), replace(KIND, cpu="another")
        told = [one.join(kind)[0] for one, kind in zip(others, kinds, strict=True)]
        return told == ["other_torch", "other_cpu"]

    until(are_refused, "a group that forms")
    running.join(300.0)
    assert codes == [TrainerExit.FAILED]
    assert pipeline.jobs.state(job_id) is JobState.FAILED
    reason = re.sub("a-[0-9a-f]{8}", "a", pipeline.jobs.fields(job_id)["reason"].decode())
    assert reason.endswith(
        "; so 1 groups of hosts ended without committing a new iteration (timeouts.max_trainer_starts)"
    )
    refused = "b: it has another torch, c: it has another kind of CPU, whose bits may differ"
    assert reason.startswith(f"a: 1 of 2 hosts within 4 s (trainer.hosts.wait_s); offered: a; refused: {refused}; so ")


class Deaf(HostsSide):
    """Hears nothing from Redis."""

    def renew(self, formed: int, sealed: int) -> NoReturn:
        raise Unavailable("Redis does not answer")


def test_a_host_that_hears_nothing_from_redis_for_a_lease_is_no_member_any_more(pipeline: Pipeline) -> None:
    job_id, _ = pipeline.jobs.create(on_one_host())
    group = formed_by(HostsSide(pipeline.broker, job_id, host="a", ranks=1), lease_ms=500)
    membership = Membership(Deaf(pipeline.broker, job_id, host="a", ranks=1), group, host="a")
    assert gone(membership) == ""
    until(lambda: gone(membership) != "", "the end of its lease")
    assert gone(membership).startswith("this host could not renew its lease for ")
    membership.close("the test is over")


def gone(membership: Membership) -> str:
    """Why it is no member any more; "" while it is one."""
    try:
        membership.check()
    except Gone as error:
        return str(error)
    return ""
