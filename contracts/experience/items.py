"""Items in the hands of a stage worker: the rows of a batch that a stage takes together."""

from __future__ import annotations

from dataclasses import dataclass, field

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


@dataclass(frozen=True, kw_only=True)
class ItemRenewal:
    """What a heartbeat learnt; the other items are still held."""

    lost: tuple[ClaimedItem, ...] = ()
    """Other workers hold them now; the first put counts."""
    settled: tuple[ClaimedItem, ...] = ()
    """They have their columns, or need none any more."""
