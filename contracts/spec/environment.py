"""Table `[environment]`: what answers the model, and for how many turns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType, field

from contracts.encoding.digests import content_digest
from contracts.encoding.wire import NO_CONTROL_CHARACTERS, Attempts, FilePathOrNone, Line, Record, Seconds, Text, Tokens
from contracts.errors import InvalidInput
from contracts.rewards import ENVIRONMENT, OnUnscorable, stated_score

MAX_TURNS = 256
VERSIONS_END = "; "
"""The separator between the versions of several environments."""
AGENT = "agent"
"""The environment of agents that own their loop. With a file its parameter of the same name is a function there."""
KEY_OF_TABLE = re.compile(rf"(?<![\w.]){ENVIRONMENT}\.(?=\w)")
RendererKind = Literal["chat", "text"]
ParamNumber = Annotated[int, Meta(ge=-(2**53), le=2**53)]
ParamRatio = Annotated[float, Meta(ge=-1e15, le=1e15)]
Params = Annotated[dict[Line, ParamNumber | ParamRatio | bool | Text], Meta(max_length=64)]


class EnvironmentSpec(Record, frozen=True, kw_only=True):
    """Many turns: after each of the model's, an environment replies, until one of them ends the trajectory."""

    name: Line
    """The name of the environment: an entry point of group `onbeat.environments` where the reward service runs, or a
    class of the file. With "agent" and a file, params.agent names a function of that file."""
    file: FilePathOrNone = ""
    """A file of Python that defines the class, or the agent's function. A relative path starts as that of `model.path`.
    With "" the name is an entry point."""
    source: Text = ""
    """The text of the file. The gateway reads it when the job is submitted; a later edit of the file changes
    nothing."""
    params: Params = field(default_factory=dict)
    """Parameters of the environment."""
    max_turns: Annotated[int, Meta(ge=1, le=MAX_TURNS)] = 8
    """The most turns of the model. The trajectory ends with the last one, whatever the environment answers to it."""
    max_tokens: Tokens = 4096
    """The most tokens of a trajectory: sampled tokens and the environment's, without the prompt. If another turn of
    rollout.sampling.max_new_tokens doesn't fit in, the trajectory ends."""
    max_context_tokens: Tokens | UnsetType = UNSET
    """The most of these tokens that the model sees at a time, for environments that begin a context anew. Left out:
    max_tokens."""
    renderer: RendererKind = "chat"
    """How messages become tokens. chat: by the model's chat template. text: the contents of the messages follow each
    other, for models without a template."""
    chat_format: Annotated[str, Meta(max_length=64, pattern=NO_CONTROL_CHARACTERS)] = ""
    """The name of a chat format of the package `renderers`, such as "qwen3". With "" the model's own chat template is
    used, which must leave earlier turns as they are."""
    step_timeout_s: Annotated[float, Meta(gt=0.0, le=3600.0)] = 30.0
    """The deadline of one reset or step of the environment. After it the environment's process is killed."""
    request_timeout_s: Seconds = 300.0
    """The deadline of one request to the reward service, which has a step of each trajectory of a batch. A failed
    request is repeated, for twice as long in all."""
    max_attempts: Attempts = 3
    """How often a trajectory is begun before its batch fails, if its environment hangs, dies or raises an error."""
    on_failure: OnUnscorable = "fail"
    """Decides what happens if the environment fails at the same message in each attempt. fail: the batch fails, and in
    the end the job. A number: the trajectory ends, and this number is the environment's whole reward. It is counted and
    audited, and after a time-out or a crash it is given in the last attempt only. A resume may change it."""

    @property
    def seen_bound(self) -> tuple[str, int]:
        """The key that says how many tokens may follow a prompt, or what begins anew with its own, and their number."""
        most = self.max_context_tokens
        if most is UNSET:
            return ("max_tokens", self.max_tokens)
        return ("max_context_tokens", most)

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


def environment_name(source: str) -> str:
    """By which what the environment of a source couldn't judge is counted. source: "" where one plays all prompts."""
    return f"{ENVIRONMENT}/{source}" if source else ENVIRONMENT


def played_by(versions: Mapping[str, str]) -> str:
    """`guess 1.2`, or `games: guess 1.2; tools: mcp 0.9` of a mixture's sources; "" of none."""
    return VERSIONS_END.join(f"{source}: {version}" if source else version for source, version in versions.items())


@contextmanager
def environment_at(field: str) -> Iterator[None]:
    """Raises an InvalidInput from within again with `field` where field or cure name the table `environment`.

    What refuses an environment doesn't know which of a mixture's it is. field: that of `environment_field`.
    """
    try:
        yield
    except InvalidInput as error:
        names = [text and KEY_OF_TABLE.sub(f"{field}.", text) for text in (error.field, error.cure)]
        if names == [error.field, error.cure]:
            raise
        raise InvalidInput(error.problem, field=names[0], cure=names[1]) from error
