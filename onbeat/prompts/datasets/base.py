"""DatasetSpec → ExampleSets: the one door to every kind of data set, and the kinds that are a few lines each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from contracts.errors import InvalidInput
from contracts.rewards import RewardComponent
from contracts.spec_tables.datasets import (
    AdditionDataset,
    DatasetSpec,
    DatasetTable,
    EnvironmentDataset,
    JsonlDataset,
    PluginDataset,
)
from contracts.spec_tables.references import check_job, check_reference
from contracts.spec_tables.root import SpecRoot
from onbeat.process.entry_points import load_entry_point
from onbeat.prompts.datasets.examples import Example, ExampleSets, Request, disjoint
from onbeat.prompts.datasets.jsonl import load_jsonl

GROUP, TYPES = "onbeat.datasets", "onbeat.dataset_types"
FIELD = "dataset.entry_point"
NUM_TERMS = 100
"""Terms of an addition are 0..99."""
NUM_HELD_OUT = 512
SPLIT_SEED = 20_260_414
"""Not the job's seed: the committed warm start was trained on this very split."""


def load_addition(_spec: AdditionDataset, request: Request) -> ExampleSets:
    """Makes the demo's task: `58+67=` is answered `521`, the digits of 125 from the last to the first, so that a small
    model carries as it writes.

    There are 9,488 training pairs and the first of the 512 held-out ones; the split is the same for every job.
    """
    request.check_held_out(NUM_HELD_OUT, f"the addition data set holds {NUM_HELD_OUT} out")
    pairs = [(first, second) for first in range(NUM_TERMS) for second in range(NUM_TERMS)]
    random.Random(SPLIT_SEED).shuffle(pairs)
    return ExampleSets(
        train=tuple(_addition("train", pair) for pair in pairs[NUM_HELD_OUT:]),
        evaluation=tuple(_addition("evaluation", pair) for pair in pairs[: request.num_evaluation]),
    )


def _addition(pool: str, pair: tuple[int, int]) -> Example:
    first, second = pair
    question = f"{first}+{second}="
    answer = str(first + second)[::-1]
    return Example(example_id=f"{pool}/{question}", question=question, reference=answer, completion=answer)


def load_environment(spec: EnvironmentDataset, request: Request) -> ExampleSets:
    """Makes `num_train_prompts` training tasks and as many held-out ones as are asked for: a number in a split each.

    That the two splits share no task is the environment's to keep; so is the question, which is its opening.
    """
    return ExampleSets(
        train=tuple(
            Example(example_id=f"train/{index}", question="", reference="") for index in range(spec.num_train_prompts)
        ),
        evaluation=tuple(
            Example(example_id=f"evaluation/{index}", question="", reference="")
            for index in range(request.num_evaluation)
        ),
    )


def load_plugin(spec: PluginDataset, request: Request) -> ExampleSets:
    """Calls the function and checks what it returns. Raises InvalidInput that names the field of the spec."""
    load = load_entry_point(GROUP, spec.entry_point, field=FIELD)
    try:
        train, evaluation = load(params=dict(spec.params), num_evaluation=request.num_evaluation, seed=request.seed)
        train, evaluation = list(_checked(train)), list(_checked(evaluation))
    # Foreign code may raise anything, or ask to exit, and each of it has the same answer.
    except (Exception, SystemExit) as error:
        raise _refusal(spec, f"failed: {type(error).__name__}: {error}") from error
    ids = [example.example_id for example in (*train, *evaluation)]
    if len(set(ids)) < len(ids):
        raise _refusal(spec, "gives two examples the same example_id")
    source = f"the data set `{spec.entry_point}`"
    request.check_held_out(len(evaluation), f"{source} holds {len(evaluation)} out")
    return disjoint(train, evaluation[: request.num_evaluation], source=source, field=FIELD)


def _checked(examples: Iterable[Any]) -> Iterator[Example]:
    """Yields them; raises TypeError for what is none, and UnicodeEncodeError for text that can't be sent."""
    for example in examples:
        if not isinstance(example, Example):
            raise TypeError(f"{type(example).__name__} is no onbeat.prompts.datasets.examples.Example")
        for name in ("example_id", "question", "reference", "task_entry", "origin", "completion"):
            text = getattr(example, name)
            if not isinstance(text, str):
                raise TypeError(f"{name} is a {type(text).__name__}, not a string")
            text.encode()
        yield example


def _refusal(spec: PluginDataset, problem: str) -> InvalidInput:
    return InvalidInput(
        f"the data set `{spec.entry_point}` {problem}",
        field=FIELD,
        cure="docs/extend.md says what its function must return",
    )


LOADERS: dict[type[DatasetTable], Callable[[Any, Request], ExampleSets]] = {
    AdditionDataset: load_addition,
    JsonlDataset: load_jsonl,
    EnvironmentDataset: load_environment,
    PluginDataset: load_plugin,
}
"""A line for each member of `DatasetSpec`: (the data set's table in the spec, request) → both sets; the others' are
extras, found in the group TYPES by the type."""


def load_dataset(
    spec: DatasetSpec,
    *,
    num_evaluation: int,
    seed: int,
    model_root: SpecRoot,
    components: tuple[RewardComponent, ...] = (),
    learns_given: bool = False,
) -> ExampleSets:
    """Loads the training pool and `num_evaluation` held-out examples; equal arguments give equal sets.

    learns_given: whether the training pool's completions are given, so that nothing scores them.

    Raises InvalidInput that names the field for a data set that is empty, unknown, unreadable or too small, and for one
    that the reward's components can't score: a job fails at its start, not at the first batch that holds the example.
    """
    check_job(spec, components)
    request = Request(num_evaluation=num_evaluation, seed=seed, model_root=model_root)
    loader = LOADERS.get(type(spec)) or load_entry_point(TYPES, str(spec.__struct_config__.tag), field="dataset.type")
    dataset: ExampleSets = loader(spec, request)
    for example in (*(() if learns_given else dataset.train), *dataset.evaluation):
        for component in components:
            try:
                check_reference(component, reference=example.reference, task_entry=example.task_entry)
            except InvalidInput as error:
                where = example.origin or example.example_id
                raise InvalidInput(f"{where}: {error.problem}", field=example.field, cure=error.cure) from error
    return dataset
