"""Answers of the gateway next to a job's status: a spec's check, a log's part, a verdict, the stack.

The answer of every service that refuses is here as well (RFC 9457).
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

from msgspec import UNSET, UnsetType

from contracts.encoding.wire import Record, encode_json
from contracts.errors import Refusal
from contracts.events import JobEvent
from contracts.versions import PolicyVersion


class SpecCheck(Record, frozen=True, kw_only=True):
    """The answer to `POST /v1/jobs/check`. A spec that a submission would refuse gets the same problem, with all
    refusals."""

    valid: bool


class LogPart(Record, frozen=True, kw_only=True):
    """A part of a job's trainer.log, which the trainers of the job wrote one after the other."""

    text: str
    """Whole characters, and whole lines where one ends in this part; what is no UTF-8 is replaced. It is what a process
    wrote: show it as text, with control characters escaped."""
    after: int
    """Bytes of the file before this part: what was asked for, or less where the file is shorter."""
    next: int
    """`after` of the part that follows; the same as `after` where nothing has been written since."""
    size: int
    """Bytes of the file now; 0 where no trainer has started yet."""


class ToldEvent(Record, frozen=True, kw_only=True):
    """An event of a job with its id in the stream."""

    id: str
    event: JobEvent


class JobStory(Record, frozen=True, kw_only=True):
    """The answer to `GET /v1/jobs/{job_id}/story`: what a client that asks again and again has yet to see."""

    after: str
    """Id of the newest event: what the next request asks for what came after."""
    events: tuple[ToldEvent, ...]
    """Oldest first, without commits. After a `rewound` the next request asks for the iterations from its one on."""
    iterations: tuple[int, ...]
    """Committed ones, in order."""
    columns: dict[str, tuple[float | None, ...]]
    """Numbers of these iterations by name, to six digits; `reward: NAME` and `environment: NAME` among them."""
    thinned: bool
    """True where iterations between these, and all events, are left out: the same request without `most` gets them."""


class StackState(Record, frozen=True, kw_only=True):
    """The answer to `GET /v1/stack`: what all jobs share."""

    redis_used_bytes: int
    """Memory that counts against the limit."""
    redis_max_bytes: int
    """`maxmemory` of the server; 0 where it has no limit."""
    live_generators: int
    live_stage_workers: int
    live_consumers: int
    live_task_workers: int = 0
    num_jobs: int
    """Jobs that are kept; a new one is refused at `max_jobs`."""
    max_jobs: int


class SpecFiles(Record, frozen=True, kw_only=True):
    """The answer to `GET /v1/files`: the models and rows that a spec may name without anything being fetched."""

    models: tuple[str, ...]
    """Paths of folders with a `config.json`, relative to the model root, in the order of their names; behind them the
    models of the hub that are on this host, as "hub:Qwen/Qwen3-0.6B"."""
    rows: tuple[str, ...]
    """Paths of files of rows below the model root."""
    datasets: tuple[str, ...] = ()
    """Data sets of the hub that are on this host, as "hub:openai/gsm8k"; `path` of a data set names one."""
    is_complete: bool
    """False where the model root has more than is looked at for one answer: others may be named, too."""


class AuditVerdict(Record, frozen=True, kw_only=True):
    """The verdict that `onbeat verify --json` prints: the audit chain and the weights on disk, checked again."""

    job_id: str
    verified: bool
    """True where `gaps` is empty."""
    records: int
    iterations: int
    """Committed iterations that trained."""
    batches_trained: int
    batches_evaluated: int
    rewinds: int
    digests_recomputed: int
    """Versions whose files were hashed again."""
    gaps: tuple[str, ...]
    """Faults of the chain and of the files that it names, a sentence each."""
    environments: tuple[str, ...] | UnsetType = UNSET
    """Packages and versions of the environment that played the iterations, in their order; left out in a job without
    one."""
    notes: tuple[str, ...] = ()
    """Checks that could not be made from where the command ran, a sentence each."""


class ComputedProbe(Record, frozen=True, kw_only=True):
    """A version's log-probs, computed again from weights on disk, next to those of the audit chain."""

    version: PolicyVersion
    source: str
    """The holder of the weights: "the model's folder", or a checkpoint below the run root."""
    is_equal: bool
    """Bit for bit."""
    gap: float
    """The largest gap: |now - then| / (1 + |then|)."""
    row: int
    """The row of that gap, from 0."""


class ProbeCheck(Record, frozen=True, kw_only=True):
    """The answer of the process that computes probes again (`onbeat verify --probe`)."""

    versions: tuple[ComputedProbe, ...] = ()
    gaps: tuple[str, ...] = ()
    """Probes that differ from the audit chain's, a sentence each."""
    notes: tuple[str, ...] = ()
    """Probes that could not be computed, a sentence each."""


MEDIA_TYPE = "application/problem+json"


class ProblemDetails(Record, frozen=True, kw_only=True):
    """The body of every answer of 400 and above."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    field: str | None = None
    """Path of the offending field, e.g. "model.path" or "items[3].reference"; null where no field is at fault."""
    cure: str | None = None
    """The change that cures it; null where none is known."""
    refusals: tuple[Refusal, ...] | UnsetType = UNSET
    """All refusals of a spec; detail, field and cure are those of the first one."""


def problem_body(
    status: int,
    detail: str,
    *,
    field: str | None = None,
    cure: str | None = None,
    refusals: Sequence[Refusal] = (),
) -> bytes:
    """Makes JSON of the problem; text that UTF-8 can't hold, as a hostile header may bring, is escaped."""
    details = ProblemDetails(
        title=HTTPStatus(status).phrase,
        status=status,
        detail=_encodable(detail),
        field=field and _encodable(field),
        cure=cure and _encodable(cure),
        refusals=tuple(_encodable_refusal(refusal) for refusal in refusals) or UNSET,
    )
    return encode_json(details)


def _encodable_refusal(refusal: Refusal) -> Refusal:
    return Refusal(
        field=_encodable(refusal.field),
        problem=_encodable(refusal.problem),
        cure=_encodable(refusal.cure),
    )


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
