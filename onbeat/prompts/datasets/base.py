"""DatasetSpec → ExampleSets: the one door to every kind of data set."""

from __future__ import annotations

from collections.abc import Callable
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
    ReasoningGymDataset,
)
from contracts.spec_tables.reasoning_tasks import check_job
from contracts.spec_tables.references import check_reference
from contracts.spec_tables.root import SpecRoot
from onbeat.prompts.datasets.addition import load_addition
from onbeat.prompts.datasets.environment import load_environment
from onbeat.prompts.datasets.examples import ExampleSets, Request
from onbeat.prompts.datasets.jsonl import load_jsonl
from onbeat.prompts.datasets.plugin import load_plugin
from onbeat.prompts.datasets.reasoning_gym import load_reasoning_gym

LOADERS: dict[type[DatasetTable], Callable[[Any, Request], ExampleSets]] = {
    AdditionDataset: load_addition,
    ReasoningGymDataset: load_reasoning_gym,
    JsonlDataset: load_jsonl,
    EnvironmentDataset: load_environment,
    PluginDataset: load_plugin,
}
"""A line for each member of `DatasetSpec`: (the data set's table in the spec, request) → both sets."""


def load_dataset(
    spec: DatasetSpec,
    *,
    num_evaluation: int,
    seed: int,
    model_root: SpecRoot,
    components: tuple[RewardComponent, ...] = (),
) -> ExampleSets:
    """Loads the training pool and `num_evaluation` held-out examples; equal arguments give equal sets.

    Raises InvalidInput that names the field for a data set that is empty, unknown, unreadable or too small, and for one
    that the reward's components can't score: a job fails at its start, not at the first batch that holds the example.
    """
    check_job(spec, components)
    request = Request(num_evaluation=num_evaluation, seed=seed, model_root=model_root)
    dataset = LOADERS[type(spec)](spec, request)
    for example in (*dataset.train, *dataset.evaluation):
        for component in components:
            try:
                check_reference(component, reference=example.reference, task_entry=example.task_entry)
            except InvalidInput as error:
                where = example.origin or example.example_id
                raise InvalidInput(f"{where}: {error.problem}", field=example.field, cure=error.cure) from error
    return dataset
