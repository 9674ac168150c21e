"""Two releases on one server, each with a library of its own: neither calls the other's, and a job may have both."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from msgspec.structs import replace

from broker.connection.client import connect, load_scripts
from broker.connection.roles import GATEWAY, GENERATOR, LOADER, TRAINER
from broker.connection.script_texts import library_name
from broker.generator_side import GeneratorSide, PublishOutcome
from broker.job_store import JobStore
from contracts.errors import BrokerUnavailable
from contracts.events import record_digest
from contracts.settings import StackSettings
from onbeat.stack.redis import EmbeddedRedis
from tests.builders import DIGEST, commit_record
from tests.integration.test_fence import Job, job_of
from tests.integration.window_parts import answer_to, claimed

ANOTHER = """
import sys
from broker.connection import script_texts

script_texts.PRELUDE += "-- as another release has it\\n"
from tests.integration.test_two_releases import run_release

run_release(*sys.argv[1:])
"""
WITHIN_S = 300.0


def publish_one(side: GeneratorSide, name: str) -> None:
    claim = claimed(side)
    assert side.publish(claim, answer_to(claim.prompt_batch, name)) is PublishOutcome.ACCEPTED


def commit(job: Job, iteration: int, *, previous: str = "", opens_next: bool = False) -> str:
    """Commits two batches, and answers the digest of the audit record."""
    trained = {one.batch.batch_id: one.digest for one in job.trainer.claim_rollouts(iteration, max_batches=8)[0]}
    assert len(trained) == 2
    if opens_next:
        job.announce(iteration + 1)
    link = replace(commit_record(iteration, trained), previous=previous)
    following, made = (job.opening(iteration + 1), (iteration + 1, DIGEST)) if opens_next else (None, None)
    job.trainer.commit(link, trained, event=None, opening=following, next_version=made)
    return record_digest(link)


def started(server_urls: tuple[str, str, str]) -> Job:
    """A job with two batches in work, each side of it by its own user."""
    job = job_of(*(connect(StackSettings(redis_url=url)) for url in server_urls))
    job.trainer.open_iteration(job.opening(0), {0: DIGEST})
    return job


def urls_of(server: EmbeddedRedis) -> tuple[str, str, str]:
    return server.url_of(GATEWAY), server.url_of(TRAINER), server.url_of(GENERATOR)


def run_release(loader: str, seal: str, others_job: str, *urls: str) -> None:
    """The other process: its library, a whole job by it, and a batch of the first release's job."""
    load_scripts(loader, seal)
    job = started(urls)  # type: ignore[arg-type]
    for _ in range(2):
        publish_one(job.generator(), "g1")
    commit(job, 0)
    assert job.generators is not None
    publish_one(GeneratorSide(job.generators, others_job, "of the other"), "of the other")
    sys.stdout.write(f"{library_name()} {job.job_id}\n")


def libraries(server: EmbeddedRedis) -> set[str]:
    found: Any = connect(StackSettings(redis_url=server.url)).redis.function_list()
    return {fields[fields.index(b"library_name") + 1].decode() for fields in found}


def test_each_release_calls_its_own_library_and_the_older_one_can_be_deleted(server: EmbeddedRedis) -> None:
    job = started(urls_of(server))
    program = (sys.executable, "-c", ANOTHER, server.url_of(LOADER), server.seal, job.job_id, *urls_of(server))
    done = subprocess.run(program, check=True, capture_output=True, text=True, timeout=WITHIN_S)
    other_library, other_job = done.stdout.split()
    assert libraries(server) == {library_name(), other_library}
    assert [one.iteration for one in JobStore(job.broker).audit(other_job)] == [0]
    # A job in which both have published.
    publish_one(job.generator(), "g1")
    link = commit(job, 0, opens_next=True)
    operator = connect(StackSettings(redis_url=server.url))
    operator.redis.function_delete(other_library)
    for _ in range(2):
        publish_one(job.generator(), "g1")
    commit(job, 1, previous=link)
    # The other way round: who is left without a library hears of it in one line.
    operator.redis.function_delete(library_name())
    with pytest.raises(BrokerUnavailable, match="lacks this release's functions"):
        connect(StackSettings(redis_url=server.url_of(TRAINER)), patience_s=1.0).check()
    server.load_scripts()
    job.trainer.renew()
