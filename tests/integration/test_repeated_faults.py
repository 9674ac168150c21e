"""A fault of foreign code that repeats word for word has no third attempt, and a job that waits says the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from broker.connection.client import Broker
from broker.fence import read_fence
from broker.generator_side import PublishOutcome
from broker.leases import FailOutcome
from broker.monitor import job_status
from broker.presence import Presence
from contracts.errors import BatchFailed, fault_words
from contracts.monitor import GeneratorSeen
from contracts.settings import StackSettings
from onbeat.client import Consumer, Producer
from onbeat.stack.redis import EmbeddedRedis
from onbeat.work.failures import named_failure
from tests.any_exception import ALL, OF_A_BATCH
from tests.integration.fence_parts import let_expire, set_claim_times, set_recent_times
from tests.integration.stage_parts import external, open_job
from tests.integration.test_client import created, model_of
from tests.integration.test_fence import Job, opened
from tests.integration.window_parts import answer_to, claimed

LEASE_S = 600.0
SOON_S = 60.0
NAMES = {"ExceptionGroup": "KeyError: 'layers'", "BaseExceptionGroup": "ValueError: a mask"}
"""Kind → what names it, where that isn't the kind itself."""


@pytest.fixture(name="job")
def opened_job(broker: Broker) -> Job:
    return opened(broker, count=1, rollout__max_attempts=5)


def fail(job: Job, error: BaseException, *, who: str = "g1", is_released: bool = False) -> FailOutcome:
    """Claims the batch, and fails it as a generator's carrier does."""
    claim = claimed(job.generator(who), LEASE_S)
    failure = named_failure(error, what=f"batch {claim.prompt_batch.batch_id}")
    return job.generator(who).fail(claim, str(failure), is_released=is_released, fault=failure.foreign)


@pytest.mark.parametrize("kind", OF_A_BATCH)
def test_a_batch_that_fails_by_the_same_words_in_two_attempts_is_dead_with_them(job: Job, kind: str) -> None:
    make = OF_A_BATCH[kind]
    assert fail(job, make(), who="g1") is FailOutcome.RETRIED
    assert fail(job, make(), who="g2") is FailOutcome.DEAD
    (reason,) = job.trainer.dead_batches(0).values()
    assert reason == f"{named_failure(make(), what='batch 0/train/0')} (word for word as in an attempt before)"


def test_numbers_and_addresses_are_no_other_words(job: Job) -> None:
    assert fail(job, ValueError("<Layer at 0x7f3a2c> of process 4711 has 17 rows")) is FailOutcome.RETRIED
    assert fail(job, ValueError("<Layer at 0x55beef> of process 12 has 9 rows")) is FailOutcome.DEAD


def test_other_words_or_another_kind_have_all_their_attempts(job: Job) -> None:
    errors: list[BaseException] = [KeyError("layers"), KeyError("heads"), ValueError("heads"), TypeError("heads")]
    assert [fail(job, error) for error in errors] == [FailOutcome.RETRIED] * 4
    assert fail(job, IndexError("a fifth")) is FailOutcome.DEAD, "rollout.max_attempts = 5"


def test_an_error_of_ours_has_all_its_attempts_however_often_it_says_the_same(job: Job) -> None:
    """A scorer that answers nothing, a batch without a place: what may pass is tried as often as the spec says."""
    outcomes = [fail(job, BatchFailed("the reward service refused it")) for _ in range(4)]
    assert outcomes == [FailOutcome.RETRIED] * 4


def test_a_fault_that_is_no_batch_s_is_no_attempt_of_it_but_its_words_are_known(job: Job) -> None:
    assert fail(job, KeyError("layers"), is_released=True) is FailOutcome.RELEASED
    assert fail(job, KeyError("layers"), is_released=True) is FailOutcome.RELEASED
    assert claimed(job.generator("g1"), LEASE_S).attempt == 1


def test_the_words_outlast_a_generator_that_dies_in_between(job: Job) -> None:
    assert fail(job, KeyError("layers")) is FailOutcome.RETRIED
    claimed(job.generator("g2"), LEASE_S)
    let_expire(job.broker, job.broker.job_keys(job.job_id), "0/train/0")
    assert fail(job, KeyError("layers"), who="g3") is FailOutcome.DEAD


def test_an_item_of_a_stage_that_fails_by_the_same_words_twice_makes_its_batch_dead(
    redis_server: EmbeddedRedis,
) -> None:
    job = open_job(redis_server, [external("judge", max_attempts=5)])
    job.publish()
    words = fault_words(AssertionError("shapes differ"))
    (item,) = job.stage().claim("judge", 1)
    assert job.stage().fail(item, "AssertionError: shapes differ", fault=words) is FailOutcome.RETRIED
    items = job.stage("s2").claim("judge", 100)
    again = next(other for other in items if other.item == item.item)
    first_time = next(other for other in items if other.item != item.item)
    assert job.stage("s2").fail(first_time, "AssertionError: shapes differ", fault=words) is FailOutcome.RETRIED
    assert job.stage("s2").fail(again, "AssertionError: shapes differ", fault=words) is FailOutcome.DEAD
    assert job.trainer.dead_batches(0) == {
        "0/train/0": "stage judge: AssertionError: shapes differ (word for word as in an attempt before)"
    }


# What the job waits for


def says(job: Job, *live: GeneratorSeen) -> str:
    for generator in live or (GeneratorSeen(worker_id="g1"), GeneratorSeen(worker_id="g2")):
        Presence(job.broker).beat(generator)
    return job_status(job.broker, job.job_id).reason


def test_a_status_says_whose_batch_failed_and_by_which_words_until_it_is_there(job: Job) -> None:
    assert says(job) == ""
    fail(job, AttributeError("no 'batch_repeat_interleave'"), who="g2")
    words = (
        "waits for batch 0/train/0, which g2 failed at attempt 1, and which is tried again: "
        "batch 0/train/0 failed: AttributeError: no 'batch_repeat_interleave'"
    )
    assert says(job) == words
    claim = claimed(job.generator("g1"), LEASE_S)
    assert says(job) == words, "while it is sampled again"
    assert job.trainer.awaited_batch([]) == words.removeprefix("waits for ")
    assert job.generator("g1").publish(claim, answer_to(claim.prompt_batch, "g1")) is PublishOutcome.ACCEPTED
    assert says(job) == ""


def test_a_status_says_who_gave_a_batch_back_at_no_attempt(job: Job) -> None:
    fail(job, OSError(5, "Input/output error"), is_released=True)
    assert says(job).startswith("waits for batch 0/train/0, which g1 gave back, and which is tried again: ")


def held_for(job: Job, seconds: float) -> None:
    keys = job.broker.job_keys(job.job_id)
    claimed_ms = int(1000 * (job.broker.now_s() - seconds))
    set_claim_times(job.broker, keys, "0/train/0", claimed_ms=claimed_ms)


def test_a_status_says_who_holds_a_batch_for_long_and_what_it_does(job: Job) -> None:
    claimed(job.generator("g1"), LEASE_S)
    doing = GeneratorSeen(worker_id="g1", doing="generating 0/train/0")
    assert says(job, doing) == "", "no batch is there at once"
    held_for(job, 11.0)
    said = says(job, doing)
    assert said.startswith("waits for batch 0/train/0, which g1 has held since ")
    assert said.endswith(" UTC (attempt 1), and says: generating 0/train/0")
    set_recent_times(job.broker, job.broker.job_keys(job.job_id), [20_000])
    assert says(job, doing) == "", "batches of this job take 20 s"
    held_for(job, 61.0)
    assert "which g1 has held since" in says(job, doing)


def test_a_status_says_that_the_holder_of_a_batch_is_gone(job: Job) -> None:
    claimed(job.generator("killed"), LEASE_S)
    held_for(job, 11.0)
    assert says(job, GeneratorSeen(worker_id="g2")).endswith(
        "and no longer lives: the batch goes to another when its lease is over"
    )


def test_a_status_says_that_no_generator_claims_a_batch(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    assert says(job) == ""
    monkeypatch.setattr("broker.awaited_batch.PATIENCE_S", -1.0)
    assert says(job).startswith("waits for batch 0/train/0, which no generator has claimed since ")


@pytest.mark.parametrize("hurt", [b"\xff", b"\x81\xa5stage\x07", b""])
def test_a_setback_that_is_none_hides_nothing_else(job: Job, hurt: bytes) -> None:
    fail(job, KeyError("layers"))
    job.broker.redis.hset(job.broker.job_keys(job.job_id).progress, "setback", hurt)
    assert says(job) == ""


# A generator of one's own


@pytest.mark.parametrize("kind", ALL)
def test_what_leaves_a_producer_s_block_gives_its_batch_back_by_name(
    own: StackSettings, broker: Broker, kind: str
) -> None:
    """An Exception costs an attempt, and the second of the same words the batch; a person who stops it costs none."""
    job_id = created(broker, rollout__batches_per_iteration=1, evaluation__num_prompts=0, rollout__max_attempts=9)
    is_of_the_batch = isinstance(ALL[kind](), Exception)

    def fail() -> None:
        with Producer(job_id, settings=own) as producer:
            assert producer.claim(timeout_s=SOON_S) is not None
            raise ALL[kind]()

    with Consumer(job_id, settings=own) as consumer:
        consumer.begin(model_of(consumer))
        with pytest.raises(type(ALL[kind]())):
            fail()
        keys = broker.job_keys(job_id)
        setback = read_fence(broker, keys).setback
        assert setback is not None
        assert NAMES.get(kind, kind) in setback.reason
        assert setback.is_released is not is_of_the_batch
        with pytest.raises(type(ALL[kind]())):
            fail()
        buried: Any = broker.redis.xrange(keys.dead)
        reasons = [fields[b"reason"].decode() for _, fields in buried]
        assert [NAMES.get(kind, kind) in reason for reason in reasons] == [True] * is_of_the_batch


# Words


@pytest.mark.parametrize(
    ("one", "other", "are_equal"),
    [
        (lambda: ValueError("at 0x7f"), lambda: ValueError("at 0xAB12"), True),
        (lambda: ValueError("pid 12"), lambda: ValueError("pid 99871"), True),
        (lambda: ValueError("layer q"), lambda: ValueError("layer k"), False),
        (lambda: ValueError("x"), lambda: KeyError("x"), False),
        (lambda: RuntimeError("first\nsecond"), lambda: RuntimeError("first\nthird"), True),
    ],
)
def test_words_are_the_kind_and_the_first_line_without_numbers(
    one: Callable[[], BaseException], other: Callable[[], BaseException], are_equal: bool
) -> None:
    assert (fault_words(one()) == fault_words(other())) is are_equal
