"""The trainer's side of one job: epoch, weights, open, claim, commit. Every call but `acquire` needs the epoch (I4)."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from broker.batch_cache import READ_AHEAD, RolloutCursor, RolloutEntry
from broker.connection.bounds import ASKED_AT_ONCE, RESTORED_AT_ONCE
from broker.connection.client import Broker
from broker.fence import FenceState, KnownVersion, read_fence
from broker.keys import STAGE_BAND, JobKeys, OpenKeys, batch_field, chunk_field, item_fields
from broker.ledger import Dead, Published, batch_record
from broker.openings import DispatchChunk, IterationOpening, dispatch_chunks, opening_arguments
from contracts.encoding.wire import Record, decode, encode
from contracts.errors import Conflict, FencedOff, FenceViolation, NotFound
from contracts.events import AuditRecord, JobEvent, Rewound, record_digest
from contracts.experience.plan import StagePlan, all_items, columns_of
from contracts.jobs import JobState
from contracts.rollouts import PromptBatch, RolloutBatch, batch_digest
from contracts.versions import WeightManifest, WeightShard

NO_STAGES = StagePlan()


class Arrived(Record, frozen=True, kw_only=True):
    """A published batch and the digest that the ledger holds for it."""

    batch: RolloutBatch
    digest: str
    num_bytes: int


class TrainerSide:
    """One trainer, one job."""

    def __init__(
        self, broker: Broker, job_id: str, *, owner: str, lease_s: float, num_open: int = 1, plan: StagePlan = NO_STAGES
    ) -> None:
        """num_open, plan: of the job's spec."""
        self._broker = broker
        self._job_id = job_id
        self._num_open = num_open
        self._plan = plan
        self._owner = owner
        self._lease_ms = int(lease_s * 1000)
        self._epoch: int | None = None
        self._engine: str | None = None
        """The kind that sampled the first rollouts that it was given, of a deterministic job."""
        self._cursors = [RolloutCursor() for _ in range(num_open)]

    @property
    def trainer_epoch(self) -> int:
        """Raises FencedOff before one was acquired."""
        if self._epoch is None:
            raise FencedOff("this trainer holds no epoch: it has not acquired the job", field="trainer_epoch")
        return self._epoch

    def acquire(self, sealed: int = 0) -> int:
        """The new trainer epoch, a fencing token. sealed: the number of the hosts whose ranks it leads (hosts_side.py).

        Raises Conflict while another trainer's lease lives, or where those hosts are no group any more, and NotFound
        for a job that was removed.
        """
        outcome, *rest = self._run("acquire_trainer", owner=self._owner, lease_ms=self._lease_ms, sealed=sealed)
        if outcome == b"unknown":
            raise NotFound("there is no such job", field=OpenKeys(self._job_id).job, cure="`onbeat jobs` lists them")
        if outcome == b"held":
            raise Conflict(f"another trainer holds the job for {rest[0] / 1000:.1f} s more", field="trainer lease")
        if outcome == b"no_group":
            raise Conflict(f"its hosts are no group: {rest[0].decode() or 'another one stands'}", field="trainer.hosts")
        self._epoch = int(rest[0])
        self._engine = None
        self._cursors = [RolloutCursor() for _ in range(self._num_open)]
        return self._epoch

    def renew(self) -> JobState:
        """Extends the lease and answers the job's state, so that a cancel is noticed. Raises FencedOff."""
        _, state = self._fenced("renew_trainer", lease_ms=self._lease_ms)
        return JobState(state.decode())

    def release(self) -> None:
        """Gives the lease back, so that a successor need not wait. Raises FencedOff."""
        self._fenced("renew_trainer", lease_ms=0)

    def fence(self) -> FenceState:
        """The fence as it stands. Raises FencedOff where it is another trainer's by now."""
        state = read_fence(self._broker, self._keys)
        if state.trainer_epoch != self.trainer_epoch:
            raise self._fenced_off()
        return state

    def publish_weights(self, manifest: WeightManifest, *, oldest_kept: int) -> None:
        """Announces a version; manifests older than oldest_kept go.

        Raises FencedOff, or FenceViolation where the window is sampled with other weights of this version: a restarted
        server has lost the rewind after which it was made anew.
        """
        version = manifest.policy_version
        kept = {"oldest_kept": oldest_kept, "chunk_bytes": manifest.num_chunk_bytes}
        outcome, *rest = self._fenced("publish_weights", encode(manifest), policy_version=version, **kept)
        if outcome != b"published":
            raise FenceViolation(f"version {version} cannot be announced: {_said(outcome, rest)}", field="digest")
        if self._num_open > 1:
            # It wakes the generators that receive versions while they sample: they wait for files.
            file = manifest.files[-1]
            told = {"policy_version": version, "path": f"{manifest.directory}/{file.name}"}
            self.announce_shard(WeightShard(**told, name=file.name, num_bytes=file.num_bytes))

    def announce_shard(self, shard: WeightShard) -> None:
        """Tells generators of a file before its version is announced. Raises FencedOff."""
        self._fenced("announce_shard", encode(shard))

    def record_files(self, listed: bytes) -> None:
        """Says which objects the files of the run are (onbeat/run_folder/run_files.py). Raises FencedOff."""
        self._fenced("record_files", listed)

    def put_chunk(self, policy_version: int, name: str, number: int, data: bytes, *, keep_s: float) -> None:
        """keep_s: after so long without another chunk all of them go. Raises FencedOff, BrokerFull."""
        field = chunk_field(policy_version, name, number)
        self._fenced("put_chunk", data, field=field, keep_ms=int(keep_s * 1000))

    def drop_chunks_before(self, policy_version: int, kept: Collection[int] = ()) -> None:
        """Removes the chunks of older versions but `kept`. Raises FencedOff."""
        self._fenced("drop_chunks", oldest_kept=policy_version, kept=list(kept))

    def open_iteration(self, opening: IterationOpening, versions: Mapping[int, str]) -> bool:
        """True if it was opened now, False if it stood open already: its batches go on.

        versions: version → weights digest, announced ones that the window's batches may be sampled with. The first
        batches go out with the opening, the rest after it; what a death leaves undone `reconcile` does.
        Raises FencedOff, or FenceViolation for an iteration that is not the next one, finds as many open as may be, or
        lacks its oldest version.
        """
        chunks = self._chunks(opening.batches)
        following, payloads = opening_arguments(opening, chunks)
        known = [KnownVersion(version=version, digest=digest) for version, digest in sorted(versions.items())]
        outcome, *rest = self._fenced("open_iteration", *payloads, opening=following, versions=known)
        if outcome not in (b"opened", b"already_open"):
            raise FenceViolation(f"iteration {opening.iteration} cannot open: {_said(outcome, rest)}")
        if outcome == b"opened":
            self._dispatch(opening.iteration, chunks)
        return outcome == b"opened"

    def rewind(self, record: AuditRecord) -> None:
        """Makes record.iteration the next to open, writes the rewind into the chain and tells of it; safe to repeat.

        Raises FencedOff, or FenceViolation for an iteration that would leave a gap, or a record that follows another.
        """
        told = encode(Rewound.by(record, committed=self.fence().committed))
        outcome, *rest = self._fenced("rewind", encode(record), told, iteration=record.iteration, **_links(record))
        if outcome not in (b"rewound", b"already_rewound"):
            raise FenceViolation(f"iteration {record.iteration} cannot be next: {_said(outcome, rest)}")
        for cursor in self._cursors:
            cursor.read_ahead.clear()

    def restore(self, records: Sequence[AuditRecord]) -> None:
        """Gives the chain records back that a server which came back older has lost, with nothing open behind them.

        records: oldest first; the first follows the newest one of the chain. Raises FencedOff, and FenceViolation where
        they don't follow.
        """
        for first in range(0, len(records), RESTORED_AT_ONCE):
            some = records[first : first + RESTORED_AT_ONCE]
            newest = some[-1]
            outcome, *rest = self._fenced(
                "restore_chain",
                *[encode(record) for record in some],
                committed=newest.iteration - (newest.kind != "commit"),
                digests=[record_digest(record) for record in some],
                previous=some[0].previous,
            )
            if outcome not in (b"restored", b"already_restored"):
                raise FenceViolation(f"iteration {newest.iteration} cannot be restored: {_said(outcome, rest)}")

    def claim_rollouts(self, iteration: int, *, max_batches: int) -> tuple[list[Arrived], int]:
        """(published batches in arrival order, number of dead batches) of an open iteration. Doesn't block.

        The first calls also answer what an earlier epoch claimed and did not commit. Raises FencedOff, or
        FenceViolation where a restarted server has lost the opening of this iteration.
        """
        cursor = self._cursor_of(iteration)
        known = cursor.read_ahead
        outcome, num_dead, *rows = self._fenced(
            "claim_rollouts",
            iteration=iteration,
            max_batches=max_batches,
            last_entry=cursor.last_entry,
            read_ahead=list(known),
        )
        if outcome != b"claimed":
            raise FenceViolation(f"the fence is not open at iteration {iteration}: {_said(outcome, [num_dead])}")
        engine, *rows = rows
        if rows and engine and self._engine is None:
            self._engine = engine.decode(errors="replace")
        claimed = {
            entry.decode(): RolloutEntry(*fields)
            for entry, *fields in zip(rows[0::4], rows[1::4], rows[2::4], rows[3::4], strict=True)
        }
        entries = {entry: known[entry] if row.payload == b"" else row for entry, row in claimed.items()}
        elsewhere = [row.batch_id for row in entries.values() if row.payload is None]
        payloads = self._beside_columns(iteration, elsewhere) if elsewhere else {}
        arrived = []
        for entry, row in entries.items():
            payload = payloads[row.batch_id] if row.payload is None else row.payload
            batch = decode(payload, RolloutBatch)
            if batch_digest(batch) != row.digest.decode():
                raise FenceViolation(f"batch {batch.batch_id} is not what the ledger recorded", field="digest")
            arrived.append(Arrived(batch=batch, digest=row.digest.decode(), num_bytes=len(payload)))
            known.pop(entry, None)
            cursor.last_entry = entry
        cursor.awaited_entry = cursor.last_entry
        return arrived, num_dead

    def _beside_columns(self, iteration: int, batch_ids: Sequence[bytes]) -> dict[bytes, bytes]:
        """Batch id → payload, of batches that have columns. Raises FenceViolation for one that is gone."""
        key, fields = self._keys.slot_of(iteration).items, [batch_field(batch_id.decode()) for batch_id in batch_ids]
        with self._broker.call():
            payloads: Any = self._broker.redis.hmget(key, fields)
        gone = [batch_id.decode() for batch_id, payload in zip(batch_ids, payloads, strict=True) if payload is None]
        if gone:  # a restarted server has lost it, or another trainer has cleared the iteration
            raise FenceViolation(f"batch {gone[0]} is gone, though it was published", field=key)
        return dict(zip(batch_ids, payloads, strict=True))

    def columns(self, batch: RolloutBatch) -> dict[str, tuple[bytes, ...]]:
        """Column → a value for each row, of what the job's stages made of a batch that has arrived.

        Raises FenceViolation where the ledger holds another batch by now, or they are gone: a restarted server has lost
        them, or the iteration was cleared; and ContractViolation for what is no output of its stage.
        """
        items = all_items(self._plan, batch)
        if not items:
            return {}
        fields = [item_fields(index + 1, batch.batch_id, item).columns for index, item in items]
        slot = self._keys.slot_of(batch.iteration)
        with self._broker.call():
            # The ledger last: where it still holds this batch, the columns are its. A full server takes no transaction.
            pipe: Any = self._broker.redis.pipeline(transaction=False)
            packed, noted = pipe.hmget(slot.items, fields).hget(slot.ledger, batch.batch_id).execute()
        known = batch_record(noted) if noted else None
        if not isinstance(known, Published) or known.digest != batch_digest(batch):
            raise FenceViolation(f"batch {batch.batch_id} is not what the ledger records by now", field="digest")
        return columns_of(self._plan, batch, packed)

    def stages_with_work(self, iteration: int) -> list[str]:
        """Returns the stages, in order, that have items of an open iteration in work, free or leased."""
        if not self._plan.stages:
            return []
        work = self._keys.slot_of(iteration).work
        with self._broker.call():
            pipe: Any = self._broker.redis.pipeline(transaction=False)
            for number in range(1, len(self._plan.stages) + 1):
                pipe.zcount(work, number * STAGE_BAND, f"({(number + 1) * STAGE_BAND}")
            counts = pipe.execute()
        return [stage.name for stage, count in zip(self._plan.stages, counts, strict=True) if count]

    def wait_for_rollouts(self, iteration: int, timeout_s: float) -> None:
        """Blocks until the iteration has a batch after the last one claimed or waited for, or for timeout_s.

        The next claim takes what a wait has brought, so that a batch crosses the connection once.
        """
        cursor, stream = self._cursor_of(iteration), self._keys.slot_of(iteration).rollouts
        block_ms = max(1, int(timeout_s * 1000))
        with self._broker.call(blocks_s=timeout_s):
            rows = self._broker.connections.ask(
                "XREAD", "COUNT", READ_AHEAD, "BLOCK", block_ms, "STREAMS", stream, cursor.awaited_entry
            )
        for entry, words in dict(rows or ()).get(stream.encode(), ()):
            fields = dict(zip(words[::2], words[1::2], strict=True))
            cursor.keep(entry.decode(), RolloutEntry(fields.get(b"batch"), fields[b"digest"], fields[b"batch_id"]))

    def dead_batches(self, iteration: int) -> dict[str, str]:
        """Batch id → reason, of an open iteration."""
        with self._broker.call():
            rows: Any = self._broker.redis.hgetall(self._keys.slot_of(iteration).ledger)
        batches = {batch_id.decode(): batch_record(value) for batch_id, value in rows.items()}
        return {batch_id: batch.reason for batch_id, batch in batches.items() if isinstance(batch, Dead)}

    def dispatch(self, iteration: int, batches: Iterable[PromptBatch]) -> int:
        """Puts batches of an open iteration in work that have not been there; how many.

        Raises FencedOff, or FenceViolation for an iteration that is not open, and for an evaluation whose version isn't
        made yet.
        """
        return self._dispatch(iteration, self._chunks(batches))

    def reconcile(self, iteration: int, batches: Sequence[PromptBatch]) -> int:
        """Dispatches what of an open iteration is neither settled nor in work; how many.

        Raises FencedOff, or FenceViolation where a restarted server has lost the opening of this iteration.
        """
        if self._lost(iteration, ()) is None:
            return 0
        lost: set[str] = set()
        batch_ids = iter([batch.batch_id for batch in batches])
        while some := list(islice(batch_ids, ASKED_AT_ONCE)):
            lost |= set(self._lost(iteration, some) or ())
        return self._dispatch(iteration, self._chunks(batch for batch in batches if batch.batch_id in lost))

    def _lost(self, iteration: int, batch_ids: Sequence[str]) -> list[str] | None:
        """Those of the batches that are nowhere; None where no batch of the iteration is."""
        outcome, *rest = self._fenced("reconcile", iteration=iteration, batch_ids=batch_ids)
        if outcome not in (b"whole", b"lost"):
            raise FenceViolation(f"the fence is not open at iteration {iteration}: {_said(outcome, rest)}")
        return None if outcome == b"whole" else [batch_id.decode() for batch_id in rest]

    def _dispatch(self, iteration: int, chunks: Iterable[DispatchChunk]) -> int:
        num_dispatched = 0
        for chunk in chunks:
            outcome, *value = self._fenced("dispatch", *chunk.payloads, iteration=iteration, batches=chunk.batches)
            if outcome == b"no_manifest":
                raise FenceViolation(f"a batch of iteration {iteration} lacks the version that samples it: no_manifest")
            if outcome != b"dispatched":
                raise FenceViolation(f"the fence is not open at iteration {iteration}: {_said(outcome, value)}")
            num_dispatched += value[0]
        return num_dispatched

    def _chunks(self, batches: Iterable[PromptBatch]) -> Iterator[DispatchChunk]:
        return dispatch_chunks(batches, num_open=self._num_open)

    def _cursor_of(self, iteration: int) -> RolloutCursor:
        return self._cursors[iteration % self._num_open]

    def commit(
        self,
        record: AuditRecord,
        trained: Mapping[str, str],
        *,
        event: JobEvent | None,
        opening: IterationOpening | None,
        made: tuple[int, str] | None,
    ) -> None:
        """Commits the oldest open iteration and opens the next in one script; safe to repeat.

        `trained` maps batch id to digest; `made` is the announced version that the iteration has made, with its digest,
        None where it only evaluated. Raises FencedOff, or FenceViolation for a ledger that is not complete,
        and for a record that doesn't follow the newest: a restart has lost what this trainer had committed.
        """
        chunks = self._chunks(opening.batches if opening else ())
        following, prompts = opening_arguments(opening, chunks) if opening else (None, [])
        outcome, *rest = self._fenced(
            "commit_iteration",
            encode(record),
            encode(event) if event else b"",
            *prompts,
            iteration=record.iteration,
            trained=dict(trained),
            made=KnownVersion(version=made[0], digest=made[1]) if made else None,
            opening=following,
            engine=self._engine,
            **_links(record),
        )
        if outcome not in (b"committed", b"already_committed"):
            raise FenceViolation(f"iteration {record.iteration} cannot be committed: {_said(outcome, rest)}")
        self._cursor_of(record.iteration).read_ahead.clear()
        if opening and outcome == b"committed":
            self._dispatch(opening.iteration, chunks)

    def confirm(self, iteration: int) -> None:
        """Returns when the commit of this iteration is on the server's disk, where the server can tell.

        Raises FenceViolation where it is gone: a restart has lost it after it was answered. BrokerUnavailable where the
        disk doesn't take it.
        """
        self._broker.durability.persisted(is_read_again=True)
        # A successor's fence tells it as well: what is committed is the job's.
        if read_fence(self._broker, self._keys).committed < iteration:
            raise FenceViolation(f"a restart of the server has lost the commit of iteration {iteration}")

    @functools.cached_property
    def _keys(self) -> JobKeys:
        return self._broker.job_keys(self._job_id, self._num_open)

    def _run(self, function: str, *payloads: bytes, **told: Any) -> list:
        return self._broker.run(function, *payloads, job=self._job_id, num_slots=self._num_open, **told)

    def _fenced(self, function: str, *payloads: bytes, **told: Any) -> list:
        """The function's answer to the holder of the epoch. Raises FencedOff."""
        answer = self._run(function, *payloads, epoch=self._epoch, **told)
        if answer[0] == b"fenced":
            raise self._fenced_off()
        return answer

    def _fenced_off(self) -> FencedOff:
        return FencedOff(f"epoch {self._epoch} is over: another trainer holds the job", field="trainer_epoch")


def _links(record: AuditRecord) -> dict[str, str]:
    return {"digest": record_digest(record), "previous": record.previous}


def _said(outcome: bytes, rest: Sequence[bytes | int]) -> str:
    return " ".join(item.decode() if isinstance(item, bytes) else str(item) for item in (outcome, *rest))
