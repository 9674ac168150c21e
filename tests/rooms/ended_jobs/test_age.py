"""An ended job goes with its files at the age that the stack says, and not before."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from broker.connection.client import Broker, connect
from broker.connection.roles import CELERY, GATEWAY, TASKS, TRAINER
from broker.job_store import JobStore
from broker.removals import Removals
from broker.trainer_side import TrainerSide
from contracts.encoding.wire import encode_json
from contracts.errors import Conflict, InvalidInput, NotFound
from contracts.jobs import JobState, ResumeRequest
from contracts.run_folder import RunFolder
from contracts.settings import DAY_S, StackSettings, settings_from
from gateway.api.deletion import remove_for_good
from gateway.services import Services
from onbeat.stack.redis import EmbeddedRedis
from onbeat.tasks.removal import file_remover
from onbeat.tasks.removal.due_jobs import due_jobs
from onbeat.tasks.removal.file_remover import FileRemover
from onbeat.tasks.work.forget import forget_due
from tests.builders import commit_record, job_spec
from tests.integration.test_fence import DIGEST, Job, answer_to, claimed

ROOT = Path(__file__).parents[3]
KEPT_DAYS = 30.0
"""The age at which ended jobs of these stacks go."""


@dataclass(kw_only=True)
class Stack:
    """A gateway, a consumer and a worker of tasks, each with its own rights, over one run root."""

    operator: Broker
    gateway: Services
    consumer: Broker
    tasks: Broker
    settings: StackSettings
    """The settings of the worker of tasks."""

    @property
    def jobs(self) -> JobStore:
        return self.gateway.jobs

    def remove_files(self) -> None:
        FileRemover(self.tasks, self.settings).remove_all()

    def forget_due(self) -> list[str]:
        return forget_due(self.tasks, self.settings)

    def folder(self, job_id: str) -> RunFolder:
        return RunFolder(self.settings.run_root_path, job_id)

    def ended(self, *, days_ago: float, num_committed: int = 1, **changes: Any) -> RunFolder:
        """A job of one iteration that succeeded so long ago, with the files that its trainer would have left."""
        spec = job_spec(iterations=1, evaluation__num_prompts=0, rollout__batches_per_iteration=2, **changes)
        job_id, _ = self.jobs.create(spec)
        trainer = TrainerSide(self.consumer, job_id, owner="t", lease_s=600.0)
        trainer.acquire()
        trainers = JobStore(self.consumer)
        trainers.move(job_id, JobState.RUNNING, trainer_epoch=trainer.trainer_epoch)
        job = Job(self.operator, job_id, trainer)
        if num_committed:
            train(job)
        trainers.move(job_id, JobState.SUCCEEDED, trainer_epoch=trainer.trainer_epoch)
        trainer.release()
        self.operator.redis.hset(
            self.operator.job_keys(job_id).job, "ended_s", repr(self.operator.now_s() - days_ago * DAY_S)
        )
        folder = self.folder(job_id)
        for path in (folder.checkpoint_after(0), folder.weights_of(0), folder.weights_of(1), folder.path / "rollouts"):
            path.mkdir(parents=True)
        (folder.checkpoint_after(0) / "state.json").write_text("{}")
        (folder.path / "rollouts" / "batch").write_bytes(b"x")
        folder.spec.write_bytes(encode_json(spec))
        folder.metrics.write_text("{}\n")
        return folder


def train(job: Job) -> None:
    """Iteration 0, which makes version 1."""
    job.announce(0)
    job.trainer.open_iteration(job.opening(0), {0: DIGEST})
    for _ in range(2):
        claim = claimed(job.generator("g1"))
        job.generator("g1").publish(claim, answer_to(claim.prompt_batch, "g1"))
    trained = {one.batch.batch_id: one.digest for one in job.trainer.claim_rollouts(0, max_batches=8)[0]}
    job.announce(1)
    job.trainer.commit(commit_record(0, trained), trained, event=None, opening=None, next_version=(1, DIGEST))


@contextlib.contextmanager
def stack_below(folder: Path) -> Iterator[Stack]:
    """A stack with a server of its own."""
    with EmbeddedRedis(folder / "redis") as server:
        settings = StackSettings(
            redis_url=server.url_of(TASKS),
            celery_url=server.url_of(CELERY),
            run_root=str(folder / "runs"),
            keep_ended_days=KEPT_DAYS,
        )
        of_gateway = replace(settings, redis_url=server.url_of(GATEWAY), api_key="test-key")
        services = Services(settings=of_gateway, broker=connect(of_gateway))
        operator = connect(StackSettings(redis_url=server.url))
        consumer = connect(StackSettings(redis_url=server.url_of(TRAINER)))
        tasks = connect(settings)
        yield Stack(operator=operator, gateway=services, consumer=consumer, tasks=tasks, settings=settings)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with stack_below(tmp_path) as stack:
        yield stack


def known(stack: Stack, folder: RunFolder) -> bool:
    try:
        stack.jobs.state(folder.job_id)
    except NotFound:
        return False
    return True


def keys_of(stack: Stack, folder: RunFolder) -> list[bytes]:
    return list(stack.operator.redis.scan_iter(match=f"*{folder.job_id}*"))


def test_a_job_goes_with_its_keys_and_its_files_at_its_age_and_a_younger_one_stays(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, young = stack.ended(days_ago=KEPT_DAYS + 1), stack.ended(days_ago=KEPT_DAYS - 1)
    files = sorted(young.path.rglob("*"))
    stack.remove_files()
    assert old.weights_of(1).is_dir(), "no file goes before the keys of its job"
    assert stack.forget_due() == [old.job_id]
    assert keys_of(stack, old) == []
    assert list(Removals(stack.tasks).notes().removals) == [old.job_id]
    stack.remove_files()
    assert not old.path.exists()
    assert (known(stack, old), known(stack, young)) == (False, True)
    assert sorted(young.path.rglob("*")) == files
    assert stack.forget_due() == []
    monkeypatch.setattr(file_remover, "LATE_S", 0.0)
    stack.remove_files()
    assert Removals(stack.tasks).notes().removals == {}


@pytest.mark.parametrize("days", [1.0, 7.5])
def test_the_age_is_that_of_the_setting_and_counts_from_the_job_s_end(stack: Stack, days: float) -> None:
    settings = replace(stack.settings, keep_ended_days=days)
    due = stack.ended(days_ago=days + 0.01, num_committed=0)
    stack.ended(days_ago=days - 0.01, num_committed=0)
    assert [job.job_id for job in due_jobs(stack.operator, settings)] == [due.job_id]


def test_no_job_goes_by_age_in_a_stack_that_sets_none(stack: Stack) -> None:
    folder = stack.ended(days_ago=9000)
    stack.settings = replace(stack.settings, keep_ended_days=StackSettings().keep_ended_days)
    assert stack.forget_due() == []
    stack.remove_files()
    assert known(stack, folder)
    assert folder.weights_of(1).is_dir()


@pytest.mark.parametrize("days", [0.0, 0.99, -1.0, 36501.0, float("nan"), float("inf")])
def test_an_age_below_a_day_or_above_a_hundred_years_is_refused_by_its_name(days: float) -> None:
    """A repeated submission is answered for a day: the job that the answer names must be there."""
    with pytest.raises(InvalidInput, match="KEEP_ENDED_DAYS"):
        settings_from({"ONBEAT_KEEP_ENDED_DAYS": str(days)})


def test_a_resume_between_the_look_and_the_removal_wins(stack: Stack) -> None:
    folder = stack.ended(days_ago=40)
    (seen,) = due_jobs(stack.operator, stack.settings)
    stack.jobs.resume(folder.job_id, ResumeRequest(iterations=2))
    with pytest.raises(Conflict):
        stack.jobs.remove(folder.job_id, seen_ended_s=seen.ended_s)
    assert stack.forget_due() == []
    stack.jobs.request_cancel(folder.job_id)
    with pytest.raises(Conflict, match="resumed after its end was read"):
        stack.jobs.remove(folder.job_id, seen_ended_s=seen.ended_s)
    assert stack.forget_due() == [], "it has ended again, today"
    stack.remove_files()
    assert folder.weights_of(1).is_dir()
    age(stack, folder, days_ago=35)
    assert stack.forget_due() == [folder.job_id]


def age(stack: Stack, folder: RunFolder, *, days_ago: float) -> None:
    """Has the job ended so long ago."""
    ended_s = stack.operator.now_s() - days_ago * DAY_S
    stack.operator.redis.hset(stack.operator.job_keys(folder.job_id).job, "ended_s", repr(ended_s))


def test_a_forgetting_that_dies_before_the_files_go_is_finished_by_the_next_removal_of_files(stack: Stack) -> None:
    """The note is written in the step that removes the keys: no death in between leaves files without a note."""
    folder = stack.ended(days_ago=40)
    program = (
        "import os, signal; from broker.connection.client import connect; from contracts.settings import settings_from;"
        "from onbeat.tasks.work.forget import forget_due;"
        "settings = settings_from(os.environ);"
        "forget_due(connect(settings), settings, lambda: os.kill(os.getpid(), signal.SIGKILL))"
    )
    died = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | stack.settings.environment(), cwd=ROOT, check=False
    )
    assert died.returncode == -signal.SIGKILL
    assert keys_of(stack, folder) == []
    assert folder.path.is_dir()
    stack.remove_files()
    assert not folder.path.exists()


def test_a_job_stays_while_a_fork_that_begins_with_it_has_not_ended(stack: Stack) -> None:
    folder = stack.ended(days_ago=40)
    fork, _ = stack.jobs.create(job_spec(fork={"job": folder.job_id, "version": 1}))
    assert stack.forget_due() == []
    with pytest.raises(Conflict, match=f"job {fork} goes on from version 1 of {folder.job_id}"):
        remove_for_good(stack.gateway, folder.job_id)
    assert Removals(stack.tasks).notes().removals == {}
    stack.jobs.request_cancel(fork)
    assert stack.forget_due() == [folder.job_id]
    stack.remove_files()
    assert not folder.path.exists()


def test_files_stay_for_a_fork_that_was_submitted_before_they_went(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stack.ended(days_ago=40)
    forks_of = JobStore.forks_of
    forks: list[str] = []

    def without_the_newest(jobs: JobStore, job_id: str) -> dict[str, int]:
        """Has the fork come right after the look for forks."""
        before = forks_of(jobs, job_id)
        forks.append(stack.jobs.create(job_spec(fork={"job": folder.job_id, "version": 1}))[0])
        return before

    monkeypatch.setattr(JobStore, "forks_of", without_the_newest)
    assert stack.forget_due() == [folder.job_id]
    monkeypatch.undo()
    stack.remove_files()
    assert folder.path.exists()
    stack.jobs.request_cancel(forks[0])
    stack.remove_files()
    assert not folder.path.exists()


def test_a_run_folder_whose_job_redis_never_had_is_left_alone(stack: Stack) -> None:
    """A server that lost its data has forgotten all jobs: their folders hold all that is left of them."""
    folder = stack.ended(days_ago=400)
    stack.operator.redis.flushall()  # a server of this test's own
    before = sorted(folder.path.rglob("*"))
    stack.remove_files()
    assert sorted(folder.path.rglob("*")) == before


def test_a_folder_of_a_job_that_redis_does_not_know_is_deleted_by_its_id_where_it_has_an_audit_chain(
    stack: Stack,
) -> None:
    folder, without_chain = stack.ended(days_ago=0), stack.ended(days_ago=0)
    stack.operator.redis.flushall()  # a server of this test's own, which has lost its data
    folder.audit.write_text("{}")
    remove_for_good(stack.gateway, folder.job_id)
    stack.remove_files()
    assert not folder.path.exists()
    remove_for_good(stack.gateway, folder.job_id)  # repeated, while its note stands
    for unknown in (without_chain.job_id, "job-000000000000", "../outside"):
        with pytest.raises(NotFound):
            remove_for_good(stack.gateway, unknown)
    assert list(Removals(stack.tasks).notes().removals) == [folder.job_id]
    assert without_chain.path.is_dir()


def test_a_job_without_a_folder_is_forgotten_as_well(stack: Stack) -> None:
    job_id, _ = stack.jobs.create(job_spec())
    stack.jobs.request_cancel(job_id)
    stack.operator.redis.hset(stack.operator.job_keys(job_id).job, "ended_s", "1.0")
    assert stack.forget_due() == [job_id]
    stack.remove_files()
    assert not stack.folder(job_id).path.exists()


@pytest.mark.parametrize("ended_s", ["long ago", "9" * 400, ""])
def test_a_job_whose_end_cannot_be_read_stays_and_the_one_next_to_it_goes(stack: Stack, ended_s: str) -> None:
    damaged, whole = stack.ended(days_ago=100), stack.ended(days_ago=90)
    stack.operator.redis.hset(stack.operator.job_keys(damaged.job_id).job, "ended_s", ended_s)
    assert stack.forget_due() == [whole.job_id]
    stack.remove_files()
    assert known(stack, damaged)
    assert damaged.weights_of(1).is_dir()
    assert not whole.path.exists()


@pytest.mark.parametrize("key", ["spec", "audit"])
def test_a_job_with_a_damaged_spec_or_chain_goes_at_its_age_like_any_other(stack: Stack, key: str) -> None:
    folder = stack.ended(days_ago=40)
    name = getattr(stack.operator.job_keys(folder.job_id), key)
    stack.operator.redis.delete(name)
    stack.operator.redis.set(name, b"\xc1")
    assert stack.forget_due() == [folder.job_id]
    stack.remove_files()
    assert keys_of(stack, folder) == []
    assert not folder.path.exists()
