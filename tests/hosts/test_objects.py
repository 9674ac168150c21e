"""Hosts that share no folder: any of them goes on, and nothing that store and caches do changes a weight."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from contracts.spec.job import JobSpec
from contracts.weights import ObjectWeights
from onbeat.base.process.child_process import ChildProcess
from onbeat.weights.objects.blobs import open_blobs
from tests.chaos.short_job import IS_LONG, LAG, committed, long_variant, short_job, succeed, until
from tests.chaos.test_crash_points import COPY_POINTS, LAGGING_POINTS, TRAINER_POINTS
from tests.forked import TASK_WORKER
from tests.hosts.machines import Machines
from tests.hosts.ranks import finished
from tests.pipeline import HELD, wait_for_exit
from tests.rooms.objects.s3_server import FaultyProxy

FEW = ["consumer.after_micro_batch", "consumer.writing_weights", "consumer.writing_checkpoint"]
"""Training, publishing, saving."""
JOB = short_job(weights=ObjectWeights(), evaluation__every_iterations=4, recording={})
LAGGING = short_job(iterations=34, weights=ObjectWeights(), recording={}, **LAG)
LEASE_S = 1.0
"""The lease of JOB's trainer."""
TRAINERS = ("first", "second")


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    with Machines(tmp_path, monkeypatch) as machines:
        yield machines


@long_variant
@pytest.mark.parametrize(
    ("job", "points"),
    [(JOB, FEW), (LAGGING, [*TRAINER_POINTS, *LAGGING_POINTS, *COPY_POINTS])],
    ids=["periodic", "delayed"],
)
def test_a_trainers_host_is_lost_and_another_with_an_empty_disk_goes_on(
    machines: Machines, tmp_path: Path, job: JobSpec, points: list[str]
) -> None:
    gateway = machines.start_gateway()
    machines.start_at("sampler", "producer-1")
    job_id, _ = machines.jobs.create(job)
    for number, point in enumerate(points):
        host = TRAINERS[number % 2]
        nth = 1 if point == "consumer.after_opening" else 2
        exit_code = machines.train_until_death(job_id, crash_at=f"{point}:{nth}", **machines.there(host))
        assert exit_code == -signal.SIGKILL, f"{point} was never reached: exit code {exit_code}"
        machines.hosts[host].lose()
        machines.hosts[host].boot()
    assert f'onbeat_job_reward_mean{{job="{job_id}"}}' in gateway.get("/metrics").text
    assert machines.train_until_death(job_id, **machines.there(TRAINERS[len(points) % 2])) == 0
    finished(machines, job_id, job, tmp_path / "oracle")
    # Less than all of it was trained again each time.
    trained = [record.iteration for record in machines.jobs.audit(job_id) if record.kind == "commit"]
    assert trained.count(0) < len(points)
    machines.start_at("viewer", TASK_WORKER, "check")
    assert_seen(gateway, job_id, job)


def assert_seen(gateway: httpx.Client, job_id: str, job: JobSpec) -> None:
    """Asserts that a gateway that was up all the time, on a host without a trainer, shows the run and verifies it."""

    def ask(path: str, method: str = "GET") -> Any:
        answer = gateway.request(method, f"/v1/jobs/{job_id}/{path}")
        assert answer.is_success, answer.text
        return answer.json()

    assert [one["iteration"] for one in ask("metrics")["iterations"]] == list(range(job.iterations))
    assert ask("rollouts")["iterations"]
    verdict = ask("verify?wait=50", "POST")
    assert verdict["verified"]
    assert verdict["digests_recomputed"] > 0


def test_a_trainer_that_was_cut_off_for_two_leases_ends_and_writes_nothing(machines: Machines, tmp_path: Path) -> None:
    machines.start_at("sampler", "producer-1")
    job_id, _ = machines.jobs.create(JOB)
    # It outlasts the cut, however long the other one takes to come.
    cut_off = machines.start_at("first", f"consumer-{job_id}", job_id, broker_timeout_s=600.0)
    until(committed(machines, job_id, 3), "three commits")
    address = machines.hosts["first"].address
    machines.network.cut_off(address)
    time.sleep(2 * LEASE_S)
    other = goes_on(machines, job_id)
    machines.network.heal(address)
    assert wait_for_exit(cut_off) == HELD, cut_off.tail()
    succeed(other)
    finished(machines, job_id, JOB, tmp_path / "oracle")
    epochs = epochs_of(machines, job_id)
    assert epochs == sorted(epochs)
    assert len(set(epochs)) == 2
    # Its last pointer is of an iteration that it had committed before the other came.
    last_of_cut_off = max(i for i, epoch in enumerate(epochs) if epoch == epochs[0])
    blobs = open_blobs(machines.settings, job_id, "run", deadline_s=300.0)
    pointers = [(int(epoch), int(iteration)) for epoch, iteration in (one.split("-") for one in blobs.pointers())]
    assert all(iteration <= last_of_cut_off for epoch, iteration in pointers if epoch == epochs[0])
    assert max(pointers)[0] == epochs[-1]


def goes_on(machines: Machines, job_id: str) -> ChildProcess:
    """The trainer of the second host that has taken the job over."""
    before = set(epochs_of(machines, job_id))
    while True:
        trainer = machines.start_at("second", f"consumer-{job_id}-{len(machines.children)}", job_id)
        until(partial(has_taken_over, machines, job_id, trainer, before), "the second host's trainer to commit")
        if trainer.exit_code != HELD:
            return trainer


def has_taken_over(machines: Machines, job_id: str, trainer: ChildProcess, before: set[int]) -> bool:
    """Whether it has committed under an epoch of its own, or has ended."""
    return not trainer.is_running or not before.issuperset(epochs_of(machines, job_id))


def epochs_of(machines: Machines, job_id: str) -> list[int]:
    """Those of the commits, in order."""
    return [record.trainer_epoch for record in machines.jobs.audit(job_id)]


def test_a_store_that_fails_in_every_way_and_caches_that_are_full_or_damaged_change_no_weight(
    machines: Machines, tmp_path: Path
) -> None:
    store, sampler = machines.hosts["store"], machines.hosts["sampler"]
    with FaultyProxy(machines.s3_server.port, store.address, machines.network.own) as proxy:
        machines.go_through(proxy.port, machines.network.own)
        generator = machines.start_at("sampler", "producer-1")
        before, _ = machines.jobs.create(replace(JOB, iterations=3))
        succeed(machines.start_at("first", f"consumer-{before}", before))
        # The next job begins with the same versions.
        sampler.do("for file in cache/blobs/*; do printf x | dd of=$file conv=notrunc status=none; done")
        machines.hosts["second"].do("mkdir cache; mount -t tmpfs -o size=64k full cache")
        faults = Faults()
        proxy.refuse, proxy.spoil = faults.refuse, faults.spoil
        job_id, _ = machines.jobs.create(JOB)
        trainer = machines.start_at("second", f"consumer-{job_id}", job_id)
        until(committed(machines, job_id, 3), "three commits")
        machines.s3_server.pause()
        threading.Timer(20.0 if IS_LONG else 3.0, machines.s3_server.go_on).start()
        succeed(trainer)
    machines.go_through(machines.s3_server.port, store.address)
    finished(machines, job_id, JOB, tmp_path / "oracle")
    assert min(faults.num_refused, faults.num_broken_off, faults.num_wrong) > 0
    assert "No space left on device" in trainer.log_path.read_text()
    assert "has other bytes than its name says, and is deleted" in generator.log_path.read_text()


@long_variant
def test_a_trainer_behind_a_slow_link_that_loses_frames_ends_with_the_same_weights(
    machines: Machines, tmp_path: Path
) -> None:
    spec = short_job(iterations=6, weights=ObjectWeights(), recording={}, timeouts__trainer_lease_s=4.0)
    machines.start_at("sampler", "producer-1")
    job_id, _ = machines.jobs.create(spec)
    with machines.network.slow_down(machines.hosts["first"].address, delay_s=0.02, loss=0.01) as cable:
        succeed(machines.start_at("first", f"consumer-{job_id}", job_id))
    assert cable.num_lost > 0
    finished(machines, job_id, spec, tmp_path / "oracle")


class Faults:
    """Each seventh request gets a 503; each other body breaks off in its middle, or has a wrong byte, by turns."""

    def __init__(self) -> None:
        self._num_requests = self._num_bodies = 0
        self.num_refused = self.num_broken_off = self.num_wrong = 0

    def refuse(self, method: str, path: str) -> int:
        self._num_requests += 1
        if self._num_requests % 7:
            return 0
        self.num_refused += 1
        return 503

    def spoil(self, method: str, path: str, body: bytes) -> bytes | None:
        if method != "GET" or not body or body.startswith(b"<?xml"):
            return body
        self._num_bodies += 1
        match self._num_bodies % 4:
            case 1:
                self.num_broken_off += 1
                return None
            case 3:
                self.num_wrong += 1
                return bytes([body[0] ^ 1]) + body[1:]
        return body


def test_a_cache_on_a_disk_that_two_hosts_share_is_refused_by_name(machines: Machines, tmp_path: Path) -> None:
    shared = tmp_path / "mounted by both"
    shared.mkdir()
    job_id, _ = machines.jobs.create(JOB)
    machines.start_at("sampler", "producer-1")
    first = machines.start("consumer-first", job_id, **machines.there("first") | {"cache": str(shared)})
    until(committed(machines, job_id, 1), "a commit")
    other = machines.start("producer-2", **machines.there("second") | {"cache": str(shared)})
    refused = (
        f"can't serve {job_id} now, and tries again later: ONBEAT_CACHE: {shared} is the cache of host first, this is"
    )
    until(lambda: refused in other.tail(), "the other host's generator to be refused")
    succeed(first)
