"""Items, the rows of a batch that a stage takes together: in the hands of a stage worker, and joined to columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from contracts.errors import FenceViolation
from contracts.experience.columns import check_values, row_shapes, unpack_values
from contracts.experience.plan import StagePlan
from contracts.rollouts import RolloutBatch


@dataclass(frozen=True, kw_only=True)
class ClaimedItem:
    """Rows that a stage takes together, under a lease."""

    stage: str
    iteration: int
    batch_id: str
    item: int
    rows: range
    """Its rows in the batch."""
    claim: int = field(repr=False)
    """The number of its claim: no other claim of the job ever has it."""
    attempt: int
    """From 1."""
    batch: RolloutBatch
    inputs: dict[str, list[bytes]]
    """Input column → a value for each of the rows."""
    digest: str = field(repr=False)
    """The digest of the batch."""
    input_digests: tuple[str, ...] = field(default=(), repr=False)
    """The digests of the items of other stages that the inputs are from, in the order of the plan."""

    def __str__(self) -> str:
        return f"stage {self.stage}, batch {self.batch_id}, item {self.item} (attempt {self.attempt})"


def all_items(plan: StagePlan, batch: RolloutBatch) -> list[tuple[int, int]]:
    """Returns (stage by its index, item) of each item of the batch, in the order of the plan."""
    size = {"num_groups": len(batch.groups), "group_size": batch.group_size}
    return [
        (index, item)
        for index, stage in enumerate(plan.stages)
        for item in range(batch.num_completions // stage.item_rows(**size))
    ]


def columns_of(plan: StagePlan, batch: RolloutBatch, packed: Sequence[bytes | None]) -> dict[str, tuple[bytes, ...]]:
    """Column → a value for each row. packed: the columns of `all_items`, as they were put.

    Raises FenceViolation for an item without any, ContractViolation for what is no output of its stage.
    """
    size, shapes = {"num_groups": len(batch.groups), "group_size": batch.group_size}, row_shapes(batch)
    found: dict[str, list[bytes]] = {column.name: [] for column in plan.outputs}
    for (index, item), data in zip(all_items(plan, batch), packed, strict=True):
        stage, of = plan.stages[index], f"stage {plan.stages[index].name}, batch {batch.batch_id}"
        if data is None:
            raise FenceViolation(f"item {item} lacks its columns", field=of)
        values, rows = unpack_values(data), stage.rows_of_item(item, **size)
        check_values(values, stage.outputs, shapes[rows.start : rows.stop], of=of)
        for column, of_rows in values.items():
            found[column] += of_rows
    return {column: tuple(of_rows) for column, of_rows in found.items()}
