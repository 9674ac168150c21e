"""The kinds of data sets: the table in the spec decides which module loads it.

A package's own data set is one of type `plugin`, whose function stands in the entry points of group `onbeat.datasets`.
"""

from __future__ import annotations

from contracts.spec.datasets import (
    AdditionDataset,
    EnvironmentDataset,
    HuggingFaceDataset,
    JsonlDataset,
    PluginDataset,
    ReasoningGymDataset,
    SourceDataset,
)
from onbeat.data.datasets.addition import load_addition
from onbeat.data.datasets.environment_tasks import load_environment
from onbeat.data.datasets.functions import load_plugin
from onbeat.data.datasets.reasoning_gym_tasks import load_reasoning_gym
from onbeat.data.datasets.rows import load_jsonl
from onbeat.data.datasets.saved_rows import load_saved
from onbeat.data.prompts.examples import ExampleSets, Request


def load_source(table: SourceDataset, request: Request) -> ExampleSets:
    """Loads one data set, which is a job's only one or a source of a mixture.

    Args:
        table: The data set's table in the spec.
        request: What the job needs of it.

    Raises:
        InvalidInput: The data set can't be read, or is too small; the error names the spec's field.
    """
    match table:
        case AdditionDataset():
            return load_addition(table, request)
        case EnvironmentDataset():
            return load_environment(table, request)
        case HuggingFaceDataset():
            return load_saved(table, request)
        case JsonlDataset():
            return load_jsonl(table, request)
        case PluginDataset():
            return load_plugin(table, request)
        case ReasoningGymDataset():
            return load_reasoning_gym(table, request)
