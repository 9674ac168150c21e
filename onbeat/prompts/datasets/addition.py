"""Two-digit addition, the demo task: `58+67=` is answered `521`, the digits of 125 from the last to the first.

Reversed digits let a small model carry as it writes: each digit depends on what it has already written.
"""

from __future__ import annotations

import random

from contracts.spec_tables.datasets import AdditionDataset
from onbeat.prompts.datasets.examples import Example, ExampleSets, Request

NUM_TERMS = 100
"""Terms are 0..99."""
NUM_HELD_OUT = 512
SPLIT_SEED = 20_260_414
"""Not the job's seed: the committed warm start was trained on this very split."""


def load_addition(_spec: AdditionDataset, request: Request) -> ExampleSets:
    """Makes the 9,488 training pairs and the first of the 512 held-out ones; the split is the same for every job."""
    request.check_held_out(NUM_HELD_OUT, f"the addition data set holds {NUM_HELD_OUT} out")
    pairs = [(first, second) for first in range(NUM_TERMS) for second in range(NUM_TERMS)]
    random.Random(SPLIT_SEED).shuffle(pairs)
    return ExampleSets(
        train=tuple(_example("train", pair) for pair in pairs[NUM_HELD_OUT:]),
        evaluation=tuple(_example("evaluation", pair) for pair in pairs[: request.num_evaluation]),
    )


def _example(pool: str, pair: tuple[int, int]) -> Example:
    first, second = pair
    question = f"{first}+{second}="
    return Example(example_id=f"{pool}/{question}", question=question, reference=str(first + second)[::-1])
