"""A stage worker's side of one job: claim rows, put their columns, renew, fail. Every refusal is a typed outcome.

    publish ──▶ free ──claim──▶ leased ──put──▶ there ──▶ all items there: the batch is the trainer's
                 ▲                 │ lease expired, or failed with attempts left
                 └─────────────────┤
                                   └ no attempt left: the batch is dead (I6)

An item is the rows of a batch that a stage takes together. It is free once the stages before have made its inputs, it
goes out under a lease, and it comes back whole. Its first put counts (I3).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

from broker.batch_cache import BatchCache, CachedBatch
from broker.connection.bounds import MAX_ITEMS
from broker.connection.client import Broker
from broker.keys import batch_field, item_fields
from broker.leases import Lease, LeasedSide
from contracts.encoding.digests import content_digest
from contracts.encoding.wire import Record, decode
from contracts.errors import ContractViolation, NotFound
from contracts.experience.columns import ColumnValues, base_values, check_values, pack_values, row_shapes, unpack_values
from contracts.experience.graph import ClaimedItem, StageGraph, StageNode
from contracts.rollouts import RolloutBatch
from contracts.spec.job import JobSpec

PUT_BYTES = 2**25
"""Columns that one call puts, of several items: as many as one claim answers (scripts/stage.lua)."""


class PutOutcome(str, Enum):
    """The answer to an item's columns that were put."""

    ACCEPTED = "accepted"
    AGAIN = "again"
    """The same columns stand there already."""
    DIVERGENT = "divergent"
    """Other columns stand there: those of the first put are trained."""
    NOT_READY = "not_ready"
    """The inputs that the columns were made of are not what stands there, as after a restart that lost them: the item
    is claimed again."""
    SETTLED = "settled"
    """They are not needed: the batch is dead or was sampled anew, or its iteration or job is over."""


class PackedItem(NamedTuple):
    """An item that is to be put."""

    item: ClaimedItem
    columns: bytes
    """Its values, packed."""


class _ClaimedRows(Record, frozen=True, kw_only=True):
    """Items of a batch as `claim_rows` packs them."""

    iteration: int
    batch_id: str
    digest: str
    items: tuple[tuple[int, int], ...]
    """(item, attempt) of each."""


class _Answer(Record, frozen=True, kw_only=True):
    """The answer of `claim_rows` where it has found items."""

    claim: int
    """The claim's number, the same for all of its items."""
    batches: tuple[_ClaimedRows, ...]
    fields: tuple[str, ...]
    """Fields of `items`, in the order in which their values follow."""


class StageSide(LeasedSide[ClaimedItem]):
    """The side of one stage worker at one job. Thread-safe.

    A stage worker creates one for each job that it serves, claims items of it, renews their leases and puts columns.
    """

    def __init__(self, broker: Broker, job_id: str, worker_id: str) -> None:
        super().__init__(broker, job_id, worker_id)
        self._batches = BatchCache()
        self.empty: dict[str, float] = {}
        """Stage → the seconds until a lease of another worker ends, infinite without one, where its latest claim found
        nothing; 0.0 where it found some."""

    @property
    def spec(self) -> JobSpec:
        """Raises NotFound for a job that was removed."""
        return self._job.spec

    @property
    def graph(self) -> StageGraph:
        return self._job.graph

    def claim(self, stage: str, max_rows: int = 1, *, is_idle: bool = True) -> list[ClaimedItem]:
        """Claims items of a stage under its lease, those of the oldest iteration first.

        A claim whose answer was lost comes first, again. An item whose batch can't be read is failed here.

        Args:
            stage: The stage's name.
            max_rows: Most rows of several items; one item at least is claimed where there is one.
            is_idle: Where there is none, this worker is woken before those that have items in hand.

        Returns:
            The items; [] where the stage has none.

        Raises:
            NotFound: The job has no such stage, or was removed.
        """
        number, node = self._find(stage)
        cached_batches = self._batches.by_id()
        with self._claiming:
            outcome, *rest = self._run(
                "claim_rows",
                worker=self._worker_id,
                heard=self._heard.get(number, 0),
                stage=number,
                name=stage,
                stages=self._job.stages,
                lease_ms=int(node.lease_s * 1000),
                max_attempts=node.max_attempts,
                max_rows=max_rows,
                held={batch_id: cached.digest for batch_id, cached in cached_batches.items()},
                is_idle=is_idle,
            )
            self.empty[stage] = 0.0
            if outcome == b"none":
                ends_ms = rest[0]  # -1 where no other worker has a lease
                self.empty[stage] = ends_ms / 1000 if ends_ms >= 0 else math.inf
                return []
            answer = decode(rest[0], _Answer)
            self._heard[number] = answer.claim
        values: dict[str, bytes] = dict(zip(answer.fields, rest[1:], strict=True))
        items: list[ClaimedItem] = []
        for rows in answer.batches:
            try:
                batch = self._batch_of(rows, cached_batches, values)
            except ContractViolation as error:
                self._fail_all(number, rows, rows.items, claim=answer.claim, reason=str(error))
                continue
            if batch is not None:
                items += self._all_claimed(number, rows, batch, values, claim=answer.claim)
        return items

    def _all_claimed(
        self, number: int, rows: _ClaimedRows, batch: RolloutBatch, values: dict[str, bytes], *, claim: int
    ) -> Iterator[ClaimedItem]:
        for item in rows.items:
            try:
                yield self._claimed(number, rows, item, batch, values, claim=claim)
            except ContractViolation as error:
                self._fail_all(number, rows, [item], claim=claim, reason=str(error))

    def _fail_all(
        self, number: int, rows: _ClaimedRows, items: Iterable[tuple[int, int]], *, claim: int, reason: str
    ) -> None:
        """Fails items that nothing can be made of: other items of the batch are not to wait for their lease.

        Args:
            number: The stage's number.
            rows: The claimed items of a batch.
            items: (item, attempt) of those that fail.
            claim: The claim's number.
            reason: Why they fail.
        """
        for item, _ in items:
            lease = Lease(stage=number, iteration=rows.iteration, batch_id=rows.batch_id, item=item, claim=claim)
            self._give_back(lease, reason)

    def _batch_of(
        self, rows: _ClaimedRows, cached_batches: dict[str, CachedBatch], values: dict[str, bytes]
    ) -> RolloutBatch | None:
        """Returns the batch of claimed items, which this worker holds from now on.

        Args:
            rows: The claimed items.
            cached_batches: The batches that this worker had before the claim, by id.
            values: Field of `items` → its value, of those that came with the claim.

        Returns:
            The batch; None where it is no longer the one that was claimed.

        Raises:
            ContractViolation: Its bytes are no batch.
        """
        cached = cached_batches.get(rows.batch_id)
        if cached is None or cached.digest != rows.digest:
            payload = values.pop(batch_field(rows.batch_id), None) or self._large_payload(rows)
            if payload is None:
                return None
            cached = CachedBatch(rows.digest, decode(payload, RolloutBatch), len(payload))
            cached_batches[rows.batch_id] = cached
            self._batches.keep(rows.batch_id, cached)
        return cached.batch

    def _large_payload(self, rows: _ClaimedRows) -> bytes | None:
        """Reads a batch where it stands; None where its ledger has another one by now, or none."""
        outcome, *payload = self._run(
            "read_batch", iteration=rows.iteration, batch_id=rows.batch_id, digest=rows.digest
        )
        return payload[0] if outcome == b"read" else None

    def put(self, items: Sequence[tuple[ClaimedItem, ColumnValues]]) -> list[PutOutcome]:
        """Puts the columns of items. Safe to repeat.

        Each call of the server takes MAX_ITEMS items, and PUT_BYTES of columns where it takes several.

        Args:
            items: The items, each with its columns.

        Returns:
            An outcome for each item, in their order.

        Raises:
            ContractViolation: Columns are not the stage's outputs; nothing was sent then.
            InvalidInput: The columns of one item are more than a call takes.
        """
        packed: list[PackedItem] = []
        for _, of_batch in itertools.groupby(items, lambda put: put[0].digest):
            packed += self._packed(list(of_batch))
        outcomes: list[bytes] = []
        for several in puts_at_once(packed):
            payloads: list[bytes] = []
            runs: list[dict[str, Any]] = []
            for (stage, _), run in itertools.groupby(several, lambda put: (put.item.stage, put.item.digest)):
                runs.append(self._run_of(*self._find(stage), list(run), payloads))
            outcomes += self._run("put_rows", *payloads, stages=self._job.stages, runs=runs)[1:]
        return [PutOutcome(outcome.decode()) for outcome in outcomes]

    def _packed(self, items: Sequence[tuple[ClaimedItem, ColumnValues]]) -> list[PackedItem]:
        """Packs the columns of items of one batch. Raises ContractViolation where they are not the stage's outputs."""
        shapes = row_shapes(items[0][0].batch)
        for item, values in items:
            _, node = self._find(item.stage)
            check_values(values, node.outputs, shapes[item.rows.start : item.rows.stop], of=str(item))
        return [PackedItem(item, pack_values(values)) for item, values in items]

    def _run_of(
        self, number: int, node: StageNode, packed: Sequence[PackedItem], payloads: list[bytes]
    ) -> dict[str, Any]:
        """Returns items of a stage and a batch as `put_rows` gets them, and appends their payloads.

        Args:
            number: The stage's number.
            node: The stage.
            packed: The items.
            payloads: Gets the columns of each item, and behind them the digests of its inputs where the stage reads
                columns of others.
        """
        first = packed[0].item
        has_inputs = bool(node.after)
        digests: list[str] = []
        # Digests are only kept of columns that another stage is made of.
        if self.graph.is_read(number - 1):  # the graph counts from 0
            digests = [content_digest(item.columns) for item in packed]
        for item, columns in packed:
            payloads.append(columns)
            if has_inputs:
                # In the order in which the script puts the digests of its inputs together: stage by stage, item by
                # item.
                payloads.append("".join(item.input_digests).encode())
        return {
            "stage": number,
            "iteration": first.iteration,
            "batch_id": first.batch_id,
            "of": first.digest,
            "items": [item.item.item for item in packed],
            "has_inputs": has_inputs,
            "digests": digests,
        }

    def _lease_of(self, claim: ClaimedItem) -> Lease:
        return Lease(
            stage=self._find(claim.stage)[0],
            iteration=claim.iteration,
            batch_id=claim.batch_id,
            item=claim.item,
            claim=claim.claim,
        )

    def _claimed(
        self,
        number: int,
        claimed_rows: _ClaimedRows,
        claimed: tuple[int, int],
        batch: RolloutBatch,
        values: dict[str, bytes],
        *,
        claim: int,
    ) -> ClaimedItem:
        """Makes a claimed item, with the inputs that its stage reads.

        Args:
            number: The stage's number, counted from 1.
            claimed_rows: The items of the batch that were claimed.
            claimed: (item, attempt) of this one.
            batch: The batch.
            values: Field of `items` → the packed columns that other stages made.
            claim: The claim's number.
        """
        node = self.graph.stages[number - 1]
        item, attempt = claimed
        sizes = {"num_groups": len(batch.groups), "group_size": batch.group_size}
        rows = node.rows_of_item(item, **sizes)
        inputs = base_values(batch, node.inputs, rows)
        digests: list[str] = []
        for before in node.after:
            size = self.graph.stages[before].item_rows(**sizes)  # rows of an item of the earlier stage
            # rows is half-open: its last row is stop - 1.
            parts = range(rows.start // size, (rows.stop - 1) // size + 1)
            packed = [values[item_fields(before + 1, claimed_rows.batch_id, part).columns] for part in parts]
            digests += [content_digest(values) for values in packed]
            first = parts.start * size
            columns = [unpack_values(values) for values in packed]
            for name in node.inputs:
                if name in columns[0]:
                    of_parts = [value for part in columns for value in part[name]]
                    # The parts may begin before this item's rows, and end behind them: first is the row that they begin
                    # with.
                    inputs[name] = of_parts[rows.start - first : rows.stop - first]
        return ClaimedItem(
            stage=node.name,
            iteration=claimed_rows.iteration,
            batch_id=claimed_rows.batch_id,
            item=item,
            rows=rows,
            claim=claim,
            attempt=attempt,
            batch=batch,
            inputs=inputs,
            digest=claimed_rows.digest,
            input_digests=tuple(digests),
        )

    def _find(self, stage: str) -> tuple[int, StageNode]:
        """Returns (the stage's number, which scripts count from 1; the stage)."""
        try:
            # Scripts count stages from 1, since 0 stands for rollouts; the graph counts from 0.
            number = 1 + self.graph.index(stage)
        except KeyError:
            names = ", ".join(stage.name for stage in self.graph.stages) or "none"
            raise NotFound(f"the job has no stage {stage}", field="stage", cure=f"it has {names}") from None
        return number, self.graph.stages[number - 1]


def puts_at_once(items: Iterable[PackedItem]) -> Iterator[list[PackedItem]]:
    """Cuts items into what one call puts, in order: MAX_ITEMS, and PUT_BYTES of columns or a single larger item."""
    several: list[PackedItem] = []
    num_bytes = 0
    for item in items:
        if several and (len(several) == MAX_ITEMS or num_bytes + len(item.columns) > PUT_BYTES):
            yield several
            several = []
            num_bytes = 0
        several.append(item)
        num_bytes += len(item.columns)
    if several:
        yield several


def wait_for_items(waits: Sequence[tuple[StageSide, Collection[str] | None]], timeout_s: float) -> None:
    """Blocks until items became free after claims of the stages that found none, a lease ends, or for timeout_s.

    Doesn't block where the latest claim of one of them has found items.

    Args:
        waits: Each job of one worker, with the names of its stages; None stands for those that it has claimed of.
        timeout_s: Seconds.
    """
    if not waits:
        raise ValueError("there is no job to wait for")
    side = waits[0][0]
    each = [due_s for side, stages in waits for name, due_s in side.empty.items() if stages is None or name in stages]
    side.wait_for_wake(min([timeout_s, *each]))
