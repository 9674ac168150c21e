"""The least that an iteration can take under each schedule, whatever the order of its events: docs/job.md.

    synchronous, colocated    T_gen + T_train + T_sync
    periodic                  T_sync + max(T_gen + t_last, t_first + T_train)
    delayed, bounded          max(T_gen + swap, T_train + T_step)

T_gen and T_train are the work of an iteration over all generators or ranks, as if it could be divided at will; T_sync
is the way from the last gradient to the first token of the next version; t_last is the training of the last batch, and
t_first the generation of the first one.
"""

from __future__ import annotations

import statistics

from contracts.schedule import Schedule
from contracts.spec import JobSpec
from onbeat_extras.planning.pipeline.costs import Costs
from onbeat_extras.planning.pipeline.simulation import Machines


def lower_bound_s(spec: JobSpec, schedule: Schedule, machines: Machines, costs: Costs) -> float:
    """Seconds of an iteration without an evaluation and a checkpoint."""
    batches, waits = spec.rollout.batches_per_iteration, costs.waits
    is_colocated = schedule.name == "colocated"
    of_generator = machines.generator_gain if is_colocated else 1.0
    of_rank = machines.trainer_gain if is_colocated else 1.0
    size = spec.rollout.prompts_per_batch * spec.rollout.group_size
    at_once = max(1, -(-machines.completions_at_once // size))
    each_s = costs.generate_s / of_generator
    generate_s = batches * (each_s + waits.claim_s) / (machines.num_generators * at_once)
    train_s = batches * costs.train_s / machines.world_size / of_rank
    step_s = statistics.fmean(one.step_s for one in costs.steps) / of_rank
    publish_s = statistics.fmean(one.publish_s for one in costs.steps)
    boundary_s = step_s + publish_s + waits.open_s
    sync_s = boundary_s + waits.load_s
    if schedule.lags:
        return max(generate_s + waits.swap_s, train_s + boundary_s + waits.after_s)
    if schedule.takes_at_once:
        score_s = statistics.fmean(batch.rounds[-1].score_s for batch in costs.training)
        last_s = score_s + costs.train_s / of_rank
        return sync_s + max(generate_s + last_s, each_s + score_s + train_s)
    switch_s = 2 * machines.switch_s if is_colocated else 0.0
    return generate_s + train_s + sync_s + switch_s
