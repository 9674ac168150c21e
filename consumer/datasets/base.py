"""DatasetSpec → Dataset: the one door to every kind of data set."""

from __future__ import annotations

from pathlib import Path

from consumer.datasets.addition import load_addition
from consumer.datasets.examples import Dataset, Example
from consumer.datasets.jsonl import load_jsonl
from contracts.datasets import AdditionDataset, DatasetSpec, JsonlDataset
from contracts.errors import InvalidInput
from contracts.reasoning_tasks import check_job
from contracts.rewards import RewardComponent

__all__ = ["Dataset", "Example", "load_dataset"]


def load_dataset(
    spec: DatasetSpec,
    *,
    num_evaluation: int,
    seed: int,
    model_root: Path,
    components: tuple[RewardComponent, ...] = (),
) -> Dataset:
    """Training pool and `num_evaluation` held-out examples; equal arguments give equal sets.

    Raises InvalidInput that names the field for a data set that is empty, unknown, unreadable or too small, and for one
    that the reward's components can't score.
    """
    check_job(spec, components)
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
