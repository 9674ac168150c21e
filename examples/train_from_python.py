"""Trains the demo's model on rows and by a reward of this program: python examples/train_from_python.py [ITERATIONS]

Rows and reward are written below the run folder, and the reward is run in a cage, with what it uses of this file.
"""

import random
import sys
from typing import Any

import onbeat


def sums(count: int) -> list[dict[str, str]]:
    """Rows as the model knows them: `12+34=`, and the digits of the sum in reverse."""
    numbers = random.Random(0)
    pairs = [(numbers.randrange(100), numbers.randrange(100)) for _ in range(count)]
    return [{"prompt": f"{a}+{b}=", "reference": str(a + b)[::-1]} for a, b in pairs]


def right_digits(completion: str, reference: str) -> float:
    """The share of digits that are right in their places."""
    return sum(map(str.__eq__, completion, reference)) / max(len(completion), len(reference))


JOB: dict[str, Any] = {
    "model": "configs/models/two-digit-addition",
    "rollout": {
        "batches_per_iteration": 4,
        "prompts_per_batch": 16,
        "group_size": 8,
        "max_prompt_tokens": 8,
        "sampling": {"max_new_tokens": 5},
    },
    "optimizer": {"learning_rate": 9e-4, "warmup_iterations": 5},
    "evaluation": {"num_prompts": 64},
}


def main(iterations: int) -> None:
    with onbeat.train(iterations=iterations, dataset=sums(2000), reward=right_digits, **JOB) as run:
        for iteration in run:
            print(iteration.number, f"{iteration.reward_mean:.3f}", flush=True)
        print(run.result().state.value, "verified" if run.verify().verified else "not verified", run.id)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
