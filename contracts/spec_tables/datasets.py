"""Where a job's prompts come from: a type for each kind, which `LOADERS` of onbeat/prompts/datasets/base.py loads."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType, field

from contracts.encoding.wire import FilePath, FilePathOrNone, Line, Record, Text
from contracts.sampling import SamplingParams
from contracts.spec_tables.rollout import RolloutSpec

TaskNumber = Annotated[int, Meta(ge=-(2**53), le=2**53)]
TaskRatio = Annotated[float, Meta(ge=-1e15, le=1e15)]
TaskParams = Annotated[dict[Line, TaskNumber | TaskRatio | bool | Text], Meta(max_length=64)]


class ChatSpec(Record, frozen=True, kw_only=True):
    """How a question becomes a prompt through the tokenizer's own chat template."""

    system_prompt: Text = ""
    """"" leaves the system turn out (the template may have a default of its own)."""
    chat_template_kwargs: TaskParams | UnsetType = UNSET
    """Variables of the model's chat template, as `enable_thinking`; one that the template doesn't read is refused."""


class DatasetTable(Record, tag_field="type", frozen=True, kw_only=True):
    """What every kind of data set says of itself."""

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)

    @property
    def has_task_entries(self) -> bool:
        """Whether its examples may have the entries that a reward of type `reasoning_gym` needs."""
        return True

    @property
    def has_completions(self) -> bool:
        """Whether its examples may have completions, which loss = "sft" learns."""
        return True

    def files(self) -> dict[str, str]:
        """Returns the paths that it names below the stack's model root, by their field."""
        return {}


class AdditionDataset(DatasetTable, tag="addition", frozen=True, kw_only=True):
    """`a+b=` for all pairs of numbers below 100, answers with the digits reversed; 512 pairs are held out. An answer is
    the completion, too."""

    @property
    def has_task_entries(self) -> bool:
        return False

    @property
    def chat(self) -> None:
        """Its model is no chat model."""


class ReasoningGymDataset(DatasetTable, tag="reasoning_gym", frozen=True, kw_only=True):
    """Procedural tasks of reasoning-gym; evaluation items come from another seed, repeated questions are dropped."""

    task: Line
    """Name in reasoning-gym, e.g. "chain_sum"."""
    params: TaskParams = field(default_factory=dict)
    """Parameters of the task's generator."""
    num_train_prompts: Annotated[int, Meta(ge=1, le=1_000_000)] = 10_000
    """Size of the training pool; iterations walk through shuffled passes of it."""
    question_suffix: Text = ""
    """Text after each question, e.g. how to mark the answer."""
    chat: ChatSpec | None = None
    """Renders the question by the chat template; without it the question text is the prompt."""

    @property
    def has_completions(self) -> bool:
        return False


class JsonlDataset(DatasetTable, tag="jsonl", frozen=True, kw_only=True):
    """One JSON object a line: `{"prompt": "...", "reference": "..."}`, optionally `"task_entry"`; with `"completion"`,
    which loss = "sft" learns, the reference may be left out.

    A line whose prompt is also held out is not trained. `task_entry` is data: the JSON that reasoning-gym's tasks are
    scored from.
    """

    train_path: FilePath
    """File of training prompts; relative paths start at the stack's model root."""
    evaluation_path: FilePathOrNone = ""
    """File of held-out prompts; "" holds the last `evaluation.num_prompts` lines of the training file out."""
    chat: ChatSpec | None = None
    """Renders the prompt by the chat template; without it the prompt text is used as it is."""

    def files(self) -> dict[str, str]:
        named = {"train_path": self.train_path, "evaluation_path": self.evaluation_path}
        return {name: path for name, path in named.items() if path}


class EnvironmentDataset(DatasetTable, tag="environment", frozen=True, kw_only=True):
    """Tasks that the job's environment has of its own; it is asked for them by split and number."""

    num_train_prompts: Annotated[int, Meta(ge=1, le=1_000_000)] = 1024
    """Size of the training pool: tasks 0, 1, … of split "train"; iterations walk through shuffled passes of it. All of
    them are opened when the job starts."""

    @property
    def has_completions(self) -> bool:
        return False

    @property
    def has_task_entries(self) -> bool:
        return False

    @property
    def chat(self) -> None:
        """The environment says what the messages are, and its renderer what becomes of them."""


class PluginDataset(DatasetTable, tag="plugin", frozen=True, kw_only=True):
    """A user's function, found by its name among the entry points of group `onbeat.datasets` where the trainer runs.

    docs/extend.md says what it is called with and what it must keep.
    """

    entry_point: Line
    """Name of the function in group `onbeat.datasets`."""
    params: TaskParams = field(default_factory=dict)
    """Parameters that the function gets."""
    chat: ChatSpec | None = None
    """Renders the question by the chat template; without it the question text is the prompt."""


DatasetSpec = AdditionDataset | ReasoningGymDataset | JsonlDataset | EnvironmentDataset | PluginDataset


def given_problem(dataset: DatasetTable, rollout: RolloutSpec, *, plays: bool, lags: bool) -> str:
    """Says what doesn't go with a job that learns the data set's completions; "" where all does.

    plays: whether it has an environment. lags: whether its schedule lets older versions sample.
    """
    learns = 'has no effect with algorithm.loss = "sft", which learns what the data set gives'
    sampling = rollout.sampling
    if not dataset.has_completions:
        return f'dataset.type = "{dataset.kind}" gives no completions to learn; take "jsonl", "addition" or "plugin"'
    if plays:
        return f"environment {learns}; leave it out"
    if lags:
        return f'a lag {learns}: no version samples it; set schedule = "periodic" and max_policy_lag = 0'
    if rollout.group_size > 1:
        return f"rollout.group_size = {rollout.group_size} {learns}, once for a prompt; set it to 1"
    if rollout.max_resamples:
        return f"rollout.max_resamples {learns}; set it to 0"
    if sampling != SamplingParams(max_new_tokens=sampling.max_new_tokens):
        return (
            f"rollout.sampling {learns}, but for max_new_tokens; evaluation.sampling says how held-out prompts are "
            "sampled"
        )
    return ""
