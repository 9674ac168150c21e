"""A small real HTTP server with the gateway's routes and one finished job, for the command line's tests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, parse_qsl

import msgspec

from contracts.answers import AuditVerdict, LogPart, StackState
from contracts.errors import HubFetching
from contracts.events import (
    AuditRecord,
    EvaluationFinished,
    IterationCommitted,
    IterationMetrics,
    JobEvent,
    StateChanged,
    TrainerStarted,
    record_digest,
)
from contracts.jobs import EvaluationScore, JobState, JobStatus, ResumeRequest
from contracts.monitor import GeneratorSeen
from contracts.spec.job import JobSpec
from contracts.tasks.kinds import TaskKind, TaskState
from contracts.tasks.records import TaskArguments, TaskResult, TaskStatus
from onbeat.audit.chain import verify_run
from tests.builders import commit_record, job_spec

KEY = "secret-key"
JOB = "job-0a1b"
TASK = "task-0123456789ab"
STACK = StackState(
    redis_used_bytes=95,
    redis_max_bytes=100,
    live_generators=1,
    live_stage_workers=0,
    live_consumers=1,
    num_jobs=3,
    max_jobs=1000,
)


def digest(version: int) -> str:
    return f"{version:x}".rjust(64, "0")


def small_spec(**changes: object) -> JobSpec:
    return job_spec(
        iterations=2,
        rollout__batches_per_iteration=1,
        evaluation__num_prompts=2,
        evaluation__prompts_per_batch=2,
        evaluation__greedy=False,
        **changes,
    )


def metrics_of(iteration: int, reward: float) -> IterationMetrics:
    counts = {"num_batches": 1, "num_completions": 8, "num_tokens": 40, "response_tokens_max": 5}
    names = (
        "reward_std zero_advantage_share response_tokens_mean truncated_share loss "
        "grad_norm learning_rate mismatch_k3 mismatch_max effective_sample_share generation_s training_s "
        "waiting_s step_s publish_s"
    )
    return IterationMetrics(
        iteration=iteration,
        policy_version=iteration,
        trainer_epoch=1,
        reward_mean=reward,
        reward_components={"exact": reward},
        loss_metrics={"clip_share": 0.1, "kl_to_reference": 0.1},
        started_s=10.0 + iteration,
        wall_s=2.0,
        tokens_per_s=20.0,
        **counts,
        **dict.fromkeys(names.split(), 0.1),
    )


def evaluation(version: int, sampled: float) -> EvaluationScore:
    return EvaluationScore(iteration=version, policy_version=version, sampled=sampled, greedy=sampled, num_prompts=2)


def audit_records(spec: JobSpec) -> list[tuple[AuditRecord, str]]:
    linked: list[tuple[AuditRecord, str]] = []
    for iteration in range(spec.iterations + 1):
        trains = iteration < spec.iterations
        names = [f"{iteration}/train/0"] if trains else []
        names += [f"{iteration}/evaluation/0"] if iteration in (0, spec.iterations) else []
        record = commit_record(
            iteration,
            dict.fromkeys(names, "d"),
            weights_digest=digest(iteration),
            next_weights_digest=digest(iteration + 1) if trains else "",
            previous=linked[-1][1] if linked else "",
        )
        linked.append((record, record_digest(record)))
    return linked


def events_of(final: JobState) -> list[JobEvent]:
    return [
        StateChanged(at_s=1.0, state=JobState.RUNNING),
        TrainerStarted(at_s=2.0, trainer_epoch=1, next_iteration=0, resumed=False),
        EvaluationFinished(at_s=3.0, score=evaluation(0, 0.4)),
        IterationCommitted(at_s=4.0, metrics=metrics_of(0, 0.5), weights_digest=digest(1)),
        IterationCommitted(at_s=5.0, metrics=metrics_of(1, 0.75), weights_digest=digest(2)),
        EvaluationFinished(at_s=6.0, score=evaluation(2, 0.7)),
        StateChanged(at_s=7.0, state=final, reason="" if final is JobState.SUCCEEDED else "the loss is not finite"),
    ]


LETTER = {
    "entry_id": "1700000000500-0",
    "at_s": 1700000000.5,
    "batch_id": "3/train/1",
    "iteration": 3,
    "reason": "the scorer raised\n\x1b[2J",
    "attempts": 3,
    "prompts": [{"prompt_id": "train/7", "text": "[red]1+1=\x1b]0;evil\x07"}],
    "can_retry": True,
}


class FakeGateway(ThreadingHTTPServer):
    """State that a test sets before it asks."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Routes)
        self.spec = small_spec()
        self.final = JobState.SUCCEEDED
        self.submitted: list[tuple[str, JobSpec]] = []
        self.resumed: list[ResumeRequest] = []
        self.fetches: list[str] = []
        """What it says of its fetches from the hub, one at a time, before it takes what is asked next."""
        self.listings: list[dict[str, list[str]]] = []
        """What was asked of each list of jobs."""
        self.log = b""
        self.earlier: list[JobEvent] = []
        """Events that come before those of the last run."""
        self.break_after: int | None = None
        """The first event stream breaks off after so many events."""
        self.last_event_ids: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def verdict(self) -> AuditVerdict:
        """The verdict of a chain without a record."""
        return verify_run([], self.spec, complete=False, digests_on_disk={}, job_id=JOB)

    def task(self, state: TaskState) -> TaskStatus:
        """The task that checks the job."""
        result = TaskResult(verdict=self.verdict()) if state is TaskState.DONE else None
        return TaskStatus(
            task_id=TASK,
            kind=TaskKind.VERIFY,
            queue="check",
            state=state,
            arguments=TaskArguments(job_id=JOB),
            who="the operator",
            created_s=100.0,
            result=result,
        )

    def status(self) -> JobStatus:
        return JobStatus(
            job_id=JOB,
            name="test",
            state=self.final,
            reason="" if self.final is JobState.SUCCEEDED else "the loss is not finite",
            schedule="periodic",
            iterations=2,
            iterations_committed=2,
            policy_version=2,
            weights_digest=digest(2),
            created_s=100.0,
            ended_s=104.5,
            batches_rejected={"stale": 1},
            batches_hedged=3,
            hedges_won=2,
            live_generators=1,
        )


class Routes(BaseHTTPRequestHandler):
    server: FakeGateway  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        if self._refused():
            return
        jobs = f"/v1/jobs/{JOB}"
        path, _, query = self.path.partition("?")
        asked = dict(parse_qsl(query))
        if path == "/v1/jobs":
            self.server.listings.append(parse_qs(query))
            self._answer(200, {"jobs": [self.server.status()]})
        elif path == f"/v1/tasks/{TASK}":
            self._answer(200, self.server.task(TaskState.DONE))
        elif path == "/v1/stack":
            self._answer(200, STACK)
        elif path == "/v1/generators":
            seen = GeneratorSeen(worker_id="g-1", seen_s=0.5, doing="generating 2/train/0\x1b[2J")
            self._answer(200, {"generators": [seen]})
        elif path == f"{jobs}/evaluations":
            self._answer(200, {"evaluations": [evaluation(0, 0.4), evaluation(2, 0.7)]})
        elif path == f"{jobs}/log":
            after, limit = min(int(asked["after"]), len(self.server.log)), int(asked["limit"])
            data = self.server.log[after : after + limit]
            size = len(self.server.log)
            self._answer(200, LogPart(text=data.decode(), after=after, next=after + len(data), size=size))
        elif path == f"{jobs}/dead":
            self._answer(200, {"letters": [LETTER]})
        elif self.path == jobs:
            self._answer(200, self.server.status())
        elif path == f"{jobs}/metrics":
            self._answer(200, {"iterations": [metrics_of(0, 0.5), metrics_of(1, 0.75)]})
        elif self.path == f"{jobs}/spec?defaults=false":
            self._answer(200, self.server.spec)
        elif self.path == f"{jobs}/streams":
            self._answer(
                200, {"num_prompts": 3, "oldest_age_s": 1.5, "groups": [{"name": "generators", "num_bytes": 2048}]}
            )
        elif self.path == f"{jobs}/audit":
            self._answer(200, {"records": [self._with_digest(*pair) for pair in audit_records(self.server.spec)]})
        elif self.path == f"{jobs}/events":
            self._stream()
        else:
            self._problem(404, detail="there is no such job", field="job", cure="GET /v1/jobs lists them")

    def do_DELETE(self) -> None:
        if self._refused():
            return
        if self.path == f"/v1/jobs/{JOB}":
            self.send_response(204)
            self.end_headers()
        else:
            self._problem(404, detail="there is no such job", field="job")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self._refused():
            return
        if self.server.fetches and self.path in ("/v1/jobs", f"/v1/jobs/{JOB}/resume"):
            self._problem(HubFetching.status, detail=self.server.fetches.pop(0), field=HubFetching.FIELD)
        elif self.path == "/v1/jobs":
            self.server.submitted.append((self.headers["Idempotency-Key"], msgspec.json.decode(body, type=JobSpec)))
            self._answer(201, self.server.status())
        elif self.path == f"/v1/jobs/{JOB}/resume":
            self.server.resumed.append(msgspec.json.decode(body, type=ResumeRequest))
            self._answer(200, self.server.status())
        elif self.path.startswith(f"/v1/jobs/{JOB}/verify?wait="):
            self._answer(200, self.server.verdict())
        elif self.path == f"/v1/jobs/{JOB}/verify":
            self._answer(202, self.server.task(TaskState.QUEUED))
        elif self.path == f"/v1/jobs/{JOB}/cancel":
            self._problem(409, detail="a succeeded job cannot become cancelling", field="state")
        else:
            self._problem(404, detail="there is no such job", field="job")

    def log_message(self, *_: object) -> None:
        """Logs nothing."""

    def _refused(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {KEY}":
            return False
        self._problem(401, detail="the key is wrong")
        return True

    def _stream(self) -> None:
        after = self.headers.get("Last-Event-ID")
        self.server.last_event_ids.append(after)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        start = int(after) if after else 0
        events = [*self.server.earlier, *events_of(self.server.final)]
        for number, event in enumerate(events[start:], start=start + 1):
            text = f": keep-alive\n\nid: {number}\nevent: news\ndata: {msgspec.json.encode(event).decode()}\n\n"
            self.wfile.write(text.encode())
            if after is None and self.server.break_after == number:
                self.wfile.write(b"id: 99\ndata: {half an ev")
                return

    def _with_digest(self, record: AuditRecord, link: str) -> dict[str, Any]:
        return {**json.loads(msgspec.json.encode(record)), "digest": link}

    def _problem(self, status: int, **members: object) -> None:
        self._answer(status, {"type": "about:blank", "title": "refused", "status": status, **members})

    def _answer(self, status: int, body: object) -> None:
        data = msgspec.json.encode(body)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def fake_gateway() -> Iterator[FakeGateway]:
    server = FakeGateway()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
