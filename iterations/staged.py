"""What stages have made of a batch is checked once more, and put beside what was sampled, before the batch is trained.

    batch as published ─┐
    columns ── checked ─┴─▶ batch as trained: `columns`, and the rewards with those that stages add

A batch's own digest stays that of what was sampled and scored; its columns have a digest of their own.
"""

from __future__ import annotations

import struct

from msgspec.structs import replace

from contracts.encoding.digests import Digest
from contracts.experience.columns import ColumnValues, check_values, row_shapes, values_digest
from contracts.rollouts import Rollout, RolloutBatch
from contracts.spec import JobSpec


def staged_batch(batch: RolloutBatch, values: ColumnValues, spec: JobSpec) -> tuple[RolloutBatch, Digest]:
    """Returns the batch as it is trained, and the digest of its columns.

    values: column → a value for each row, of all stages of the job. Raises ContractViolation naming the column and the
    row, for values that are not those of the job's stages.
    """
    check_values(values, spec.stage_plan.outputs, row_shapes(batch), of=f"batch {batch.batch_id}")
    with_columns = replace(batch, columns={name: tuple(of_rows) for name, of_rows in values.items()})
    return with_stage_rewards(with_columns, values, spec.stage_reward_weights), values_digest(values)


def with_stage_rewards(batch: RolloutBatch, values: ColumnValues, weights: dict[str, float]) -> RolloutBatch:
    """Adds weight x value of each reward column to the rewards; the value joins the breakdown, as a component does."""
    if not weights:
        return batch
    size = batch.group_size

    def rewarded(rollout: Rollout, row: int) -> Rollout:
        scores = {name: struct.unpack("<f", values[name][row])[0] for name in weights}
        added = [weight * scores[name] for name, weight in weights.items()]
        return replace(
            rollout,
            # The order is that of the spec: sums of floats are the same every time (I7).
            reward=sum(added, start=rollout.reward),
            reward_breakdown=rollout.reward_breakdown | scores,
        )

    groups = tuple(
        replace(group, rollouts=tuple(rewarded(one, place * size + i) for i, one in enumerate(group.rollouts)))
        for place, group in enumerate(batch.groups)
    )
    return replace(batch, groups=groups)
