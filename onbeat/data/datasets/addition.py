"""The demo's task: sums of two numbers."""

from __future__ import annotations

import random

from contracts.spec.datasets import AdditionDataset
from onbeat.data.datasets.held_out import check_held_out
from onbeat.data.prompts.examples import Example, ExampleSets, Request

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
    check_held_out(request, NUM_HELD_OUT, f"the addition data set holds {NUM_HELD_OUT} out")
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
