"""A trainer whose ranks are those of several hosts: whichever of them come, go or hang, the weights are the same."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from broker.monitor import job_status
from contracts.jobs import JobState, TrainerExit
from tests.chaos.short_job import LAG, committed, long_variant, until
from tests.hosts.machines import Machines
from tests.hosts.ranks import HOSTS, both_training, comes_in, consume, cut_off, ends_well, finished, job_of_hosts, offer
from tests.pipeline import wait_for_exit

# What executes ranks of hosts, and ends them, has tests/rooms/ranks/hosts/test_launcher.py.
pytestmark = pytest.mark.usefixtures("forked_ranks")

LORA = {"rank": 4}
MOVING: dict[str, Any] = {"algorithm__kl_coefficient": 0.05, "algorithm__ref_model_sync_iterations": 2}


def signalled(processes: list[int], number: signal.Signals) -> None:
    for pid in processes:
        os.kill(pid, number)


@long_variant
def test_two_hosts_with_two_ranks_each_make_the_weights_of_one_process(machines: Machines, tmp_path: Path) -> None:
    spec = job_of_hosts(ranks=2, iterations=8)
    job_id, _ = machines.jobs.create(spec)
    ends_well(machines, job_id, *(offer(machines, where, job_id) for where in HOSTS))
    finished(machines, job_id, spec, tmp_path / "oracle")


@long_variant
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"trainer__sharding": "fsdp"} | MOVING, id="rows, a reference that moves"),
        pytest.param({"trainer__lora": LORA, "trainer__sharding": "fsdp"}, id="adapters over rows", marks=long_variant),
        pytest.param({"trainer__lora": LORA}, id="adapters", marks=long_variant),
        pytest.param(LAG, id="lag", marks=long_variant),
    ],
)
def test_another_host_takes_a_lost_ones_place_in_whatever_the_ranks_share(
    machines: Machines, tmp_path: Path, changes: dict[str, Any]
) -> None:
    spec = job_of_hosts(**changes)
    job_id, _ = machines.jobs.create(spec)
    launchers = both_training(machines, job_id)
    machines.hosts["second"].lose()
    third = comes_in(machines, "third", job_id)
    ends_well(machines, job_id, launchers["first"], third)
    finished(machines, job_id, spec, tmp_path / "oracle")


@pytest.mark.parametrize("lost", [pytest.param(0, id="rank 0's"), pytest.param(1, id="another", marks=long_variant)])
def test_a_host_is_lost_while_it_trains_and_the_one_that_is_left_goes_on(
    machines: Machines, tmp_path: Path, lost: int
) -> None:
    spec = job_of_hosts(least=1)
    job_id, _ = machines.jobs.create(spec)
    launchers = both_training(machines, job_id, leader=HOSTS[lost])
    machines.hosts[HOSTS[0]].lose()
    ends_well(machines, job_id, launchers[HOSTS[1]])
    assert "hosts of the ranks: 1" in launchers[HOSTS[1]].tail(400)
    finished(machines, job_id, spec, tmp_path / "oracle")


@long_variant
def test_a_host_that_is_cut_off_ends_its_ranks_and_comes_back_after_the_others_have_gone_on(
    machines: Machines, tmp_path: Path
) -> None:
    spec = job_of_hosts(least=1)
    job_id, _ = machines.jobs.create(spec)
    first, second = both_training(machines, job_id).values()
    address = machines.hosts["second"].address
    machines.network.cut_off(address)
    until(lambda: "could not renew its lease" in second.tail(40), "the end of the ranks that were cut off")
    ends_well(machines, job_id, first)
    machines.network.heal(address)
    assert wait_for_exit(second) in (TrainerExit.DONE, TrainerExit.DIED), second.tail(40)
    finished(machines, job_id, spec, tmp_path / "oracle")


@long_variant
def test_a_host_that_comes_at_iteration_5_waits_until_the_ranks_begin_again_with_it(
    machines: Machines, tmp_path: Path
) -> None:
    spec = job_of_hosts(least=1, hosts={"regroup_s": 2.0})
    job_id, _ = machines.jobs.create(spec)
    first = consume(machines, "first")
    until(committed(machines, job_id, 5), "iteration 5")
    sampler = machines.network.processes(machines.hosts["sampler"].address)
    signalled(sampler, signal.SIGSTOP)  # however long the other one takes to come, the job is not over by then
    second = consume(machines, "second")
    until(lambda: "a host waits: the ranks begin again" in first.tail(2000), "a new generation")
    until(lambda: "hosts of the ranks: 2" in second.tail(2000), "the second host's ranks")
    signalled(sampler, signal.SIGCONT)
    before = len(machines.jobs.audit(job_id))
    until(committed(machines, job_id, before + 3), "commits of both")
    machines.hosts["first"].lose()
    until(lambda: machines.jobs.state(job_id).is_final, "the end by the one that came")
    finished(machines, job_id, spec, tmp_path / "oracle")


@long_variant
def test_too_few_hosts_are_one_line_that_names_them_and_the_job_fails_with_it(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = job_of_hosts(least=2, hosts={"wait_s": 15.0}, timeouts__max_trainer_starts=1)
    job_id, _ = machines.jobs.create(spec)
    launchers = {"first": offer(machines, "first", job_id)}
    until(lambda: "leads the ranks" in launchers["first"].tail(40), "a leader")
    monkeypatch.setenv("OMP_THREAD_LIMIT", "64")  # by such variables libraries choose their kernels
    other = offer(machines, "second", job_id)
    assert wait_for_exit(other) == TrainerExit.HELD, other.tail(20)
    assert "it has another kind of CPU, whose bits may differ" in other.tail(20)
    assert wait_for_exit(launchers["first"]) == TrainerExit.FAILED, launchers["first"].tail(40)
    assert machines.jobs.state(job_id) is JobState.FAILED
    reason = machines.jobs.fields(job_id)["reason"].decode()
    assert "1 of 2 hosts within 15 s (trainer.hosts.wait_s); offered: first-" in reason
    assert "refused: second-" in reason


@long_variant
def test_hosts_that_are_cut_off_from_each_other_alone_wait_and_train_again_once_they_are_healed(
    machines: Machines, tmp_path: Path
) -> None:
    spec = job_of_hosts(hosts={"wait_s": 600.0})
    job_id, _ = machines.jobs.create(spec)
    launchers = both_training(machines, job_id)
    cut_off(machines, "second", "first")
    until(lambda: "have ended: cannot reach" in launchers["second"].tail(400), "the end of the ranks there")
    refused = "it cannot reach the first host"
    until(lambda: refused in job_status(machines.broker, job_id).reason, "one that waits for the other")
    machines.network.join(machines.hosts["second"].address, machines.hosts["first"].address)
    ends_well(machines, job_id, *launchers.values())
    finished(machines, job_id, spec, tmp_path / "oracle")


@long_variant
def test_a_host_that_hangs_is_replaced_and_ends_its_ranks_when_it_wakes(machines: Machines, tmp_path: Path) -> None:
    spec = job_of_hosts(least=1)
    job_id, _ = machines.jobs.create(spec)
    first, second = both_training(machines, job_id).values()
    hung = machines.network.processes(machines.hosts["second"].address)
    signalled(hung, signal.SIGSTOP)
    ends_well(machines, job_id, first)
    signalled(hung, signal.SIGCONT)
    assert wait_for_exit(second) == TrainerExit.DONE, second.tail(40)
    finished(machines, job_id, spec, tmp_path / "oracle")
