"""DatasetSpec → Dataset: the one door to every kind of data set."""

from __future__ import annotations

from consumer.datasets.addition import load_addition
from consumer.datasets.examples import Dataset, Example
from consumer.datasets.jsonl import load_jsonl
from contracts.errors import InvalidInput
from contracts.rewards import RewardComponent
from contracts.spec_tables.datasets import AdditionDataset, DatasetSpec, JsonlDataset
from contracts.spec_tables.reasoning_tasks import check_job
from contracts.spec_tables.references import check_reference
from contracts.spec_tables.root import SpecRoot

__all__ = ["Dataset", "Example", "load_dataset"]


def load_dataset(
    spec: DatasetSpec,
    *,
    num_evaluation: int,
    seed: int,
    model_root: SpecRoot,
    components: tuple[RewardComponent, ...] = (),
) -> Dataset:
    """Training pool and `num_evaluation` held-out examples; equal arguments give equal sets.

    Raises InvalidInput that names the field for a data set that is empty, unknown, unreadable or too small, and for one
    that the reward's components can't score.
    """
    check_job(spec, components)
    dataset = _load(spec, num_evaluation=num_evaluation, seed=seed, model_root=model_root)
    for example in (*dataset.train, *dataset.evaluation):
        _check_references(spec, example, components)
    return dataset


def _check_references(spec: DatasetSpec, example: Example, components: tuple[RewardComponent, ...]) -> None:
    """A job must fail at its start, not at the first batch that holds the example."""
    for component in components:
        try:
            check_reference(component, reference=example.reference, task_entry=example.task_entry)
        except InvalidInput as error:
            where, field = _origin(spec, example)
            raise InvalidInput(f"{where}: {error.problem}", field=field, cure=error.cure) from error


def _origin(spec: DatasetSpec, example: Example) -> tuple[str, str]:
    """(file and line, or the example's name; the field of the spec)"""
    pool, _, place = example.example_id.partition("/")
    if not isinstance(spec, JsonlDataset):
        return example.example_id, "dataset"
    if pool == "evaluation" and spec.evaluation_path:
        return f"{spec.evaluation_path}:{place}", "dataset.evaluation_path"
    return f"{spec.train_path}:{place}", "dataset.train_path"


def _load(spec: DatasetSpec, *, num_evaluation: int, seed: int, model_root: SpecRoot) -> Dataset:
    if isinstance(spec, AdditionDataset):
        return load_addition(num_evaluation=num_evaluation)
    if isinstance(spec, JsonlDataset):
        dataset = load_jsonl(spec, num_evaluation=num_evaluation, model_root=model_root)
        if not dataset.train:
            raise InvalidInput(f"{spec.train_path} holds no prompts", field="dataset.train_path", cure="add lines")
        return dataset
    # Importing reasoning-gym takes seconds, which only its own jobs should pay.
    from consumer.datasets.reasoning_gym import load_reasoning_gym

    return load_reasoning_gym(spec, num_evaluation=num_evaluation, seed=seed)
