"""A data set: two disjoint sequences of questions with their reference answers, and the one door to its kinds, which
are extras found by their types.

A reference that a reward can't compare, as far as that is known without the scorer's own parser, fails a job at its
start, or when it is submitted, not at the batch that holds the example."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from contracts import rewards
from contracts.encoding.numbers import read_number
from contracts.environments.messages import Message
from contracts.errors import InvalidInput
from contracts.spec.datasets import DatasetSpec, ReasoningGymDataset, sources_of
from contracts.spec.job import JobSpec
from contracts.spec.rollout import EvaluationSet
from contracts.spec.root import SpecRoot
from onbeat.base.process.entry_points import load_entry_point
from onbeat.data.prompts.file_rows import DatasetRoom

TYPES = "onbeat.dataset_types"
"""Group of the functions (the data set's table in the spec, request) → both sets."""
TASKS = "onbeat.known_tasks"
"""A group of entry points: what knows the tasks of a package, by the type of its data sets and rewards."""
MATH_DELIMITER = re.compile(r"\$|\\boxed|\\\(|\\\[")
MATH_WORD = re.compile(r"(?<![\\A-Za-z])(?!sqrt(?![A-Za-z]))[A-Za-z]{3,}")
"""Letters that would be read as a product of symbols, c·a·t; `\\frac` is a command and sqrt is understood."""


@dataclass(frozen=True)
class Example:
    """One question, before any tokenizer saw it."""

    example_id: str
    """Stable name in the data set, e.g. "train/4711"."""
    question: str
    """The prompt text, or the user's turn where the data set is rendered by a chat template; of messages, all of their
    text."""
    reference: str
    """The reference answer, for the reward."""
    task_entry: str = ""
    """JSON of the task's own entry, "" where the reference is enough."""
    origin: str = ""
    """File and line, "" where its id says enough."""
    field: str = "dataset"
    """Field of the spec that leads to it."""
    completion: str = ""
    """What loss = "sft" learns as the answer; "" where none is given."""
    messages: tuple[Message, ...] = ()
    """The messages before the answer, where the prompt is a conversation."""
    metadata: str = ""
    """JSON of further columns, which rewards see; "" of none."""
    source: str = ""
    """Its data set in a mixture of several."""
    difficulty: float = 0.0
    """By which a curriculum goes."""

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of the texts that it holds."""
        texts = [self.question, self.reference, self.task_entry, self.completion, self.metadata]
        for message in self.messages:
            texts += [message.content, *(call.arguments for call in message.tool_calls)]
        # An ASCII text, which most are, has as many bytes as characters, and isn't copied to be counted.
        return sum(len(text) if text.isascii() else len(text.encode(errors="surrogatepass")) for text in texts)


@dataclass(frozen=True)
class ExampleSets:
    """Training pool and held-out examples; both keep their order, and share no question."""

    train: tuple[Example, ...]
    evaluation: tuple[Example, ...]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a loader is asked for; with the data set's table in the spec it decides every example (I7)."""

    num_evaluation: int
    """Held-out examples: so many, or InvalidInput."""
    seed: int
    """The job's seed."""
    model_root: SpecRoot
    """Where files are found."""
    trains: bool = True
    """Whether the training pool is asked for, too; else it may be empty, and a file held out whole."""
    room: DatasetRoom
    """The room that rows of files may take; all data sets of one job share it."""


def job_examples(spec: JobSpec, root: SpecRoot) -> ExampleSets:
    """Loads a job's data set as `load_dataset` does."""
    return load_dataset(
        spec.dataset,
        num_evaluation=spec.evaluation.num_prompts,
        seed=spec.seed,
        model_root=root,
        components=spec.reward.components,
        learns_given=spec.algorithm.learns_given,
        sets=spec.evaluation.sets or (),
    )


def load_dataset(
    spec: DatasetSpec,
    *,
    num_evaluation: int,
    seed: int,
    model_root: SpecRoot,
    components: tuple[rewards.RewardComponent, ...] = (),
    learns_given: bool = False,
    sets: Sequence[EvaluationSet] = (),
) -> ExampleSets:
    """Loads the training pool and `num_evaluation` held-out examples; equal arguments give equal sets.

    learns_given: whether the training pool's completions are given, so that nothing scores them. sets: what else is
    held out, behind those, with the sets' names as sources.

    Raises InvalidInput that names the field for a data set that is empty, unknown, unreadable or too small, and for one
    that the reward's components can't score: a job fails at its start, not at the first batch that holds the example.
    """
    check_job(sources_of(spec) | {one.name: one.dataset for one in sets}, components)
    room = DatasetRoom(model_root.dataset_mb)
    request = Request(num_evaluation=num_evaluation, seed=seed, model_root=model_root, room=room)
    dataset = load_entry_point(TYPES, spec.kind, field="dataset.type")(spec, request)
    if sets:
        dataset = load_entry_point("onbeat.evaluation_sets", "load", field="evaluation.sets")(sets, dataset, request)
    for example in (*(() if learns_given else dataset.train), *dataset.evaluation):
        for component in (one for one in components if one.scores(example.source)):
            try:
                check_reference(component, reference=example.reference, task_entry=example.task_entry)
            except InvalidInput as error:
                where = example.origin or example.example_id
                raise InvalidInput(f"{where}: {error.problem}", field=example.field, cure=error.cure) from error
    return dataset


def check_job(tables: Mapping[str, object], components: tuple[rewards.RewardComponent, ...]) -> None:
    """Checks what is known of a job's tasks from its spec alone. Raises InvalidInput that names the field.

    tables: as of JobSpec.
    """
    for source, part in tables.items():
        reads = [isinstance(one, rewards.ReasoningGymReward) and one.scores(source) for one in components]
        if any(reads) or isinstance(part, ReasoningGymDataset):
            known_tasks("dataset.task").check_source(part, [place for place, is_read in enumerate(reads) if is_read])


def check_reference(component: rewards.RewardComponent, *, reference: str, task_entry: str) -> None:
    """Raises InvalidInput, with the cure, for what the component refuses whatever a model answers."""
    is_number = isinstance(component, rewards.RegexReward) and component.compare == "number"
    if (is_number or isinstance(component, rewards.NumericReward)) and read_number(reference) is None:
        raise InvalidInput(
            f"`{component.name}` finds no number in the reference",
            cure="write it as 42, -1,234, 1/2 or 2.5e-3; where the number follows a marker, as #### in GSM8K, name the "
            "marker by dataset.columns.reference_after",
        )
    has_group = isinstance(component, rewards.RegexReward) and component.compares
    if (has_group or isinstance(component, rewards.ExactReward | rewards.MathVerifyReward)) and not reference.strip():
        reader = "the pattern's group `answer`" if has_group else f"`{component.name}`"
        raise InvalidInput(f"{reader} needs a reference, and it is empty", cure="fill it in")
    if isinstance(component, rewards.MathVerifyReward):
        _check_mathematics(reference)
    if isinstance(component, rewards.ReasoningGymReward):
        known_tasks("task_entry").read_task_entry(task_entry)


def _check_mathematics(reference: str) -> None:
    is_bare = not MATH_DELIMITER.search(reference)
    if is_bare and MATH_WORD.search(reference) and not re.search(r"\d", reference):
        raise InvalidInput("`math_verify` finds no expression in the reference", cure="write $…$ around it")
    braces = re.findall(r"(?<!\\)[{}]", reference)
    if braces.count("{") != braces.count("}"):
        raise InvalidInput("`math_verify` finds an unbalanced brace in the reference", cure="write balanced LaTeX")


@cache  # each example asks, and each look goes through all that is installed
def known_tasks(field: str) -> Any:
    return load_entry_point(TASKS, "reasoning_gym", field=field, where="job")
