"""A dead batch says why it was given up and what it was, and is sampled again where that brings it back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest

from broker.job_store import JobStore
from broker.leases import FailOutcome
from contracts.dead_letters import DeadLetters
from contracts.encoding.wire import convert
from contracts.errors import Conflict, NotFound
from contracts.jobs import JobState
from contracts.settings import StackSettings
from gateway.app import create_app
from gateway.services import Services
from gateway.views.dead_letters import DeadLetterBox
from onbeat.stack.redis import EmbeddedRedis
from tests.builders import commit_record, prompt_batch
from tests.integration.dead_batches import bury, running
from tests.integration.stage_parts import external, open_job
from tests.integration.test_fence import DIGEST, answer_to, claimed
from tests.served import asked

HOSTILE = "<img src=x onerror=alert(1)> \x1b[2J"


@pytest.fixture
def ask(services: Services) -> Callable[[str, str], httpx.Response]:
    return partial(asked, create_app(services), key=services.settings.api_key)


def test_a_letter_says_why_what_it_was_and_how_often_it_was_tried(
    settings: StackSettings, ask: Callable[[str, str], httpx.Response]
) -> None:
    job = running(settings)
    batch_id = bury(job, f"the scorer raised {HOSTILE}")
    (letter,) = convert(ask("GET", f"/v1/jobs/{job.job_id}/dead").json(), DeadLetters).letters
    assert (letter.batch_id, letter.iteration, letter.attempts) == (batch_id, 0, 1)
    assert letter.reason == f"the scorer raised {HOSTILE}"
    assert [one.prompt_id for one in letter.prompts] == [one.prompt_id for one in job.batches(0)[0].prompts]
    assert [one.text for one in letter.prompts] == [one.text for one in job.batches(0)[0].prompts]
    assert (letter.can_retry, letter.why_not) == (False, "the job is about to fail with it: try again then")


def test_a_job_that_failed_of_a_dead_batch_is_queued_again_by_its_retry_which_may_be_repeated(
    settings: StackSettings, ask: Callable[[str, str], httpx.Response]
) -> None:
    job = running(settings)
    bury(job)
    JobStore(job.broker).move(job.job_id, JobState.FAILED, reason="batch 0/train/0 is dead")
    path = f"/v1/jobs/{job.job_id}/dead"
    (letter,) = ask("GET", path).json()["letters"]
    assert letter["can_retry"]
    for _ in range(2):
        answer = ask("POST", f"{path}/{letter['entry_id']}/retry")
        assert (answer.status_code, answer.json()["state"]) == (200, "queued")
    (letter,) = ask("GET", path).json()["letters"]
    assert (letter["can_retry"], letter["why_not"]) == (False, "the job is queued, and samples it anew")


def test_what_was_committed_without_a_batch_does_not_take_it_back(
    settings: StackSettings, ask: Callable[[str, str], httpx.Response]
) -> None:
    job = running(settings, rollout__on_failed_batch="abandon")
    dead = bury(job)
    claim = claimed(job.generator("g1"))
    job.generator("g1").publish(claim, answer_to(claim.prompt_batch, "g1"))
    (letter,) = DeadLetterBox(job.broker, job.job_id).newest(10)
    assert letter.why_not == "iteration 0 is open, and goes on without it"
    trained = {one.batch.batch_id: one.digest for one in job.trainer.claim_rollouts(0, max_batches=8)[0]}
    job.announce(1)
    job.trainer.commit(commit_record(0, trained), trained, event=None, opening=job.opening(1), next_version=(1, DIGEST))
    JobStore(job.broker).move(job.job_id, JobState.FAILED, reason="of something else")
    (letter,) = DeadLetterBox(job.broker, job.job_id).newest(10)
    assert (letter.can_retry, letter.why_not) == (False, "iteration 0 is committed without it")
    answer = ask("POST", f"/v1/jobs/{job.job_id}/dead/{letter.entry_id}/retry")
    assert answer.status_code == 409
    assert f"{dead} can't be tried again: iteration 0 is committed" in answer.json()["detail"]
    assert JobStore(job.broker).state(job.job_id) is JobState.FAILED


@pytest.mark.parametrize("entry", ["1-1", "x", "-", "99999999999999999999-0", "1-1%20", "%2B"])
def test_an_entry_that_is_none_is_not_found(
    entry: str, settings: StackSettings, ask: Callable[[str, str], httpx.Response]
) -> None:
    job = running(settings)
    answer = ask("POST", f"/v1/jobs/{job.job_id}/dead/{entry}/retry")
    assert (answer.status_code, answer.json()["field"]) == (404, "entry_id")
    with pytest.raises(NotFound):
        DeadLetterBox(job.broker, job.job_id).letter(entry)


def test_a_retry_of_a_running_job_changes_nothing(settings: StackSettings) -> None:
    job = running(settings)
    bury(job)
    box = DeadLetterBox(job.broker, job.job_id)
    with pytest.raises(Conflict, match="about to fail"):
        box.retry(box.newest(1)[0].entry_id)
    assert JobStore(job.broker).state(job.job_id) is JobState.RUNNING
    job.trainer.renew()


def test_what_is_kept_of_dead_batches_has_a_bound_in_entries_and_in_bytes(settings: StackSettings) -> None:
    """A letter without its prompts still says why."""
    job = running(settings)
    more = [
        prompt_batch([[1] * (20_000 if index == 70 else 2)], job_id=job.job_id, batch_id=f"0/train/{index}")
        for index in range(2, 80)
    ]
    job.trainer.dispatch(0, more)
    for _ in range(80):
        bury(job, "é" * 3000)
    redis, keys = job.broker.redis, job.broker.job_keys(job.job_id)
    assert (redis.xlen(keys.dead), redis.xlen(keys.buried)) == (80, 64)
    letters = DeadLetterBox(job.broker, job.job_id).newest(100)
    assert [bool(one.prompts) for one in letters] == [True] * 9 + [False] + [True] * 55 + [False] * 15
    assert all(one.reason for one in letters)


@pytest.mark.parametrize(
    "fields",
    [
        {"x": b"y"},
        {"batch_id": b"\xff", "reason": b"r", "attempts": b"1"},
        {"batch_id": b"0/train/0", "reason": b"r", "attempts": b"many"},
        {"batch_id": b"../train/0", "reason": b"r"},
    ],
)
def test_an_entry_that_no_script_wrote_hides_no_letter(fields: dict[str, bytes], settings: StackSettings) -> None:
    job = running(settings)
    batch_id = bury(job)
    entry = job.broker.redis.xadd(job.broker.job_keys(job.job_id).dead, dict[Any, Any](fields))
    box = DeadLetterBox(job.broker, job.job_id)
    assert [one.batch_id for one in box.newest(10)] == [batch_id]
    with pytest.raises(NotFound):
        box.letter(str(entry, "ascii") if isinstance(entry, bytes) else entry)


def test_a_batch_that_a_stage_gave_up_is_told_with_its_prompts_too(redis_server: EmbeddedRedis) -> None:
    job = open_job(redis_server, [external("judge", max_attempts=1)])
    batch = job.publish()
    box = DeadLetterBox(job.operator, job.job_id)
    assert box.newest(10) == ()
    (item,) = job.stage().claim("judge", 1)
    assert job.stage().fail(item, "no number") is FailOutcome.DEAD
    (letter,) = box.newest(10)
    assert (letter.batch_id, letter.reason, letter.attempts) == (batch.batch_id, "stage judge: no number", 1)
    assert [one.prompt_id for one in letter.prompts] == [group.prompt_id for group in batch.groups]
