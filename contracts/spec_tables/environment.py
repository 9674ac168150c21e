"""Table `[environment]`: what answers the model, and for how many turns."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from contracts.encoding.digests import content_digest
from contracts.encoding.wire import NO_CONTROL_CHARACTERS, Attempts, FilePathOrNone, Line, Record, Seconds, Text, Tokens
from contracts.rewards import OnUnscorable, stated_score
from contracts.spec_tables.datasets import DatasetSpec, EnvironmentDataset
from contracts.spec_tables.rollout import EvaluationSpec, RolloutSpec

MAX_TURNS = 256
ENVIRONMENT = "environment"
"""The name by which a completion, a metric or an audit record has what the environment couldn't judge."""
RendererKind = Literal["chat", "text"]
EnvironmentNumber = Annotated[int, Meta(ge=-(2**53), le=2**53)]
EnvironmentRatio = Annotated[float, Meta(ge=-1e15, le=1e15)]
EnvironmentParams = Annotated[dict[Line, EnvironmentNumber | EnvironmentRatio | bool | Text], Meta(max_length=64)]


class EnvironmentSpec(Record, frozen=True, kw_only=True):
    """Many turns: after each of the model's, an environment replies, until one of them ends the trajectory."""

    name: Line
    """An entry point of group `onbeat.environments` where the reward service runs, Onbeat's or another's; or a class of
    the file."""
    file: FilePathOrNone = ""
    """File of Python that defines the class; relative paths start at the stack's model root. "" takes an entry
    point."""
    source: Text = ""
    """The file's text. The gateway reads it when the job is submitted, and what the file says later changes nothing."""
    params: EnvironmentParams = field(default_factory=dict)
    """Parameters that it gets."""
    max_turns: Annotated[int, Meta(ge=1, le=MAX_TURNS)] = 8
    """Turns of the model; the trajectory ends with the last one, whatever the environment says to it."""
    max_tokens: Tokens = 4096
    """Longest trajectory: sampled tokens and the environment's, without the prompt. It ends with the turn after which
    rollout.sampling.max_new_tokens don't fit in."""
    renderer: RendererKind = "chat"
    """How messages become tokens: chat by the model's chat template; text writes their contents one after the other,
    for models without one."""
    chat_format: Annotated[str, Meta(max_length=64, pattern=NO_CONTROL_CHARACTERS)] = ""
    """Name of a chat format in the package `renderers`, as "qwen3"; "" takes the model's own chat template, which must
    leave earlier turns as they are."""
    step_timeout_s: Annotated[float, Meta(gt=0.0, le=3600.0)] = 30.0
    """Hard deadline of one reset or step of the environment; its process is killed past it."""
    request_timeout_s: Seconds = 300.0
    """Deadline of one request to the reward service, with a step of each trajectory of a batch; a failed one is
    repeated, in all for twice as long."""
    max_attempts: Attempts = 3
    """Times that a trajectory is begun before its batch fails, where its environment hangs, dies or raises."""
    on_failure: OnUnscorable = "fail"
    """What a trajectory gets at whose message the environment fails each time: fail (its batch, in the end the job), or
    a score as the environment's whole reward, counted and audited; for a time-out or a crash as the last resort. A
    resume may change it."""

    @property
    def stated_score(self) -> float | None:
        """The reward of a trajectory at which the environment fails; None where that fails its batch."""
        return stated_score(self.on_failure)

    @property
    def file_version(self) -> str:
        """The version of a class of a file; "" of an entry point, whose package has one."""
        return file_version(self.name, self.source)


def file_version(name: str, source: str) -> str:
    return f"{name} {content_digest(source.encode())}" if source else ""


def environment_problem(
    environment: EnvironmentSpec | None,
    rollout: RolloutSpec,
    evaluation: EvaluationSpec,
    dataset: DatasetSpec,
    *,
    num_components: int,
    scores: bool = True,
) -> str:
    """Says what in a spec doesn't go with its environment, or with having none; "" where all does.

    scores: whether the job has completions to score.
    """
    if environment is None:
        if isinstance(dataset, EnvironmentDataset):
            return 'dataset.type = "environment" takes its tasks from the environment; name one as environment.name'
        return (
            ""
            if num_components or not scores
            else "reward.components needs one or more, or the job an environment that rewards"
        )
    if environment.chat_format and environment.renderer != "chat":
        return 'environment.chat_format has no effect with environment.renderer = "text"; leave it out'
    if dataset.chat is not None:
        return (
            "dataset.chat has no effect with an environment, whose messages environment.renderer writes; leave it out"
        )
    if ends := rollout.sampling.own_end or evaluation.sampled_as(rollout).own_end:
        return f"sampling.{ends} would end turns that environment.renderer can't read; leave it out"
    longest = rollout.sampling.max_new_tokens
    if environment.max_tokens < longest:
        return (
            f"environment.max_tokens = {environment.max_tokens} has no room for one turn of "
            f"rollout.sampling.max_new_tokens = {longest}; raise the one or lower the other"
        )
    return ""
