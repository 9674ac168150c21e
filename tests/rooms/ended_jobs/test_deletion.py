"""A deleted job leaves nothing: no key, no file, in whatever order its processes die, come late or ask again."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import uuid
from functools import partial
from pathlib import Path

import pytest

from broker import keys
from broker.connection.client import Broker, connect
from broker.connection.roles import GATEWAY, GENERATOR, TASKS, TRAINER
from broker.generator_side import PublishOutcome
from broker.job_store import JobStore
from broker.removals import Removals
from contracts.encoding.wire import encode
from contracts.errors import NotFound, OnbeatError
from contracts.jobs import JobState
from contracts.run_folder import Removal, RunFolder
from contracts.settings import StackSettings
from gateway.app import create_app
from gateway.event_stream import EventStream
from gateway.metrics.stack_state import stack_state
from gateway.services import Services
from onbeat.stack.redis import EmbeddedRedis
from onbeat.tasks.removal import file_remover
from onbeat.tasks.removal.file_remover import FileRemover
from onbeat.tasks.removal.trees import hidden_name, remove_tree
from tests.builders import job_spec
from tests.integration.test_fence import DIGEST, answer_to, claimed, job_of
from tests.served import asked

ROOT = Path(__file__).parents[3]


@pytest.fixture
def stack(server: EmbeddedRedis, tmp_path: Path) -> StackSettings:
    return StackSettings(
        redis_url=server.url_of(TASKS), run_root=str(tmp_path / "runs"), weight_root=str(tmp_path / "weights")
    )


@pytest.fixture
def jobs(server: EmbeddedRedis) -> JobStore:
    return JobStore(connect(StackSettings(redis_url=server.url_of(GATEWAY))))


@pytest.fixture
def worker(stack: StackSettings) -> Broker:
    return connect(stack)


def ended(jobs: JobStore, stack: StackSettings, *, key: str = "") -> RunFolder:
    """A cancelled job with files, also in the weight root."""
    job_id, _ = jobs.create(job_spec(), idempotency_key=key)
    jobs.move(job_id, JobState.CANCELLED)
    folder = RunFolder(stack.run_root_path, job_id, weight_root=stack.weight_root_path)
    for path in (folder.checkpoint_after(3), folder.weights_of(4), folder.path / "replays"):
        path.mkdir(parents=True)
        (path / "file").write_bytes(b"x")
    return folder


def files_of(folder: RunFolder) -> list[str]:
    roots = (folder.run_root, folder.weight_root)
    return [str(path) for root in roots for path in root.iterdir() if folder.job_id in path.name]


def test_a_deleted_job_s_files_go_from_both_roots_and_the_note_once_no_late_writer_is_to_be_feared(
    jobs: JobStore, stack: StackSettings, worker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = ended(jobs, stack), ended(jobs, stack)
    jobs.remove(folder.job_id)
    remove_files = FileRemover(worker, stack).remove_all
    remove_files()
    assert files_of(folder) == []
    assert len(files_of(other)) == 2
    folder.trainer_log.parent.mkdir()  # by a trainer's start that was under way
    folder.trainer_log.write_text("late")
    remove_files()
    assert files_of(folder) == []
    assert list(Removals(worker).notes().removals) == [folder.job_id]
    monkeypatch.setattr(file_remover, "LATE_S", 0.0)
    remove_files()
    assert Removals(worker).notes().removals == {}


@pytest.mark.parametrize("name", ["redis", "..", "../outside", "logs", "job-1", "a/b", ""])
def test_a_name_that_is_no_job_s_id_never_becomes_a_path(
    name: str, server: EmbeddedRedis, stack: StackSettings, worker: Broker, tmp_path: Path
) -> None:
    for folder in ("redis", "logs", "job-1", "a/b"):
        (stack.run_root_path / folder).mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    note = encode(Removal(at_s=0.0))
    connect(StackSettings(redis_url=server.url)).redis.hset(keys.REMOVED, name, note)  # type: ignore[arg-type]
    FileRemover(worker, stack).remove_all()
    assert sorted(path.name for path in stack.run_root_path.iterdir()) == ["a", "job-1", "logs", "redis"]
    assert (stack.run_root_path / "a" / "b").is_dir()
    assert (tmp_path / "outside").is_dir()


def test_a_note_that_cannot_be_read_keeps_its_job_s_files_and_no_other_removal(
    server: EmbeddedRedis, jobs: JobStore, stack: StackSettings, worker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = [ended(jobs, stack) for _ in range(3)]
    for folder, note in zip(damaged, (b"", b"\xc1junk", encode(JobState.QUEUED)), strict=True):
        jobs.remove(folder.job_id)
        connect(StackSettings(redis_url=server.url)).redis.hset(keys.REMOVED, folder.job_id, note)  # type: ignore[arg-type]
    other = ended(jobs, stack)
    jobs.remove(other.job_id)
    FileRemover(worker, stack).remove_all()
    assert files_of(other) == []
    assert [len(files_of(folder)) for folder in damaged] == [2, 2, 2]
    assert caplog.text.count("is kept, because it can't be handled now") == 3
    gateway = connect(StackSettings(redis_url=server.url_of(GATEWAY)))
    assert b"onbeat_unreadable_removals 3.0" in stack_state(gateway, JobStore(gateway), stack.run_root_path)


def test_files_of_a_job_that_redis_knows_stay_though_its_removal_is_noted(
    server: EmbeddedRedis, jobs: JobStore, stack: StackSettings, worker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """No call writes such a note: the check stands between a fault elsewhere and the files of a job."""
    folder = ended(jobs, stack)
    operator = connect(StackSettings(redis_url=server.url))
    operator.redis.hset(keys.REMOVED, folder.job_id, encode(Removal(at_s=0.0)))  # type: ignore[arg-type]
    FileRemover(worker, stack).remove_all()
    assert len(files_of(folder)) == 2
    assert f"the files of {folder.job_id} stay: it is noted as removed, and Redis knows the job" in caplog.text
    assert Removals(worker).is_pending(folder.job_id), "the note stays for who looks into it"
    jobs.remove(folder.job_id)
    FileRemover(worker, stack).remove_all()
    assert files_of(folder) == []


def test_links_are_removed_and_what_they_lead_to_stays(
    jobs: JobStore, stack: StackSettings, worker: Broker, tmp_path: Path
) -> None:
    treasure = tmp_path / "treasure"
    treasure.mkdir()
    (treasure / "file").write_text("mine")
    inside, whole = ended(jobs, stack), ended(jobs, stack)
    (inside.path / "link").symlink_to(treasure)
    whole.path.rename(tmp_path / "elsewhere")
    whole.path.symlink_to(tmp_path / "elsewhere")
    for folder in (inside, whole):
        jobs.remove(folder.job_id)
    FileRemover(worker, stack).remove_all()
    assert (files_of(inside), files_of(whole)) == ([], [])
    assert (treasure / "file").read_text() == "mine"
    assert (tmp_path / "elsewhere" / "replays" / "file").is_file()


def test_a_removal_that_is_killed_in_the_middle_is_finished_by_the_next_removal_of_files(
    jobs: JobStore, stack: StackSettings, worker: Broker
) -> None:
    folder = ended(jobs, stack)
    jobs.remove(folder.job_id)
    program = (
        "import os; from broker.connection.client import connect; from contracts.settings import settings_from;"
        "from onbeat.tasks.removal.file_remover import FileRemover; from onbeat.base.process import crash_points;"
        "crash_points.arm('tasks.removing_files:2');"
        "settings = settings_from(os.environ); FileRemover(connect(settings), settings).remove_all()"
    )
    died = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | stack.environment(), cwd=ROOT, check=False, timeout=300
    )
    assert died.returncode == -9
    (left,) = files_of(folder)
    assert Path(left).name == hidden_name(folder.path).name
    FileRemover(worker, stack).remove_all()
    assert files_of(folder) == []


def test_what_cannot_be_removed_is_tried_again_and_keeps_no_other_removal(
    jobs: JobStore, stack: StackSettings, worker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ended(jobs, stack), ended(jobs, stack)
    for folder in (first, second):
        jobs.remove(folder.job_id)

    def refuses(path: Path) -> bool:
        if path.name == first.job_id:
            raise OnbeatError("cannot be removed: Read-only file system", field=str(path))
        return remove_tree(path)

    monkeypatch.setattr(file_remover, "remove_tree", refuses)
    FileRemover(worker, stack).remove_all()
    assert (len(files_of(first)), files_of(second)) == (2, [])
    monkeypatch.undo()
    FileRemover(worker, stack).remove_all()
    assert files_of(first) == []


def test_the_same_idempotency_key_after_a_deletion_makes_another_job(jobs: JobStore, stack: StackSettings) -> None:
    key = uuid.uuid4().hex
    folder = ended(jobs, stack, key=key)
    jobs.remove(folder.job_id)
    again, is_new = jobs.create(job_spec(), idempotency_key=key)
    assert is_new
    assert again != folder.job_id


def test_a_repeated_submission_never_gets_the_id_of_a_job_that_is_removed_in_the_middle_of_it(
    jobs: JobStore, stack: StackSettings, worker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ended(jobs, stack, key="a key")
    reserve = JobStore._reserve

    def removed_meanwhile(self: JobStore, key: str, job_id: str, body_digest: str) -> str:
        reserved = reserve(self, key, job_id, body_digest)
        monkeypatch.undo()
        jobs.remove(folder.job_id)
        return reserved

    monkeypatch.setattr(JobStore, "_reserve", removed_meanwhile)
    again, is_new = jobs.create(job_spec(), idempotency_key="a key")
    assert (is_new, jobs.state(again)) == (True, JobState.QUEUED)
    assert again not in Removals(worker).notes().removals
    assert jobs.create(job_spec(), idempotency_key="a key") == (again, False)


def test_a_gateway_s_own_user_may_look_for_a_note(server: EmbeddedRedis, jobs: JobStore, stack: StackSettings) -> None:
    removals = Removals(connect(StackSettings(redis_url=server.url_of(GATEWAY))))
    job_id = ended(jobs, stack).job_id
    assert not removals.is_pending(job_id)
    jobs.remove(job_id)
    assert removals.is_pending(job_id)


def test_a_late_generator_and_an_open_event_stream_bring_nothing_of_a_deleted_job_back(
    server: EmbeddedRedis, stack: StackSettings
) -> None:
    gateway, trainers = (connect(StackSettings(redis_url=server.url_of(role))) for role in (GATEWAY, TRAINER))
    generators = connect(StackSettings(redis_url=server.url_of(GENERATOR)))
    job = job_of(gateway, trainers, generators)
    job.trainer.open_iteration(job.opening(0), {0: DIGEST})
    generator = job.generator("g1")
    claim = claimed(generator)
    jobs = JobStore(gateway)

    async def watch() -> list[bytes]:
        stream = EventStream(jobs=jobs, job_id=job.job_id, after="0-0", closing=asyncio.Event())
        seen: list[bytes] = []
        async for event in stream:
            seen.append(event)
            if len(seen) == 1:  # the stream stands between two looks
                jobs.fail(job.job_id, "given up")
                await asyncio.to_thread(jobs.remove, job.job_id)
                late = generator.publish(claim, answer_to(claim.prompt_batch, "g1"))
                assert late is not PublishOutcome.ACCEPTED
                generator.fail(claim, "late")
        return seen

    assert asyncio.run(asyncio.wait_for(watch(), timeout=60.0))
    operator = connect(StackSettings(redis_url=server.url))
    assert list(operator.redis.scan_iter(match=f"*{job.job_id}*")) == []
    with pytest.raises(NotFound):
        jobs.remove(job.job_id)
    assert list(Removals(gateway).notes().removals) == [job.job_id]


def test_an_ended_job_is_removed_over_http_and_a_live_one_is_not(services: Services) -> None:
    ask = partial(asked, create_app(services), key=services.settings.api_key)
    job_id, _ = services.jobs.create(job_spec())
    refused = ask("DELETE", f"/v1/jobs/{job_id}")
    assert (refused.status_code, refused.json()["field"]) == (409, "state")
    ask("POST", f"/v1/jobs/{job_id}/cancel")
    gone = ask("DELETE", f"/v1/jobs/{job_id}")
    assert (gone.status_code, gone.content) == (204, b"")
    assert [ask(method, f"/v1/jobs/{job_id}").status_code for method in ("DELETE", "GET")] == [204, 404]
    never = f"/v1/jobs/job-{uuid.uuid4().hex[:12]}"
    assert [ask("DELETE", path).status_code for path in (never, "/v1/jobs/redis", "/v1/jobs/..%2Fredis")] == [404] * 3
    assert job_id not in [job["job_id"] for job in ask("GET", "/v1/jobs?limit=1000").json()["jobs"]]
