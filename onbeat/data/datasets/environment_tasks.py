"""Tasks that a job's environment has of its own, by split and number."""

from __future__ import annotations

from contracts.spec.datasets import EnvironmentDataset
from onbeat.data.prompts.examples import Example, ExampleSets, Request


def load_environment(spec: EnvironmentDataset, request: Request) -> ExampleSets:
    """Makes `num_train_prompts` training tasks and as many held-out ones as are asked for: a number in a split each.

    That the two splits share no task is the environment's to keep; so is the question, its initial observation.
    """

    def tasks(split: str, number: int) -> tuple[Example, ...]:
        return tuple(Example(example_id=f"{split}/{index}", question="", reference="") for index in range(number))

    return ExampleSets(
        train=tasks("train", spec.num_train_prompts), evaluation=tasks("evaluation", request.num_evaluation)
    )
