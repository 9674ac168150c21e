"""Says where a job's prompts come from: a type for each kind, which onbeat/data/datasets/kinds.py loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from msgspec import UNSET, Meta, UnsetType, field

from contracts.encoding.wire import FilePath, FilePathOrNone, Iterations, Line, Record, Table, Text, changed
from contracts.errors import InvalidInput
from contracts.file_digests import FileDigests
from contracts.hub_names import DATASETS, DEFAULT_CONFIG, SCHEME, HubPart
from contracts.spec.environment import EnvironmentSpec, Params

if TYPE_CHECKING:
    from contracts.spec.rollout import EvaluationSpec


class ChatSpec(Record, frozen=True, kw_only=True):
    """How a question becomes a prompt through the tokenizer's own chat template."""

    system_prompt: Text = ""
    """The text of a system message. With "" there is none, unless the template has one of its own."""
    chat_template_kwargs: Params | UnsetType = UNSET
    """Variables of the model's chat template, such as `enable_thinking`. A variable that the template doesn't read is
    refused."""


def no_chat_template(field: str, cure: str = "") -> InvalidInput:
    """field: a table `chat`, or what a cure of its own is for."""
    cure = cure or f"leave {field} out, and use prompts that are text"
    return InvalidInput("the model's tokenizer has no chat template", field=field, cure=cure)


class DatasetTable(Table, frozen=True, kw_only=True):
    """Base of the tables of all kinds of data sets."""

    has_task_entries: ClassVar[bool] = True
    """True: examples may have the entries that a reward of type `reasoning_gym` needs."""
    has_completions: ClassVar[bool] = True
    """True: examples may have completions, which loss = "sft" learns."""
    has_folders: ClassVar[bool] = False
    """True: a path that the table names may be a folder, or a pattern for some files in one."""


class DifficultyPools(Record, frozen=True, kw_only=True):
    """Draws from an easy, a normal and a hard pool, by measured pass rates (docs/data.md)."""

    easy_threshold: Annotated[float, Meta(ge=0.0, le=1.0)] = 1.0
    """A prompt of this pass rate or more is easy."""
    hard_threshold: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """A prompt of this pass rate or less is hard. All other prompts are normal, also those that were not tried yet."""
    easy_fraction: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.1
    """The share of an iteration's prompts that comes from the easy pool."""
    hard_fraction: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.1
    """The share that comes from the hard pool."""
    pass_reward: Annotated[float, Meta(ge=-1e9, le=1e9)] = 1.0
    """The reward from which a completion counts as passed."""
    newest_weight: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    """The weight of the newest group in a prompt's pass rate. The rate before has the rest."""


class DrawnTable(DatasetTable, frozen=True, kw_only=True):
    """Base of the tables of data sets that have prompts of their own: all kinds but a mixture."""

    difficulty_pools: DifficultyPools | UnsetType = UNSET
    """A curriculum by measured pass rates."""

    @property
    def drawn_by(self) -> str:
        """The key that says how its prompts are drawn; "" where it walks through passes."""
        return next((key for key in ("curriculum", "difficulty_pools") if getattr(self, key, UNSET)), "")


class AdditionDataset(DrawnTable, tag="addition", frozen=True, kw_only=True):
    """`a+b=` for all pairs of numbers below 100, answers with the digits reversed; 512 pairs are held out. An answer is
    the completion, too."""

    has_task_entries: ClassVar[bool] = False
    chat: ClassVar[None] = None
    """Its model is no chat model."""


class ReasoningGymDataset(DrawnTable, tag="reasoning_gym", frozen=True, kw_only=True):
    """Procedural tasks of reasoning-gym; evaluation items come from another seed, repeated questions are dropped."""

    has_completions: ClassVar[bool] = False
    task: Line
    """The name of the task in reasoning-gym, such as "chain_sum"."""
    params: Params = field(default_factory=dict)
    """Parameters of the task's generator."""
    num_train_prompts: Annotated[int, Meta(ge=1, le=1_000_000)] = 10_000
    """The number of training prompts. Iterations go through them in shuffled passes."""
    question_suffix: Text = ""
    """A text after each question, for example how the answer has to be marked."""
    chat: ChatSpec | None = None
    """Renders the question by the chat template; without it the question text is the prompt."""


class CurriculumSpec(Record, frozen=True, kw_only=True):
    """Begins with the lowest rows, a share that grows linearly (arXiv 1903.09848); then all come in shuffled passes."""

    column: Line
    """A column with a number in each training row. The rows with the lowest numbers come first."""
    iterations: Iterations
    """From this iteration on all rows are drawn."""
    begins_with: Annotated[float, Meta(gt=0.0, lt=1.0)] = 0.1
    """The share of the rows that iteration 0 draws from."""


class RowColumns(Record, frozen=True, kw_only=True):
    """Names of a row's columns; `a.b` is `b` of the table in column `a`."""

    prompt: Line = "prompt"
    """The prompt: a text, or messages."""
    messages: Line = "messages"
    """A conversation, for rows without a prompt. If its last message is the assistant's, that message is the
    completion."""
    reference: Line = "reference"
    """The reference answer: a text, or a number."""
    reference_after: Line | UnsetType = UNSET
    """A marker in the column of the reference, such as GSM8K's `####`. What follows the last marker is the reference. A
    row without a marker is refused."""
    completion: Line = "completion"
    """The completion that loss = "sft" learns: a text, or the assistant's message."""
    task_entry: Line = "task_entry"
    """JSON by which tasks of reasoning-gym are scored."""


class RowsTable(DrawnTable, frozen=True, kw_only=True):
    """Rows of files."""

    train_path: FilePath
    """Training prompts; a relative path starts as that of `model.path`."""
    evaluation_path: FilePathOrNone = ""
    """Held-out prompts. With "" the last `evaluation.num_prompts` training rows are held out."""
    chat: ChatSpec | None = None
    """Renders the prompt by the model's chat template. Without this table a text stays as it is. Messages are always
    rendered; a system message among them replaces chat.system_prompt."""
    columns: RowColumns | UnsetType = UNSET
    """Names of columns. No other column is read."""
    prompt_template: Text | UnsetType = UNSET
    """A prompt made of several columns, in place of `columns.prompt`: "Question: {question}\\nAnswer:" puts the row's
    column `question` in; `{{` and `}}` are braces."""
    metadata_columns: Annotated[tuple[Line, ...], Meta(max_length=64)] | UnsetType = UNSET
    """More columns, which rewards of type "plugin" get as `metadata`: at most 64 KiB of JSON a row."""
    curriculum: CurriculumSpec | UnsetType = UNSET
    """An order of the training rows. Left out: shuffled passes."""
    file_digests: FileDigests | UnsetType = UNSET
    """Digest of each file that the paths name. The gateway reads them when the job is submitted; a trainer that finds
    other bytes refuses the file by name."""

    @property
    def held_out_key(self) -> str:
        """The key that names held-out rows of their own."""
        return "evaluation_path"

    def files(self) -> dict[str, str]:
        """Returns the paths that it names below the stack's model root, by their keys, the one that is trained
        first."""
        named = {"train_path": self.train_path, "evaluation_path": self.evaluation_path}
        return {name: path for name, path in named.items() if path}


class JsonlDataset(RowsTable, tag="jsonl", frozen=True, kw_only=True):
    """Lines of JSON, each an object `{"prompt": "...", "reference": "..."}`; with `"completion"` the reference may be
    left out. Messages, `{"role": "user", "content": "..."}`, may stand in place of a text. A line whose prompt is also
    held out is not trained."""


class HuggingFaceDataset(RowsTable, tag="huggingface", frozen=True, kw_only=True):
    """Rows as of `jsonl`, in parquet or arrow files: one, the folder of `save_to_disk`, or one of the hub, where
    `folder/train` are its files `train-*`. It needs the extra `huggingface`."""

    has_folders: ClassVar[bool] = True
    train_path: FilePathOrNone = ""
    """Training prompts; a relative path starts as that of `model.path`. Left out where `path` names them."""
    path: FilePath | UnsetType = UNSET
    """A data set of the hub, in place of `train_path`: "hub:openai/gsm8k", or "hub:openai/gsm8k@REVISION" for another
    revision than main. The job's record has the commit of that revision."""
    config: HubPart | UnsetType = UNSET
    """The configuration of `path`. Left out: the only one, or the one that is called default."""
    split: HubPart | UnsetType = UNSET
    """The split of `path` that is trained. Left out: train."""
    evaluation_split: HubPart | UnsetType = UNSET
    """The split of `path` that is held out. Left out: the last `evaluation.num_prompts` rows of `split`."""

    @property
    def hub_splits(self) -> tuple[str, ...]:
        """The splits that it names of a data set of the hub: the one that is trained, and the one that is held out."""
        held_out = (self.evaluation_split,) if self.evaluation_split else ()
        return (self.split or "train", *held_out)

    @property
    def held_out_key(self) -> str:
        return "evaluation_split" if self.path else super().held_out_key

    def files(self) -> dict[str, str]:
        if not self.path:
            return super().files()
        name = self.path.removeprefix(SCHEME).removeprefix(DATASETS)
        folder = f"{SCHEME}{DATASETS}{name}/{self.config or DEFAULT_CONFIG}"
        keys = ("path", "evaluation_split")
        return {key: f"{folder}/{split}" for key, split in zip(keys, self.hub_splits, strict=False)}


class EnvironmentDataset(DrawnTable, tag="environment", frozen=True, kw_only=True):
    """Tasks that the job's environment has of its own; it is asked for them by split and number."""

    has_completions: ClassVar[bool] = False
    has_task_entries: ClassVar[bool] = False
    num_train_prompts: Annotated[int, Meta(ge=1, le=1_000_000)] = 1024
    """The number of training prompts: tasks 0, 1, … of split "train", which are all opened when the job starts.
    Iterations go through them in shuffled passes."""

    chat: ClassVar[None] = None
    """The environment says what the messages are, and its renderer what becomes of them."""


class PluginDataset(DrawnTable, tag="plugin", frozen=True, kw_only=True):
    """A user's function, found by its name among the entry points of group `onbeat.datasets` where the trainer runs.

    docs/extend.md says what it is called with and what it must keep.
    """

    entry_point: Line
    """Name of the function in group `onbeat.datasets`."""
    params: Params = field(default_factory=dict)
    """Parameters that the function gets."""
    chat: ChatSpec | None = None
    """Renders the question by the chat template; without it the question text is the prompt."""


OneDataset = AdditionDataset | ReasoningGymDataset | JsonlDataset | HuggingFaceDataset | PluginDataset
SourceDataset = OneDataset | EnvironmentDataset
SourceName = Annotated[str, Meta(max_length=40, pattern=r"^[A-Za-z0-9_-]+$(?!\n)")]


class MixtureSource(Record, frozen=True, kw_only=True):
    """A data set of a mixture."""

    name: SourceName
    """The name of the source in metrics, in names of prompts, and in `sources` of a reward component."""
    weight: Annotated[float, Meta(gt=0.0, le=1e6)] = 1.0
    """The weight of the source. Its share of each iteration's prompts is this number over the sum of all weights."""
    dataset: SourceDataset
    """The data set of the source: any type but a mixture."""
    environment: EnvironmentSpec | UnsetType = UNSET
    """The environment that plays the prompts of this source, if the job has no `environment` for all."""


class MixtureDataset(DatasetTable, tag="mixture", frozen=True, kw_only=True):
    """Several data sets, each with its share of every iteration and of the held-out prompts, and a mean reward."""

    sources: Annotated[tuple[MixtureSource, ...], Meta(min_length=2, max_length=16)]
    """The data sets."""


DatasetSpec = SourceDataset | MixtureDataset


def sources_of(dataset: DatasetSpec) -> dict[str, SourceDataset]:
    """Source → its data set; the one of "" in a job without a mixture."""
    if isinstance(dataset, MixtureDataset):
        return {source.name: source.dataset for source in dataset.sources}
    return {"": dataset}


def difficulty_pools_of(dataset: DatasetSpec) -> dict[str, DifficultyPools]:
    """Source → its difficulty pools, of those that have any."""
    return {name: table.difficulty_pools for name, table in sources_of(dataset).items() if table.difficulty_pools}


def environments_of(dataset: DatasetSpec, environment: EnvironmentSpec | None) -> dict[str, EnvironmentSpec]:
    """Source → what answers the model at its prompts; "" → what does at all. Other prompts have no turns but one.

    environment: the job's own.
    """
    sources = dataset.sources if isinstance(dataset, MixtureDataset) else ()
    own = {source.name: source.environment for source in sources if source.environment}
    return own if environment is None else {"": environment}


def environment_field(dataset: DatasetSpec, source: str) -> str:
    """Where the spec says what plays a source; "" is that of all."""
    if source:
        return f"dataset.sources[{[*sources_of(dataset)].index(source)}].environment"
    return "environment"


def dataset_field(dataset: DatasetSpec, evaluation: EvaluationSpec, name: str) -> str:
    """Where the spec says what a source, or a set of the evaluation, consists of; "" is the job's one data set."""
    if name in evaluation.tables:
        return f"{evaluation.field_of(name)}.dataset"
    return environment_field(dataset, name).replace("environment", "dataset")


def with_tables(
    dataset: DatasetSpec, evaluation: EvaluationSpec, change: Callable[[str, SourceDataset], SourceDataset]
) -> tuple[DatasetSpec, EvaluationSpec]:
    """Returns both with each table of theirs changed.

    Args:
        dataset: The job's data set.
        evaluation: The job's evaluation, whose sets are tables, too.
        change: (source or name of a set, table) → another table; the source is "" in a job without a mixture.
    """
    if isinstance(dataset, MixtureDataset):
        sources = [changed(source, dataset=change(source.name, source.dataset)) for source in dataset.sources]
        dataset = changed(dataset, sources=tuple(sources))
    else:
        dataset = change("", dataset)
    if evaluation.sets:
        sets = [changed(held_out, dataset=change(held_out.name, held_out.dataset)) for held_out in evaluation.sets]
        evaluation = changed(evaluation, sets=tuple(sets))
    return dataset, evaluation


def with_environments(
    dataset: DatasetSpec, environment: EnvironmentSpec | None, change: Callable[[str, EnvironmentSpec], EnvironmentSpec]
) -> dict[str, Any]:
    """Returns the fields `dataset` and `environment` with each environment changed. change: (source, it) → another."""
    if isinstance(dataset, MixtureDataset):
        own = [
            changed(source, environment=change(source.name, source.environment)) if source.environment else source
            for source in dataset.sources
        ]
        dataset = changed(dataset, sources=tuple(own))
    return {"dataset": dataset, "environment": environment and change("", environment)}
