"""Requests of generators and trainers to the reward service, and its answers: JSON or MessagePack over HTTP.

    POST /v1/initial-observations       how tasks begin; no session is left behind
         InitialObservationRequest → InitialObservationResponse
    POST /v1/sessions                   sessions begin, or go on where a history ends
         OpenRequest → SessionResponse
    POST /v1/steps                      the model's messages in, replies out
         StepRequest → SessionResponse
    POST /v1/sessions/renew             they are still needed
         RenewRequest → RenewResponse
    POST /v1/sessions/close             they are no longer needed
         CloseRequest → CloseResponse
    GET  /v1/environments               the names that a spec may use
         → EnvironmentNames
    POST /v1/environments/check         the facts of an environment, or the problem with its parameters
         EnvironmentTable → EnvironmentFacts
    POST /v1/environments/repeatability where tasks that are played twice differ
         RepeatabilityRequest → RepeatabilityResponse

A call holds many sessions, each with a result of its own: one that hangs, dies or lies costs itself. A failure is
typed, and never a reply (I6).
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeGuard

from msgspec import UNSET, Meta, UnsetType, field

from contracts.encoding.digests import Digest, content_digest
from contracts.encoding.wire import FilePathOrNone, Line, Record, Seconds, Text, encode
from contracts.environments.messages import EnvironmentNumbers, Message, Messages, Tool, check_environment_numbers
from contracts.errors import ContractViolation
from contracts.rewards import StatedReason
from contracts.sampling import SamplingParams
from contracts.spec.environment import EnvironmentSpec, Params

MAX_SESSIONS_OF_A_CALL = 2**14

FailureReason = Literal[
    "timeout",
    "crashed",
    "raised",
    "invalid_reply",
    "oversize",
    "bad_task",
    "unknown",
    "lost",
    "divergent",
    "not_in_turn",
    "rewritten",
]
"""timeout       a step, or a reset, took longer than its deadline; its process was killed
crashed       its process died: a signal, memory, an exit of its own
raised        its code raised an error
invalid_reply it answered something else than an initial observation or a reply: a reward beyond 1e12 or NaN, an
              assistant's message, another type
oversize      its answer is larger than a message may be
bad_task      it refuses the task: a data fault, which no retry fixes
unknown       no environment of this name is installed here
lost          there is no such session (any more): the service was started again, or the session was idle too long
divergent     a history was replayed, and a reply differs: it is not deterministic, or its code has changed
not_in_turn   a step for another turn than the next or the last, or after the last reply said done
rewritten     an agent's request isn't what it was told before and something new: a message or a token before the new
              ones has changed, or it asks twice at the same time"""

RETRYABLE: frozenset[str] = frozenset({"timeout", "crashed", "raised", "lost"})
"""A fresh session may do better."""


OF_MESSAGES: frozenset[str] = frozenset({"timeout", "crashed", "raised", "invalid_reply", "oversize", "rewritten"})


def is_of_message(reason: FailureReason) -> TypeGuard[StatedReason]:
    """Returns True where the model's message may be the cause of the failure: a spec may state a score for it."""
    return reason in OF_MESSAGES


class Task(Record, frozen=True, kw_only=True):
    """The task of a trajectory, of which an environment makes its initial observation."""

    task: Text
    """JSON of an object: {"question", "reference", "entry"} of an example, or {"split", "index"} where the environment
    has tasks of its own."""
    seed: Annotated[int, Meta(ge=0, lt=2**62)]
    """The same for all trajectories of a group: an initial observation is a function of task and seed."""
    sampling: SamplingParams | UnsetType = UNSET
    """How the model's turns are drawn, for an agent that asks for what it can't have; no part of what it is about."""


class InitialObservation(Record, frozen=True, kw_only=True, tag="initial_observation"):
    """How a task begins: what the model sees before its first turn."""

    messages: Messages
    tools: tuple[Tool, ...] = ()
    asks_for_tokens: bool | UnsetType = UNSET
    """True where the model's messages are to come with `Message.sampled`."""


class Reply(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The reply of an environment to one message of the model."""

    messages: Messages = ()
    """The messages that the model sees next; the assistant's only where it begins anew. Only people see those of the
    last reply."""
    reward: float = 0.0
    done: bool = False
    metrics: EnvironmentNumbers = field(default_factory=dict)
    """Named numbers for people, of the whole trajectory so far."""
    truncated: bool = False
    """With `done`: the trajectory was cut before its end, as `algorithm.on_truncated` reads it."""
    begins_anew: bool = False
    """True where the messages are all that the model sees next, in place of all that stood before."""

    def __post_init__(self) -> None:
        if self.begins_anew and (self.done or not self.messages):
            raise ContractViolation("what begins anew begins with a message, and isn't done", field="begins_anew")
        if self.truncated and not self.done:
            raise ContractViolation("only a reply that is done has cut its trajectory", field="truncated")
        check_environment_numbers(self.reward, *self.metrics.values(), field="reward")
        if not self.begins_anew and any(message.role == "assistant" for message in self.messages):
            raise ContractViolation("an environment can't send messages of the role assistant", field="messages")


def reply_digest(reply: Reply) -> Digest:
    """Returns one digest for equal replies; metrics count, since they are published with the batch (I7)."""
    return content_digest(encode(reply))


class Failure(Record, frozen=True, kw_only=True, tag="failure"):
    """Why there is no reply."""

    reason: FailureReason
    detail: str


class Turned(Record, frozen=True, kw_only=True, tag="turned"):
    """A session after an initial observation or a step."""

    observation: InitialObservation | UnsetType = UNSET
    """Only of a session that was opened."""
    reply: Reply | UnsetType = UNSET
    """To the last message of the history or the step; unset at the very beginning."""


Result = Turned | Failure


class Played(Record, frozen=True, kw_only=True):
    """A turn that was played: for a session that begins where it ends."""

    message: Message
    """The model's."""
    reply_digest: Digest
    """`reply_digest` of the reply that it had."""


class EnvironmentTable(Record, frozen=True, kw_only=True):
    """An environment as a spec names it."""

    name: Line
    params: Params = field(default_factory=dict)
    source: Text = ""
    """Text of the file that defines the class `name`; "" where it is an entry point."""
    file: FilePathOrNone = ""
    """The file's path, for tracebacks; nothing is read there."""


def table_of(environment: EnvironmentSpec) -> EnvironmentTable:
    return EnvironmentTable(
        name=environment.name, params=environment.params, source=environment.source, file=environment.file
    )


class EnvironmentFacts(Record, frozen=True, kw_only=True):
    """Facts that an environment states about itself."""

    deterministic: bool
    """Equal tasks, seeds and messages have equal replies."""
    version: str
    """The version of the distribution that it comes from."""


class EnvironmentNames(Record, frozen=True, kw_only=True):
    environments: tuple[str, ...]
    """Built in and installed, sorted."""


JobName = Annotated[str, Meta(max_length=64)]
"""The job that asks: no process holds sessions of two jobs. "" is a job, too."""


class InitialObservationRequest(Record, frozen=True, kw_only=True, omit_defaults=True):
    """How do these tasks begin?"""

    environment: EnvironmentTable
    tasks: Annotated[tuple[Task, ...], Meta(min_length=1, max_length=MAX_SESSIONS_OF_A_CALL)]
    step_timeout_s: Seconds
    job_id: JobName = ""


class InitialObservationResponse(Record, frozen=True, kw_only=True):
    observations: tuple[InitialObservation | Failure, ...]


class NewSession(Record, frozen=True, kw_only=True):
    """A session to begin."""

    session_id: Line
    """Chosen by the caller; a session that has it already is ended first."""
    task: Task
    history: tuple[Played, ...] = ()
    """Turns to play before it begins, and to compare; of a deterministic environment only."""


class OpenRequest(Record, frozen=True, kw_only=True, omit_defaults=True):
    environment: EnvironmentTable
    sessions: Annotated[tuple[NewSession, ...], Meta(min_length=1, max_length=MAX_SESSIONS_OF_A_CALL)]
    step_timeout_s: Seconds
    """Hard deadline of each reset and step; its process is killed past it."""
    idle_s: Seconds
    """A session without a call for this long is ended: its generator is gone."""
    job_id: JobName = ""


class Step(Record, frozen=True, kw_only=True):
    session_id: Line
    turn: Annotated[int, Meta(ge=0)]
    """0 is the model's first message. The last one may be repeated, by a caller whose answer was lost: its reply comes
    again, and nothing is stepped."""
    message: Message


class StepRequest(Record, frozen=True, kw_only=True):
    steps: Annotated[tuple[Step, ...], Meta(min_length=1, max_length=MAX_SESSIONS_OF_A_CALL)]


class SessionResponse(Record, frozen=True, kw_only=True):
    """A result for each session of the request, in its order."""

    results: tuple[Result, ...]


class RenewRequest(Record, frozen=True, kw_only=True):
    """These sessions are still needed, while the model takes its turn."""

    session_ids: Annotated[tuple[Line, ...], Meta(max_length=MAX_SESSIONS_OF_A_CALL)]


class RenewResponse(Record, frozen=True, kw_only=True):
    num_open: int
    """The number of these sessions that are open."""


class CloseRequest(Record, frozen=True, kw_only=True):
    session_ids: Annotated[tuple[Line, ...], Meta(max_length=MAX_SESSIONS_OF_A_CALL)]


class CloseResponse(Record, frozen=True, kw_only=True):
    num_closed: int
    """The number of these sessions that were open."""


class RepeatabilityRequest(Record, frozen=True, kw_only=True):
    """Do these tasks open and go on the same, twice, in two processes, in other company?"""

    environment: EnvironmentTable
    tasks: Annotated[tuple[Task, ...], Meta(min_length=1, max_length=16)]
    step_timeout_s: Seconds


class RepeatabilityResponse(Record, frozen=True, kw_only=True):
    problem: str
    """The difference between the two, with its task and turn; "" where there is none. Initial observations are compared
    of every environment, replies of those that say that they are deterministic."""
