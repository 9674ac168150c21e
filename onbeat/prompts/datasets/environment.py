"""Tasks that an environment has of its own: a number in a split, which it makes a task of by itself.

Training numbers count from 0 and held-out ones from 0 in a split of their own: that the two share no task is the
environment's to keep.
"""

from __future__ import annotations

from contracts.spec_tables.datasets import EnvironmentDataset
from onbeat.prompts.datasets.examples import Example, ExampleSets, Request


def load_environment(spec: EnvironmentDataset, request: Request) -> ExampleSets:
    """Makes `num_train_prompts` training tasks and as many held-out ones as are asked for."""
    return ExampleSets(
        train=tuple(_example("train", index) for index in range(spec.num_train_prompts)),
        evaluation=tuple(_example("evaluation", index) for index in range(request.num_evaluation)),
    )


def _example(pool: str, index: int) -> Example:
    """Its question is the opening, which the environment alone knows."""
    return Example(example_id=f"{pool}/{index}", question="", reference="")
