"""The fence of a job as its processes read it: the window of open iterations, and the versions that may sample them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from broker.connection.client import Broker
from broker.keys import JobKeys
from broker.ledger import Setback, read_of, readable
from contracts.encoding.wire import Record, decode
from contracts.jobs import WindowIteration

LEDGER_FORMAT = b"7"
"""The format that scripts/prelude.lua writes. A window of another one is an older Onbeat's, and is opened anew."""


class KnownVersion(Record, frozen=True, kw_only=True):
    """A version that batches of the window may be sampled with, as scripts pack it and get it."""

    version: int
    digest: str


class WindowEntry(Record, frozen=True, kw_only=True):
    """An open iteration, as the scripts pack it."""

    iteration: int
    slot: int
    oldest_version: int
    newest_version: int
    expected: int
    opened_ms: int


class FenceState(Record, frozen=True, kw_only=True):
    """The fence of a job at one moment.

    `read_fence` creates it of two hashes that only scripts write; trainers, generators and the job's status read it.
    """

    state: str
    """open, closed, or "" before the first iteration."""
    committed: int
    """Last committed iteration; -1 before the first."""
    window: tuple[WindowIteration, ...] = ()
    """The open iterations, oldest first: committed + 1, committed + 2 and so on."""
    versions: dict[int, str]
    """Version → weights digest, of those that batches of the window may be sampled with; oldest first."""
    trainer_epoch: int
    lease_until_s: float
    """Unix time by the server's clock; 0.0 when no trainer holds the job."""
    lease_s: float = 0.0
    """How long the lease was taken for; 0.0 where none ever was."""
    engine: str = ""
    """Fingerprint of the one kind of engine that samples a deterministic job (I7); "" before its first claim."""
    setback: Setback | None = None
    """The newest claim that was given back; None before the first."""
    recent_ms: tuple[int, ...] = ()
    """Milliseconds from claim to publication, for each round of the latest batches, newest first."""

    @property
    def iteration(self) -> int:
        """The newest open or the last iteration; -1 before the first."""
        return self.committed + len(self.window)

    @property
    def policy_version(self) -> int:
        """The newest version of the window; 0 where nothing is open that one could sample."""
        return max(self.versions, default=0)

    @property
    def weights_digest(self) -> str:
        """Digest of policy_version; "" where there is none."""
        return self.versions.get(self.policy_version, "")

    @property
    def expected(self) -> int:
        """Batches of the oldest open iteration; published and dead ones are among them."""
        return self.window[0].batches_expected if self.window else 0

    @property
    def published(self) -> int:
        """Published batches of the oldest open iteration."""
        return self.window[0].batches_published if self.window else 0

    @property
    def is_sampled(self) -> bool:
        """True where nothing of the oldest open iteration is left to sample, as where nothing is open.

        The schedules `synchronous` and `colocated` wait for it.
        """
        if not self.window:
            return True
        oldest = self.window[0]
        return oldest.batches_published + oldest.batches_dead >= oldest.batches_expected

    def is_held(self, now_s: float) -> bool:
        """Returns True while the trainer's lease is valid.

        A lease that ends more than twice lease_s from now was written before the clock stepped back, and counts as
        expired.

        Args:
            now_s: Unix time by the server's clock.
        """
        left_s = self.lease_until_s - now_s
        return left_s > 0 and not (self.lease_s and left_s > 2 * self.lease_s)


def read_fence(broker: Broker, job_keys: JobKeys) -> FenceState:
    """Reads the fence of a job; that of a job whose trainer never came reads as zeros. Raises ContractViolation."""
    with broker.call():
        pipe: Any = broker.redis.pipeline(transaction=False)  # no transaction: a server at maxmemory takes none
        fence, progress = pipe.hgetall(job_keys.fence).hgetall(job_keys.progress).execute()
    with read_of(job_keys.fence):
        return fence_of(fence, progress)


def fence_of(rows: Mapping[bytes, bytes], counts: Mapping[bytes, bytes]) -> FenceState:
    """Makes the state of the two hashes of a fence.

    Args:
        rows: The hash `fence`, which trainers write.
        counts: The hash `progress`, which generators count in.
    """
    state = ""
    window: tuple[WindowIteration, ...] = ()
    known: list[KnownVersion] = []
    if rows.get(b"ledger_format") == LEDGER_FORMAT:
        # Packed oldest first; the i-th is committed + 1 + i.
        window = tuple(_open_iteration(entry, counts) for entry in decode(rows[b"window"], list[WindowEntry]))
        known = decode(rows[b"versions"], list[KnownVersion])
        state = "open" if window else "closed"
    return FenceState(
        state=state,
        committed=int(rows.get(b"committed", -1)),
        window=window,
        versions={version.version: version.digest for version in known},
        trainer_epoch=int(rows.get(b"epoch", 0)),
        lease_until_s=float(rows.get(b"lease_until", 0)) / 1000,  # scripts write milliseconds
        lease_s=float(rows.get(b"lease_ms", 0)) / 1000,
        engine=counts.get(b"engine", b"").decode(errors="replace"),
        setback=readable(counts.get(b"setback"), Setback),
        recent_ms=readable(counts.get(b"recent_ms"), tuple[int, ...]) or (),
    )


def _open_iteration(entry: WindowEntry, counts: Mapping[bytes, bytes]) -> WindowIteration:
    return WindowIteration(
        iteration=entry.iteration,
        oldest_version=entry.oldest_version,
        newest_version=entry.newest_version,
        batches_expected=entry.expected,
        batches_published=int(counts.get(f"published:{entry.slot}".encode(), 0)),
        batches_dead=int(counts.get(f"dead:{entry.slot}".encode(), 0)),
    )
