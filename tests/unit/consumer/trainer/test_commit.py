"""When a checkpoint follows a commit."""

from __future__ import annotations

from consumer.trainer.commit import is_due
from tests.builders import job_spec


def test_a_checkpoint_follows_every_so_many_iterations_and_the_last_one() -> None:
    spec = job_spec(iterations=7, trainer__checkpoint_every_iterations=3)
    assert [iteration for iteration in range(7) if is_due(spec, iteration)] == [2, 5, 6]
