"""A host dies, or is cut off, at each place of a trainer of several: whichever is left makes the same weights."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from contracts.jobs import TrainerExit
from onbeat.base.process.child_process import ChildProcess
from tests.chaos.short_job import assert_undisturbed, committed, long_variant, sequential_digest, until
from tests.hosts.machines import Machines
from tests.hosts.network import Network
from tests.hosts.ranks import HOSTS, both_training, comes_in, cut_off, ends_well, finished, job_of_hosts, offer
from tests.pipeline import Pipeline, wait_for_exit
from tests.redundant_redis import RedundantRedis

# What executes ranks of hosts, and ends them, has tests/rooms/ranks/hosts/test_launcher.py.
pytestmark = pytest.mark.usefixtures("forked_ranks")

DEATHS = {
    "forming": "hosts.forming:1",
    "sealed": "hosts.sealed:1",
    "loading": "hosts.loading:1",
    "training": "consumer.after_micro_batch:3",
    "stepping": "consumer.after_step:2",
    "publishing": "consumer.writing_weights:2",
    "saving": "consumer.writing_checkpoint:2",
}
"""What the host of rank 0 does when it dies → its crash point."""


def leads(machines: Machines, where: str, job_id: str, *, crash_at: str = "") -> ChildProcess:
    launcher = offer(machines, where, job_id, crash_at=crash_at)
    until(lambda: "leads the ranks" in launcher.tail(40), "a leader")
    return launcher


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
@long_variant
def test_the_host_of_rank_0_dies_at_each_place_and_the_other_one_goes_on(
    machines: Machines, tmp_path: Path, sharding: str
) -> None:
    """Its launcher and its ranks are killed at once, and its disk is thrown away."""
    spec = job_of_hosts(least=1, iterations=200, trainer__sharding=sharding, timeouts__max_trainer_starts=50)
    job_id, _ = machines.jobs.create(spec)
    for name, point in DEATHS.items():
        dying = leads(machines, "first", job_id, crash_at=f"{point}:group")
        other = offer(machines, "second", job_id)
        assert wait_for_exit(dying) == -signal.SIGKILL, f"{name}: {dying.tail(40)}"
        machines.hosts["first"].lose()
        until(committed(machines, job_id, len(machines.jobs.audit(job_id)) + 2), f"commits after {name}")
        assert "hosts of the ranks: 1" in other.tail(400)
        other.stop(grace_s=20.0)
        machines.hosts["first"].boot()
    ends_well(machines, job_id, offer(machines, "first", job_id))
    finished(machines, job_id, spec, tmp_path / "oracle")


@long_variant
def test_a_host_that_is_cut_off_from_redis_alone_ends_its_ranks_and_comes_back(
    machines: Machines, tmp_path: Path
) -> None:
    spec = job_of_hosts(least=2, iterations=80)
    job_id, _ = machines.jobs.create(spec)
    launchers = both_training(machines, job_id)
    cut_off(machines, "second", "services")
    until(lambda: "could not renew its lease" in launchers["second"].tail(400), "the end of the ranks there")
    until(lambda: "lost second" in launchers["first"].tail(400), "the end of the group")
    machines.network.join(machines.hosts["second"].address, machines.hosts["services"].address)
    if wait_for_either(launchers["second"], "hosts of the ranks: 2", times=2) is False:
        launchers["second"] = comes_in(machines, "second", job_id)
    ends_well(machines, job_id, *launchers.values())
    finished(machines, job_id, spec, tmp_path / "oracle")


@long_variant
def test_of_hosts_that_are_cut_off_from_each_other_alone_one_goes_on(machines: Machines, tmp_path: Path) -> None:
    spec = job_of_hosts(least=1)
    job_id, _ = machines.jobs.create(spec)
    launchers = both_training(machines, job_id)
    cut_off(machines, "second", "first")
    until(lambda: "have ended: cannot reach" in launchers["second"].tail(400), "the end of the ranks there")
    until(lambda: machines.jobs.state(job_id).is_final, "the end")
    codes = {wait_for_exit(one) for one in launchers.values()}
    assert TrainerExit.DONE in codes <= {TrainerExit.DONE, TrainerExit.HELD}
    finished(machines, job_id, spec, tmp_path / "oracle")


def wait_for_either(launcher: ChildProcess, line: str, *, times: int) -> bool:
    """Whether the line came so often; False where the launcher ended before."""
    until(lambda: launcher.tail(2000).count(line) >= times or launcher.exit_code is not None, line)
    return launcher.exit_code is None


@long_variant
def test_a_host_that_is_cut_off_from_all_and_healed_trains_again_with_the_other(
    machines: Machines, tmp_path: Path
) -> None:
    spec = job_of_hosts(least=2, iterations=80)
    job_id, _ = machines.jobs.create(spec)
    launchers = both_training(machines, job_id)
    address = machines.hosts["second"].address
    machines.network.cut_off(address)
    until(lambda: "could not renew its lease" in launchers["second"].tail(400), "the end of the ranks there")
    machines.network.heal(address)
    if wait_for_either(launchers["second"], "hosts of the ranks: 2", times=2) is False:
        launchers["second"] = comes_in(machines, "second", job_id)
    ends_well(machines, job_id, *launchers.values())
    finished(machines, job_id, spec, tmp_path / "oracle")


@long_variant
def test_three_hosts_train_of_which_one_comes_late_and_another_is_lost(machines: Machines, tmp_path: Path) -> None:
    spec = job_of_hosts(least=2, iterations=100, hosts={"most": 3, "regroup_s": 3.0}, rollout__batches_per_iteration=4)
    job_id, _ = machines.jobs.create(spec)
    launchers = both_training(machines, job_id)
    launchers["third"] = comes_in(machines, "third", job_id, num_hosts=3)
    until(committed(machines, job_id, len(machines.jobs.audit(job_id)) + 3), "commits of three")
    machines.hosts["first"].lose()
    ends_well(machines, job_id, launchers["second"], launchers["third"])
    finished(machines, job_id, spec, tmp_path / "oracle")


@long_variant
def test_four_ranks_of_one_host_make_the_weights_of_one_process(machines: Machines, tmp_path: Path) -> None:
    spec = job_of_hosts(least=1, ranks=4, iterations=8, hosts={"most": 1})
    job_id, _ = machines.jobs.create(spec)
    ends_well(machines, job_id, offer(machines, "first", job_id))
    finished(machines, job_id, spec, tmp_path / "oracle")


@long_variant
def test_ranks_meet_over_ipv6(machines: Machines, tmp_path: Path) -> None:
    spec = job_of_hosts(iterations=20)
    job_id, _ = machines.jobs.create(spec)
    for number, where in enumerate(HOSTS, start=1):
        machines.hosts[where].do(
            f"ip -6 addr add fd00:5eed::{number}/64 nodad dev $(ip -o -4 addr show scope global | awk '{{print $2}}')"
        )
    launchers = [offer(machines, where, job_id, network="fd00:5eed::/64") for where in HOSTS]
    until(committed(machines, job_id, 1), "a commit")
    for number, where in enumerate(HOSTS, start=1):
        listening = machines.hosts[where].do("ss -Htln | awk '{print $4}'").split()
        assert {one.rpartition(":")[0] for one in listening} == {f"[fd00:5eed::{number}]"}
    ends_well(machines, job_id, *launchers)
    finished(machines, job_id, spec, tmp_path / "oracle")


@long_variant
def test_hosts_form_again_after_a_failover_of_redis(tmp_path: Path) -> None:
    with Network(5) as network:
        redundant = RedundantRedis(tmp_path / "redis", hosts=network.hosts[:3], entering=network.entering)
        with Pipeline(tmp_path, redundant) as pipeline:
            spec = job_of_hosts(least=2, iterations=40, weights={"transport": "redis"})
            oracle = sequential_digest(pipeline, spec, tmp_path / "oracle")
            pipeline.start_generators(1)
            job_id, _ = pipeline.jobs.create(spec)
            launchers = [
                pipeline.start(
                    f"consumer-{number}",
                    job_id,
                    entering=network.entering(host),
                    network=f"{host}/24",
                    broker_timeout_s=30.0,
                )
                for number, host in enumerate(network.hosts[3:])
            ]
            until(committed(pipeline, job_id, 3), "three commits")
            redundant.servers[0].child.kill()
            redundant.until_another(redundant.servers[0])
            for one in launchers:
                assert wait_for_exit(one) == TrainerExit.DONE, one.tail(40)
            assert_undisturbed(pipeline, job_id, oracle)
