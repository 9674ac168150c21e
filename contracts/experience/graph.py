"""The graph of a job's stages for a batch: its items, and which of them have to be done before which.

    rows of a batch, k = 2, G = 2     0  1 │ 2  3
    items of a stage of unit "row"    0  1   2  3
    items of a stage of unit "group"  0──┘   1──┘
    items of a stage of unit "batch"  0─────────┘

An item is leased, computed and put whole, so that what a stage computes together is a function of the spec (I7).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from contracts.encoding.wire import Record
from contracts.errors import FenceViolation
from contracts.experience.columns import (
    BASE_COLUMNS,
    CARRIED_COLUMNS,
    Column,
    ColumnName,
    check_values,
    row_shapes,
    unpack_values,
)
from contracts.rollouts import RolloutBatch

Unit = Literal["row", "group", "batch"]


class StageNode(Record, frozen=True, kw_only=True):
    """A stage as scripts, stage workers and the trainer know it."""

    name: str
    unit: Unit
    inputs: tuple[ColumnName, ...]
    outputs: tuple[Column, ...]
    after: tuple[int, ...]
    """Indices of the stages whose outputs it reads."""
    max_attempts: int
    lease_s: float

    def rows_of_item(self, item: int, *, num_groups: int, group_size: int) -> range:
        """Returns the rows of the batch that the item has."""
        size = self.item_rows(num_groups=num_groups, group_size=group_size)
        return range(item * size, (item + 1) * size)

    def item_rows(self, *, num_groups: int, group_size: int) -> int:
        """Returns the number of rows of each item of a batch."""
        return {"row": 1, "group": group_size, "batch": num_groups * group_size}[self.unit]


class StageGraph(Record, frozen=True, kw_only=True):
    """The stages of a job, in the order of the spec; a stage is known by its index."""

    stages: tuple[StageNode, ...] = ()

    @property
    def outputs(self) -> tuple[Column, ...]:
        """The columns that a row has on top of its base columns before its batch is trained."""
        return tuple(column for stage in self.stages for column in stage.outputs)

    @property
    def carries_texts(self) -> bool:
        """True where generators publish the texts of prompts and references, since a stage reads them."""
        return any(CARRIED_COLUMNS.intersection(stage.inputs) for stage in self.stages)

    def index(self, name: str) -> int:
        """Returns the index of a stage, from 0. Raises KeyError for a name that no stage has."""
        return {stage.name: index for index, stage in enumerate(self.stages)}[name]

    def is_read(self, index: int) -> bool:
        """Returns True where another stage reads columns of this one. index: from 0."""
        return any(index in stage.after for stage in self.stages)

    def for_scripts(self) -> list[dict[str, object]]:
        """Returns what scripts/prelude.lua needs: the unit of each stage, and those before it, counted from 1."""
        return [{"unit": stage.unit, "after": [1 + before for before in stage.after]} for stage in self.stages]


def stages_before(inputs: Iterable[str], outputs: Sequence[Sequence[Column]]) -> tuple[int, ...]:
    """Returns the indices of the stages that make the inputs. outputs: of each stage.

    Raises KeyError for an input that is neither a base column nor any stage's output.
    """
    makers: Mapping[str, int] = {column.name: index for index, columns in enumerate(outputs) for column in columns}
    return tuple(sorted({makers[name] for name in inputs if name not in BASE_COLUMNS}))


def circle(after: Sequence[Sequence[int]]) -> list[int]:
    """Returns stages that wait for one another, in their order; [] where there are none. after: of each stage."""
    left = set(range(len(after)))
    num_before = len(left) + 1
    while len(left) < num_before:  # until a round takes no stage away
        num_before = len(left)
        left -= {index for index in left if not left.intersection(after[index])}
    if not left:
        return []
    # Each stage that is left waits for another one that is left: a walk along them comes back to one of them.
    walk: list[int] = []
    stage = min(left)
    while stage not in walk:
        walk.append(stage)
        stage = next(index for index in after[stage] if index in left)
    return walk[walk.index(stage) :]


@dataclass(frozen=True, kw_only=True)
class ClaimedItem:
    """Rows that a stage takes together, under a lease.

    `StageSide.claim` creates it; the stage's worker reads its inputs and puts their columns under its name.
    """

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
    """The digests of the items of other stages that the inputs are from, in the order of the graph."""

    def __str__(self) -> str:
        return f"stage {self.stage}, batch {self.batch_id}, item {self.item} (attempt {self.attempt})"


def all_items(graph: StageGraph, batch: RolloutBatch) -> list[tuple[int, int]]:
    """Returns (stage by its index, item) of each item of the batch, in the order of the graph."""
    size = {"num_groups": len(batch.groups), "group_size": batch.group_size}
    return [
        (index, item)
        for index, stage in enumerate(graph.stages)
        for item in range(batch.num_completions // stage.item_rows(**size))
    ]


def columns_of(graph: StageGraph, batch: RolloutBatch, packed: Sequence[bytes | None]) -> dict[str, tuple[bytes, ...]]:
    """Joins the columns of a batch's items.

    Args:
        graph: The job's stages.
        batch: The batch.
        packed: The columns of each of `all_items`, as they were put; None for an item without any.

    Returns:
        Column → a value for each row.

    Raises:
        FenceViolation: An item has no columns.
        ContractViolation: A value is no output of its stage.
    """
    size = {"num_groups": len(batch.groups), "group_size": batch.group_size}
    shapes = row_shapes(batch)
    columns: dict[str, list[bytes]] = {column.name: [] for column in graph.outputs}
    for (index, item), data in zip(all_items(graph, batch), packed, strict=True):
        stage = graph.stages[index]
        source = f"stage {stage.name}, batch {batch.batch_id}"
        if data is None:
            raise FenceViolation(f"item {item} lacks its columns", field=source)
        values = unpack_values(data)
        rows = stage.rows_of_item(item, **size)
        check_values(values, stage.outputs, shapes[rows.start : rows.stop], of=source)
        # The items of a stage come in the order of their rows.
        for column, of_rows in values.items():
            columns[column] += of_rows
    return {column: tuple(of_rows) for column, of_rows in columns.items()}
