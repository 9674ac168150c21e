"""What a script is told is bounded, and of the kind that it names: any holder of a role's password may call it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from redis.exceptions import ResponseError

from broker.connection.client import connect
from broker.connection.script_texts import function_name
from broker.job_store import JobStore
from broker.keys import MAX_SLOTS
from broker.leases import FailOutcome
from broker.presence import Presence
from broker.spans import report_spans
from contracts.encoding.wire import encode
from contracts.errors import ContractViolation, InvalidInput, OnbeatError
from contracts.events import TimelineSpan
from contracts.jobs import JobState
from contracts.monitor import GeneratorSeen
from contracts.settings import StackSettings
from onbeat.stack.redis import EmbeddedRedis
from tests.integration.fence_parts import lose_prompts
from tests.integration.stage_parts import external, open_job
from tests.integration.test_fence import DIGEST, Job, claimed, job_of


@pytest.fixture
def job(redis_server: EmbeddedRedis) -> Job:
    operator = connect(StackSettings(redis_url=redis_server.url))
    return job_of(operator, operator, operator)


def presented(job: Job, job_id: str, slots: str) -> Any:
    """Calls a function of a job by hand, as a client of another make would."""
    told = encode({"kind": "generators"})
    return job.broker.redis.execute_command("FCALL", function_name("present"), 0, job_id, slots, told)


@pytest.mark.parametrize("job_id", ["job:1", "{job}", "job/../other", "j" * 65])
def test_a_function_takes_no_job_id_that_could_name_another_key(job: Job, job_id: str) -> None:
    assert presented(job, "j" * 64, "")
    with pytest.raises(ResponseError, match="not a job id"):
        presented(job, job_id, "")


@pytest.mark.parametrize("slots", ["0", "-1", str(MAX_SLOTS + 1), "nan"])
def test_a_function_takes_one_slot_to_the_most(job: Job, slots: str) -> None:
    assert presented(job, "job", str(MAX_SLOTS))
    with pytest.raises(ResponseError, match="not a number of slots"):
        presented(job, "job", slots)


@pytest.mark.parametrize(("name", "said"), [("g" * 257, ""), ("g1", "x" * 65536)])
def test_a_generator_that_says_too_much_of_itself_is_not_noted(job: Job, name: str, said: str) -> None:
    presence = Presence(job.broker)
    presence.beat(GeneratorSeen(worker_id="g" * 256, doing="x" * 60000))
    with pytest.raises(InvalidInput, match="says too much"):
        presence.beat(GeneratorSeen(worker_id=name, doing=said))
    assert name not in [one.worker_id for one in presence.live()]
    presence.leave("g" * 256)


def test_a_report_of_spans_that_is_too_large_is_not_kept(job: Job) -> None:
    spans = job.broker.job_keys(job.job_id).spans
    wait = TimelineSpan(who="g1", what="wait", iteration=0, started_s=1.0, ended_s=2.0)
    report_spans(job.broker, job.job_id, [replace(wait, what="w" * 65536)])
    assert job.broker.redis.xlen(spans) == 0
    report_spans(job.broker, job.job_id, [wait])
    assert job.broker.redis.xlen(spans) == 1


def test_a_claim_whose_prompt_is_gone_has_nothing_to_be_given_back(job: Job) -> None:
    job.trainer.open_iteration(job.opening(0, count=1), {0: DIGEST})
    claim = claimed(job.generator(), 10)
    lose_prompts(job.broker, job.broker.job_keys(job.job_id), claim.prompt_batch.batch_id)
    assert job.generator().fail(claim, "no reward") is FailOutcome.SETTLED


def test_a_write_of_no_job_is_of_a_key_of_the_server(job: Job) -> None:
    assert job.broker.write("HSET", "bounds", "field", "value") == 1
    assert job.broker.redis.hgetall("onbeat:bounds") == {b"field": b"value"}
    assert job.broker.write("DEL", "bounds") == 1


@pytest.mark.parametrize("slots", ["9" * 400, str(2**63 - 1), "-1", "nan", "1.5", "x"])
def test_a_fence_that_names_no_sound_number_of_slots_has_one_and_no_loop_is_endless(job: Job, slots: str) -> None:
    job.trainer.open_iteration(job.opening(0, count=1), {0: DIGEST})
    keys = job.broker.job_keys(job.job_id)
    job.broker.redis.hset(keys.fence, "num_slots", slots)
    operator = JobStore(job.broker)
    operator.move(job.job_id, JobState.CANCELLED)
    assert job.broker.redis.xlen(keys.slots[0].prompts) == 0
    told = encode({"idempotency_key": "", "as_seen": None})
    removed = job.broker.redis.execute_command(
        "FCALL", function_name("remove_job"), 0, job.job_id, "", told, encode({})
    )
    assert removed == [b"removed"]


@pytest.mark.parametrize("shape", ["1x99999999999", "99999999999x1", f"{'9' * 400}x1", "0x0", "x", 7])
def test_a_batch_whose_ledger_names_no_sound_shape_is_an_error_and_no_endless_loop(
    redis_server: EmbeddedRedis, shape: Any
) -> None:
    staged = open_job(redis_server, [external("judge")])
    batch = staged.publish()
    ledger = staged.keys.slots[0].ledger
    entry = msgspec.msgpack.decode(staged.operator.redis.hget(ledger, batch.batch_id))
    staged.operator.redis.hset(ledger, batch.batch_id, msgspec.msgpack.encode(entry | {"shape": shape}))
    with pytest.raises(OnbeatError, match="not the shape of a batch"):
        staged.stage().claim("judge", 8)
    assert staged.operator.redis.ping()


def test_a_claim_of_a_version_whose_manifest_is_gone_is_damaged(job: Job) -> None:
    job.trainer.open_iteration(job.opening(0, count=1), {0: DIGEST})
    job.broker.redis.delete(job.broker.job_keys(job.job_id).weights)
    with pytest.raises(ContractViolation, match="WeightManifest: is not there"):
        job.generator().claim(10)
