"""Compares ranks on several hosts with as many ranks on one host, and measures how long a lost host is missed.

    python -m benchmarks hosts [--rounds 3] [--num-hosts 1,2,4] [--healing 3]

Hosts are network namespaces of this machine, on one bridge; so all of them share its cores, and what is measured is
what the launcher, the sockets and the sums' way cost, not what more cores gain. In turns: N hosts with a rank each, and
`trainer.world_size = N` on one of them. Healing: two hosts, leases of 2 s, the one of rank 0 or the other loses power;
seconds until Redis knows no group of it, the next one is sealed, its trainer holds the job, and has committed. Beside
these: what each host sends in an iteration, and the processor time that Redis takes for one renewal in a group of 1 to
512 hosts, neither of which other work disturbs. It needs root and `ip netns`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks._results import shown_path, write_result
from broker.connection.client import Broker, connect
from broker.fence import read_fence
from broker.hosts_side import HostGroup, HostKind, HostsSide
from broker.job_store import JobStore
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from onbeat.base.process.child_process import ChildProcess
from onbeat.base.process.waiting import Waiting
from onbeat.stack.redis import EmbeddedRedis
from tests.builders import job_spec
from tests.hosts.machines import Machines

EXPECTED = (
    "Before the first run: 2 and 4 hosts within 1.1 times as many ranks of one host: a sum of 0.5 MB over veth costs "
    "what it costs over loopback. A lost host: up to 2 s of lease, 0.7 s until the other asks again, 6 s of a rank's "
    "start and 1 s of its first iteration: 8 to 10 s."
)
TRAINERS = ("first", "second", "third", "fourth")
WARM_UP = 5
SETTLED_S = 15.0
"""By then the ranks of a next generation have been started, and wait."""
MEMBERS = (1, 8, 64, 512)
RENEWALS = 500
DEADLINE_S = 300.0
LOOK_S = 0.02


def spec_of(iterations: int, **changes: Any) -> JobSpec:
    fields: dict[str, Any] = {
        "iterations": iterations,
        "model__path": "configs/models/two-digit-addition",
        "optimizer__learning_rate": 1e-3,
        "rollout__batches_per_iteration": 8,
        "trainer__checkpoint_every_iterations": 5,
        "timeouts__trainer_lease_s": 2.0,
        "timeouts__generator_lease_s": 2.0,
        "weights": {"transport": "redis"},
    }
    return job_spec(**(fields | changes))


@contextmanager
def machines_up() -> Iterator[Machines]:
    with (
        tempfile.TemporaryDirectory(prefix="onbeat-bench-") as folder,
        pytest.MonkeyPatch.context() as patch,
        Machines(Path(folder), patch) as machines,
    ):
        machines.start_at("sampler", "producer-1")
        yield machines


def until(what: str, condition: Callable[[], bool]) -> float:
    """The time at which it came true, seconds of this process' clock."""
    waiting = Waiting(what, deadline_s=DEADLINE_S)
    while not condition():
        waiting.poke()
        time.sleep(LOOK_S)
    return time.monotonic()


def commits(machines: Machines, job_id: str, count: int) -> float:
    return until(f"{count} commits", lambda: len(machines.jobs.audit(job_id)) >= count)


def offered(machines: Machines, where: str, job_id: str, **changes: Any) -> ChildProcess:
    network = f"{machines.hosts[where].address}/24"
    return machines.start_at(where, f"consumer-{where}", job_id, network=network, **changes)


def iteration_of(num_ranks: int, *, over_hosts: bool, num_iterations: int) -> tuple[float, list[float]]:
    """(mean seconds of an iteration after some, MB that each host sends in it)."""
    hosts = {"least": num_ranks, "most": num_ranks}
    spread = {"trainer__hosts": hosts} if over_hosts else {"trainer__world_size": num_ranks}
    where = TRAINERS[: num_ranks if over_hosts else 1]
    with machines_up() as machines:
        job_id, _ = machines.jobs.create(spec_of(100_000, **spread))
        for host in where:
            # Neither the copies of a run folder nor passes in threads are what is compared.
            offered(machines, host, job_id, objects="", max_passes=1)
        commits(machines, job_id, WARM_UP)
        time.sleep(SETTLED_S)
        done = len(machines.jobs.audit(job_id))
        began_s, before = commits(machines, job_id, done + 1), sent_bytes(machines, where)
        taken_s = commits(machines, job_id, done + 1 + num_iterations) - began_s
        sent = [after - early for after, early in zip(sent_bytes(machines, where), before, strict=True)]
        return taken_s / num_iterations, [round(num_bytes / num_iterations / 1e6, 3) for num_bytes in sent]


def sent_bytes(machines: Machines, where: Sequence[str]) -> list[int]:
    """What each host has sent, over its cable."""
    tables = [machines.hosts[host].do("cat /proc/net/dev").splitlines()[2:] for host in where]
    rows = [[line.split(":") for line in table] for table in tables]
    return [sum(int(numbers.split()[8]) for name, numbers in table if name.strip() != "lo") for table in rows]


def renewal_ms(url: str, num_members: int) -> float:
    """Redis' processor milliseconds for one renewal in a sealed group of so many hosts."""
    about = HostGroup(
        **{"number": 0, "formed": 0, "sealed": 0, "members": (), "refused": (), "reason": ""},
        **{"least": 1, "most": 512, "lease_ms": 600_000, "address": "10.0.0.1 1", "key": "00" * 32},
        kind=HostKind(code="c" * 64, torch="2.13.0", device="cpu, 1 threads", cpu="a processor of some name"),
    )
    with closing(connect(StackSettings(redis_url=url), patience_s=60.0)) as broker:
        job_id, _ = JobStore(broker).create(spec_of(1, trainer__hosts={"least": 1, "most": 512}))
        names = [f"host-{number:03d}-12345-0123abcd" for number in range(num_members)]
        sides = [HostsSide(broker, job_id, host=name, ranks=8) for name in names]
        _, group = sides[0].form(about)
        assert about.kind is not None
        for side in sides[1:]:
            side.join(about.kind)
        _, group = sides[0].seal(group.formed)
        before = used_cpu_s(broker)
        for number in range(RENEWALS):
            sides[number % num_members].renew(group.formed, group.sealed)
        return round(1000 * (used_cpu_s(broker) - before) / RENEWALS, 4)


def used_cpu_s(broker: Broker) -> float:
    info: Any = broker.redis.info("cpu")
    return info["used_cpu_sys"] + info["used_cpu_user"]


def healing_s(lost: int) -> dict[str, float]:
    """Event → seconds since a host lost power. lost: 0 for rank 0's."""
    spec = spec_of(500, trainer__hosts={"least": 1, "most": 2, "regroup_s": 1.0})
    with machines_up() as machines:
        job_id, _ = machines.jobs.create(spec)
        leader, other = TRAINERS[:2]
        first = offered(machines, leader, job_id)
        until("a leader", lambda: "leads the ranks" in first.tail(40))
        offered(machines, other, job_id)
        until("both hosts", lambda: "hosts of the ranks: 2" in first.tail(400))
        commits(machines, job_id, WARM_UP)
        before, epoch = group(machines, job_id), held_epoch(machines, job_id)
        machines.hosts[(leader, other)[lost]].lose()
        at_s = time.monotonic()
        done = len(machines.jobs.audit(job_id))
        moments_s = {
            "group ended": until("its end", lambda: group(machines, job_id).formed != before.formed),
            "sealed": until("a seal", lambda: group(machines, job_id).sealed > before.sealed),
            "trainer holds": until("a trainer", lambda: held_epoch(machines, job_id) > epoch),
            "committed": commits(machines, job_id, done + 1),
        }
        return {name: round(when_s - at_s, 2) for name, when_s in moments_s.items()}


def group(machines: Machines, job_id: str) -> HostGroup:
    """As Redis holds it: a look by the script would itself end a group whose lease is over."""
    packed = machines.broker.redis.get(machines.broker.job_keys(job_id).hosts)
    return msgspec.msgpack.decode(packed, type=HostGroup)  # type: ignore[arg-type]


def held_epoch(machines: Machines, job_id: str) -> int:
    """The epoch of the trainer that holds the job; 0 where none does."""
    fence = read_fence(machines.broker, machines.broker.job_keys(job_id))
    return fence.trainer_epoch if fence and fence.lease_until_s else 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks hosts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-hosts", default="1,2,4")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--healing", type=int, default=3, help="times that each host is lost")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="onbeat-bench-") as folder, EmbeddedRedis(Path(folder) / "redis") as redis:
        renewals = {str(count): renewal_ms(redis.url, count) for count in MEMBERS}
    print("a renewal, ms of Redis", renewals, flush=True)
    seconds: dict[str, dict[str, list[float]]] = {}
    sent: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        for number in map(int, arguments.num_hosts.split(",")):
            row = seconds.setdefault(str(number), {"hosts": [], "ranks": []})
            for name, over_hosts in (("hosts", True), ("ranks", False)):
                taken_s, sent_mb = iteration_of(number, over_hosts=over_hosts, num_iterations=arguments.iterations)
                row[name].append(round(taken_s, 4))
                sent[f"{number} {name}"] = sent_mb
                print(number, name, row[name][-1], sent_mb, flush=True)
    healing: dict[str, list[dict[str, float]]] = {"rank 0's": [], "another": []}
    for _ in range(arguments.healing):
        for lost, name in enumerate(healing):
            healing[name].append(healing_s(lost))
            print(name, healing[name][-1], flush=True)
    ratios = {
        number: [round(hosts_s / ranks_s, 3) for hosts_s, ranks_s in zip(row["hosts"], row["ranks"], strict=True)]
        for number, row in seconds.items()
    }
    result = {
        "expected": EXPECTED,
        "hosts_over_ranks": {number: statistics.median(values) for number, values in ratios.items()},
        "to_the_next_commit_s": {
            name: statistics.median(lost["committed"] for lost in losses) for name, losses in healing.items() if losses
        },
        "renewal_ms": renewals,
        "sent_mb": sent,
        "iteration_s": seconds,
        "ratios": ratios,
        "healing_s": healing,
    }
    path = write_result("hosts", result)
    print(result["hosts_over_ranks"], result["to_the_next_commit_s"], f"written to {shown_path(path)}")


if __name__ == "__main__":
    main()
