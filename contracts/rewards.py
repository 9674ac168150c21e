"""Requests of the producer to the reward service, and its answers. A failure is a typed error, never a number (I6)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType, field
from msgspec.structs import replace

from contracts.encoding.digests import content_digest
from contracts.encoding.wire import Attempts, Characters, FilePathOrNone, Line, Pattern, Record, Seconds, Text, Tokens
from contracts.errors import ContractViolation, InvalidInput
from contracts.reward_arguments import reads_reference

FinishReason = Literal["stop", "length"]
TokenIds = bytes
"""int32[T], little-endian."""
ENVIRONMENT = "environment"
"""The name by which a completion, a metric or an audit record has what the environment couldn't judge."""
Weight = Annotated[float, Meta(ge=-1000.0, le=1000.0)]
OnUnscorable = Literal["fail"] | Annotated[float, Meta(ge=-1000.0, le=1000.0)]
"""The score of a completion that a scorer (`on_unscorable`), an environment or a stage (`on_failure`) can't judge;
"fail": it has none, and its batch fails."""


def stated_score(on_unscorable: OnUnscorable) -> float | None:
    """Returns the score that a spec states; None for "fail"."""
    if isinstance(on_unscorable, str):
        return None
    return on_unscorable


class Component(Record, tag_field="type", frozen=True, kw_only=True):
    """A scorer of a rubric. The reward is the sum of weight x score over the components."""

    weight: Weight = 1.0
    """The factor of this score in the reward. A negative number makes it a penalty."""
    on_unscorable: OnUnscorable = "fail"
    """Decides what happens if this component raises an error, times out or crashes at a completion. fail: the batch
    fails, and in the end the job. A number: the completion gets this score, which is counted and audited; after a
    time-out or a crash it is given in the last attempt only. A resume may change it."""

    sources: Annotated[tuple[Line, ...], Meta(min_length=1, max_length=16)] | UnsetType = UNSET
    """The sources of a mixture, and the sets of the evaluation, whose completions this component scores. Left out:
    all."""

    def scores(self, source: str | UnsetType) -> bool:
        """Returns True where it scores completions of a source."""
        return self.sources is UNSET or source in self.sources

    @property
    def stated_score(self) -> float | None:
        """The score of what it can't score; None where that fails."""
        return stated_score(self.on_unscorable)

    @property
    def patterns(self) -> dict[str, str]:
        """Its regular expressions, by their keys. A decode compiles none of them: that may take minutes."""
        return {}

    @property
    def name(self) -> str:
        """Name in metrics, on the page and in errors; of two components with one name the later one gets a number."""
        return str(self.__struct_config__.tag)


class ExactReward(Component, tag="exact", frozen=True, kw_only=True):
    """1.0 if the completion, stripped of white space, equals the reference, else 0.0."""

    ignore_case: bool = False
    """Capitals and small letters count as equal."""


class NumericReward(Component, tag="numeric", frozen=True, kw_only=True):
    """1.0 if the last number in the completion equals the reference within the tolerance, else 0.0.

    Signs, currencies, thousands separators, percent, fractions and powers are read; 12,34 has a decimal comma.
    """

    tolerance: Annotated[float, Meta(ge=0.0, le=1e12)] = 1e-6
    """Absolute tolerance."""


class RegexReward(Component, tag="regex", frozen=True, kw_only=True):
    """1.0 if the pattern is found in the completion, else 0.0. A named group `answer` must equal the reference."""

    pattern: Pattern
    """Python regular expression, searched anywhere in the completion. Patterns without look-around and back-references
    are matched in linear time."""
    compare: Literal["text", "number"] | UnsetType = UNSET
    """How the group `answer` is compared with the reference: as "text", or as "number", so that 1058 equals 1,058 as
    under `numeric`. Left out: as text."""

    @property
    def patterns(self) -> dict[str, str]:
        return {"pattern": self.pattern}

    @property
    def compares(self) -> bool:
        """True if the pattern seems to have a group `answer`, read as text: a decode compiles nothing."""
        prefix = "(?P<answer>"
        at = 0
        class_begins = -1  # where a bracket would end the class that is open here; -1 outside classes
        while at < len(self.pattern):
            if self.pattern[at] == "\\":
                at += 2
                continue
            if class_begins >= 0:
                # A bracket that stands first in a class is one of its members.
                is_end = self.pattern[at] == "]" and at > class_begins
                if is_end:
                    class_begins = -1
            elif self.pattern.startswith("[^", at):
                class_begins = at + 2
            elif self.pattern[at] == "[":
                class_begins = at + 1
            elif self.pattern.startswith(prefix, at):
                return True
            at += 1
        return False


class FormatReward(Component, tag="format", frozen=True, kw_only=True):
    """1.0 if the whole completion matches the pattern, else 0.0 (`.` matches line breaks)."""

    pattern: Pattern
    """Python regular expression that the whole completion must match."""

    @property
    def patterns(self) -> dict[str, str]:
        return {"pattern": self.pattern}


class LengthReward(Component, tag="length", frozen=True, kw_only=True):
    """1.0 up to `target_chars` characters, then falling linearly to 0.0 at `max_chars`."""

    target_chars: Characters
    """Longest completion with the full score."""
    max_chars: Annotated[int, Meta(ge=1, le=2**27)]
    """Shortest completion with a score of 0.0; above target_chars."""


class OverlongReward(Component, tag="overlong", frozen=True, kw_only=True):
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13): 0.0 up to max_tokens - buffer_tokens sampled
    tokens, then falling linearly to -1.0 at `max_tokens`, and -1.0 beyond."""

    max_tokens: Tokens
    """L_max: shortest completion with the full punishment, the end-of-sequence token included."""
    buffer_tokens: Tokens
    """L_cache: how many tokens before it the punishment begins; at most max_tokens."""

    @property
    def free_tokens(self) -> int:
        """Longest completion without punishment."""
        # At this length the punishment is 0.0; at max_tokens it is -1.0.
        return self.max_tokens - self.buffer_tokens


class ReasoningGymReward(Component, tag="reasoning_gym", frozen=True, kw_only=True):
    """The score of the reasoning-gym task that made the prompt, on the text between the answer tags.

    reasoning-gym gives partial credit for substrings: `strict` counts 1.0 only.
    """

    strict: bool = True
    """Anything below 1.0 counts as 0.0."""
    answer_pattern: Pattern = r"(?s)<answer>\s*(?P<answer>.*?)\s*</answer>"
    """The last match's group `answer` is scored; "" scores the whole completion."""

    @property
    def patterns(self) -> dict[str, str]:
        return {"answer_pattern": self.answer_pattern}


class MathVerifyReward(Component, tag="math_verify", frozen=True, kw_only=True):
    """1.0 if math-verify finds the completion mathematically equal to the reference, else 0.0."""


class PluginReward(Component, tag="plugin", frozen=True, kw_only=True):
    """A user's function: of an installed package, or of a file below the stack's model root.

    It is called with what it names of prompt, completion, reference, task_entry, finish_reason (all str), metadata (a
    dict), completion_ids (a list of int) and the data set's columns, and returns a float. One that names `completions`
    is called once for whole groups, with lists, and returns a list, as TRL's rewards do.
    """

    entry_point: Line
    """The name of the function in group `onbeat.rewards`, or in the file."""
    file: FilePathOrNone = ""
    """A file of Python that defines the function. A relative path starts as that of `model.path`. With "" the function
    is of an installed package."""
    source: Text = ""
    """The text of the file. The gateway reads it when the job is submitted; a later edit of the file changes
    nothing."""
    arguments: Annotated[tuple[Line, ...], Meta(max_length=64)] | UnsetType = UNSET
    """The arguments that the function of the file needs. The gateway reads them from the text. Names that Onbeat
    doesn't have are columns of the data set."""
    package: Line | UnsetType = UNSET
    """Name and version of the installed package that has the function, such as "brief 1.0". The gateway asks the reward
    service for them when the job is submitted. A reward service with another version refuses to score."""

    @property
    def name(self) -> str:
        """The function's name."""
        return self.entry_point


RewardComponent = (
    ExactReward
    | NumericReward
    | RegexReward
    | FormatReward
    | LengthReward
    | OverlongReward
    | ReasoningGymReward
    | MathVerifyReward
    | PluginReward
)


class RewardPackages(Record, frozen=True, kw_only=True):
    """The answer to `GET /v1/rewards` of the reward service."""

    packages: dict[Line, Line]
    """Function of group `onbeat.rewards` → name and version of the package that offers it."""
    lacks: tuple[Line, ...] | UnsetType = UNSET
    """The types of rewards whose package isn't installed there; left out where none is missing."""


class TaskEntry(Record, frozen=True, kw_only=True):
    """The JSON in RewardItem.task_entry."""

    task: str
    """Name in reasoning-gym, e.g. "chain_sum"."""
    entry: dict[str, Any]
    """The dataset's item: question, answer, metadata."""


class RewardItem(Record, frozen=True, kw_only=True):
    """A completion to score."""

    prompt: str
    completion: str
    reference: str
    task_entry: str = ""
    metadata: str | UnsetType = UNSET
    """`Prompt.metadata`."""
    source: str | UnsetType = UNSET
    """`Prompt.source`."""
    num_tokens: Annotated[int, Meta(ge=0)] = 0
    """Sampled tokens of the completion, the end-of-sequence token included; 0: unknown, which `overlong` refuses."""
    finish_reason: FinishReason | UnsetType = UNSET
    """`Completion.finish_reason`."""
    token_ids: TokenIds | UnsetType = UNSET
    """`Completion.token_ids`, where a plug-in scores it."""


class RewardRequest(Record, frozen=True, kw_only=True):
    """Items to score with one rubric; the answer has one result for each that is asked for, in order."""

    components: Annotated[tuple[RewardComponent, ...], Meta(min_length=1, max_length=32)]
    items: Annotated[tuple[RewardItem, ...], Meta(min_length=1, max_length=4096)]
    to_score: Annotated[tuple[int, ...], Meta(max_length=4096)] | UnsetType = UNSET
    """Places of the items to score; left out: all. The others are what a plug-in sees of the groups around them."""
    group_size: Annotated[int, Meta(ge=1, le=4096)] = 1
    """So many items side by side have one prompt."""
    item_timeout_s: Annotated[float, Meta(gt=0.0, le=600.0)] = 10.0
    """Hard deadline of one item over all components, and of a call for whole groups; past it its process is killed."""
    job_id: Annotated[str, Meta(max_length=64)] = ""
    """The job of these completions: plug-ins keep their process from one request of a job to the next, and share it
    with no other job. "": none, with a process for this request alone."""
    settles: bool = False
    """True in the last request for them, after a failure of each in all requests before: then a time-out or a
    crash, too, gets its component's `on_unscorable` score. Each component that is left has the deadline for itself."""

    def __post_init__(self) -> None:
        if len(self.items) % self.group_size:
            raise ValueError(f"{len(self.items)} items are no whole groups of {self.group_size}")
        # Each place once: a completion that is scored twice would count twice in what is waited for.
        places = set(self.places)
        if len(places) < len(self.places) or not places <= set(range(len(self.items))):
            raise ValueError("`to_score` names a place twice, or one that no item has")

    @property
    def places(self) -> tuple[int, ...]:
        """The places of the items to score."""
        if self.to_score is UNSET:
            return tuple(range(len(self.items)))
        return self.to_score


UnscorableReason = Literal[
    "timeout", "crashed", "raised", "not_finite", "bad_reference", "unknown_entry_point", "too_complex", "bad_pattern"
]
"""Why a scorer has no score:

timeout              it took longer than its deadline, and its process was killed
crashed              its process died
raised               the scorer raised an exception
not_finite           its score is NaN, or too large for sums
bad_reference        the reference can't be compared with anything
unknown_entry_point  the plug-in, or the package of a scorer, isn't there, or can't be imported or called
too_complex          the comparison would take more time or memory than any item has
bad_pattern          the pattern is no regular expression"""
UP_TO_LUCK: frozenset[str] = frozenset({"timeout", "crashed"})
"""Reasons, an environment's too, that another try or machine may not meet. The others are in the item itself."""
EnvironmentReason = Literal["invalid_reply", "oversize", "rewritten"]
StageReason = Literal["not_finite", "too_long", "refused", "no_answer", "out_of_range"]
StatedReason = UnscorableReason | EnvironmentReason | StageReason
"""Why a completion has a stated score: a scorer's reasons, an environment's (contracts/environments/service.py), and a
stage's:

too_long      it is longer than what a reward model or a judge reads
refused       the judge, or a chat template, refuses it
no_answer     the judge's answer is cut, or has no number where the spec says that there is one
out_of_range  the judge's number is not between lowest and highest"""


class Scored(Record, tag="scored", tag_field="type", frozen=True, kw_only=True, omit_defaults=True):
    """A reward, with the unweighted score of each component."""

    reward: float
    breakdown: dict[str, float]
    unscorable: dict[str, UnscorableReason] = field(default_factory=dict)
    """Components that could not score it, and gave their `on_unscorable` score."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ContractViolation("a reward is finite or it is an error", field="reward")


NO_NUMBER = "not a number: return a float on every path"  # how a detail ends


class Unscorable(Record, tag="unscorable", tag_field="type", frozen=True, kw_only=True):
    """Why an item has no reward."""

    reason: UnscorableReason
    detail: str
    component: str = ""


Result = Scored | Unscorable
Outcome = float | Unscorable
"""A component's unweighted score of an item, or why it has none."""


class RewardResponse(Record, frozen=True, kw_only=True):
    results: tuple[Result, ...]


class ScorerLosses(Record, frozen=True, kw_only=True):
    """The losses of a job's scorer processes, so far: the answer to `GET /v1/score/losses`.

    Who waits for a long request learns from it, before the request ends, what takes so long.
    """

    num_lost: Annotated[int, Meta(ge=0)] = 0
    """Processes that were killed at a deadline, or died, since the service started."""
    last_ago_s: Annotated[float, Meta(ge=0.0, le=1e12)] = 0.0
    """Since the last one."""
    last: Unscorable | None = None
    """The answer to its item; None where there was none."""


def stated_scores(components: tuple[RewardComponent, ...]) -> dict[str, float]:
    """Returns breakdown name → `on_unscorable` score, of the components that have one."""
    stated = {name: component.stated_score for name, component in named(components)}
    return {name: score for name, score in stated.items() if score is not None}


def imports_plugins(components: tuple[RewardComponent, ...]) -> bool:
    """Returns True where scoring by the rubric imports foreign code."""
    return any(isinstance(component, PluginReward) for component in components)


def reads_references(components: tuple[RewardComponent, ...]) -> bool:
    """Returns True unless no component compares a completion with a reference.

    A function counts as reading it where the spec doesn't say what its arguments are.
    """
    return any(_reads_reference(component) for component in components)


def _reads_reference(component: RewardComponent) -> bool:
    if isinstance(component, PluginReward):
        return component.arguments is UNSET or reads_reference(component.arguments)
    if isinstance(component, RegexReward):
        return component.compares
    return not isinstance(component, FormatReward | LengthReward | OverlongReward | ReasoningGymReward)


def source_digests(components: tuple[RewardComponent, ...]) -> dict[str, str]:
    """Returns breakdown name → digest of the file that the function is of, where it is of a file."""
    sources = {name: getattr(component, "source", "") for name, component in named(components)}
    return {name: content_digest(source.encode()) for name, source in sources.items() if source}


def with_on_unscorable(
    components: tuple[RewardComponent, ...], changes: Mapping[str, OnUnscorable]
) -> tuple[RewardComponent, ...]:
    """Replaces `on_unscorable`, by breakdown name. Raises InvalidInput for a name that the rubric doesn't have."""
    names = breakdown_names(components)
    unknown = sorted(changes.keys() - set(names))
    if unknown:
        raise InvalidInput(
            f"the rubric has no component `{unknown[0]}`", field="on_unscorable", cure=f"it has {', '.join(names)}"
        )
    return tuple(
        replace(component, on_unscorable=changes.get(name, component.on_unscorable))
        for name, component in named(components)
    )


def named(components: tuple[RewardComponent, ...]) -> list[tuple[str, RewardComponent]]:
    """Returns each component with its name in the breakdown."""
    return list(zip(breakdown_names(components), components, strict=True))


def breakdown_names(components: tuple[RewardComponent, ...]) -> tuple[str, ...]:
    """Returns unique names for a rubric, in the order of the spec.

    A built-in component has the name of its type, and a function its own. A name that an earlier component has gets the
    next free number: `exact`, `exact_2`, `exact_3`.
    """
    names: list[str] = []
    for component in components:
        name = component.name
        number = 1
        # A function may itself be called `exact_2`, so each number is tried.
        # What the environment couldn't judge is counted under its name.
        while name in names or name == ENVIRONMENT:
            number += 1
            name = f"{component.name}_{number}"
        names.append(name)
    return tuple(names)


class RewardSpec(Record, frozen=True, kw_only=True):
    """The rubric, and how long scoring may take."""

    components: Annotated[tuple[RewardComponent, ...], Meta(max_length=32)] = ()
    """Scorers; the reward is the weighted sum of their scores, and of what an environment and stages gave. There may be
    none where an environment, or a stage such as a judge or a reward model, gives rewards."""
    item_timeout_s: Annotated[float, Meta(gt=0.0, le=600.0)] = 10.0
    """Hard deadline of one completion; its process is killed past it. Patterns alone have 10 s at most; a plug-in's
    first call in a fresh process has 60 s at least, since it may load a model then."""
    request_timeout_s: Seconds = 120.0
    """Deadline of one request to the reward service."""
    max_attempts: Attempts = 4
    """Requests for a batch, with back-off and jitter, before it fails. Requests without an answer, and requests in
    which the same completion couldn't be scored, are counted separately."""
