"""A host that is cut off with Redis' primary on it: what was confirmed stays, and the job goes on elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.short_job import LAG, assert_undisturbed, long_variant, sequential_digest, short_job, until
from tests.hosts.network import Network
from tests.pipeline import Pipeline, wait_for_exit
from tests.redundant_redis import RedundantRedis

WRITER = """
import sys
from broker.connection.client import connect
from contracts.errors import BrokerUnavailable
from contracts.settings import StackSettings

broker = connect(StackSettings(redis_url=sys.argv[1], redis_replicas=int(sys.argv[2])), patience_s=10.0)
while True:
    try:
        number = broker.redis.incr("numbers")
        broker.durability.persisted()
    except Exception:
        break
    print(number, flush=True)
"""


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as made:
        yield made


def redundant_over(network: Network, folder: Path, **how: int) -> RedundantRedis:
    return RedundantRedis(folder, hosts=network.hosts, entering=network.entering, **how)


@pytest.mark.parametrize("replicas", [1, pytest.param(0, marks=long_variant)])
def test_what_a_cut_off_primary_confirmed_is_lost_only_where_no_replica_was_asked_for(
    network: Network, tmp_path: Path, replicas: int
) -> None:
    redundant = redundant_over(network, tmp_path / "redis", min_replicas=replicas)
    try:
        redundant.start()
        cut_off, *_ = network.hosts
        command = (*network.entering(cut_off), sys.executable, "-c", WRITER, redundant.url, str(replicas))
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "1\n"
            network.cut_off(cut_off)
            another = redundant.until_another(redundant.servers[0])
            writer.kill()
            confirmed = int([1, *writer.stdout][-1])
        network.heal(cut_off)
        redundant.until_follows(redundant.servers[0], another)
        kept = int(redundant.ask(redundant.servers[0], "GET", "numbers") or 0)
    finally:
        redundant.stop()
    assert (kept >= confirmed) == (replicas == 1), (kept, confirmed)


def test_a_job_goes_on_where_the_others_are_and_the_trainer_that_was_cut_off_ends(
    network: Network, tmp_path: Path
) -> None:
    redundant = redundant_over(network, tmp_path / "redis")
    cut_off, *_ = network.hosts
    with Pipeline(tmp_path, redundant) as pipeline:
        spec = short_job(**LAG)
        oracle = sequential_digest(pipeline, spec, tmp_path / "oracle")
        pipeline.start_generators(2)
        job_id, _ = pipeline.jobs.create(spec)
        there = pipeline.start(f"consumer-{job_id}", job_id, entering=network.entering(cut_off), broker_timeout_s=5.0)
        until(lambda: len(pipeline.jobs.audit(job_id)) >= 3, "three commits")
        network.cut_off(cut_off)
        pipeline.train_to_the_end(job_id)
        assert wait_for_exit(there) != 0
        network.heal(cut_off)
        redundant.until_follows(redundant.servers[0], redundant.primary())
        assert_undisturbed(pipeline, job_id, oracle)


@long_variant
def test_a_trainer_behind_a_slow_link_that_loses_frames_ends_with_the_same_weights(
    network: Network, tmp_path: Path
) -> None:
    redundant = redundant_over(network, tmp_path / "redis")
    far, *_ = reversed(network.hosts)
    spec = short_job(iterations=4, weights={"transport": "redis"}, timeouts__trainer_lease_s=4.0)
    with Pipeline(tmp_path, redundant) as pipeline:
        oracle = sequential_digest(pipeline, spec, tmp_path / "oracle")
        pipeline.start_generators(1)
        job_id, _ = pipeline.jobs.create(spec)
        # The server there is a replica: what is confirmed goes over the link, too.
        with network.slow_down(far, delay_s=0.02, loss=0.01) as cable:
            trainer = pipeline.start(f"consumer-{job_id}", job_id, entering=network.entering(far))
            assert wait_for_exit(trainer) == 0, trainer.tail()
        assert cable.num_lost > 0
        assert_undisturbed(pipeline, job_id, oracle)
