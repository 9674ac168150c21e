"""Costs and machines of tests about plans, in which every second is one that a test states."""

from __future__ import annotations

from typing import Any

from contracts.schedule import Schedule
from contracts.spec.job import JobSpec
from onbeat.planning.pipeline.costs import BatchCost, Costs, Machines, Round, StepCost, Waits
from onbeat.planning.pipeline.walk import Run, walk

NO_WAITS = Waits(
    claim_s=0.0, load_s=0.0, swap_s=0.0, arrival_s=0.0, take_s=0.0, open_s=0.0, after_s=0.0, checkpoint_s=0.0
)


def batch(generate_s: float, train_s: float = 0.0, *, score_s: float = 0.0, num_tokens: int = 0) -> BatchCost:
    return BatchCost(rounds=(Round(generate_s=generate_s, score_s=score_s),), train_s=train_s, num_tokens=num_tokens)


def costs(*training: BatchCost, step_s: float = 0.0, publish_s: float = 0.0, waits: Waits = NO_WAITS) -> Costs:
    """An evaluation batch takes a second to sample."""
    return Costs(
        source="stated",
        training=training,
        evaluation=(batch(1.0),),
        steps=(StepCost(step_s=step_s, publish_s=publish_s),),
        waits=waits,
    )


def run(spec: JobSpec, schedule: Schedule, stated: Costs, *, seed: int = 0, **machines: Any) -> Run:
    """Walks the whole job."""
    return walk(spec, schedule, Machines(**machines), stated, num_iterations=spec.last_iteration + 1, seed=seed)
