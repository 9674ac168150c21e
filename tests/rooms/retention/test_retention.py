"""An ended job is kept as its spec and its stack say; what Redis forgets, its run folder tells."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import save_file

from broker.connection.client import Broker, connect
from broker.connection.roles import CELERY, GATEWAY, TASKS, TRAINER
from broker.job_store import JobStore
from broker.monitor import job_status
from broker.removals import Removals
from broker.trainer_side import TrainerSide
from contracts.encoding.wire import encode_json
from contracts.errors import Conflict, NotFound
from contracts.jobs import JobState, ResumeRequest
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.versions import weights_digest
from gateway.api.deletion import remove_for_good
from gateway.services import Services
from onbeat.audit.chain import verify_run
from onbeat.audit.folder import read_audit_file, read_spec
from onbeat.stack.redis import EmbeddedRedis
from onbeat.tasks.removal import left_folders, sweeper
from onbeat.tasks.removal.due_jobs import audit_links, due_jobs
from onbeat.tasks.removal.left_folders import needless
from onbeat.tasks.removal.sweeper import Sweeper, put_aside
from onbeat.tasks.work.forget import forget_due
from tests.builders import commit_record, job_spec
from tests.integration.test_fence import DIGEST, Job, answer_to, claimed

ROOT = Path(__file__).parents[3]
DAY_S = 86400.0


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

    def sweep(self) -> None:
        Sweeper(self.tasks, self.settings).sweep()

    def forget_due(self) -> list[str]:
        """By a worker that sees what the gateway does of the run folders."""
        return forget_due(self.tasks, replace(self.settings, run_root=self.gateway.settings.run_root))

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
    job.trainer.commit(commit_record(0, trained), trained, event=None, opening=None, made=(1, DIGEST))


@contextlib.contextmanager
def stack_below(folder: Path) -> Iterator[Stack]:
    """A stack with a server of its own."""
    with EmbeddedRedis(folder / "redis") as server:
        settings = StackSettings(
            redis_url=server.url_of(TASKS), celery_url=server.url_of(CELERY), run_root=str(folder / "runs")
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


def test_a_job_is_kept_for_its_days_and_then_its_folder_tells_what_redis_has_forgotten(stack: Stack) -> None:
    old, young = stack.ended(days_ago=31), stack.ended(days_ago=29)
    links, status = audit_links(stack.operator, old.job_id), job_status(stack.operator, old.job_id)
    assert stack.forget_due() == [], "nothing is put aside yet"
    stack.sweep()
    assert not old.audit.exists()
    assert stack.forget_due() == [old.job_id]
    assert list(stack.operator.redis.scan_iter(match=f"*{old.job_id}*")) == []
    assert (known(stack, old), known(stack, young)) == (False, True)
    stack.sweep()
    kept = read_audit_file(old.audit)
    told, entries = kept.status, kept.entries
    assert [(one.record, one.digest) for one in entries] == links
    assert replace(told, live_generators=0) == replace(status, live_generators=0)
    assert verify_run(entries, read_spec(old), complete=True, digests_on_disk={}).gaps == ()
    assert Removals(stack.tasks).notes().removals == {}
    assert old.checkpoint_after(0).is_dir(), "the whole folder is kept for a hundred years"
    assert not young.audit.exists()
    assert not young.audit_aside.exists()


@pytest.mark.parametrize(
    ("asked", "setting", "days"),
    [
        ({"retention__keys_days": 3.0}, {}, 3.0),
        ({}, {"keep_keys_days": 5.0}, 5.0),
        ({"retention__keys_days": 90.0}, {"max_keys_days": 7.0}, 7.0),
        ({}, {"max_keys_days": 2.0}, 2.0),
    ],
)
def test_the_spec_goes_before_the_default_and_the_ceiling_before_both(
    stack: Stack, asked: dict[str, float], setting: dict[str, float], days: float
) -> None:
    settings = replace(stack.settings, **setting)  # type: ignore[arg-type]
    due = stack.ended(days_ago=days + 0.01, num_committed=0, **asked)
    stack.ended(days_ago=days - 0.01, num_committed=0, **asked)
    assert [one.job_id for one in due_jobs(stack.operator, settings)] == [due.job_id]


def test_a_resume_between_the_steps_wins_and_what_was_put_aside_is_put_aside_anew(stack: Stack) -> None:
    folder = stack.ended(days_ago=40)
    stack.sweep()
    (seen,) = due_jobs(stack.operator, stack.settings)
    stack.jobs.resume(folder.job_id, ResumeRequest(iterations=2))
    with pytest.raises(Conflict):
        stack.jobs.remove(folder.job_id, as_seen=(seen.ended_s, seen.num_records))
    assert stack.forget_due() == []
    stack.jobs.request_cancel(folder.job_id)
    with pytest.raises(Conflict, match="no longer what its run folder says"):
        stack.jobs.remove(folder.job_id, as_seen=(seen.ended_s, seen.num_records))
    later = stack.operator.now_s() - 35 * DAY_S
    stack.operator.redis.hset(stack.operator.job_keys(folder.job_id).job, "ended_s", repr(later))
    assert stack.forget_due() == [], "its folder tells of an earlier end"
    stack.sweep()
    assert stack.forget_due() == [folder.job_id]
    stack.sweep()
    assert read_audit_file(folder.audit).status.state is JobState.CANCELLED


def test_chain_and_status_are_put_aside_once_and_a_job_without_a_folder_gets_none(stack: Stack) -> None:
    folder = stack.ended(days_ago=40)
    (due,) = due_jobs(stack.tasks, stack.settings)
    assert put_aside(stack.tasks, folder, due)
    assert not put_aside(stack.tasks, folder, due)
    shutil.rmtree(folder.path)
    assert not put_aside(stack.tasks, folder, due)
    assert not folder.path.exists()


@pytest.mark.parametrize("damage", ["changed", "cut", "gone", "shorter"])
def test_a_chain_that_is_not_whole_in_its_folder_stays_in_redis(stack: Stack, damage: str) -> None:
    folder = stack.ended(days_ago=40)
    stack.sweep()
    whole = folder.audit_aside.read_bytes()
    if damage == "gone":
        folder.audit_aside.unlink()
    elif damage == "cut":
        folder.audit_aside.write_bytes(whole[:-9])
    elif damage == "changed":
        folder.audit_aside.write_bytes(whole.replace(b'"trainer_epoch":', b'"trainer_epoch":1', 2))
    else:
        folder.audit_aside.write_bytes(whole.partition(b'"entries":')[0] + b'"entries":[]}')
    assert stack.forget_due() == []
    assert known(stack, folder)
    stack.sweep()
    assert folder.audit_aside.read_bytes() == whole
    assert stack.forget_due() == [folder.job_id]


@pytest.mark.parametrize("point", ["tasks.putting_aside", "tasks.reducing_files"])
def test_a_sweep_that_is_killed_in_the_middle_is_finished_by_the_next(stack: Stack, point: str) -> None:
    folder = stack.ended(days_ago=40, retention__keys_days=1.0, retention__files_days=30.0)
    if point == "tasks.reducing_files":
        forget(stack, folder)
    program = (
        "import os; from broker.connection.client import connect; from contracts.settings import settings_from;"
        "from onbeat.tasks.removal.sweeper import Sweeper; from onbeat.base.process import crash_points;"
        f"crash_points.arm({point!r});"
        "settings = settings_from(os.environ); Sweeper(connect(settings), settings).sweep()"
    )
    died = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | stack.settings.environment(), cwd=ROOT, check=False
    )
    assert died.returncode == -9
    if point == "tasks.putting_aside":
        assert stack.forget_due() == []
        forget(stack, folder)
    stack.sweep()
    assert sorted(path.name for path in folder.path.iterdir()) == [
        *("audit.json", "checkpoints", "metrics.jsonl", "spec.json", "weights")
    ]
    assert [path.name for path in folder.checkpoints.iterdir()] == ["i000000"]


def forget(stack: Stack, folder: RunFolder) -> None:
    """All three steps."""
    stack.sweep()
    assert stack.forget_due() == [folder.job_id]
    name_all(stack)


def name_all(stack: Stack) -> None:
    for job_id in Removals(stack.tasks).notes().removals:
        stack.folder(job_id).audit_aside.rename(stack.folder(job_id).audit)
        Removals(stack.tasks).done(job_id)


def test_a_forgotten_job_is_reduced_to_its_result_and_then_removed(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stack.ended(days_ago=40, retention__keys_days=1.0, retention__files_days=30.0, retention__result_days=60.0)
    trained = folder.weights_of(1) / "weights-00001-of-00001.safetensors"
    trained.write_bytes(b"trained")
    monkeypatch.setattr(left_folders, "digest_of", lambda files: DIGEST if files == [trained] else "")
    forget(stack, folder)
    stack.sweep()
    assert sorted(path.name for path in folder.path.iterdir()) == [
        *("audit.json", "metrics.jsonl", "spec.json", "weights")
    ]
    assert [path.name for path in folder.weights.iterdir()] == ["v000001"]
    kept = read_audit_file(folder.audit)
    assert (kept.status.policy_version, len(kept.entries)) == (1, 1)
    monkeypatch.setattr(sweeper.time, "time", lambda: stack.operator.now_s() + 21 * DAY_S)
    stack.sweep()
    stack.sweep()
    assert not folder.path.exists()


def test_files_stay_while_a_fork_that_begins_with_them_has_not_ended(stack: Stack) -> None:
    folder = stack.ended(days_ago=40, retention__keys_days=1.0, retention__files_days=30.0, retention__result_days=30.0)
    forget(stack, folder)
    fork, _ = stack.jobs.create(job_spec(fork={"job": folder.job_id, "version": 1}))
    before = sorted(folder.path.rglob("*"))
    stack.sweep()
    assert sorted(folder.path.rglob("*")) == before
    with pytest.raises(Conflict, match=f"job {fork} goes on from version 1 of {folder.job_id}"):
        remove_for_good(stack.gateway, folder.job_id)
    assert Removals(stack.tasks).notes().removals == {}
    stack.jobs.request_cancel(fork)
    stack.sweep()
    stack.sweep()
    assert not folder.path.exists()


def test_files_that_are_to_go_stay_for_a_fork_that_was_submitted_before_they_went(stack: Stack) -> None:
    folder = stack.ended(days_ago=40)
    forget(stack, folder)
    remove_for_good(stack.gateway, folder.job_id)
    fork, _ = stack.jobs.create(job_spec(fork={"job": folder.job_id, "version": 1}))
    stack.sweep()
    assert folder.path.exists()
    stack.jobs.request_cancel(fork)
    stack.sweep()
    assert not folder.path.exists()


def test_a_run_folder_whose_job_redis_never_had_is_left_alone(stack: Stack) -> None:
    """A server that lost its data has forgotten all jobs: their folders hold all that is left of them."""
    folder = stack.ended(days_ago=400, retention__keys_days=1.0, retention__files_days=1.0, retention__result_days=1.0)
    stack.operator.redis.flushall()  # a server of this test's own
    before = sorted(folder.path.rglob("*"))
    stack.sweep()
    assert sorted(folder.path.rglob("*")) == before


def test_a_forgotten_job_is_deleted_by_its_id(stack: Stack) -> None:
    folder = stack.ended(days_ago=40)
    forget(stack, folder)
    remove_for_good(stack.gateway, folder.job_id)
    stack.sweep()
    assert not folder.path.exists()
    remove_for_good(stack.gateway, folder.job_id)  # repeated, while its note stands
    for unknown in ("job-000000000000", "../outside"):
        with pytest.raises(NotFound):
            remove_for_good(stack.gateway, unknown)
    assert list(Removals(stack.tasks).notes().removals) == [folder.job_id]


def test_a_job_that_trained_nothing_and_has_no_folder_is_forgotten_without_one(stack: Stack) -> None:
    job_id, _ = stack.jobs.create(job_spec())
    stack.jobs.request_cancel(job_id)
    stack.operator.redis.hset(stack.operator.job_keys(job_id).job, "ended_s", "1.0")
    assert stack.forget_due() == [job_id]
    stack.sweep()
    assert Removals(stack.tasks).notes().removals == {}
    assert not stack.folder(job_id).path.exists()


@pytest.mark.parametrize(
    "damage",
    [
        ("hset", "job", "ended_s", "long ago"),
        ("hset", "job", "ended_s", "9" * 400),
        ("xadd", "audit", {"x": "y"}),
        ("set", "audit", "x"),
        ("set", "spec", b"\xc1"),
    ],
    ids=["end", "endless", "record", "chain", "spec"],
)
def test_a_damaged_job_stays_and_the_one_beside_it_is_forgotten(stack: Stack, damage: tuple[str, str, Any]) -> None:
    folders = [stack.ended(days_ago=100), stack.ended(days_ago=90)]
    stack.sweep()
    command, name, *values = damage
    redis: Any = stack.operator.redis
    if command == "set":
        redis.delete(getattr(stack.operator.job_keys(folders[0].job_id), name))
    getattr(redis, command)(getattr(stack.operator.job_keys(folders[0].job_id), name), *values)
    stack.sweep()
    assert stack.forget_due()[-1] == folders[1].job_id
    assert not known(stack, folders[1])


@pytest.mark.parametrize("kind", ["whole", "damaged", "cut", "delta", "only a checkpoint", "neither"])
def test_nothing_goes_for_the_sake_of_weights_that_are_not_the_last_version_s(kind: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "job-0123456789ab")
    for path in (*map(folder.weights_of, (6, 7)), *map(folder.checkpoint_after, (3, 6)), folder.weights / "base"):
        path.mkdir(parents=True)
        (path / "state.json").write_text("{}")
        (path / "optimizer.safetensors").write_bytes(b"x")
    tensors = {"w": np.arange(4, dtype=np.float32)}
    digest = weights_digest([("w", "float32", (4,), memoryview(tensors["w"].tobytes()))])
    (folder.weights_of(7) / "optimizer.safetensors").unlink()
    whole = folder.weights_of(7) / "weights-00001-of-00001.safetensors"
    save_file(tensors if kind != "damaged" else {"w": tensors["w"] + 1}, whole)
    if kind == "cut":
        whole.write_bytes(whole.read_bytes()[:-1])
    elif kind == "delta":
        whole.rename(whole.with_name("delta-1"))
    elif kind in ("only a checkpoint", "neither"):
        shutil.rmtree(folder.weights)
    if kind == "neither":
        shutil.rmtree(folder.checkpoint_after(6))
    found = {path.relative_to(folder.path).as_posix() for path in needless(folder, 7, digest)}
    if kind == "whole":
        assert found == {"checkpoints", "weights/v000006", "weights/base"}
    elif kind == "neither":
        assert found == set()
    else:
        assert found == {"checkpoints/i000003", "checkpoints/i000006/optimizer.safetensors"}
