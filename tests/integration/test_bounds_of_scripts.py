"""What a script is told is bounded, and of the kind that it names: any holder of a role's password may call it."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from redis.exceptions import ResponseError

from broker import generator_side
from broker.connection.client import connect
from broker.connection.script_texts import function_name
from broker.generator_side import PublishOutcome
from broker.job_store import MAX_REASON_CHARS, JobStore
from broker.keys import MAX_SLOTS, STAGE_WORKERS, sealed_name
from broker.leases import FailOutcome
from broker.presence import Presence, StagePresence
from broker.spans import report_spans
from contracts.encoding.wire import encode
from contracts.errors import ContractViolation, InvalidInput, OnbeatError
from contracts.events import TimelineSpan
from contracts.jobs import JobState
from contracts.monitor import GeneratorSeen, StageWorkerSeen
from contracts.settings import StackSettings
from onbeat.stack.redis import EmbeddedRedis
from tests.integration.fence_parts import lose_prompts, set_typical_time
from tests.integration.stage_parts import external, open_job
from tests.integration.test_fence import DIGEST, Job, answer_to, claimed, job_of


@pytest.fixture(name="job")
def job_of_operators(redis_server: EmbeddedRedis) -> Job:
    operator = connect(StackSettings(redis_url=redis_server.url))
    return job_of(operator, operator, operator)


def sent(job: Job, function: str, *arguments: Any, of: str = "job") -> Any:
    """Sends a function what a client of another make might, behind the job and its slots."""
    return job.broker.redis.execute_command("FCALL", function_name(function), 0, of, "", *arguments)


@pytest.mark.parametrize(
    ("function", "arguments", "problem"),
    [
        ("renew", [encode({"leases": [1] * 257})], "leases has 257 elements, and at most 256 are taken"),
        ("renew", [encode({"leases": []}), b"x"], "1 payloads, and at most 0 are taken"),
        ("renew", [b"x" * 65537], "65537 bytes of arguments, and at most 65536 are taken"),
        ("report_spans", [encode({"max_reports": 1}), b"x" * 65537], "65537 bytes of payloads, and at most 65536"),
        ("put_rows", [encode({"stages": [], "runs": [{"items": [1] * 257}]})], "items has 257 elements"),
        ("put_rows", [encode({"stages": [{"after": [1] * 17}], "runs": []})], "after has 17 elements"),
        (
            "open_iteration",
            [encode({"epoch": 1, "opening": {"batches": [1] * 257}, "versions": []})],
            "batches has 257 elements",
        ),
    ],
)
def test_a_function_takes_no_more_than_its_bounds_whoever_calls_it(
    job: Job, function: str, arguments: list[bytes], problem: str
) -> None:
    with pytest.raises(ResponseError, match=problem):
        sent(job, function, *arguments)


def test_a_function_is_called_with_a_job_slots_and_arguments(job: Job) -> None:
    for words in ((), ("job",), ("job", "")):
        with pytest.raises(ResponseError, match="is called with a job, a number of slots and its arguments"):
            job.broker.redis.execute_command("FCALL", function_name("present"), 0, *words)
    with pytest.raises(ResponseError, match="not a job id, or not a number of slots"):
        job.broker.redis.execute_command("FCALL", function_name("present"), 0, "job", "1" * 33, encode({}))


@pytest.mark.parametrize("leases", [7, "text", None, [1], [[1]], {"a": 1}])
def test_arguments_of_another_shape_are_an_error_or_nothing(job: Job, leases: Any) -> None:
    with contextlib.suppress(ResponseError):
        sent(job, "renew", encode({"leases": leases}))
    with pytest.raises(ResponseError):
        sent(job, "renew", encode(leases))
    assert job.broker.redis.ping()


def test_what_is_no_record_in_a_list_of_records_is_left_to_the_function(job: Job) -> None:
    assert sent(job, "put_rows", encode({"stages": [1], "runs": []}), of=job.job_id) == [b"put"]


def test_no_more_processes_are_known_than_a_reader_can_read_and_none_by_a_long_name(job: Job) -> None:
    key = sealed_name(STAGE_WORKERS, job.broker.seal)
    told = {"kind": STAGE_WORKERS, "id": "w" * 257}
    assert sent(job, "beat", encode(told), b"alive") == [b"full"]
    job.broker.redis.hset(key, mapping={f"w{number}": "0 x" for number in range(10_000)})
    assert sent(job, "beat", encode(told | {"id": "new"}), b"alive") == [b"full"]
    assert sent(job, "beat", encode(told | {"id": "w7"}), b"alive") == [b"beaten"]
    job.broker.redis.delete(key)


def test_one_claim_buries_no_more_dead_batches_than_hold_the_server_for_milliseconds(job: Job) -> None:
    job.trainer.open_iteration(job.opening(0, count=300), {0: DIGEST})
    told: dict[str, Any] = {
        **{"generator": "g1", "heard": 0, "lease_ms": 1000, "max_attempts": 0, "may_hedge": False, "max_rounds": 1},
        **{"held_version": -1, "held_digest": "", "oldest_only": False, "is_idle": True, "engine": None},
    }
    answers = [job.broker.run("claim_prompt", job=job.job_id, **told) for _ in range(2)]
    assert answers == [[b"none", 1], [b"none", -1]], "of the first more is to be looked at at once"
    assert len(job.trainer.dead_batches(0)) == 300


def test_a_generator_that_holds_a_thousand_batches_is_not_looked_past_for_a_hedge(job: Job) -> None:
    job.trainer.open_iteration(job.opening(0, count=1030), {0: DIGEST})
    many, other = job.generator("many"), job.generator("other")
    for _ in range(1029):
        claimed(many, 3600.0)
    late = claimed(other, 3600.0)
    set_typical_time(job.broker, job.broker.job_keys(job.job_id), 0.0)
    assert many.claim(3600.0, hedge=True) is None
    assert late.prompt_batch.batch_id != claimed(job.generator("third"), 3600.0, hedge=True).prompt_batch.batch_id


def test_a_batch_that_no_value_of_redis_holds_is_refused_before_it_is_sent(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.trainer.open_iteration(job.opening(0, count=1), {0: DIGEST})
    generator = job.generator()
    claim = claimed(generator, 10)
    batch = answer_to(claim.prompt_batch, "g1", attempt=claim.attempt)
    monkeypatch.setattr(generator_side, "BATCH_BYTES", 10)
    assert generator.publish(claim, batch) is PublishOutcome.OVERSIZE
    monkeypatch.undo()
    assert generator.publish(claim, batch) is PublishOutcome.ACCEPTED


def test_a_reason_of_any_length_ends_a_job(job: Job) -> None:
    JobStore(job.broker).fail(job.job_id, "x" * 5_000_000)
    assert len(JobStore(job.broker).fields(job.job_id)["reason"]) == MAX_REASON_CHARS


def test_one_claim_buries_no_more_staged_items_than_hold_the_server_for_a_moment(redis_server: EmbeddedRedis) -> None:
    staged = open_job(redis_server, [external("judge"), external("other")], count=3)
    ledger = staged.keys.slots[0].ledger
    for batch in staged.publish_all(3):
        packed: Any = staged.operator.redis.hget(ledger, batch.batch_id)
        entry = msgspec.msgpack.decode(packed)
        staged.operator.redis.hset(ledger, batch.batch_id, msgspec.msgpack.encode(entry | {"shape": "128x128"}))
    told: dict[str, Any] = {
        **{"worker": "s1", "heard": 0, "stage": 1, "name": "judge", "stages": staged.spec.stage_graph.for_scripts()},
        **{"lease_ms": 1000, "max_attempts": 0, "max_rows": 8, "held": {}, "is_idle": True},
    }
    for num_dead in (1, 2, 3):
        assert staged.operator.run("claim_rows", job=staged.job_id, **told) == [b"none", 0]
        assert len(staged.trainer.dead_batches(0)) == num_dead
    assert staged.operator.run("claim_rows", job=staged.job_id, **told) == [b"none", -1]


def test_the_more_processes_are_known_the_less_each_may_say(job: Job) -> None:
    presence = StagePresence(job.broker)
    for number in range(400):
        presence.beat(StageWorkerSeen(worker_id=f"w{number}", serves=(), leaves_alone={"job": "x" * 40_000}))
    with pytest.raises(InvalidInput, match=r"the limit is|too many"):
        presence.beat(StageWorkerSeen(worker_id="w400", serves=(), leaves_alone={"job": "x" * 50_000}))
    presence.beat(StageWorkerSeen(worker_id="w400", serves=(), leaves_alone={"job": "x" * 40_000}))
    presence.beat(StageWorkerSeen(worker_id="w399", serves=(), leaves_alone={"job": "y" * 40_000}))
    job.broker.redis.delete(sealed_name(STAGE_WORKERS, job.broker.seal))


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
    with pytest.raises(InvalidInput, match=r"the limit is|too many"):
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
    told = encode({"idempotency_key": "", "seen_ended_s": None})
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
