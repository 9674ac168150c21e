"""Versions and announcements of shards in a real Redis: the trainer writes through the fence, generators read."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from broker.connection.client import Broker
from broker.generator_side import GeneratorSide, WeightChunks, WeightNews
from broker.job_store import JobStore
from broker.keys import OpenKeys
from broker.trainer_side import TrainerSide
from contracts.errors import FencedOff
from contracts.versions import WeightFile, WeightManifest, WeightShard
from tests.builders import job_spec

NAME = "weights.safetensors"


@pytest.fixture(name="job")
def submitted_job(broker: Broker) -> str:
    return JobStore(broker).create(job_spec())[0]


@pytest.fixture
def trainer(broker: Broker, job: str) -> TrainerSide:
    side = TrainerSide(broker, job, owner="first", lease_s=10.0)
    side.acquire()
    return side


def test_chunks_are_kept_by_version_until_they_are_dropped(broker: Broker, job: str, trainer: TrainerSide) -> None:
    chunks = WeightChunks(broker, job)
    for version in (9, 10, 11):
        for number in range(2):
            trainer.put_chunk(version, NAME, number, b"%d %d" % (version, number), keep_s=60.0)
    assert chunks.get(10, NAME, 1) == b"10 1"
    assert chunks.get(10, NAME, 2) is None
    trainer.drop_chunks_before(11, {9})
    assert [chunks.get(version, NAME, 0) for version in (9, 10, 11)] == [b"9 0", None, b"11 0"]
    key = OpenKeys(job).chunks
    assert 0 < broker.redis.pttl(key) <= 60_000  # type: ignore[operator]
    trainer.drop_chunks_before(2**63 - 1)
    assert broker.redis.exists(key) == 0


def test_a_generator_that_waits_for_prompts_is_told_of_each_shard_once(
    broker: Broker, job: str, trainer: TrainerSide
) -> None:
    shards = [
        WeightShard(policy_version=4, path=f"j/weights/.v000004.0/{name}", name=name, num_bytes=8) for name in "ab"
    ]
    generator = GeneratorSide(broker, job, "generator-a")
    assert generator.wait_for_prompts(0.01) == []
    for shard in shards:
        trainer.announce_shard(shard)
        assert generator.wait_for_prompts(60.0) == [shard]
    assert generator.wait_for_prompts(0.01) == []
    late = GeneratorSide(broker, job, "generator-b")
    assert late.wait_for_prompts(60.0) == shards, "one that comes late has them at once"
    assert late.wait_for_prompts(0.01) == []


def test_a_generator_of_a_job_with_a_lag_is_told_of_versions_and_of_the_files_after_them(broker: Broker) -> None:
    job_id, _ = JobStore(broker).create(
        job_spec(schedule="delayed", max_policy_lag=1, algorithm__correction="none", iterations=9)
    )
    trainer = TrainerSide(broker, job_id, owner="first", lease_s=10.0, num_open=2)
    trainer.acquire()
    generator = GeneratorSide(broker, job_id, "generator-a")
    assert generator.wait_for_weights(60.0) == WeightNews(versions=(), shards=()), "the first answer is at once"

    def version(number: int, digest: str) -> WeightManifest:
        directory = f"{job_id}/weights/v{number:06d}"
        files = (WeightFile(name=NAME, num_bytes=8),)
        return WeightManifest(
            policy_version=number, weights_digest=digest * 64, dtype="float32", directory=directory, files=files
        )

    def ahead(number: int) -> WeightShard:
        path = f"{job_id}/weights/.v{number:06d}.0/{NAME}"
        return WeightShard(policy_version=number, path=path, name=NAME, num_bytes=8)

    first, second = version(10, "a"), version(9, "b")
    for manifest in (first, second):
        with ThreadPoolExecutor(1) as waiting:
            told = waiting.submit(generator.wait_for_weights, 60.0)
            trainer.publish_weights(manifest, oldest_kept=0)
            assert manifest in told.result(60.0).versions
    for shard in (ahead(10), ahead(11)):
        trainer.announce_shard(shard)
    assert generator.wait_for_prompts(0.01) == [], "who waits for prompts takes no file from who waits for weights"
    assert generator.wait_for_weights(60.0) == WeightNews(versions=(second, first), shards=(ahead(11),))
    assert generator.wait_for_prompts(0.01) == [], "an idle generator is told of none twice"
    again = version(10, "c")
    trainer.publish_weights(again, oldest_kept=10)
    assert generator.wait_for_weights(60.0) == WeightNews(versions=(again,), shards=())
    assert generator.wait_for_weights(0.01) == WeightNews(versions=(again,), shards=())


def test_a_trainer_whose_epoch_is_over_writes_no_weights(broker: Broker, job: str, trainer: TrainerSide) -> None:
    trainer.put_chunk(0, NAME, 0, b"mine", keep_s=60.0)
    trainer.record_files(b"mine")
    trainer.release()
    TrainerSide(broker, job, owner="second", lease_s=10.0).acquire()
    shard = WeightShard(policy_version=1, path="j/weights/.v000001.0/a", name="a", num_bytes=8)
    for write in (
        lambda: trainer.put_chunk(0, NAME, 0, b"late", keep_s=60.0),
        lambda: trainer.drop_chunks_before(1),
        lambda: trainer.announce_shard(shard),
        lambda: trainer.record_files(b"late"),
    ):
        with pytest.raises(FencedOff):
            write()
    assert WeightChunks(broker, job).get(0, NAME, 0) == b"mine"
    assert JobStore(broker).files(job) == b"mine"
    assert GeneratorSide(broker, job, "generator-a").wait_for_prompts(0.01) == []
