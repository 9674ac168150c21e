"""Jobs against a real server: created once, moved along their lifecycle only, told about in order."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from broker.connection.client import Broker, connect
from broker.job_store import JobStore
from broker.keys import OpenKeys
from broker.trainer_side import TrainerSide
from contracts.encoding.wire import decode, encode
from contracts.errors import Conflict, FencedOff, InvalidInput, NotFound
from contracts.events import BatchDead, StateChanged
from contracts.jobs import EvaluationScore, JobState, ResumeRequest
from contracts.rewards import ExactReward
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from gateway.submission import check_fork
from tests.builders import job_spec


@pytest.fixture
def key() -> str:
    """An idempotency key that no other test uses."""
    return uuid.uuid4().hex


def score(iteration: int) -> EvaluationScore:
    return EvaluationScore(iteration=iteration, policy_version=iteration, sampled=0.5, num_prompts=8)


def test_a_key_makes_one_job_however_often_it_is_sent(jobs: JobStore, key: str) -> None:
    job_id, is_new = jobs.create(job_spec(), idempotency_key=key)
    assert is_new
    assert jobs.create(job_spec(), idempotency_key=key) == (job_id, False)
    assert jobs.create(job_spec())[0] != job_id
    assert jobs.spec(job_id) == job_spec()
    assert jobs.state(job_id) is JobState.QUEUED


def test_a_key_cannot_be_used_for_another_spec(jobs: JobStore, key: str) -> None:
    job_id, _ = jobs.create(job_spec(), idempotency_key=key)
    with pytest.raises(Conflict, match=job_id):
        jobs.create(job_spec(seed=1), idempotency_key=key)


def test_a_fork_is_checked_when_it_is_submitted_and_its_source_stays_until_it_has_ended(
    jobs: JobStore, settings: StackSettings, tmp_path: Path
) -> None:
    here = replace(settings, run_root=str(tmp_path))
    source, _ = jobs.create(job_spec())
    fork = {"job": source, "version": 2}
    forking = job_spec(fork=fork)
    check_fork(forking, here, jobs)  # its files may be another host's
    RunFolder(tmp_path, source).checkpoint_after(2).mkdir(parents=True)
    for changes, problem in (
        ({"job": "job-none"}, "there is no such job"),
        ({}, "no checkpoint of it .*are of versions 3"),
        ({"trainer": {"lora": {}}}, "it has trainer.lora = None"),
    ):
        of = {**fork, **{key: value for key, value in changes.items() if key == "job"}}
        spec = job_spec(fork=of, **{key: value for key, value in changes.items() if key != "job"})
        with pytest.raises(InvalidInput, match=problem):
            check_fork(spec, here, jobs)
    check_fork(job_spec(fork={**fork, "version": 3}), here, jobs)
    job_id, _ = jobs.create(forking)
    unread, _ = jobs.create(forking)
    jobs._redis.set(OpenKeys(unread).spec, encode({"fork": 7}))
    assert jobs.forks_of(source).pop(job_id) == 2, "beside a spec that nothing can read"
    jobs._redis.set(OpenKeys(unread).spec, encode({"fork": fork, "of": "another release"}))
    assert jobs.forks_of(source)[unread] == 2
    jobs.fail(unread, "it is over")
    jobs.move(job_id, JobState.RUNNING)
    jobs.fail(job_id, "it is over")
    assert jobs.forks_of(source) == {}


class Died(Exception):
    """What is left of a process that was killed."""


class MortalBroker(Broker):
    """A broker whose process dies when its first script has answered."""

    dies = True

    def run(self, function: str, *payloads: str | int | bytes, **told: Any) -> list[Any]:
        answer = super().run(function, *payloads, **told)
        if self.dies:
            raise Died
        return answer


def test_a_process_that_dies_leaves_no_job_unlisted_and_none_active_that_has_ended(
    jobs: JobStore, key: str, settings: StackSettings
) -> None:
    mortal = JobStore(MortalBroker(connect(settings).redis))
    with pytest.raises(Died):
        mortal.create(job_spec(), idempotency_key=key)
    job_id, is_new = jobs.create(job_spec(), idempotency_key=key)
    assert not is_new
    assert job_id in jobs.job_ids()
    assert job_id in jobs.active_jobs()
    with pytest.raises(Died):
        mortal.move(job_id, JobState.CANCELLED)
    assert job_id not in jobs.active_jobs()
    with pytest.raises(Died):
        mortal.resume(job_id)
    assert job_id in jobs.active_jobs()


def test_active_jobs_are_answered_oldest_first(jobs: JobStore) -> None:
    made = [jobs.create(job_spec())[0] for _ in range(5)]
    assert [job_id for job_id in jobs.active_jobs() if job_id in made] == made


def test_a_repeated_submission_does_not_revive_a_job_that_has_ended(jobs: JobStore, key: str) -> None:
    job_id, _ = jobs.create(job_spec(), idempotency_key=key)
    jobs.move(job_id, JobState.CANCELLED)
    jobs.create(job_spec(), idempotency_key=key)
    assert job_id not in jobs.active_jobs()
    assert jobs.state(job_id) is JobState.CANCELLED


def test_a_job_is_active_until_its_final_state(jobs: JobStore) -> None:
    job_id, _ = jobs.create(job_spec())
    assert jobs.move(job_id, JobState.RUNNING) is True
    assert jobs.move(job_id, JobState.RUNNING) is False
    assert job_id in jobs.active_jobs()
    assert jobs.move(job_id, JobState.FAILED, reason="the loss is not finite") is True
    assert job_id not in jobs.active_jobs()
    assert jobs.fields(job_id)["reason"] == b"the loss is not finite"
    assert {"created_s", "started_s", "ended_s"} <= jobs.fields(job_id).keys()


@pytest.mark.parametrize("after", [JobState.SUCCEEDED, JobState.CANCELLING, JobState.QUEUED])  # queued: by a resume
def test_a_move_that_the_lifecycle_does_not_have_is_refused(jobs: JobStore, after: JobState) -> None:
    job_id, _ = jobs.create(job_spec())
    jobs.move(job_id, JobState.CANCELLED)
    with pytest.raises(Conflict, match="cancelled job cannot become"):
        jobs.move(job_id, after)
    assert jobs.state(job_id) is JobState.CANCELLED


@pytest.mark.parametrize("end", [JobState.SUCCEEDED, JobState.FAILED])
def test_a_trainer_of_an_old_epoch_ends_nobody_s_run(settings: StackSettings, end: JobState) -> None:
    broker = connect(settings)
    jobs = JobStore(broker)
    job_id, _ = jobs.create(job_spec())
    slow, successor = (TrainerSide(broker, job_id, owner=name, lease_s=600.0) for name in ("slow", "successor"))
    slow.acquire()
    assert jobs.move(job_id, JobState.RUNNING, trainer_epoch=slow.trainer_epoch)
    slow.release()
    successor.acquire()
    with pytest.raises(FencedOff):
        jobs.move(job_id, end, trainer_epoch=slow.trainer_epoch)
    assert jobs.state(job_id) is JobState.RUNNING
    assert jobs.move(job_id, JobState.FAILED, trainer_epoch=successor.trainer_epoch)
    jobs.resume(job_id)
    with pytest.raises(FencedOff):
        jobs.move(job_id, JobState.RUNNING, trainer_epoch=successor.trainer_epoch)
    assert jobs.state(job_id) is JobState.QUEUED


def test_a_cancel_ends_a_queued_job_asks_a_running_one_and_leaves_a_final_one(jobs: JobStore) -> None:
    queued, _ = jobs.create(job_spec())
    running, _ = jobs.create(job_spec())
    jobs.move(running, JobState.RUNNING)
    assert jobs.request_cancel(queued) is JobState.CANCELLED
    assert jobs.request_cancel(running) is JobState.CANCELLING
    assert jobs.request_cancel(running) is JobState.CANCELLING
    jobs.move(running, JobState.SUCCEEDED)
    assert jobs.request_cancel(running) is JobState.SUCCEEDED


class Overtaken(Broker):
    """Before its first move, a trainer begins and another client asks for the same cancel."""

    is_overtaken = False

    def run(self, function: str, *payloads: str | int | bytes, **told: Any) -> list[Any]:
        if function == "set_state" and not self.is_overtaken:
            self.is_overtaken = True
            others = JobStore(Broker(self.redis))
            others.move(told["job"], JobState.RUNNING)
            others.request_cancel(told["job"])
        return super().run(function, *payloads, **told)


def test_of_two_cancels_at_once_none_ends_a_trainer_that_may_save(jobs: JobStore, settings: StackSettings) -> None:
    job_id, _ = jobs.create(job_spec())
    overtaken = JobStore(Overtaken(connect(settings).redis))
    assert overtaken.request_cancel(job_id) is JobState.CANCELLING
    assert jobs.state(job_id) is JobState.CANCELLING


def ended(jobs: JobStore, state: JobState) -> str:
    """A job that came to this end after two trainer starts."""
    job_id, _ = jobs.create(job_spec())
    jobs.move(job_id, JobState.RUNNING)
    for _ in range(2):
        jobs.count_trainer_start(job_id)
    if state is JobState.CANCELLED:
        jobs.move(job_id, JobState.CANCELLING)
    jobs.move(job_id, state, reason="a reason")
    return job_id


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.CANCELLED])
def test_a_resumed_job_is_queued_and_active_and_its_end_is_forgotten(jobs: JobStore, state: JobState) -> None:
    job_id = ended(jobs, state)
    for _ in ("the first", "a repeat after a lost answer"):
        assert jobs.resume(job_id) == (), "the spec stays"
        assert jobs.state(job_id) is JobState.QUEUED
    assert job_id in jobs.active_jobs()
    fields = jobs.fields(job_id)
    assert (fields["reason"], "ended_s" in fields, "horizons" in fields) == (b"", False, False)
    assert jobs.count_trainer_start(job_id) == 1
    events = [event for _, event in jobs.events_after(job_id, "0-0")]
    assert [event.state for event in events if isinstance(event, StateChanged)][-2:] == [state, JobState.QUEUED]


def test_a_resume_may_change_the_iterations_and_what_was_trained_keeps_its_learning_rate(jobs: JobStore) -> None:
    job_id = ended(jobs, JobState.SUCCEEDED)
    with pytest.raises(Conflict, match="succeeded job of 4 iterations has nothing left to do"):
        jobs.resume(job_id)
    jobs.resume(job_id, ResumeRequest(iterations=6))
    assert jobs.spec(job_id) == job_spec(iterations=6)
    assert jobs.horizons(job_id) == {0: 6}, "nothing was trained in this test"


def test_a_resume_may_widen_the_sums_of_what_is_not_trained_yet(jobs: JobStore) -> None:
    job_id = ended(jobs, JobState.FAILED)
    jobs.resume(job_id, ResumeRequest(wider_sums=6))
    assert jobs.spec(job_id) == job_spec(trainer__wider_sums=[{"first_iteration": 0, "bits": 6}])
    jobs.move(job_id, JobState.FAILED, reason="a reason")
    jobs.resume(job_id, ResumeRequest(wider_sums=9))
    assert jobs.spec(job_id) == job_spec(trainer__wider_sums=[{"first_iteration": 0, "bits": 9}])


def test_a_resume_to_no_more_iterations_than_the_lag_is_refused_and_the_spec_stays(jobs: JobStore) -> None:
    spec = job_spec(schedule="delayed", max_policy_lag=2, algorithm__correction="tis")
    job_id, _ = jobs.create(spec)
    jobs.move(job_id, JobState.CANCELLED)
    with pytest.raises(InvalidInput, match="max_policy_lag: 2 is too large"):
        jobs.resume(job_id, ResumeRequest(iterations=2))
    assert (jobs.state(job_id), jobs.spec(job_id)) == (JobState.CANCELLED, spec)


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.CANCELLING])
def test_a_job_that_has_not_ended_cannot_be_resumed(jobs: JobStore, state: JobState) -> None:
    job_id, _ = jobs.create(job_spec())
    for step in (JobState.RUNNING, state):
        jobs.move(job_id, step)
    with pytest.raises(Conflict, match=f"a {state.value} job cannot be resumed"):
        jobs.resume(job_id, ResumeRequest(iterations=6))
    assert jobs.spec(job_id) == job_spec()


def test_a_job_that_was_resumed_while_its_end_was_being_booked_stays_active(jobs: JobStore) -> None:
    job_id = ended(jobs, JobState.FAILED)
    jobs.resume(job_id)
    jobs.leave_active(job_id)
    assert job_id in jobs.active_jobs()


def test_an_unknown_job_is_not_found(jobs: JobStore, job_id: str) -> None:
    for ask in (jobs.spec, jobs.state, jobs.fields, jobs.request_cancel, jobs.resume):
        with pytest.raises(NotFound, match=job_id):
            ask(job_id)
    with pytest.raises(NotFound, match=job_id):
        jobs.move(job_id, JobState.RUNNING)


def test_events_are_read_in_order_from_where_a_reader_stopped(jobs: JobStore) -> None:
    job_id, _ = jobs.create(job_spec())
    jobs.move(job_id, JobState.RUNNING)
    dead = BatchDead(at_s=1.0, batch_id="0/train/0", reason="no reward")
    jobs.tell(job_id, dead)
    ((first, queued),) = jobs.events_after(job_id, "0-0", count=1)
    assert isinstance(queued, StateChanged)
    assert queued.state is JobState.QUEUED
    later = [event for _, event in jobs.events_after(job_id, first)]
    assert [type(event) for event in later] == [StateChanged, BatchDead]
    assert later[1] == dead


def test_the_first_evaluation_stays_beside_the_latest(jobs: JobStore) -> None:
    job_id, _ = jobs.create(job_spec())
    for iteration in (0, 2, 4):
        jobs.record_evaluation(job_id, score(iteration))
    fields = jobs.fields(job_id)
    assert decode(fields["evaluation_before"], EvaluationScore) == score(0)
    assert decode(fields["evaluation_latest"], EvaluationScore) == score(4)


def test_trainer_starts_are_counted_since_the_last_progress(jobs: JobStore) -> None:
    job_id, _ = jobs.create(job_spec())
    assert [jobs.count_trainer_start(job_id) for _ in range(2)] == [1, 2]
    jobs.reset_trainer_starts(job_id)
    assert jobs.count_trainer_start(job_id) == 1


def test_a_resume_may_state_a_score_for_what_a_component_cannot_score(jobs: JobStore) -> None:
    job_id = ended(jobs, JobState.FAILED)
    with pytest.raises(InvalidInput, match=r"no component `math_verify` \(it has exact"):
        jobs.resume(job_id, ResumeRequest(on_unscorable={"exact": 0.0, "math_verify": 0.0}))
    assert jobs.state(job_id) is JobState.FAILED
    changes = jobs.resume(job_id, ResumeRequest(on_unscorable={"exact": 0.25}))
    assert changes == ("reward.components.0.on_unscorable: fail → 0.25",)
    (component,) = jobs.spec(job_id).reward.components
    assert component == ExactReward(on_unscorable=0.25)
    assert "horizons" not in jobs.fields(job_id), "the iterations are the same"


def test_a_resume_may_state_a_score_for_what_the_environment_or_a_stage_cannot_judge(jobs: JobStore) -> None:
    stages = [{"type": "reward_model", "model": "scorer"}, {"type": "reference"}]
    spec = job_spec(environment={"name": "secret_table"}, stages=stages, algorithm__kl_coefficient=0.1)
    job_id, _ = jobs.create(spec)
    jobs.move(job_id, JobState.CANCELLED)
    for unknown in ("exact", "reference"):
        with pytest.raises(InvalidInput, match=rf"on_failure: the job has no `{unknown}` .*environment, reward_model"):
            jobs.resume(job_id, ResumeRequest(on_failure={"environment": 0.0, unknown: 0.0}))
    assert jobs.state(job_id) is JobState.CANCELLED
    jobs.resume(job_id, ResumeRequest(on_failure={"environment": -1.0, "reward_model": 0.5}))
    after = jobs.spec(job_id)
    assert after.stated_scores == {"environment": -1.0, "reward_model": 0.5}
    assert after.stages[1:] == spec.stages[1:]


def test_a_change_by_another_s_hand_wakes_a_consumer_and_removes_nothing(jobs: JobStore, broker: Broker) -> None:
    newest = jobs.wait_for_changes("0", 0.1)
    broker.redis.xadd("onbeat:changes", {"other": "entry"})
    after = jobs.wait_for_changes(newest, 30.0)
    assert after != newest
