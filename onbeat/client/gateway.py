"""The gateway over HTTP, for the command line: typed answers, and errors that name the field and the cure."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar, get_args

import httpx
import msgspec
from httpx_sse import EventSource
from msgspec import UNSET

from contracts.answers import AuditVerdict, LogPart
from contracts.dead_letters import DeadLetter, DeadLetters
from contracts.encoding.wire import convert, encode_json
from contracts.errors import (
    Conflict,
    ContractViolation,
    DeadlineExceeded,
    HubFetching,
    InvalidInput,
    NotFound,
    OnbeatError,
    Refusal,
    SpecRefused,
    Unavailable,
)
from contracts.events import AuditRecord, IterationMetrics, JobEvent, StateChanged
from contracts.jobs import EvaluationScore, JobState, JobStatus, ResumeRequest
from contracts.rewards import OnUnscorable
from contracts.settings import KEY_FORM
from contracts.spec.job import JobSpec
from contracts.tasks.kinds import TASK_ID, TaskKind, TaskState
from contracts.tasks.records import ExportRequest, TaskList, TaskResult, TaskStatus
from onbeat.audit.chain import AuditEntry
from onbeat.base.http.outgoing import FOLLOWED, downloaded, legible, make_client

T = TypeVar("T")

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 30.0
"""The longest silence."""
ANSWER_S = 300.0
"""For a whole answer: the audit chain of a long job may come over a slow line."""
EVENT_SILENCE_S = 60.0
"""The gateway sends a comment more often than this; a longer silence is a broken connection."""
RECONNECT_S = 1.0
KNOWN_EVENTS = frozenset(str(kind.__struct_config__.tag) for kind in get_args(JobEvent))
VERIFY_WAIT_S = 15.0
"""How long one request waits for a verdict: what stands between may cut a longer silence. Then the task is asked."""
TASK_EVERY_S = 1.0
UNREACHABLE_S = 60.0
"""How long a follower of events tries to come back to a gateway that is away."""


class GatewayClient:
    """Use as a context manager. `key` is the bearer key; it is sent, never logged."""

    def __init__(self, url: str, key: str, *, transport: httpx.BaseTransport | None = None) -> None:
        self.url = url.rstrip("/")
        if key and not KEY_FORM.fullmatch(key):
            raise InvalidInput(
                "has a character that a key cannot have, perhaps a line break at its end",
                field="the gateway's key",
                cure="use the value of ONBEAT_API_KEY of the gateway",
            )
        if not url.startswith(("http://", "https://")):
            raise InvalidInput(f"`{url}` is not an address", field="gateway", cure="write it as http://HOST:PORT")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            self._http = make_client(
                self.url, headers=headers, timeout=REQUEST_TIMEOUT_S, least_s=ANSWER_S, transport=transport
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise InvalidInput(f"`{url}` is not an address: {error}", field="gateway") from error

    def __enter__(self) -> GatewayClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def of_job(self, method: str, job_id: str, behind: str = "", **request: Any) -> Any:
        """`ask` below the path of a job."""
        return self.ask(method, f"/v1/jobs/{segment(job_id)}{behind}", **request)

    def ask(self, method: str, path: str, **request: Any) -> Any:
        """Returns the answer's JSON, of any route. Raises OnbeatError as the gateway does."""
        try:
            answer = self._http.request(method, path, **request)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        except httpx.InvalidURL as error:
            raise InvalidInput(str(error), field="gateway") from error
        if not answer.is_success:
            raise problem_of(answer)
        if answer.status_code == 204:
            return None
        try:
            return answer.json()
        except ValueError as error:
            raise ContractViolation("the answer is not JSON", field=f"{method} {path}") from error

    def submit(self, spec: JobSpec, *, idempotency_key: str, fetching: Callable[[str], None] = log.info) -> JobStatus:
        """Submits a job. It may be repeated with the same key: the gateway answers the same job.

        Args:
            spec: The job.
            idempotency_key: The key.
            fetching: Takes how far the gateway is that fetches a name of the hub first, again and again. The gateway
                ends a fetch in which nothing comes.
        """
        headers = {"Idempotency-Key": idempotency_key, "Content-Type": "application/json"}

        def ask() -> Any:
            # The gateway reads the model's weights when it meets them first.
            return self.ask("POST", "/v1/jobs", content=encode_json(spec), headers=headers, timeout=ANSWER_S)

        return convert(_once_fetched(ask, fetching), JobStatus)

    def check(self, values: Any) -> tuple[Refusal, ...]:
        """Returns the refusals that a submission would meet; () of a spec that the gateway takes.

        Args:
            values: The plain values of the spec, which may be wrong.

        Raises:
            InvalidInput: They can't be written as JSON.
            OnbeatError: The gateway doesn't answer, or not about the spec.
        """
        try:
            body = encode_json(values)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidInput(f"is no JSON: {error}", field="spec") from error
        headers = {"Content-Type": "application/json"}
        try:
            self.ask("POST", "/v1/jobs/check", content=body, headers=headers, timeout=ANSWER_S)
        except SpecRefused as error:
            return error.refusals
        return ()

    def jobs(self, *, limit: int | None = None, states: Sequence[JobState] = (), name: str = "") -> list[JobStatus]:
        """Returns the newest jobs, newest first.

        Args:
            limit: The most jobs; None for the gateway's own number.
            states: A job is in one of them; () for all.
            name: A part of the job's name, in any letters.
        """
        query = {"limit": limit, "state": [state.value for state in states], "name": name}
        params = {key: value for key, value in query.items() if value}
        return _member(self.ask("GET", "/v1/jobs", params=params), "jobs", list[JobStatus])

    def job(self, job_id: str) -> JobStatus:
        return convert(self.of_job("GET", job_id), JobStatus)

    def cancel(self, job_id: str) -> JobStatus:
        return convert(self.of_job("POST", job_id, "/cancel"), JobStatus)

    def resume(
        self,
        job_id: str,
        *,
        iterations: int | None = None,
        on_unscorable: Mapping[str, OnUnscorable] = MappingProxyType({}),
        on_failure: Mapping[str, OnUnscorable] = MappingProxyType({}),
        wider_sums: int | None = None,
        fetching: Callable[[str], None] = log.info,
    ) -> JobStatus:
        """Queues a job again that failed or was cancelled. It may be repeated while the job is queued.

        `fetching` is as for `submit`.
        """
        headers = {"Content-Type": "application/json"}
        changes = ResumeRequest(
            iterations=iterations,
            on_unscorable=dict(on_unscorable),
            on_failure=dict(on_failure),
            wider_sums=UNSET if wider_sums is None else wider_sums,
        )

        def ask() -> Any:
            return self.of_job("POST", job_id, "/resume", content=encode_json(changes), headers=headers)

        return convert(_once_fetched(ask, fetching), JobStatus)

    def verify(self, job_id: str, *, within_s: float) -> AuditVerdict:
        """Has a worker of tasks check the audit chain, and the weights that it sees, and waits for the verdict.

        Raises:
            DeadlineExceeded: It isn't there within so many seconds. The task goes on.
            OnbeatError: The check failed, or was cancelled.
        """
        until_s = time.monotonic() + within_s
        wait_s = min(within_s, VERIFY_WAIT_S)
        answer = self.of_job(
            "POST", job_id, "/verify", params={"wait": f"{wait_s:g}"}, timeout=wait_s + REQUEST_TIMEOUT_S
        )
        if "task_id" not in answer:
            return convert(answer, AuditVerdict)
        status = convert(answer, TaskStatus)
        try:
            while not status.state.is_final:
                if time.monotonic() >= until_s:
                    raise DeadlineExceeded(
                        f"the check of {job_id} is not done after {within_s:.0f} s: {status.reason or 'it runs'}",
                        field=status.task_id,
                        cure="`onbeat jobs --tasks` shows what it does",
                    )
                time.sleep(TASK_EVERY_S)
                status = self.task(status.task_id)
        except KeyboardInterrupt:
            with contextlib.suppress(OnbeatError):
                self.cancel_task(status.task_id)
            raise
        verdict = result_of(status).verdict
        if verdict is UNSET:
            raise ContractViolation("the task has no verdict", field=status.task_id)
        return verdict

    def begin_verify(self, job_id: str) -> TaskStatus:
        """Creates a task `verify`, or joins the one that is open."""
        return convert(self.of_job("POST", job_id, "/verify"), TaskStatus)

    def begin_export(self, job_id: str, request: ExportRequest) -> TaskStatus:
        """Creates a task `export`, or joins the same one where it is open."""
        headers = {"Content-Type": "application/json"}
        return convert(
            self.of_job("POST", job_id, "/export", content=encode_json(request), headers=headers), TaskStatus
        )

    def task(self, task_id: str) -> TaskStatus:
        return convert(self.ask("GET", _task_path(task_id)), TaskStatus)

    def tasks(
        self,
        *,
        limit: int | None = None,
        job_id: str = "",
        states: Sequence[TaskState] = (),
        kinds: Sequence[TaskKind] = (),
    ) -> list[TaskStatus]:
        """Returns the newest tasks, newest first: of a job, in one of the states, of one of the kinds."""
        states_and_kinds = {"state": [state.value for state in states], "kind": [kind.value for kind in kinds]}
        query = {"limit": limit, "job_id": job_id, **states_and_kinds}
        params = {key: value for key, value in query.items() if value}
        return list(convert(self.ask("GET", "/v1/tasks", params=params), TaskList).tasks)

    def cancel_task(self, task_id: str) -> TaskStatus:
        """Cancels a task. It may be repeated."""
        return convert(self.ask("DELETE", _task_path(task_id)), TaskStatus)

    @contextlib.contextmanager
    def task_files(self, task_id: str, *, start: int, etag: str, num_bytes: int) -> Iterator[httpx.Response]:
        """Opens the tar of an export, from its byte `start` on; the answer says by its status whether it begins there.

        Args:
            task_id: The export.
            start: The first byte that is asked for.
            etag: Of the tar that an earlier answer began; "" of none.
            num_bytes: Of the whole tar: a longer answer is refused.

        Raises:
            Unavailable: The connection breaks, also while the answer is read.
            OnbeatError: As the gateway answers.
        """
        headers = {"Range": f"bytes={start}-"} if start else {}
        if start and etag:
            headers["If-Range"] = etag
        path = f"{_task_path(task_id)}/files"
        try:
            with self._http.stream("GET", path, headers=headers, extensions=downloaded(num_bytes)) as answer:
                if not answer.is_success:
                    answer.read()
                    raise problem_of(answer)
                yield answer
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    def evaluations(self, job_id: str) -> list[EvaluationScore]:
        """Held-out scores, oldest first."""
        return _member(self.of_job("GET", job_id, "/evaluations"), "evaluations", list[EvaluationScore])

    def metrics(self, job_id: str, *, last: int | None = None) -> list[IterationMetrics]:
        """Returns the numbers of the committed iterations, oldest first."""
        params = {"last": last} if last else {}
        return _member(self.of_job("GET", job_id, "/metrics", params=params), "iterations", list[IterationMetrics])

    def streams(self, job_id: str) -> dict[str, Any]:
        """Returns the report of the stream monitor, as it stands in the answer."""
        return self.of_job("GET", job_id, "/streams")

    def dead_letters(self, job_id: str, *, limit: int) -> tuple[DeadLetter, ...]:
        """Returns the newest batches of a job that were given up, newest first."""
        return convert(self.of_job("GET", job_id, "/dead", params={"limit": limit}), DeadLetters).letters

    def log_part(self, job_id: str, *, after: int, limit: int) -> LogPart:
        """Returns a part of a job's trainer.log. after: the bytes before it. limit: its bytes at most."""
        return convert(self.of_job("GET", job_id, "/log", params={"after": after, "limit": limit}), LogPart)

    def audit(self, job_id: str) -> list[AuditEntry]:
        """The audit chain, oldest first."""
        return audit_entries(self.of_job("GET", job_id, "/audit"))

    def events(self, job_id: str) -> Iterator[tuple[str, JobEvent]]:
        """(event id, event) from the first to the job's final state, over as many connections as it takes.

        It ends when this client is closed, too. Raises Unavailable when the gateway stays away.
        """
        heard_s = time.monotonic()
        after = ""
        is_over = False
        while not self._http.is_closed:
            answer: httpx.Response | None = None
            try:
                with self._event_stream(job_id, after) as answer:
                    for event_id, event in parse_events(answer):
                        after = event_id
                        yield event_id, event
                        # A job that was resumed has earlier ends: the gateway closes the stream after the last one.
                        is_over = isinstance(event, StateChanged) and event.state.is_final
                if is_over:
                    return
                log.info("the event stream ended, coming back after event %s", after or "0")
            except (httpx.TransportError, Unavailable) as error:
                if self._http.is_closed:
                    return
                log.info("the event stream broke off (%s), coming back after event %s", error, after or "0")
                # A long iteration has comments only: a stream that sent a byte was there until it broke off.
                if not (answer and answer.num_bytes_downloaded) and time.monotonic() - heard_s > UNREACHABLE_S:
                    raise error if isinstance(error, Unavailable) else self._unreachable(error) from error
            if answer and answer.num_bytes_downloaded:
                heard_s = time.monotonic()
            time.sleep(RECONNECT_S)

    @contextlib.contextmanager
    def _event_stream(self, job_id: str, after: str) -> Iterator[httpx.Response]:
        """Raises httpx.TransportError, and what the gateway answers instead of a stream."""
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": after} if after else {})
        timeout = httpx.Timeout(REQUEST_TIMEOUT_S, read=EVENT_SILENCE_S)
        with self._http.stream(
            "GET", f"/v1/jobs/{segment(job_id)}/events", headers=headers, timeout=timeout, extensions=FOLLOWED
        ) as answer:
            if not answer.is_success:
                answer.read()
                raise problem_of(answer)
            yield answer

    def _unreachable(self, error: Exception) -> Unavailable:
        reason = str(error) or type(error).__name__
        return Unavailable(
            f"no answer from {self.url}: {reason}",
            field="gateway",
            cure="check that `onbeat up` is running and that --gateway is right",
        )


def _once_fetched(ask: Callable[[], Any], fetching: Callable[[str], None]) -> Any:
    """Asks again for as long as the gateway says that it fetches from the hub, and returns the answer."""
    while True:
        try:
            return ask()
        except HubFetching as error:
            fetching(error.problem)
            time.sleep(error.retry_after_s)


def result_of(status: TaskStatus) -> TaskResult:
    """Returns what came of a task that has ended. Raises OnbeatError, with its reason, where nothing did."""
    cure = f"`onbeat jobs --tasks {status.task_id}` shows it"
    if status.state is TaskState.CANCELLED:
        raise Conflict(f"the task was cancelled: {status.reason}", field=status.task_id, cure=cure)
    if status.state is not TaskState.DONE or status.result is None:
        raise OnbeatError(f"the task failed: {status.reason}", field=status.task_id, cure=cure)
    return status.result


def parse_events(answer: httpx.Response) -> Iterator[tuple[str, JobEvent]]:
    """Reads the events of one connection; a gateway of a newer Onbeat may tell of more than this one knows.

    Raises httpx.TransportError where it breaks off, or holds none.
    """
    for event in EventSource(answer).iter_sse():
        if not event.data:  # the blank line after a comment ends an event without data
            continue
        if (kind := _decode(event.data, _Typed).type) in KNOWN_EVENTS:
            yield event.id, _decode(event.data, JobEvent)  # pyright: ignore[reportArgumentType]
        else:
            log.info("ignoring an event of type %r, which this release doesn't know", kind[:100])


def audit_entries(body: Any) -> list[AuditEntry]:
    """Returns the entries of an answer `{"records": [{…record…, "digest": "…"}]}`."""
    entries = []
    for fields in _member(body, "records", list[dict[str, Any]]):
        digest = fields.pop("digest", "")
        entries.append(AuditEntry(record=convert(fields, AuditRecord), digest=str(digest)))
    return entries


def _member(body: Any, name: str, kind: type[T]) -> T:
    """Returns the member of an answer that should be an object with it. Raises ContractViolation or InvalidInput."""
    if not isinstance(body, dict) or name not in body:
        raise ContractViolation(f"the answer has no `{name}`", field="gateway")
    return convert(body[name], kind)


def problem_of(answer: httpx.Response) -> OnbeatError:
    """Makes an RFC 9457 problem our error, and anything else its status line. No redirect is followed."""
    if answer.has_redirect_location:
        return InvalidInput(
            f"it redirects to {answer.headers['Location']!r}",
            field="gateway",
            cure="give the address itself by --gateway",
        )
    try:
        problem = msgspec.json.decode(legible(answer), type=dict[str, Any])
    except ValueError:  # no JSON, or no object
        problem = {}
    detail = str(problem.get("detail") or problem.get("title") or f"the gateway answered {answer.status_code}")
    field = problem.get("field")
    cure = problem.get("cure")
    if answer.status_code == 401:
        field = "--api-key"
        cure = "give the stack's, or its folder by --run-dir"
    kinds: dict[int, type[OnbeatError]] = {404: NotFound, 409: Conflict}
    if refusals := _refusals_in(problem):
        return SpecRefused(refusals)
    if answer.status_code == HubFetching.status and field == HubFetching.FIELD:
        return HubFetching(detail, field=field, cure=cure)
    kind = kinds.get(answer.status_code, InvalidInput if answer.is_client_error else Unavailable)
    return kind(detail, field=field, cure=cure)


def _refusals_in(problem: dict[str, Any]) -> list[Refusal]:
    """Returns the refusals of a spec that a problem tells of; [] of another problem, and of what has another form."""
    try:
        return msgspec.convert(problem.get("refusals", []), list[Refusal])
    except msgspec.ValidationError:
        return []


class _Typed(msgspec.Struct):
    type: str


def _decode(text: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise ContractViolation(f"an event that does not decode: {error}", field="events") from error


def _task_path(task_id: str) -> str:
    if not TASK_ID.fullmatch(task_id):
        raise InvalidInput(f"`{task_id}` is not a task's id", field="task", cure="`onbeat jobs --tasks` lists them")
    return f"/v1/tasks/{task_id}"


def segment(job_id: str) -> str:
    """A job id as one path segment."""
    if not job_id or not all(letter.isalnum() or letter in "-_." for letter in job_id) or job_id.strip(".") == "":
        raise InvalidInput(f"`{job_id}` is not a job id", field="job", cure="`onbeat jobs` lists them")
    return job_id
