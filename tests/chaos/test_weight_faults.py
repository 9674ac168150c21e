"""Weights that go bad on their way, by the transports that don't move whole files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from broker.keys import OpenKeys, chunk_field
from contracts.run_folder import RunFolder
from contracts.weights import DeltaWeights, RedisWeights, WeightsSpec
from onbeat.weights.delta.codec import DELTA_NAME
from onbeat.weights.whole import SHARD_NAME
from tests.chaos.short_job import DEADLINE_S, assert_undisturbed, long_variant, running, short_job, succeed
from tests.pipeline import Pipeline, wait_for_exit

DELTA = pytest.param(DeltaWeights(snapshot_every_versions=4), id="delta")
REDIS = pytest.param(RedisWeights(), id="redis", marks=long_variant)


def cut_delta(pipeline: Pipeline, job_id: str) -> None:
    path = RunFolder(pipeline.settings.run_root_path, job_id).weights_of(1) / DELTA_NAME.format(number=1, count=1)
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit_in_redis(pipeline: Pipeline, job_id: str) -> None:
    """Flips a bit in the last tensor: the chunk keeps its size, its header and every name."""
    key, field = OpenKeys(job_id).chunks, chunk_field(1, SHARD_NAME.format(number=1, count=1), 0)
    data = bytearray(pipeline.broker.redis.hget(key, field))  # type: ignore[arg-type]
    data[-1] ^= 1
    pipeline.broker.redis.hset(key, field, bytes(data))


DAMAGE = {DeltaWeights: cut_delta, RedisWeights: flip_a_bit_in_redis}


@pytest.mark.parametrize("weights", [DELTA, REDIS])
def test_a_damaged_version_is_refused_and_written_again(tmp_path: Path, undisturbed: str, weights: WeightsSpec) -> None:
    with Pipeline(tmp_path) as pipeline:
        first = pipeline.start("producer-first", crash_at="producer.loading_weights:2")
        job_id, _ = pipeline.jobs.create(short_job(weights=weights))
        with running(pipeline, f"consumer-{job_id}", job_id) as trainer:
            # It dies while it loads version 1, whose iteration no other generator can sample.
            wait_for_exit(first, DEADLINE_S)
            DAMAGE[type(weights)](pipeline, job_id)
            pipeline.start_generators(1)
            succeed(trainer)
            assert "a generator refuses" in trainer.tail(num_lines=100)
        assert_undisturbed(pipeline, job_id, undisturbed)
