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
from contracts.experience.plan import ClaimedItem, PlannedStage, StagePlan
from contracts.rollouts import RolloutBatch
from contracts.spec.job import JobSpec

PUT_BYTES = 2**25
"""Columns that one call puts, of several items: as many as one claim answers (scripts/stage.lua)."""


class PutOutcome(str, Enum):
    """What became of an item's columns."""

    ACCEPTED = "accepted"
    AGAIN = "again"
    """The same columns stand there already."""
    DIVERGENT = "divergent"
    """Other columns stand there: those of the first put are trained."""
    NOT_READY = "not_ready"
    """What they were made of is not what stands there, as after a restart that lost it: the item is claimed again."""
    SETTLED = "settled"
    """They are not needed: the batch is dead or was sampled anew, or its iteration or job is over."""


class PackedItem(NamedTuple):
    """An item that is to be put."""

    item: ClaimedItem
    columns: bytes
    """Its values, packed."""


class _Found(Record, frozen=True, kw_only=True):
    """Items of a batch as `claim_rows` packs them."""

    iteration: int
    batch_id: str
    digest: str
    items: tuple[tuple[int, int], ...]
    """(item, attempt) of each."""


class _Answer(Record, frozen=True, kw_only=True):
    claim: int
    """Its number."""
    found: tuple[_Found, ...]
    fields: tuple[str, ...]


class StageSide(LeasedSide[ClaimedItem]):
    """One stage worker, one job. Thread-safe."""

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
    def plan(self) -> StagePlan:
        return self._job.plan

    def claim(self, stage: str, max_rows: int = 1, *, is_idle: bool = True) -> list[ClaimedItem]:
        """Items of the stage under its lease, oldest iteration first; [] when it has none.

        A claim whose answer was lost comes first, again. One item at least where there is one, and no more rows than
        max_rows in several. An item whose batch can't be read is failed here. is_idle: where there is none, this worker
        is woken before those that have items in hand. Raises NotFound for a stage that the job doesn't have, and for a
        job that was removed.
        """
        number, planned = self._find(stage)
        held = self._batches.held()
        with self._claiming:
            outcome, *rest = self._run(
                "claim_rows",
                worker=self._worker_id,
                heard=self._heard.get(number, 0),
                stage=number,
                name=stage,
                stages=self._job.stages,
                lease_ms=int(planned.lease_s * 1000),
                max_attempts=planned.max_attempts,
                max_rows=max_rows,
                held={batch_id: cached.digest for batch_id, cached in held.items()},
                is_idle=is_idle,
            )
            self.empty[stage] = 0.0
            if outcome == b"none":
                self.empty[stage] = rest[0] / 1000 if rest[0] >= 0 else math.inf
                return []
            answer = decode(rest[0], _Answer)
            self._heard[number] = answer.claim
        values: dict[str, bytes] = dict(zip(answer.fields, rest[1:], strict=True))
        items: list[ClaimedItem] = []
        for found in answer.found:
            try:
                batch = self._batch_of(found, held, values)
            except ContractViolation as error:
                self._fail_all(number, found, found.items, claim=answer.claim, reason=str(error))
                continue
            if batch is not None:
                items += self._all_claimed(number, found, batch, values, claim=answer.claim)
        return items

    def _all_claimed(
        self, number: int, found: _Found, batch: RolloutBatch, values: dict[str, bytes], *, claim: int
    ) -> Iterator[ClaimedItem]:
        for item in found.items:
            try:
                yield self._claimed(number, found, item, batch, values, claim=claim)
            except ContractViolation as error:
                self._fail_all(number, found, [item], claim=claim, reason=str(error))

    def _fail_all(
        self, number: int, found: _Found, items: Iterable[tuple[int, int]], *, claim: int, reason: str
    ) -> None:
        """Fails items that nothing can be made of: the items beside them are not to wait for their lease."""
        for item, _ in items:
            lease = Lease(stage=number, iteration=found.iteration, batch_id=found.batch_id, item=item, claim=claim)
            self._give_back(lease, reason)

    def _batch_of(self, found: _Found, held: dict[str, CachedBatch], values: dict[str, bytes]) -> RolloutBatch | None:
        """The batch of items, held from now on; None where it is no longer the one that was claimed.

        held, values: what this worker had before the claim, and what came with it. Raises ContractViolation.
        """
        known = held.get(found.batch_id)
        if known is None or known.digest != found.digest:
            payload = values.pop(batch_field(found.batch_id), None) or self._large_payload(found)
            if payload is None:
                return None
            known = held[found.batch_id] = CachedBatch(found.digest, decode(payload, RolloutBatch), len(payload))
            self._batches.keep(found.batch_id, known)
        return known.batch

    def _large_payload(self, found: _Found) -> bytes | None:
        """Reads a batch where it stands; None where its ledger has another one by now, or none."""
        named = {"iteration": found.iteration, "batch_id": found.batch_id, "digest": found.digest}
        outcome, *payload = self._run("read_batch", **named)
        return payload[0] if outcome == b"read" else None

    def put(self, made: Sequence[tuple[ClaimedItem, ColumnValues]]) -> list[PutOutcome]:
        """Puts the columns of items; an outcome for each. Safe to repeat.

        Each call of the server takes MAX_ITEMS items, and PUT_BYTES of columns where it takes several.

        Raises ContractViolation for columns that are not the stage's outputs, before anything is sent, and InvalidInput
        for those of an item that no call takes.
        """
        packed: list[PackedItem] = []
        for _, items in itertools.groupby(made, lambda put: put[0].digest):
            packed += self._packed(list(items))
        outcomes: list[bytes] = []
        for several in puts_at_once(packed):
            payloads: list[bytes] = []
            runs: list[dict[str, Any]] = []
            for (stage, _), run in itertools.groupby(several, lambda put: (put.item.stage, put.item.digest)):
                runs.append(self._run_of(*self._find(stage), list(run), payloads))
            outcomes += self._run("put_rows", *payloads, stages=self._job.stages, runs=runs)[1:]
        return [PutOutcome(outcome.decode()) for outcome in outcomes]

    def _packed(self, made: Sequence[tuple[ClaimedItem, ColumnValues]]) -> list[PackedItem]:
        """made: items of one batch. Raises ContractViolation for columns that are not the stage's outputs."""
        shapes = row_shapes(made[0][0].batch)
        for item, values in made:
            _, planned = self._find(item.stage)
            check_values(values, planned.outputs, shapes[item.rows.start : item.rows.stop], of=str(item))
        return [PackedItem(item, pack_values(values)) for item, values in made]

    def _run_of(
        self, number: int, planned: PlannedStage, made: Sequence[PackedItem], payloads: list[bytes]
    ) -> dict[str, Any]:
        """Items of a stage and a batch as `put_rows` is told of them. payloads: gets what follows its arguments."""
        first, is_read = made[0].item, self.plan.is_read(number - 1)
        has_inputs = bool(planned.after)
        for item, columns in made:
            payloads.append(columns)
            if has_inputs:
                payloads.append("".join(item.input_digests).encode())
        return {
            "stage": number,
            "iteration": first.iteration,
            "batch_id": first.batch_id,
            "of": first.digest,
            "items": [put.item.item for put in made],
            "has_inputs": has_inputs,
            "digests": [content_digest(put.columns) for put in made] if is_read else [],
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
        found: _Found,
        claimed: tuple[int, int],
        batch: RolloutBatch,
        values: dict[str, bytes],
        *,
        claim: int,
    ) -> ClaimedItem:
        planned, (item, attempt) = self.plan.stages[number - 1], claimed
        sizes = {"num_groups": len(batch.groups), "group_size": batch.group_size}
        rows = planned.rows_of_item(item, **sizes)
        inputs = base_values(batch, planned.inputs, rows)
        digests: list[str] = []
        for before in planned.after:
            size = self.plan.stages[before].item_rows(**sizes)
            parts = range(rows.start // size, (rows.stop - 1) // size + 1)
            packed = [values[item_fields(before + 1, found.batch_id, part).columns] for part in parts]
            digests += [content_digest(values) for values in packed]
            first = parts.start * size
            made = [unpack_values(values) for values in packed]
            for name in planned.inputs:
                if name in made[0]:
                    of_parts = [value for part in made for value in part[name]]
                    inputs[name] = of_parts[rows.start - first : rows.stop - first]
        return ClaimedItem(
            stage=planned.name,
            iteration=found.iteration,
            batch_id=found.batch_id,
            item=item,
            rows=rows,
            claim=claim,
            attempt=attempt,
            batch=batch,
            inputs=inputs,
            digest=found.digest,
            input_digests=tuple(digests),
        )

    def _find(self, stage: str) -> tuple[int, PlannedStage]:
        """(its number, as scripts count from 1, the stage)."""
        try:
            number = 1 + self.plan.index(stage)
        except KeyError:
            names = ", ".join(stage.name for stage in self.plan.stages) or "none"
            raise NotFound(f"the job has no stage {stage}", field="stage", cure=f"it has {names}") from None
        return number, self.plan.stages[number - 1]


def puts_at_once(items: Iterable[PackedItem]) -> Iterator[list[PackedItem]]:
    """Cuts items into what one call puts, in order: MAX_ITEMS, and PUT_BYTES of columns or a single larger item."""
    several: list[PackedItem] = []
    num_bytes = 0
    for item in items:
        if several and (len(several) == MAX_ITEMS or num_bytes + len(item.columns) > PUT_BYTES):
            yield several
            several, num_bytes = [], 0
        several.append(item)
        num_bytes += len(item.columns)
    if several:
        yield several


def wait_for_items(waits: Sequence[tuple[StageSide, Collection[str] | None]], timeout_s: float) -> None:
    """Blocks until items became free after claims of the stages that found none, a lease ends, or for timeout_s.

    Doesn't block where the latest claim of one of them has found items. waits: each job of one worker with its stages;
    None stands for those claimed of.
    """
    if not waits:
        raise ValueError("there is no job to wait for")
    side = waits[0][0]
    each = [due_s for side, stages in waits for name, due_s in side.empty.items() if stages is None or name in stages]
    side.wait_for_wake(min([timeout_s, *each]))
