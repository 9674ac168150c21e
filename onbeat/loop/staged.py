"""What stages have made of a batch is checked once more, and put beside what was sampled, before the batch is trained.

    batch as published ─┐
    columns ── checked ─┴─▶ batch as trained: `columns`, the rewards with those that stages add, and marks of the
                            completions that have the score which a stage states for what it can't judge

A batch's own digest stays that of what was sampled and scored; its columns have a digest of their own.
"""

from __future__ import annotations

import struct

from msgspec.structs import replace

from contracts.encoding.digests import Digest
from contracts.errors import ContractViolation
from contracts.experience.columns import ColumnValues, check_values, row_shapes, values_digest
from contracts.rewards import StatedReason
from contracts.rollouts import Rollout, RolloutBatch
from contracts.spec import JobSpec
from contracts.spec_tables.stages import STAGE_REASONS, JudgingStage


def staged_batch(batch: RolloutBatch, values: ColumnValues, spec: JobSpec) -> tuple[RolloutBatch, Digest]:
    """Returns the batch as it is trained, and the digest of its columns.

    values: column → a value for each row, of all stages of the job. Raises ContractViolation naming the column and the
    row, for values that are not those of the job's stages.
    """
    check_values(values, spec.stage_plan.outputs, row_shapes(batch), of=f"batch {batch.batch_id}")
    with_columns = replace(batch, columns={name: tuple(of_rows) for name, of_rows in values.items()})
    rewarded = with_stage_rewards(with_columns, values, spec.stage_reward_weights)
    return _marked(rewarded, values, spec), values_digest(values)


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


def _marked(batch: RolloutBatch, values: ColumnValues, spec: JobSpec) -> RolloutBatch:
    """Marks the completions that a stage could not judge. Raises ContractViolation for a reason or a score that isn't
    what the spec states: a stage worker wrote both."""
    stating = [stage for stage in spec.stages if isinstance(stage, JudgingStage) and stage.stated_score is not None]
    marks: dict[int, dict[str, StatedReason]] = {}
    for stage in stating:
        stated = struct.pack("<f", stage.stated_score)
        for row, text in enumerate(values[stage.failure_column]):
            if not text:
                continue
            reason: StatedReason | None = next((one for one in STAGE_REASONS if one.encode() == text), None)
            if reason is None or any(values[name][row] != stated for name in stage.reward_weights):
                raise ContractViolation(
                    f"column {stage.failure_column}, row {row}: is no reason with the score that the spec states",
                    field=f"batch {batch.batch_id}",
                )
            marks.setdefault(row, {})[stage.name] = reason
    if not marks:
        return batch
    groups = tuple(
        replace(
            group,
            rollouts=tuple(
                replace(one, unscorable=one.unscorable | marks.get(place * batch.group_size + sample, {}))
                for sample, one in enumerate(group.rollouts)
            ),
        )
        for place, group in enumerate(batch.groups)
    )
    return replace(batch, groups=groups)
