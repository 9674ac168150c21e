"""Redis' memory goes to the oldest iteration first, whose commit frees it: whatever fills it, the window moves on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from broker.connection import roles
from broker.connection.client import Broker, connect
from broker.generator_side import Claim, PublishOutcome
from broker.monitor import stack_state
from contracts.errors import BrokerFull
from contracts.rollouts import encoded_batch
from contracts.settings import StackSettings
from contracts.versions import WeightFile
from onbeat.stack.redis import EmbeddedRedis
from tests.builders import manifest
from tests.integration.window_parts import LEASE_S, NUM_TRAIN, LaggingJob, answer_to, digest, lagging_spec

LARGE = {"response_tokens": (6000, 6000)}
"""Makes a batch large beside everything else that the server holds."""
CHUNK = b"w" * 400_000
BUFFERS = 3
"""Batches that connections hold on their way: the server counts them, too."""
ACCEPTED, NO_ROOM = PublishOutcome.ACCEPTED, PublishOutcome.NO_ROOM


class Users(NamedTuple):
    operator: Broker
    generator: Broker


@pytest.fixture
def users(tmp_path: Path) -> Iterator[Users]:
    """Generators with their own rights: they have to see how much memory is left."""
    with EmbeddedRedis(tmp_path / "redis") as server:
        made = Users(*(connect(StackSettings(redis_url=url)) for url in (server.url, server.url_of(roles.GENERATOR))))
        yield made
        for broker in made:
            broker.close()


class FullJob(LaggingJob):
    """Its versions travel in chunks, its batches are large, and generators hold what finds no room."""

    in_chunks: bool = True

    def announce(self, version: int, *, oldest_kept: int = 0) -> None:
        made = manifest(version, digest(version))
        if self.in_chunks:
            self.trainer.put_chunk(version, "w", 0, CHUNK, keep_s=600.0)
            file = WeightFile(name="w", num_bytes=len(CHUNK))
            made = replace(made, transport="redis", files=(file,))
        self.trainer.publish_weights(made, oldest_kept=oldest_kept)
        self.trainer.drop_chunks_before(version - self.schedule.max_policy_lag)

    def claim_all(self) -> list[Claim]:
        claims = []
        while (claim := self.generator().claim(LEASE_S)) is not None:
            claims.append(claim)
        return claims

    def publish(self, claim: Claim, name: str = "g1", **changes: object) -> PublishOutcome:
        return super().publish(claim, name, **(LARGE | changes))


def full_job(users: Users, lag: int, *, in_chunks: bool = True, schedule: str = "delayed") -> FullJob:
    job = FullJob(users.operator, lagging_spec(lag, schedule=schedule), generators=users.generator)
    job.in_chunks = in_chunks
    job.start()
    return job


def payload_bytes(job: FullJob, claim: Claim) -> int:
    return len(encoded_batch(answer_to(claim.prompt_batch, "g1", **LARGE))[0])


def limit(users: Users, num_bytes: int) -> None:
    """Limits the server to so many bytes more than it holds; negative: to less."""
    users.operator.redis.config_set("maxmemory", stack_state(users.operator, max_jobs=0).redis_used_bytes + num_bytes)


@pytest.mark.parametrize("in_chunks", [False, True], ids=["file", "redis"])
@pytest.mark.parametrize(("lag", "schedule"), [(0, "periodic"), (1, "delayed"), (2, "delayed"), (2, "bounded")])
def test_a_window_whose_younger_batches_come_first_moves_on_in_memory_for_little_more_than_one_iteration(
    users: Users, lag: int, schedule: str, in_chunks: bool
) -> None:
    job = full_job(users, lag, schedule=schedule, in_chunks=in_chunks)
    held = job.claim_all()
    size = payload_bytes(job, held[0])
    limit(users, int((NUM_TRAIN + BUFFERS) * size) + in_chunks * 2 * len(CHUNK))
    refused = 0
    for iteration in range(4):
        held.sort(key=lambda claim: claim.prompt_batch.iteration, reverse=True)
        outcomes = [(claim, job.publish(claim)) for claim in held]
        assert {outcome for _, outcome in outcomes} <= {ACCEPTED, NO_ROOM}
        assert all(outcome is ACCEPTED for claim, outcome in outcomes if claim.prompt_batch.iteration == iteration)
        server = stack_state(users.operator, max_jobs=0)
        assert server.redis_used_bytes <= server.redis_max_bytes, "what was estimated is what came"
        job.commit(iteration)
        held = [claim for claim, outcome in outcomes if outcome is NO_ROOM] + job.claim_all()
        refused += sum(outcome is NO_ROOM for _, outcome in outcomes)
    assert bool(refused) == bool(lag)
    assert job.fence.committed == 3


def test_what_the_oldest_iteration_lacks_passes_a_limit_that_the_younger_ones_have_reached(users: Users) -> None:
    """As it stands where the limit was lowered, or batches got longer: of iterations 0, 1, 2 there are 1, 2, 1."""
    job = full_job(users, 2, in_chunks=False)
    first, last, *younger, youngest = job.claim_all()
    for claim in (first, *younger):
        assert job.publish(claim) is ACCEPTED
    limit(users, -100_000)
    assert job.publish(youngest) is NO_ROOM
    assert job.publish(last) is ACCEPTED
    job.commit(0)
    assert job.open_iterations == [1, 2, 3]
    assert job.publish(youngest) is NO_ROOM
    job.commit(1)
    assert job.publish(youngest) is ACCEPTED


def test_an_iteration_that_does_not_fit_at_all_is_refused_at_the_limit(users: Users) -> None:
    job = full_job(users, 2)
    claim = job.claim()
    limit(users, -1)
    with pytest.raises(BrokerFull, match="maxmemory"):
        job.publish(claim)
    with pytest.raises(BrokerFull, match="maxmemory"):
        job.announce(1)
    assert job.fence.published == 0
    users.operator.redis.config_set("maxmemory", 0)
    assert job.publish(claim) is ACCEPTED
    limit(users, -1)
    job.announce(1)


def test_a_generator_that_holds_what_finds_no_room_may_claim_of_the_oldest_iteration_alone(users: Users) -> None:
    job = full_job(users, 2, in_chunks=False)
    first = job.claim()
    job.publish(job.claim())
    generator = job.generator()
    assert generator.claim(LEASE_S, oldest_only=True) is None
    generator.fail(first, "its engine is gone")
    again = generator.claim(LEASE_S, oldest_only=True)
    assert again is not None
    assert again.prompt_batch.batch_id == first.prompt_batch.batch_id
    younger = generator.claim(LEASE_S)
    assert younger is not None
    assert younger.prompt_batch.iteration == 1
