"""What the gateway writes as server-sent events, its client reads again, whatever happens to the gateway."""

from __future__ import annotations

import math
from collections.abc import Iterator

import httpx
import pytest

from contracts.answers import AuditVerdict
from contracts.encoding.wire import encode_json
from contracts.errors import Conflict, DeadlineExceeded, InvalidInput, OnbeatError, Unavailable
from contracts.events import StateChanged
from contracts.jobs import JobState
from contracts.tasks.kinds import TaskKind, TaskState
from contracts.tasks.records import TaskResult, TaskStatus
from gateway.event_stream import encode_event
from onbeat.client import gateway as gateway_client
from onbeat.client.gateway import GatewayClient, parse_events


@pytest.mark.parametrize(
    "reason", ["", "a\nb\r\nc", "data: x\n\n", "one\u2028two\u2029three\x85four\x0b\x1cfive", "\U0001f916"]
)
def test_whatever_an_event_s_text_holds_it_arrives_as_it_was(reason: str) -> None:
    failed = StateChanged(at_s=1.0, state=JobState.FAILED, reason=reason)
    body = b": keep-alive\n\n".join(encode_event(f"{number}-0", failed) for number in (1, 2))
    answer = httpx.Response(200, headers={"Content-Type": "text/event-stream"}, content=body)
    assert list(parse_events(answer)) == [("1-0", failed), ("2-0", failed)]


def test_an_answer_of_another_kind_is_a_stream_that_broke_off() -> None:
    with pytest.raises(httpx.TransportError, match="text/event-stream"):
        list(parse_events(httpx.Response(200, html="<p>log in</p>")))


class Clock:
    """Time that passes only where a test says so."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class BrokenStream(httpx.SyncByteStream):
    """One event, a long iteration of comments, and the end of the gateway's process."""

    def __init__(self, clock: Clock, event: bytes) -> None:
        self._clock, self._event = clock, event

    def __iter__(self) -> Iterator[bytes]:
        yield self._event
        for _ in range(20):
            self._clock.sleep(15.0)
            yield b": keep-alive\n\n"
        raise httpx.ReadError("connection reset by peer")


def following(monkeypatch: pytest.MonkeyPatch, *, restart_s: float) -> list[str]:
    """Ids of the events of a job whose gateway restarts in a long iteration, and answers 503 before it is ready."""
    clock = Clock()
    monkeypatch.setattr(gateway_client, "time", clock)
    running, succeeded = (StateChanged(at_s=1.0, state=state) for state in (JobState.RUNNING, JobState.SUCCEEDED))
    num_streams, back_s = 0, math.inf

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal num_streams, back_s
        head = {"Content-Type": "text/event-stream"}
        if not num_streams:
            num_streams, back_s = 1, clock.now_s + 300.0 + restart_s
            return httpx.Response(200, headers=head, stream=BrokenStream(clock, encode_event("1-0", running)))
        if clock.now_s < back_s - 5.0:
            raise httpx.ConnectError("connection refused")
        if clock.now_s < back_s:
            return httpx.Response(503, json={"detail": "Redis does not answer"})
        assert request.headers["Last-Event-ID"] == "1-0"
        return httpx.Response(200, headers=head, content=encode_event("2-0", succeeded))

    with GatewayClient("http://gateway", "key", transport=httpx.MockTransport(answer)) as client:
        return [event_id for event_id, _ in client.events("job-1")]


def test_a_follower_comes_back_to_a_gateway_that_restarts_in_a_long_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    assert following(monkeypatch, restart_s=30.0) == ["1-0", "2-0"]


def test_a_follower_gives_up_a_gateway_that_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="no answer from http://gateway: connection refused"):
        following(monkeypatch, restart_s=3600.0)


VERDICT = AuditVerdict(
    job_id="job-1",
    verified=True,
    records=1,
    iterations=1,
    batches_trained=1,
    batches_evaluated=0,
    rewinds=0,
    digests_recomputed=1,
    gaps=(),
)
TASK = "task-0123456789ab"


class Checks:
    """A gateway whose checks take long: each look finds the next of these states."""

    def __init__(self, *states: TaskState, reason: str = "") -> None:
        self._states = iter(states)
        self._reason = reason
        self.asked: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(f"{request.method} {request.url.raw_path.decode()}")
        state = next(self._states)
        status = TaskStatus(
            task_id=TASK,
            kind=TaskKind.VERIFY,
            queue="check",
            state=state,
            reason=self._reason,
            who="ann",
            created_s=1.0,
            result=TaskResult(verdict=VERDICT) if state is TaskState.DONE else None,
        )
        return httpx.Response(202, content=encode_json(status))


def client_of(answer: Checks, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> GatewayClient:
    monkeypatch.setattr(gateway_client, "time", clock)
    return GatewayClient("http://gateway", "", transport=httpx.MockTransport(answer))


def test_a_check_that_takes_longer_than_a_request_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Checks(TaskState.QUEUED, TaskState.RUNNING, TaskState.DONE)
    with client_of(answer, Clock(), monkeypatch) as client:
        assert client.verify("job-1", within_s=60.0) == VERDICT
    task = f"GET /v1/tasks/{TASK}"
    assert answer.asked == ["POST /v1/jobs/job-1/verify?wait=15", task, task]


@pytest.mark.parametrize(
    ("states", "error", "text"),
    [
        ([TaskState.QUEUED, TaskState.FAILED], OnbeatError, f"{TASK}: the task failed: no room"),
        ([TaskState.QUEUED, TaskState.CANCELLED], Conflict, f"{TASK}: the task was cancelled: no room"),
        ([TaskState.QUEUED] * 100, DeadlineExceeded, "the check of job-1 is not done after 5 s: no room"),
    ],
)
def test_a_check_without_a_verdict_is_an_error_with_its_reason(
    states: list[TaskState], error: type[OnbeatError], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        client_of(Checks(*states, reason="no room"), Clock(), monkeypatch) as client,
        pytest.raises(error, match=text),
    ):
        client.verify("job-1", within_s=5.0)


def test_a_check_that_is_interrupted_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupting(Clock):
        def sleep(self, seconds: float) -> None:
            raise KeyboardInterrupt

    answer = Checks(TaskState.QUEUED, TaskState.CANCELLED)
    with client_of(answer, Interrupting(), monkeypatch) as client, pytest.raises(KeyboardInterrupt):
        client.verify("job-1", within_s=60.0)
    assert answer.asked[1:] == [f"DELETE /v1/tasks/{TASK}"]


def test_what_is_no_task_s_id_makes_no_path() -> None:
    with GatewayClient("http://gateway", "") as client, pytest.raises(InvalidInput, match="is not a task's id"):
        client.task("../jobs")
