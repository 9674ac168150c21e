"""What the ledger holds of a batch of an open iteration, as scripts/prelude.lua packs it. Times are the server's."""

from __future__ import annotations

from contracts.encoding.wire import Record, decode


class Expected(Record, frozen=True, kw_only=True, tag_field="state", tag="expected"):
    """Nothing is published yet."""

    entry: str
    """Its entry of the prompts stream."""
    shape: str
    version: int | None = None
    """The only version that may sample it; None where the iteration's range says which may. Kept to its end."""
    holder: str = ""
    """The generator that claimed it last; "" before any claim."""
    claim: int = 0
    """The number of that claim."""
    attempt: int = 0
    claimed_ms: int = 0
    hedger: str = ""
    """The generator that works on a copy; "" where none does."""
    hedge: int = 0
    """The number of its claim."""
    hedged_ms: int = 0


class Published(Record, frozen=True, kw_only=True, tag_field="state", tag="published"):
    entry: str
    """Its entry of the rollouts stream."""
    digest: str
    generator: str
    attempt: int
    version: int | None = None
    shape: str = ""
    """As of an expected batch, where it passes stages; "" where it passes none."""
    left: int = 0
    """Its items that lack their columns: it has no entry of the rollouts stream until there are none."""
    staged_ms: int = 0
    """When its stages got it."""


class Dead(Record, frozen=True, kw_only=True, tag_field="state", tag="dead"):
    """Given up; the trainer decides by its policy."""

    reason: str
    version: int | None = None


BatchRecord = Expected | Published | Dead


def batch_record(value: bytes) -> BatchRecord:
    """Raises ContractViolation for what no script of this version has written."""
    return decode(value, BatchRecord)  # type: ignore[arg-type]
