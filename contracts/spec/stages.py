"""`[[stages]]`: what is made of a rollout between its publication and its training; a type for each kind of service."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, get_args

from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import replace

from contracts.encoding.wire import Attempts, FilePath, Lease, Line, Table, Text
from contracts.experience.columns import Column, ColumnName
from contracts.experience.graph import StageGraph, StageNode, Unit, stages_before
from contracts.file_digests import FileDigests
from contracts.rewards import OnUnscorable, StageReason, Weight, stated_score
from contracts.spec.algorithm import AlgorithmSpec
from contracts.spec.datasets import SourceName

MAX_STAGES = 16
REFERENCE_LOGPROBS = "reference_logprobs"
TEACHER_LOGPROBS = "teacher_logprobs"
"""The columns that the loss reads, whichever stage makes them: float32 per token, under the job's temperature."""
TEACHER_TOP = "teacher_top"
"""Likewise, 2 k + 1 numbers a token: the ids of k tokens, their log-probs, and the log-prob of any other token. Where
fewer than k tokens can be drawn -1 and NO_LOGPROB stand behind them."""
TEACHER_STATES = "teacher_states"
"""The bits of its last hidden state, of the model's dtype, with which its head predicts the token: two bfloat16, the
first one low (0 stands behind an odd one), or a float32 in each of the numbers of a token."""
TEACHER_HEAD = "teacher_head"
"""The digest of that head, which must be the trainer's."""
NO_LOGPROB = -1e30
"""The log-prob of what can't be drawn: its probability is 0, and it is finite, as a column's numbers are."""
Score = Annotated[float, Meta(ge=-1e6, le=1e6)]
FAILURE_SUFFIX = "_failure"
Truncation = Literal["never", "prompt_start", "completion_end"]
ANSWER_FORMS = ("number", "json")
NUMBER_PLACE = "{number}"
STAGE_REASONS: tuple[StageReason, ...] = get_args(StageReason)


class StageTable(Table, frozen=True, kw_only=True):
    """Base of the tables of all kinds of stages."""

    max_attempts: Attempts = 4
    """How often an item is tried before its batch is given up as dead."""
    lease_s: Lease = 30.0
    """If the worker of an item gives no sign of life for this long, another worker of the stage gets the item."""


class LogProbStage(StageTable, frozen=True, kw_only=True):
    """Takes a whole batch, as the trainer would, and reads its tokens."""

    unit: ClassVar[Unit] = "batch"
    inputs: ClassVar[tuple[str, ...]] = ("prompt_ids", "completion_ids")


class ReferenceStage(LogProbStage, tag="reference", frozen=True, kw_only=True):
    """Log-probs of the sampled tokens under the frozen initial model, for the KL of the loss, off the trainer.

    A batch at once, as the trainer would: the very bits.
    """

    outputs: ClassVar[tuple[Column, ...]] = (Column(name=REFERENCE_LOGPROBS, type="float32", per="token"),)
    name: ColumnName = "reference"
    """The name of the stage, in messages, metrics and streams."""


class TeacherStage(LogProbStage, tag="teacher", frozen=True, kw_only=True):
    """Log-probs of the sampled tokens under another model, for on-policy distillation."""

    model: FilePath | UnsetType = UNSET
    """Folder of a causal LM with the job's vocabulary; a relative path starts as that of `model.path`."""
    models: Annotated[dict[SourceName, FilePath], Meta(min_length=1, max_length=16)] | UnsetType = UNSET
    """Folders of teachers in place of `model`, one for each source of a mixture."""
    top_k: Annotated[int, Meta(ge=1, le=2**12)] | UnsetType = UNSET
    """How many of the teacher's likeliest tokens are sent with each token, 8 bytes each, for
    `algorithm.distillation_beta`. Left out: none."""
    hidden_size: Annotated[int, Meta(ge=1, le=2**14)] | UnsetType = UNSET
    """In place of `top_k`: the `hidden_size` of the teacher's config.json. The teacher's last hidden states are sent,
    and its head, at the trainer, makes the distribution over the whole vocabulary of them."""
    file_digests: FileDigests | UnsetType = UNSET
    """As `model.file_digests`, for the folders of the teachers."""
    name: ColumnName = "teacher"
    """The name of the stage, in messages, metrics and streams."""

    @property
    def outputs(self) -> tuple[Column, ...]:
        sampled = Column(name=TEACHER_LOGPROBS, type="float32", per="token")
        if self.hidden_size:
            states = Column(name=TEACHER_STATES, type="int32", per="token", width=self.hidden_size)
            return sampled, states, Column(name=TEACHER_HEAD, type="text")
        top = Column(name=TEACHER_TOP, type="float32", per="token", width=2 * (self.top_k or 0) + 1)
        return (sampled, top) if self.top_k else (sampled,)

    @property
    def folders(self) -> dict[str, str]:
        """Source → folder of its teacher; "" for all of a job's prompts."""
        return self.models or {"": self.model or ""}

    def files(self) -> dict[str, str]:
        return {f"models.{source}" if source else "model": path for source, path in self.folders.items()}


class JudgingStage(StageTable, frozen=True, kw_only=True):
    """Takes a row at a time, and gives its completion a score."""

    unit: ClassVar[Unit] = "row"
    weight: Weight = 1.0
    """A score of 1.0 adds this number to the reward."""
    on_failure: OnUnscorable = "fail"
    """Decides what happens if the stage can't judge a completion. fail: the batch fails, and in the end the job. A
    number: the completion gets this score, which is counted and audited. An error that the completion didn't cause
    always fails the batch. A resume may change it."""
    name: ColumnName
    """The name of the stage and of its column."""

    @property
    def stated_score(self) -> float | None:
        """The score of what it can't judge; None where that fails."""
        return stated_score(self.on_failure)

    @property
    def failure_column(self) -> str:
        """Its column with the reason why a completion has the stated score, "" where it has its own; only with one."""
        return self.name + FAILURE_SUFFIX

    @property
    def reward_weights(self) -> dict[str, float]:
        """Each column with a score of a completion → what 1.0 of it adds to the reward."""
        return {self.name: self.weight}

    @property
    def outputs(self) -> tuple[Column, ...]:
        scores = tuple(Column(name=name, type="float32") for name in self.reward_weights)
        if self.stated_score is None:
            return scores
        return (*scores, Column(name=self.failure_column, type="text"))


class RewardModelStage(JudgingStage, tag="reward_model", frozen=True, kw_only=True):
    """A sequence classifier with one output reads prompt and completion; weight times its score joins the reward."""

    inputs: ClassVar[tuple[str, ...]] = ("prompt", "text")
    model: FilePath
    """Folder of a transformers sequence classifier; a relative path starts as that of `model.path`."""
    truncate: Truncation = "never"
    """Decides what is cut off a text that exceeds the model's context. prompt_start: the beginning of the prompt.
    completion_end: the end of the completion. never: nothing is cut, and the completion can't be judged."""
    file_digests: FileDigests | UnsetType = UNSET
    """As `model.file_digests`, for the folder of this model."""
    name: ColumnName = "reward_model"
    """The name of the stage and of its column."""

    def files(self) -> dict[str, str]:
        return {"model": self.model}


class LlmJudgeStage(JudgingStage, tag="llm_judge", frozen=True, kw_only=True):
    """A model behind an OpenAI-compatible server is asked for a number, or one a criterion; weight times it, or their
    mean, joins the reward.

    ONBEAT_JUDGE_URL and ONBEAT_JUDGE_KEY of the stage worker say which server.
    """

    inputs: ClassVar[tuple[str, ...]] = ("prompt", "text", "reference")
    model: Line
    """The name of the model at the server."""
    prompt: Text
    """The question to the judge, with {prompt}, {completion} and {reference} in it."""
    system: Text | UnsetType = UNSET
    """A system message in front of the question. Left out: none."""
    answer: Annotated[str, Meta(min_length=1, max_length=200)] = "number"
    """How the number is read. number: the one plain number of the answer. json: `score` of a JSON object in the answer.
    Any other text is a pattern with {number} in it, such as "{number}/10"; its last match counts."""
    criteria: (
        Annotated[dict[ColumnName, Annotated[float, Meta(gt=0.0, le=1e3)]], Meta(min_length=1, max_length=32)]
        | UnsetType
    ) = UNSET
    """With answer = "json": the keys of the numbers, and the weight of each in their mean. Each has a column, NAME_KEY,
    and a metric, and is a component of gdpo. Left out: `score` alone."""
    lowest: Score = 0.0
    """The lowest number that the judge may answer. An answer outside of the bounds, or without a number, can't be used
    (I6)."""
    highest: Score = 10.0
    """The highest number that the judge may answer."""
    name: ColumnName = "llm_judge"
    """The name of the stage and of its column. With criteria, the names of its columns begin with it."""

    @property
    def reward_weights(self) -> dict[str, float]:
        if self.criteria is UNSET:
            return super().reward_weights
        total = math.fsum(self.criteria.values())
        return {f"{self.name}_{key}": self.weight * weight / total for key, weight in self.criteria.items()}


class ExternalStage(StageTable, tag="external", frozen=True, kw_only=True):
    """A process of one's own, by `onbeat.client`: docs/extend.md."""

    name: ColumnName
    """The name of the stage, by which the process asks for it."""
    inputs: Annotated[tuple[ColumnName, ...], Meta(min_length=1, max_length=32)]
    """Columns that a row has before the stage gets it."""
    outputs: Annotated[tuple[Column, ...], Meta(min_length=1, max_length=16)]
    """Columns that the stage makes."""
    unit: Unit = "row"
    """The unit that is leased and put together: a row, the G rows of a prompt, or a batch."""
    reward_column: Annotated[str, Meta(max_length=64)] = ""
    """The output that joins the reward, a float32 for each rollout. "": none."""
    weight: Weight = 1.0
    """1.0 in that column adds this number to the reward."""


StageSpec = ReferenceStage | TeacherStage | RewardModelStage | LlmJudgeStage | ExternalStage
BuiltInStage = ReferenceStage | TeacherStage | RewardModelStage | LlmJudgeStage


def reward_weights(stages: Sequence[StageSpec]) -> dict[str, float]:
    """Column → what 1.0 of it adds to the reward."""
    weights: dict[str, float] = {}
    for stage in stages:
        if isinstance(stage, JudgingStage):
            weights |= stage.reward_weights
        elif isinstance(stage, ExternalStage) and stage.reward_column:
            weights[stage.reward_column] = stage.weight
    return weights


def stage_graph(stages: Sequence[StageSpec], dtype: str = "float32") -> StageGraph:
    """Returns what the stages of a judged spec mean for a batch. dtype: the models'."""
    outputs = [stage.outputs for stage in stages]
    return StageGraph(
        stages=tuple(
            StageNode(
                name=stage.name,
                unit=stage.unit,
                inputs=tuple(stage.inputs),
                outputs=sent_columns(stage, dtype),
                after=stages_before(stage.inputs, outputs),
                max_attempts=stage.max_attempts,
                lease_s=stage.lease_s,
            )
            for stage in stages
        )
    )


def sent_columns(stage: StageSpec, dtype: str) -> tuple[Column, ...]:
    """Returns a stage's columns, as wide as they are on the wire. dtype: the models'."""
    halved = {TEACHER_STATES} if dtype == "bfloat16" else set()
    return tuple(
        # Two numbers of 16 bits stand in one of 32.
        replace(column, width=((column.width or 1) + 1) // 2) if column.name in halved else column
        for column in stage.outputs
    )


def read_columns(algorithm: AlgorithmSpec, stages: Sequence[StageSpec] = ()) -> dict[str, tuple[bool, str]]:
    """A column that a loss can read → whether this one does, and the key that decides it."""
    has_beta = algorithm.distillation_beta is not UNSET
    has_states = any(isinstance(stage, TeacherStage) and stage.hidden_size for stage in stages)
    of_states = "distillation_beta and a teacher's hidden_size"
    if has_states:
        of_states = "distillation_beta"
    return {
        REFERENCE_LOGPROBS: (algorithm.kl_coefficient > 0.0, "kl_coefficient"),
        TEACHER_LOGPROBS: (algorithm.distillation_coefficient > 0.0, "distillation_coefficient"),
        TEACHER_TOP: (has_beta and not has_states, "distillation_beta"),
        TEACHER_STATES: (has_beta and has_states, of_states),
    }
