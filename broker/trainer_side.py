"""The trainer's side of one job: epoch, weights, open, claim, commit. Every call but `acquire` needs the epoch (I4)."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from broker.awaited_batch import awaited_batch
from broker.batch_cache import READ_AHEAD, RolloutCursor, RolloutEntry
from broker.connection.bounds import ASKED_AT_ONCE, RESTORED_AT_ONCE
from broker.connection.client import Broker
from broker.fence import FenceState, KnownVersion, read_fence
from broker.keys import STAGE_BAND, JobKeys, OpenKeys, batch_field, chunk_field, item_fields
from broker.ledger import Dead, Published, batch_record
from broker.openings import DispatchChunk, IterationOpening, dispatch_chunks, opening_arguments
from broker.proofs import fence_probe
from contracts.encoding.wire import Record, decode, encode
from contracts.errors import Conflict, FencedOff, FenceViolation, NotFound
from contracts.events import AuditRecord, JobEvent, Rewound, record_digest
from contracts.experience.graph import StageGraph, all_items, columns_of
from contracts.jobs import JobState
from contracts.monitor import GeneratorSeen
from contracts.rollouts import PromptBatch, RolloutBatch, batch_digest
from contracts.versions import WeightManifest, WeightShard

NO_STAGES = StageGraph()


class Arrived(Record, frozen=True, kw_only=True):
    """A published batch and the digest that the ledger holds for it."""

    batch: RolloutBatch
    digest: str
    num_bytes: int


class TrainerSide:
    """The side of one trainer at one job.

    A trainer creates it, acquires the job, and then opens, claims and commits iterations until it is fenced off.
    """

    def __init__(
        self,
        broker: Broker,
        job_id: str,
        *,
        owner: str,
        lease_s: float,
        num_open: int = 1,
        graph: StageGraph = NO_STAGES,
    ) -> None:
        """Names the trainer to the job; nothing is read yet.

        Args:
            broker: The broker.
            job_id: The job.
            owner: The name of this life of the trainer: a repeat by the same owner keeps the lease.
            lease_s: Seconds for which the lease is taken.
            num_open: Iterations that may be open at once, as the job's spec says.
            graph: The stages of the job's spec.
        """
        self._broker = broker
        self._job_id = job_id
        self._num_open = num_open
        self._graph = graph
        self._owner = owner
        self._lease_ms = int(lease_s * 1000)
        self._epoch: int | None = None
        self._engine: str | None = None
        """The kind of engine that sampled the first rollouts that this trainer claimed, of a deterministic job."""
        # One for each slot: iteration t reads with the cursor of t % num_open.
        self._cursors = [RolloutCursor() for _ in range(num_open)]

    @property
    def trainer_epoch(self) -> int:
        """The epoch that this trainer holds. Raises FencedOff before it has acquired the job."""
        if self._epoch is None:
            raise FencedOff("this trainer holds no epoch: it has not acquired the job", field="trainer_epoch")
        return self._epoch

    def acquire(self, sealed: int = 0) -> int:
        """Acquires the job.

        Args:
            sealed: The number of the hosts whose ranks it leads (hosts_side.py); 0 where one host has all.

        Returns:
            The new trainer epoch, a fencing token.

        Raises:
            Conflict: Another trainer's lease lives, or the hosts are no group any more.
            NotFound: The job was removed.
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
        """Extends the lease and returns the job's state, so that a cancel is noticed. Raises FencedOff."""
        _, state = self._fenced("renew_trainer", lease_ms=self._lease_ms)
        return JobState(state.decode())

    def release(self) -> None:
        """Gives the lease back, so that a successor need not wait. Raises FencedOff."""
        self._fenced("renew_trainer", lease_ms=0)

    def fence(self) -> FenceState:
        """Reads the fence as it stands. Raises FencedOff where it is another trainer's by now."""
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
        outcome, *rest = self._fenced(
            "publish_weights",
            encode(manifest),
            *fence_probe(manifest),
            policy_version=version,
            oldest_kept=oldest_kept,
            chunk_bytes=manifest.num_chunk_bytes,
        )
        if outcome != b"published":
            raise FenceViolation(f"version {version} cannot be announced: {_words_of(outcome, rest)}", field="digest")
        # Without a lag the opening wakes the generators: they hear of files while they wait for it.
        if self._num_open > 1:
            # It wakes the generators that receive versions while they sample: they wait for files.
            file = manifest.files[-1]
            path = f"{manifest.directory}/{file.name}"
            self.announce_shard(
                WeightShard(policy_version=version, path=path, name=file.name, num_bytes=file.num_bytes)
            )

    def announce_shard(self, shard: WeightShard) -> None:
        """Announces a file to generators before its version is announced. Raises FencedOff."""
        self._fenced("announce_shard", encode(shard))

    def record_files(self, listed: bytes) -> None:
        """Says which objects the files of the run are (onbeat/run_folder/run_files.py). Raises FencedOff."""
        self._fenced("record_files", listed)

    def put_chunk(self, policy_version: int, name: str, number: int, data: bytes, *, keep_s: float) -> None:
        """Puts a chunk of a version's file into Redis.

        Args:
            policy_version: The version.
            name: The file.
            number: The chunk's place in the file, from 0.
            data: Its bytes.
            keep_s: Seconds without another chunk after which all chunks go.

        Raises:
            FencedOff: Another trainer holds the job.
            BrokerFull: The server is at maxmemory.
        """
        field = chunk_field(policy_version, name, number)
        self._fenced("put_chunk", data, field=field, keep_ms=int(keep_s * 1000))

    def drop_chunks_before(self, policy_version: int, kept_versions: Collection[int] = ()) -> None:
        """Removes the chunks of versions older than policy_version but `kept_versions`. Raises FencedOff."""
        self._fenced("drop_chunks", oldest_kept=policy_version, kept=list(kept_versions))

    def open_iteration(self, opening: IterationOpening, versions: Mapping[int, str]) -> bool:
        """Opens an iteration.

        The first batches go out with the opening, the rest after it; what a death leaves undone `reconcile` does.

        Args:
            opening: The iteration, with its batches.
            versions: Version → weights digest, of announced ones that the window's batches may be sampled with.

        Returns:
            True if it was opened now, False if it stood open already: its batches go on.

        Raises:
            FencedOff: Another trainer holds the job.
            FenceViolation: The iteration is not the next one, as many as may be are open, or its oldest version is
                missing.
        """
        chunks = self._chunks(opening.batches)
        following, payloads = opening_arguments(opening, chunks)
        known = [KnownVersion(version=version, digest=digest) for version, digest in sorted(versions.items())]
        outcome, *rest = self._fenced("open_iteration", *payloads, opening=following, versions=known)
        if outcome not in (b"opened", b"already_open"):
            raise FenceViolation(f"iteration {opening.iteration} cannot open: {_words_of(outcome, rest)}")
        if outcome == b"opened":
            self._dispatch(opening.iteration, chunks)
        return outcome == b"opened"

    def rewind(self, record: AuditRecord) -> None:
        """Makes record.iteration the next to open, and writes the rewind into the chain and the events; safe to repeat.

        Raises FencedOff, or FenceViolation for an iteration that would leave a gap, or a record that follows another.
        """
        event = encode(Rewound.by(record, committed=self.fence().committed))
        outcome, *rest = self._fenced("rewind", encode(record), event, iteration=record.iteration, **_links(record))
        if outcome not in (b"rewound", b"already_rewound"):
            raise FenceViolation(f"iteration {record.iteration} cannot be next: {_words_of(outcome, rest)}")
        for cursor in self._cursors:
            cursor.read_ahead.clear()

    def restore(self, records: Sequence[AuditRecord]) -> None:
        """Gives the chain records back that a server which came back older has lost, with nothing open behind them.

        records: oldest first; the first follows the newest one of the chain. Raises FencedOff, and FenceViolation where
        they don't follow.
        """
        for first in range(0, len(records), RESTORED_AT_ONCE):
            chunk = records[first : first + RESTORED_AT_ONCE]
            newest = chunk[-1]
            # A rewind names the iteration that is replayed first: the one before it is the last that stands.
            committed = newest.iteration if newest.kind == "commit" else newest.iteration - 1
            outcome, *rest = self._fenced(
                "restore_chain",
                *[encode(record) for record in chunk],
                committed=committed,
                # The chain's digests in the same order as the payloads.
                digests=[record_digest(record) for record in chunk],
                previous=chunk[0].previous,
            )
            if outcome not in (b"restored", b"already_restored"):
                raise FenceViolation(f"iteration {newest.iteration} cannot be restored: {_words_of(outcome, rest)}")

    def claim_rollouts(self, iteration: int, *, max_batches: int) -> tuple[list[Arrived], int]:
        """Claims published batches of an open iteration. Doesn't block.

        The first calls also return what an earlier epoch claimed and did not commit.

        Args:
            iteration: The iteration.
            max_batches: Most batches.

        Returns:
            (the batches in the order of their arrival, the number of dead batches of the iteration).

        Raises:
            FencedOff: Another trainer holds the job.
            FenceViolation: A restarted server has lost the opening of this iteration, or a batch is not the ledger's.
        """
        cursor = self._cursor_of(iteration)
        read_ahead = cursor.read_ahead
        outcome, num_dead, *rows = self._fenced(
            "claim_rollouts",
            iteration=iteration,
            max_batches=max_batches,
            last_entry=cursor.last_entry,
            read_ahead=list(read_ahead),
        )
        if outcome != b"claimed":
            raise FenceViolation(f"the fence is not open at iteration {iteration}: {_words_of(outcome, [num_dead])}")
        engine, *rows = rows
        if rows and engine and self._engine is None:
            self._engine = engine.decode(errors="replace")
        # Four items each: the entry's id, its payload, the digest, the batch's id.
        claimed = {
            entry_id.decode(): RolloutEntry(*fields)
            for entry_id, *fields in zip(rows[0::4], rows[1::4], rows[2::4], rows[3::4], strict=True)
        }
        for entry_id, entry in claimed.items():
            if entry.payload == b"":  # the script leaves out what a wait has brought already
                claimed[entry_id] = read_ahead[entry_id]
        payloads: dict[bytes, bytes] = {}
        with_columns = [entry.batch_id for entry in claimed.values() if entry.payload is None]
        if with_columns:
            payloads = self._beside_columns(iteration, with_columns)
        arrived: list[Arrived] = []
        for entry_id, entry in claimed.items():
            # None: the batch has columns, and was read next to them. b"" was replaced above.
            payload = payloads[entry.batch_id] if entry.payload is None else entry.payload
            digest = entry.digest.decode()
            batch = decode(payload, RolloutBatch)
            # Over what was decoded: a payload that another program has changed is found here, before it is trained.
            if batch_digest(batch) != digest:
                raise FenceViolation(f"batch {batch.batch_id} is not what the ledger recorded", field="digest")
            arrived.append(Arrived(batch=batch, digest=digest, num_bytes=len(payload)))
            # The cursor moves behind a batch once it has been read whole.
            read_ahead.pop(entry_id, None)
            cursor.last_entry = entry_id
        cursor.awaited_entry = cursor.last_entry
        return arrived, num_dead

    def _beside_columns(self, iteration: int, batch_ids: Sequence[bytes]) -> dict[bytes, bytes]:
        """Returns batch id → payload, of batches that have columns. Raises FenceViolation for one that is gone."""
        key = self._keys.slot_of(iteration).items
        fields = [batch_field(batch_id.decode()) for batch_id in batch_ids]
        with self._broker.call():
            payloads: Any = self._broker.redis.hmget(key, fields)
        gone = [batch_id.decode() for batch_id, payload in zip(batch_ids, payloads, strict=True) if payload is None]
        if gone:  # a restarted server has lost it, or another trainer has cleared the iteration
            raise FenceViolation(f"batch {gone[0]} is gone, though it was published", field=key)
        return dict(zip(batch_ids, payloads, strict=True))

    def columns(self, batch: RolloutBatch) -> dict[str, tuple[bytes, ...]]:
        """Reads the columns that the job's stages made of a batch that has arrived.

        Returns:
            Column → a value for each row.

        Raises:
            FenceViolation: The ledger holds another batch by now, or the columns are gone: a restarted server has lost
                them, or the iteration was cleared.
            ContractViolation: A value is no output of its stage.
        """
        items = all_items(self._graph, batch)
        if not items:
            return {}
        # The graph counts stages from 0, keys from 1.
        fields = [item_fields(index + 1, batch.batch_id, item).columns for index, item in items]
        slot = self._keys.slot_of(batch.iteration)
        with self._broker.call():
            # The ledger last: where it still holds this batch, the columns are its. A full server takes no transaction.
            pipe: Any = self._broker.redis.pipeline(transaction=False)
            packed, record_bytes = pipe.hmget(slot.items, fields).hget(slot.ledger, batch.batch_id).execute()
        record = batch_record(record_bytes) if record_bytes else None
        if not isinstance(record, Published) or record.digest != batch_digest(batch):
            raise FenceViolation(f"batch {batch.batch_id} is not what the ledger records by now", field="digest")
        return columns_of(self._graph, batch, packed)

    def stages_with_work(self, iteration: int) -> list[str]:
        """Returns the stages, in order, that have items of an open iteration in work, free or leased."""
        if not self._graph.stages:
            return []
        work = self._keys.slot_of(iteration).work
        with self._broker.call():
            pipe: Any = self._broker.redis.pipeline(transaction=False)
            for number in range(1, len(self._graph.stages) + 1):
                # The scores of a stage, up to the next one's first, which "(" leaves out.
                pipe.zcount(work, number * STAGE_BAND, f"({(number + 1) * STAGE_BAND}")
            counts = pipe.execute()
        return [stage.name for stage, count in zip(self._graph.stages, counts, strict=True) if count]

    def wait_for_rollouts(self, iteration: int, timeout_s: float) -> None:
        """Blocks until the iteration has a batch after the last one claimed or waited for, or for timeout_s.

        The next claim takes what a wait has brought, so that a batch crosses the connection once.
        """
        cursor = self._cursor_of(iteration)
        stream = self._keys.slot_of(iteration).rollouts
        # BLOCK 0 would wait for ever.
        block_ms = max(1, int(timeout_s * 1000))
        with self._broker.call(blocks_s=timeout_s):
            rows = self._broker.connections.ask(
                "XREAD", "COUNT", READ_AHEAD, "BLOCK", block_ms, "STREAMS", stream, cursor.awaited_entry
            )
        for entry_id, words in dict(rows or ()).get(stream.encode(), ()):
            fields = dict(zip(words[::2], words[1::2], strict=True))
            cursor.keep(entry_id.decode(), RolloutEntry(fields.get(b"batch"), fields[b"digest"], fields[b"batch_id"]))

    def dead_batches(self, iteration: int) -> dict[str, str]:
        """Returns batch id → reason, of the dead batches of an open iteration."""
        with self._broker.call():
            rows: Any = self._broker.redis.hgetall(self._keys.slot_of(iteration).ledger)
        batches = {batch_id.decode(): batch_record(value) for batch_id, value in rows.items()}
        return {batch_id: batch.reason for batch_id, batch in batches.items() if isinstance(batch, Dead)}

    def awaited_batch(self, live: Sequence[GeneratorSeen]) -> str:
        """Says for which batch of the oldest open iteration this trainer waits, and why; "" where it takes no longer
        than usual. live: the live generators.
        """
        return awaited_batch(self._broker, self._keys, self.fence(), live=live, now_s=self._broker.now_s())

    def dispatch(self, iteration: int, batches: Iterable[PromptBatch]) -> int:
        """Puts batches of an open iteration in work that have not been there, and returns how many.

        Raises FencedOff, or FenceViolation for an iteration that is not open, and for an evaluation whose version isn't
        made yet.
        """
        return self._dispatch(iteration, self._chunks(batches))

    def reconcile(self, iteration: int, batches: Sequence[PromptBatch]) -> int:
        """Dispatches the batches of an open iteration that are neither settled nor in work, and returns how many.

        Raises FencedOff, or FenceViolation where a restarted server has lost the opening of this iteration.
        """
        # Without ids first: in a whole iteration, which is nearly always, no batch is asked for.
        if self._lost(iteration, ()) is None:
            return 0
        lost: set[str] = set()
        batch_ids = [batch.batch_id for batch in batches]
        for start in range(0, len(batch_ids), ASKED_AT_ONCE):
            lost |= set(self._lost(iteration, batch_ids[start : start + ASKED_AT_ONCE]) or ())
        return self._dispatch(iteration, self._chunks(batch for batch in batches if batch.batch_id in lost))

    def _lost(self, iteration: int, batch_ids: Sequence[str]) -> list[str] | None:
        """Returns the batches that are neither settled nor in work; None where no batch of the iteration is so."""
        outcome, *rest = self._fenced("reconcile", iteration=iteration, batch_ids=batch_ids)
        if outcome not in (b"whole", b"lost"):
            raise FenceViolation(f"the fence is not open at iteration {iteration}: {_words_of(outcome, rest)}")
        if outcome == b"whole":
            return None
        return [batch_id.decode() for batch_id in rest]

    def _dispatch(self, iteration: int, chunks: Iterable[DispatchChunk]) -> int:
        num_dispatched = 0
        for chunk in chunks:
            outcome, *value = self._fenced("dispatch", *chunk.payloads, iteration=iteration, batches=chunk.batches)
            if outcome == b"no_manifest":
                raise FenceViolation(f"a batch of iteration {iteration} lacks the version that samples it: no_manifest")
            if outcome != b"dispatched":
                raise FenceViolation(f"the fence is not open at iteration {iteration}: {_words_of(outcome, value)}")
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
        next_version: tuple[int, str] | None,
    ) -> None:
        """Commits the oldest open iteration and opens the next in one script; safe to repeat.

        Args:
            record: The iteration's record in the audit chain.
            trained: Batch id → digest, of each batch that was trained.
            event: The event of the commit; None where the iteration only evaluated.
            opening: The iteration to open; None where none follows.
            next_version: The announced (version, digest) that the iteration has made; None where it only evaluated.

        Raises:
            FencedOff: Another trainer holds the job.
            FenceViolation: The ledger is not complete, or the record doesn't follow the newest one: a restart has lost
                what this trainer had committed.
        """
        chunks = self._chunks(opening.batches if opening else ())
        following: dict[str, Any] | None = None
        prompts: list[bytes] = []
        if opening:
            following, prompts = opening_arguments(opening, chunks)
        known: KnownVersion | None = None
        if next_version:
            version, digest = next_version
            known = KnownVersion(version=version, digest=digest)
        # Payloads in the order in which the script takes them: the record, the event, the first prompt batches.
        outcome, *rest = self._fenced(
            "commit_iteration",
            encode(record),
            encode(event) if event else b"",
            *prompts,
            iteration=record.iteration,
            trained=dict(trained),
            made=known,
            opening=following,
            engine=self._engine,
            **_links(record),
        )
        if outcome not in (b"committed", b"already_committed"):
            raise FenceViolation(f"iteration {record.iteration} cannot be committed: {_words_of(outcome, rest)}")
        # The slot is the next iteration's now: what was read ahead of it is gone from the stream.
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

    def _run(self, function: str, *payloads: bytes, **arguments: Any) -> list:
        return self._broker.run(function, *payloads, job=self._job_id, num_slots=self._num_open, **arguments)

    def _fenced(self, function: str, *payloads: bytes, **arguments: Any) -> list:
        """Runs a function that answers the holder of the epoch alone. Raises FencedOff."""
        answer = self._run(function, *payloads, epoch=self._epoch, **arguments)
        if answer[0] == b"fenced":
            raise self._fenced_off()
        return answer

    def _fenced_off(self) -> FencedOff:
        return FencedOff(f"epoch {self._epoch} is over: another trainer holds the job", field="trainer_epoch")


def _links(record: AuditRecord) -> dict[str, str]:
    """Returns the digests that put a record into the chain: its own, and that of the record before."""
    return {"digest": record_digest(record), "previous": record.previous}


def _words_of(outcome: bytes, rest: Sequence[bytes | int]) -> str:
    words = [item.decode() if isinstance(item, bytes) else str(item) for item in (outcome, *rest)]
    return " ".join(words)
