"""The one exception tree. Whatever reaches a user is an OnbeatError: a field or thing, the problem, the cure.

OnbeatError
├── InvalidInput            a spec, flag, body or file that breaks a rule; names the field
│   └── SpecRefused         a spec, with all rules that it breaks
├── ContractViolation       bytes from another process that do not decode or break an invariant (I1)
├── NotFound                a job, iteration or file that does not exist
├── Conflict                an idempotency key reused for another body, an illegal state change
│   └── JobEnded            a job that is over, or is to end: nothing more of it is needed
│       └── JobFailed       a job whose result was asked for, and that has none
├── Unavailable             a service or server that cannot be reached within its deadline
│   ├── BrokerUnavailable
│   ├── BrokerFull          the server is at maxmemory: back off and try again
│   ├── RewardUnavailable   the reward service did not answer (I6)
│   ├── EnvironmentUnavailable  nor what plays environments (I6)
│   ├── JudgeUnavailable    a judge's server did not answer (I6)
│   ├── ObjectsUnavailable  the object store did not answer (I8)
│   └── EngineUnavailable   an inference engine that died, or let a deadline pass: its generator ends (I8)
├── FencedOff               a trainer whose epoch is no longer the fence's (I4)
├── FenceViolation          a transition whose checks fail: a ledger gap, a digest that differs (I2, I3)
│   └── WrongEngine         a claim by another kind of engine than the one that samples the job (I7)
├── WeightsRejected         weights whose digest is not the manifest's (I2)
│   └── WeightsUnfit        a version with other tensors than the engine's model: no other copy of it helps
├── BatchFailed             a batch that could not be generated or scored; its reason is dead-lettered (I6)
│   ├── PrefixBroken        a turn whose prompt would not begin with the tokens before it (I9)
│   └── CompletionUnjudged  a completion that can't be judged, by its own doing; it may have a stated score (I6)
├── Unhealthy               a job that is to end where its health says so (`trainer.stop_on`)
├── TrainingDiverged        a loss or gradient that is not finite, or beyond the accumulator's range
└── DeadlineExceeded        a wait that ended without progress; names what it waited for (I8)

Each branch says with which HTTP status a service answers it; below it, the status is inherited or said anew. Where an
error ends a job, it also says whose fault that is (`Fault`): who has to be told follows from it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from http import HTTPStatus
from typing import ClassVar

import msgspec

MOST_REFUSALS = 64
"""A hostile spec may break rules thousands of times: an answer has the first refusals. The spec is also read again for
each wrong key, so that it costs no more than so many readings."""
MOST_CHARACTERS = 500
"""A library's line is cut here."""
NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
"""Addresses, process ids, sizes, positions: what differs between two lines that say the same."""
SPEC_KEY = re.compile(r"[a-z][a-z0-9_]*(\[\d+\])?(\.[a-z][a-z0-9_]*(\[\d+\])?)*")
"""`optimizer.groups[0].parameters`: a field of a spec. A setting is in capitals, a path has slashes."""
PATH_KEYS = ("path", "evaluation_split")
"""The ends of the keys that name a model or a file of rows. The gateway read these when it accepted the job."""


class Fault(StrEnum):
    """The side on which the cause of a job's failure lies (decision 15)."""

    JOB = "job"
    """The job's own spec, data, reward or numbers: its owner can fix it, and other jobs go on."""
    STACK = "stack"
    """A process, service, disk or record of the stack, or a cause that isn't known: its operator has to look."""


class OnbeatError(Exception):
    """An error of ours, in a line that names the field or thing, the problem and the cure."""

    status: ClassVar[HTTPStatus] = HTTPStatus.INTERNAL_SERVER_ERROR

    usual_fault: ClassVar[Fault] = Fault.STACK
    """A cause that isn't known to be the job's counts as the stack's, whose operator then looks."""

    @property
    def fault(self) -> Fault:
        """The side that is at fault where this error ends a job."""
        return self.usual_fault

    def __init_subclass__(cls, *, status: HTTPStatus | None = None) -> None:
        """Gives a branch its status. A new branch without one is refused here, where it is written."""
        if status is not None:
            cls.status = status
        elif OnbeatError in cls.__bases__:
            raise TypeError(f"{cls.__name__} needs the HTTP status that a service answers it with")

    foreign = ""
    """The words of an exception that no code of ours raised, and that this one stands for; "" where there is none."""

    def __init__(self, problem: str, *, field: str | None = None, cure: str | None = None) -> None:
        self.problem = problem
        self.field = field
        self.cure = cure
        line = problem
        if field:
            line = f"{field}: {line}"
        if cure:
            line = f"{line} ({cure})"
        super().__init__(line)


class InvalidInput(OnbeatError, status=HTTPStatus.UNPROCESSABLE_ENTITY):
    """A spec, flag, request body or file that breaks a rule."""

    @property
    def fault(self) -> Fault:
        """The job for a key of its spec; the stack for a setting, and for a file that the gateway could read."""
        field = self.field or ""
        is_key = SPEC_KEY.fullmatch(field) is not None
        if is_key and not field.endswith(PATH_KEYS):
            return Fault.JOB
        return Fault.STACK


class Refusal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule that a spec breaks. `judge` of contracts/spec/rules.py and the gateway make it, clients show it."""

    field: str
    """Path of the key at fault, as `stages[0].lowest`; "" where it is the whole spec."""
    problem: str
    """The fault, as a predicate whose subject is the field."""
    cure: str = ""
    """The change that cures it; "" where none is known."""

    @property
    def error(self) -> InvalidInput:
        """The refusal as an exception of its own."""
        return InvalidInput(self.problem, field=self.field or None, cure=self.cure or None)

    @classmethod
    def of(cls, error: OnbeatError) -> Refusal:
        """Returns the refusal that an exception tells of."""
        return cls(field=error.field or "", problem=error.problem, cure=error.cure or "")


class SpecRefused(InvalidInput):
    """A spec that breaks rules, with all of them; problem, field and cure are those of the first one."""

    def __init__(self, refusals: Sequence[Refusal]) -> None:
        """refusals: one or more. Those beyond MOST_REFUSALS are left out."""
        first = refusals[0].error
        super().__init__(first.problem, field=first.field, cure=first.cure)
        self.refusals = tuple(refusals[:MOST_REFUSALS])

    def __str__(self) -> str:
        """Returns a line for each refusal."""
        return "\n".join(str(refusal.error) for refusal in self.refusals)


class ContractViolation(OnbeatError, status=HTTPStatus.BAD_GATEWAY):
    """Bytes from another process that do not decode, or a record that breaks its own invariant."""


class NotFound(OnbeatError, status=HTTPStatus.NOT_FOUND):
    """The named job, iteration or file does not exist."""


class Conflict(OnbeatError, status=HTTPStatus.CONFLICT):
    """The request contradicts what is already recorded."""


class JobEnded(Conflict):
    """The job has ended, or is being cancelled; its state says which."""


class JobFailed(JobEnded):
    """The job has failed, or was cancelled, and its result was asked for."""


class Unavailable(OnbeatError, status=HTTPStatus.SERVICE_UNAVAILABLE):
    """A service could not be reached within its deadline."""

    is_doubtful = False
    """True where the request may be the cause: the service may have died of it, or answer all but this."""
    retry_after_s = 2
    """Seconds after which a client should ask again."""


class BrokerUnavailable(Unavailable):
    """Redis did not answer."""


class BrokerFull(Unavailable, status=HTTPStatus.INSUFFICIENT_STORAGE):
    """Redis is at its memory limit and refuses writes."""


class RewardUnavailable(Unavailable):
    """The reward service did not answer within its deadline or its retries."""


class EnvironmentUnavailable(Unavailable):
    """The service that plays environments did not answer within its deadline or its retries."""


class JudgeUnavailable(Unavailable):
    """A judge's server did not answer within its deadline or its retries."""


class ObjectsUnavailable(Unavailable):
    """The object store did not answer within the deadline, or broke off whatever it was asked."""


class HubFetching(Unavailable):
    """The gateway fetches what a spec names from the hub, and goes on while the client asks again."""

    FIELD: ClassVar[str] = "hub"
    """The field by which a client knows this answer."""
    retry_after_s = 1


class EngineUnavailable(Unavailable):
    """The inference engine is gone, or does not answer; its generator gives back what it holds, and ends."""


class FencedOff(OnbeatError, status=HTTPStatus.CONFLICT):
    """Another trainer holds a newer epoch; this one must stop and write nothing (I4)."""


class FenceViolation(OnbeatError, status=HTTPStatus.CONFLICT):
    """A transition was refused because its checks fail."""


class WrongEngine(FenceViolation):
    """A deterministic job is sampled with another kind of engine than this generator's: its bits would be others."""

    job_engine = ""
    """Fingerprint of the engine that the job is sampled with."""

    @classmethod
    def between(cls, *, job_engine: str, own: str, job_id: str) -> WrongEngine:
        """Makes the error of a claim.

        Args:
            job_engine: Fingerprint of the engine that the job is sampled with.
            own: Fingerprint of this generator's engine.
            job_id: The job.
        """
        error = cls(
            f"is sampled with ({job_engine}), this generator has ({own})",
            field=job_id,
            cure="give its generators one kind of engine, or submit with deterministic = false",
        )
        error.job_engine = job_engine
        return error


class WeightsRejected(OnbeatError, status=HTTPStatus.BAD_GATEWAY):
    """The weights that were loaded are not the ones that the manifest names."""


class WeightsUnfit(WeightsRejected):
    """A version whose tensors are not the model's, by name, shape or dtype. Unless its bytes are damaged, the trainer
    wrote what no engine of this kind can load."""


class BatchFailed(OnbeatError, status=HTTPStatus.BAD_GATEWAY):
    """A batch that could not be generated or scored."""

    usual_fault = Fault.JOB


class ProofFailed(BatchFailed):
    """An engine that computes with a version otherwise than the trainer does, whatever bytes it was given (I11)."""


class PrefixBroken(BatchFailed):
    """A turn whose prompt would not begin with exactly what the model has seen and sampled before (I9)."""


class CompletionUnjudged(BatchFailed):
    """A completion that can't be judged, by its own doing: the spec may state a score for it."""

    def __init__(
        self, problem: str, *, reason: str = "", lasts: bool = True, field: str | None = None, cure: str | None = None
    ) -> None:
        """Names the reason.

        Args:
            problem: As of OnbeatError, like field and cure.
            reason: A `StageReason` of contracts/rewards.py.
            lasts: True where the same completion meets it each time.
        """
        super().__init__(problem, field=field, cure=cure)
        self.reason = reason
        self.lasts = lasts


class Unhealthy(OnbeatError, status=HTTPStatus.INTERNAL_SERVER_ERROR):
    """A rule of a job's health that the spec ends it by."""

    usual_fault = Fault.JOB


class TrainingDiverged(OnbeatError, status=HTTPStatus.INTERNAL_SERVER_ERROR):
    """A loss or gradient that is not finite, or that the exact accumulator cannot represent."""

    usual_fault = Fault.JOB


class DeadlineExceeded(OnbeatError, status=HTTPStatus.GATEWAY_TIMEOUT):
    """A wait that ended without progress."""


def text_of(error: BaseException) -> str:
    """Returns what the exception says of itself. Its own `__str__` may raise, and must not hide the exception."""
    try:
        return str(error)
    except BaseException as problem:
        # `__str__` of foreign code, which may raise anything while an error is reported.
        return f"its text cannot be read: {type(problem).__name__}"


def first_line(error: BaseException) -> str:
    """Returns the first line of a library's message, or its type where it has none: the rest is for debugging."""
    lines = text_of(error).strip().splitlines()
    return lines[0][:MOST_CHARACTERS] if lines else type(error).__name__


def kind_and_text(error: BaseException) -> str:
    """Names an exception that no code of ours raised: `KeyError: 'layers'`; of a group its first member."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    kind = type(error).__name__
    text = first_line(error)
    return kind if text == kind else f"{kind}: {text}"


def fault_words(error: BaseException) -> str:
    """Returns the words by which a fault of foreign code is known again: its kind and first line, without numbers."""
    return without_numbers(kind_and_text(error))


def without_numbers(text: str) -> str:
    """Returns a text with # for each number and address: what is left of two that say the same is equal."""
    return NUMBERS.sub("#", text)
