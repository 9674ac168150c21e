"""Tasks `verify` and `export`: asked for over HTTP, done by a worker, answered and streamed."""

from __future__ import annotations

import io
import socket
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from broker.monitor import job_status
from contracts.answers import AuditVerdict
from contracts.encoding.wire import convert, encode_json
from contracts.errors import NotFound
from contracts.events import TaskChanged, record_digest
from contracts.jobs import JobState
from contracts.run_folder import RunFolder
from contracts.tasks.kinds import TaskState
from contracts.tasks.records import TaskStatus
from onbeat.audit.chain import AuditEntry
from onbeat.audit.folder import AuditFile
from onbeat.audit.weights import digest_of
from onbeat.tasks.exports import folder_of
from tests.builders import job_spec
from tests.rooms.tasks.rig import KEY, WEIGHTS, TaskStack, endless_version, status_of
from tests.until import until


def exported(stack: TaskStack, http: httpx.Client, job_id: str, **asked: object) -> TaskStatus:
    """Has a job exported, and waits for the end of the task."""
    answer = http.post(f"/v1/jobs/{job_id}/export", json=asked)
    assert answer.status_code == 202, answer.text
    assert answer.headers["Location"] == f"/v1/tasks/{status_of(answer).task_id}"
    return stack.ended(status_of(answer).task_id)


def test_a_check_is_answered_as_a_task_or_by_its_verdict_where_the_client_waits(working_stack: TaskStack) -> None:
    job_id, _ = working_stack.trained_job()
    with working_stack.gateway() as http:
        begun = http.post(f"/v1/jobs/{job_id}/verify")
        assert (begun.status_code, status_of(begun).state) in ((202, TaskState.QUEUED), (202, TaskState.RUNNING))
        status = working_stack.ended(status_of(begun).task_id)
        assert (status.state, status.reason, status.who) == (TaskState.DONE, "", "the operator")
        assert status.result is not None
        verdict = convert(http.post(f"/v1/jobs/{job_id}/verify?wait=300").json(), AuditVerdict)
        assert (verdict.verified, verdict.records, verdict.digests_recomputed, verdict.gaps) == (True, 2, 2, ())
        assert status.result.verdict == verdict
        preferred = http.post(f"/v1/jobs/{job_id}/verify", headers={"Prefer": "respond-async, wait=300"})
        assert convert(preferred.json(), AuditVerdict) == verdict
        sizes = [path.stat().st_size for path in RunFolder(working_stack.run_root, job_id).weights.rglob("*.safe*")]
        progress = status.progress
        assert (progress.files_done, progress.files_total) == (2, 2)
        assert (progress.bytes_done, progress.bytes_total) == (sum(sizes), sum(sizes))
        shown = http.get(f"/v1/tasks?job_id={job_id}").json()["tasks"][-1]
        assert convert(shown, TaskStatus) == status


def test_a_gap_is_a_verdict_and_damage_a_problem_with_its_reason(working_stack: TaskStack) -> None:
    job_id, _ = working_stack.trained_job()
    path = RunFolder(working_stack.run_root, job_id).weights_of(1) / WEIGHTS
    path.write_bytes(b"\x02" + bytes(7) + b"{}")
    with working_stack.gateway() as http:
        verdict = convert(http.post(f"/v1/jobs/{job_id}/verify?wait=300").json(), AuditVerdict)
        assert not verdict.verified
        assert verdict.gaps[0].startswith(f"{job_id}/weights/v000001: the files have digest")
        path.write_bytes(b"\xff" * 20)
        damaged = http.post(f"/v1/jobs/{job_id}/verify?wait=300")
        assert (damaged.status_code, damaged.json()["field"]) == (502, "verify")
        assert f"{path}: cannot be read: Error while deserializing header" in damaged.json()["detail"]
        empty, _ = working_stack.jobs.create(job_spec())
        nothing = http.post(f"/v1/jobs/{empty}/verify?wait=300")
        assert (nothing.status_code, nothing.json()["field"]) == (409, "state")
        assert http.post("/v1/jobs/job-000000000000/verify").status_code == 404


def test_a_check_is_cancelled_by_the_client_that_goes_away(working_stack: TaskStack) -> None:
    job_id, _ = working_stack.trained_job()
    endless_version(RunFolder(working_stack.run_root, job_id).weights_of(2))
    head = f"Host: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    request = f"POST /v1/jobs/{job_id}/verify?wait=300 HTTP/1.1\r\n{head}\r\n"
    with working_stack.gateway() as http:
        with socket.create_connection(("127.0.0.1", http.base_url.port or 0)) as client:
            client.sendall(request.encode())

            def running() -> list[TaskStatus]:
                of_job = [task for task in working_stack.tasks.open() if task.arguments.job_id == job_id]
                return [task for task in of_job if task.state is TaskState.RUNNING]

            (status,) = until(running, "the check")
        ended = working_stack.ended(status.task_id)
        assert (ended.state, ended.reason) == (TaskState.CANCELLED, "it was asked to end")


def hashes_zeros(stack: TaskStack, task_id: str) -> bool:
    """Whether a check is amid the version that takes long: its progress is told every three seconds."""
    return stack.tasks.status(task_id).progress.bytes_done > 16 * 1024**2


def test_a_client_that_joined_a_check_leaves_it_running_and_outlasts_its_creator(working_stack: TaskStack) -> None:
    job_id, _ = working_stack.trained_job()
    zeros = RunFolder(working_stack.run_root, job_id).weights_of(2)
    endless_version(zeros)
    head = f"Host: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    with working_stack.gateway() as http, ThreadPoolExecutor(1) as pool:
        begun = status_of(http.post(f"/v1/jobs/{job_id}/verify"))
        joined = http.post(f"/v1/jobs/{job_id}/verify?wait=0.2")
        assert (joined.status_code, status_of(joined).task_id) == (202, begun.task_id), "it is not done in time"
        with socket.create_connection(("127.0.0.1", http.base_url.port or 0)) as client:
            client.sendall(f"POST /v1/jobs/{job_id}/verify?wait=300 HTTP/1.1\r\n{head}\r\n".encode())
            until(lambda: hashes_zeros(working_stack, begun.task_id), "the check")
        waiting = pool.submit(http.post, f"/v1/jobs/{job_id}/verify?wait=300")
        status = working_stack.tasks.status(begun.task_id)
        assert (status.state, status.is_cancelling) == (TaskState.RUNNING, False)
        # The check that runs has it open; the next one doesn't see it.
        (zeros / WEIGHTS).unlink()
        zeros.rmdir()
        assert http.delete(f"/v1/tasks/{begun.task_id}").status_code == 202
        answer = waiting.result()
    assert answer.status_code == 200, answer.text
    assert convert(answer.json(), AuditVerdict).verified
    assert working_stack.tasks.status(begun.task_id).state is TaskState.CANCELLED


def test_an_export_is_streamed_as_a_tar_of_its_folder(working_stack: TaskStack) -> None:
    job_id, digest = working_stack.trained_job()
    with working_stack.gateway() as http:
        status = exported(working_stack, http, job_id)
        assert (status.state, status.reason) == (TaskState.DONE, "")
        assert status.result is not None
        files = status.result.exported
        assert files
        assert (files.policy_version, files.weights_digest, files.has_chain) == (1, digest, True)
        folder = folder_of(working_stack.settings("tasks"), status.task_id, files)
        assert {path.name: path.stat().st_size for path in folder.iterdir()} == files.files
        assert digest_of([folder / "model.safetensors"]) == digest
        answer = http.get(f"/v1/tasks/{status.task_id}/files", headers={"Accept-Encoding": "gzip"})
        assert "content-encoding" not in answer.headers
        assert int(answer.headers["Content-Length"]) == len(answer.content)
        assert answer.headers["Content-Disposition"] == f'attachment; filename="{job_id}-v000001.tar"'
        with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
            members = tar.getmembers()
            assert [member.name for member in members] == sorted(files.files)
            assert {(member.mtime, member.uid, member.uname, member.mode) for member in members} == {(0, 0, "", 0o644)}
            for member in members:
                content = tar.extractfile(member)
                assert content is not None
                assert content.read() == (folder / member.name).read_bytes()
        assert http.get(f"/v1/tasks/{status.task_id}/files").content == answer.content
        check_ranges(http, f"/v1/tasks/{status.task_id}/files", answer)
        events = working_stack.jobs.events_after(job_id, "0-0")
    changes = [event for _, event in events if isinstance(event, TaskChanged)]
    assert [(event.task_id, event.state) for event in changes] == [
        (status.task_id, TaskState.QUEUED),
        (status.task_id, TaskState.DONE),
    ]


def check_ranges(http: httpx.Client, path: str, whole: httpx.Response) -> None:
    """Asserts that a download goes on from any byte, of the same tar alone."""
    size = len(whole.content)
    for start in (1, 511, 512, 700, size // 2, size - 1):
        rest = http.get(path, headers={"Range": f"bytes={start}-", "If-Range": whole.headers["ETag"]})
        assert (rest.status_code, rest.headers["Content-Range"]) == (206, f"bytes {start}-{size - 1}/{size}")
        assert rest.content == whole.content[start:]
    assert http.get(path, headers={"Range": f"bytes={size}-"}).status_code == 416
    for other in ({"Range": "bytes=0-5"}, {"Range": "bytes=5-", "If-Range": '"another"'}):
        answer = http.get(path, headers=other)
        assert (answer.status_code, len(answer.content)) == (200, size)


def test_an_export_names_the_version_that_is_asked_for_or_why_there_is_none(working_stack: TaskStack) -> None:
    job_id, _ = working_stack.trained_job()
    with working_stack.gateway() as http:
        older = exported(working_stack, http, job_id, version=7)
        assert (older.state, older.result) == (TaskState.FAILED, None)
        assert older.reason.startswith(f"--version: there is no version 7 of {job_id} in ")
        adapters = exported(working_stack, http, job_id, adapters=True)
        assert adapters.reason.startswith("--adapters: ")
        both = http.post(f"/v1/jobs/{job_id}/export", json={"version": 1, "best": True})
        assert (both.status_code, both.json()["field"]) == (422, "version")
        unknown = http.post(f"/v1/jobs/{job_id}/export", json={"versoin": 1})
        assert (unknown.status_code, unknown.json()["field"]) == (422, "versoin")
        files = http.get(f"/v1/tasks/{older.task_id}/files")
        assert (files.status_code, files.json()["field"], files.json()["cure"]) == (409, "state", "export again")
    assert not (working_stack.run_root / "exports" / older.task_id).exists()


def test_an_export_of_a_damaged_version_fails_by_its_name(working_stack: TaskStack) -> None:
    job_id, digest = working_stack.trained_job()
    path = RunFolder(working_stack.run_root, job_id).weights_of(1) / WEIGHTS
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with working_stack.gateway() as http:
        status = exported(working_stack, http, job_id)
    assert status.state is TaskState.FAILED
    assert status.reason.startswith(f"{path.parent}: holds the weights ")
    assert f"version 1 is {digest[:12]} (export another version)" in status.reason
    assert not (working_stack.run_root / "exports" / status.task_id).exists()


def test_a_job_that_redis_does_not_know_is_exported_by_the_audit_chain_in_its_folder(working_stack: TaskStack) -> None:
    job_id, digest = working_stack.trained_job()
    folder = RunFolder(working_stack.run_root, job_id)
    records = working_stack.jobs.audit(job_id)
    entries = tuple(AuditEntry(record=record, digest=record_digest(record)) for record in records)
    stored = AuditFile(status=job_status(working_stack.broker, job_id), entries=entries)
    folder.audit.write_bytes(encode_json(stored))
    working_stack.jobs.remove(job_id)
    try:
        working_stack.jobs.state(job_id)
        raise AssertionError("Redis knows the job")
    except NotFound:
        pass
    with working_stack.gateway() as http:
        status = exported(working_stack, http, job_id)
        assert status.result is not None
        assert status.result.exported
        assert status.result.exported.weights_digest == digest
        assert http.post("/v1/jobs/job-000000000000/export").status_code == 404
    assert working_stack.broker.redis.exists(working_stack.broker.job_keys(job_id).events) == 0


def test_jobs_go_on_while_a_check_of_them_runs(working_stack: TaskStack) -> None:
    """A running job has no end that its chain must reach."""
    job_id, _ = working_stack.trained_job()
    running, _ = working_stack.trained_job()
    working_stack.broker.redis.hset(working_stack.broker.job_keys(running).job, "state", JobState.RUNNING.value)
    with working_stack.gateway() as http, ThreadPoolExecutor(2) as pool:
        answers = pool.map(lambda job: http.post(f"/v1/jobs/{job}/verify?wait=300"), (job_id, running))
        assert [answer.json()["verified"] for answer in answers] == [True, True]


def test_a_folder_is_written_once_though_two_ask_for_it(working_stack: TaskStack) -> None:
    job_id, _ = working_stack.trained_job()
    with working_stack.gateway() as http, ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: http.post(f"/v1/jobs/{job_id}/export"), range(2)))
    assert len({status_of(answer).task_id for answer in answers}) == 1
    place: Path = working_stack.run_root / "exports" / status_of(answers[0]).task_id
    working_stack.ended(status_of(answers[0]).task_id)
    assert len(list(place.iterdir())) == 1
