"""Hosts whose ranks are one trainer, as a test offers them, and what it asks of their end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from broker.hosts_side import HostsSide
from contracts.jobs import TrainerExit
from contracts.spec.job import JobSpec
from onbeat.base.process.child_process import ChildProcess
from tests.chaos.short_job import assert_undisturbed, committed, sequential_digest, short_job, until
from tests.hosts.machines import Machines
from tests.pipeline import wait_for_exit

HOSTS = ("first", "second")
ITERATIONS = 30
"""So many of a job that begins with one host, for the other one to come meanwhile."""
ITERATIONS_OF_TWO = 12
"""So many of one that waits for both."""


def job_of_hosts(*, least: int = 2, ranks: int = 1, **changes: Any) -> JobSpec:
    regroups = {"regroup_s": 1.0} if least == 1 else {}
    hosts = {"least": least, "most": 2, "ranks": ranks} | regroups | changes.pop("hosts", {})
    fields: dict[str, Any] = {
        "iterations": ITERATIONS if least == 1 else ITERATIONS_OF_TWO,
        "weights": {"transport": "object"},
        "trainer__hosts": hosts,
        "timeouts__trainer_lease_s": 2.0,
    }
    return short_job(**(fields | changes))


def network_of(machines: Machines) -> str:
    """The range of all hosts' addresses."""
    return f"{machines.hosts['first'].address}/24"


def offer(machines: Machines, where: str, job_id: str, **changes: Any) -> ChildProcess:
    """A host, as its consumer offers it."""
    settings = {"network": network_of(machines)} | changes
    return machines.start_at(where, f"consumer-{where}-{len(machines.children)}", job_id, **settings)


def consume(machines: Machines, where: str) -> ChildProcess:
    """A consumer, which offers its host to every job that asks for hosts."""
    name = f"consumer.supervisor-{where}-{len(machines.children)}"
    return machines.start_at(where, name, network=network_of(machines))


def finished(machines: Machines, job_id: str, spec: JobSpec, folder: Path) -> None:
    """Asserts the end of an undisturbed job, by what its hosts have left in the store."""
    machines.bring(job_id)
    assert_undisturbed(machines, job_id, sequential_digest(machines, spec, folder))


def ends_well(machines: Machines, job_id: str, *launchers: ChildProcess) -> None:
    for one in launchers:
        assert wait_for_exit(one) == TrainerExit.DONE, one.tail(40)
    assert machines.jobs.state(job_id).is_final


def both_training(machines: Machines, job_id: str, *, leader: str = HOSTS[0]) -> dict[str, ChildProcess]:
    """Host → its launcher, of two hosts whose ranks commit together; one that comes too late is offered again."""
    launchers = {leader: offer(machines, leader, job_id)}
    until(lambda: "leads the ranks" in launchers[leader].tail(40), "a leader")
    other = HOSTS[1 - HOSTS.index(leader)]
    launchers[other] = comes_in(machines, other, job_id)
    until(committed(machines, job_id, len(machines.jobs.audit(job_id)) + 3), "three commits")
    return launchers


def comes_in(machines: Machines, where: str, job_id: str, *, num_hosts: int = 2) -> ChildProcess:
    """The launcher of a host that trains with the others; one that comes too late is offered again."""
    launcher = offer(machines, where, job_id)

    def is_in() -> bool:
        nonlocal launcher
        if launcher.exit_code is not None:
            HostsSide(machines.broker, job_id, host=where, ranks=0).look(waits=True)
            launcher = offer(machines, where, job_id)
        return f"hosts of the ranks: {num_hosts}" in launcher.tail(400)

    until(is_in, f"{num_hosts} hosts")
    return launcher


def cut_off(machines: Machines, where: str, other: str) -> None:
    """No packet goes between two hosts any more, and no connection is told; each reaches all others."""
    machines.network.part(machines.hosts[where].address, machines.hosts[other].address)
