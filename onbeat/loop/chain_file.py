"""The audit chain in the run folder, beside the one in Redis: what a server that comes back older is given back.

    a record that the fence took ─▶ Redis, audit ──────────────── lost with the server's last writes
                                └─▶ chain.jsonl, then checkpoint ─▶ `after`: what follows from Redis' newest record

Every line is a record that the fence has accepted: it is appended after the commit, or the rewind. A record names the
one before it by digest, and digests are computed of what is read: a torn, changed or foreign line follows from nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from broker.job_store import JobStore
from broker.trainer_side import TrainerSide
from contracts.encoding.json_lines import append_json_lines, open_plain
from contracts.encoding.wire import decode_json
from contracts.errors import InvalidInput
from contracts.events import AuditRecord, record_digest, versions_of
from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec
from onbeat.base.process.folders import sync, usable
from onbeat.loop.chain import first_version

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 64 * 1024 * 1024
"""Far more than the record of the largest iteration: a longer line is none of ours."""


class ChainFile:
    """A trainer's view of the file; its records stay on disk."""

    def __init__(self, folder: RunFolder) -> None:
        """Reads which record follows which. Raises OnbeatError where the file can't be read."""
        self._path: Path = folder.chain
        self._previous: dict[str, str] = {}
        """Digest of each record → of the one before it, in the order in which they were written."""
        for digest, record in self._scan():
            self._previous.setdefault(digest, record.previous)

    def append(self, record: AuditRecord, digest: str = "") -> None:
        """Adds a record that the fence has accepted, unless it is there. digest: its own, where that is known.

        Raises OnbeatError.
        """
        digest = digest or record_digest(record)
        if digest in self._previous:
            return
        with usable(self._path, to_be="written"):
            append_json_lines(self._path, [record])
        self._previous[digest] = record.previous

    def sync(self) -> None:
        """Returns when all of it is on disk, its name too. Raises OnbeatError."""
        with usable(self._path, to_be="written"), contextlib.suppress(FileNotFoundError):  # no record yet
            for path in (self._path, self._path.parent):
                sync(path)

    def after(self, link: str) -> list[AuditRecord]:
        """The records that follow from the one with digest `link`, oldest first; "": from the first one on.

        Of several futures, as a replay after a rewind that a server forgot makes them, it is the one that was written
        last. Raises OnbeatError.
        """
        follows = {link}
        newest = link
        for digest, previous in self._previous.items():
            if previous in follows:
                follows.add(digest)
                newest = digest
        path: list[str] = []
        while newest != link:
            path.insert(0, newest)
            newest = self._previous[newest]
        records = {digest: record for digest, record in self._scan() if digest in path} if path else {}
        return [records[digest] for digest in path]

    def _scan(self) -> Iterator[tuple[str, AuditRecord]]:
        """(digest, record) of each line that is one. Raises OnbeatError."""
        with usable(self._path, to_be="read"), contextlib.suppress(FileNotFoundError), open_plain(self._path) as file:
            while line := file.readline(MAX_LINE_BYTES):
                with contextlib.suppress(InvalidInput):  # a torn line, or a foreign one
                    record = decode_json(line, AuditRecord)
                    yield record_digest(record), record


@dataclass(frozen=True, kw_only=True)
class RunChain:
    """The audit chain of a job as its next trainer finds it."""

    records: list[AuditRecord]
    """The records in Redis, without their batches."""
    last_link: str
    """Digest of the newest of them; "" where there is none."""
    lost: list[AuditRecord]
    """Records that follow from it in the run folder, and are not in Redis, which has come back older."""

    def versions(self, committed: int, iterations: int) -> dict[int, str]:
        """Version → digest, of those that may be gone on with. committed: by the fence; iterations: of the spec."""
        whole = [*self.records, *self.lost]
        return first_version(whole) | versions_of(whole, min(_committed(self.lost, committed), iterations))

    def to_restore(self, policy_version: int, weights_digest: str) -> list[AuditRecord]:
        """The lost records up to the one that made this version; [] where Redis knows it."""
        if versions_of(self.records).get(policy_version) == weights_digest:
            return []
        numbers = [
            number
            for number, record in enumerate(self.lost, start=1)
            if (record.policy_version + 1, record.next_weights_digest) == (policy_version, weights_digest)
        ]
        return self.lost[: numbers[-1]] if numbers else []


def read_chain(jobs: JobStore, job_id: str, spec: JobSpec, file: ChainFile) -> RunChain:
    """Reads both, and gives the file what it lacks: a trainer may die between a commit and its line.

    Raises OnbeatError.
    """
    records, last_link = jobs.audit_outline(job_id, seen=file.append)
    # The kind of engine that samples a deterministic job stands in Redis from the first claim on, and in no record: a
    # server without a commit may have lost it, and another kind must not go on from what the first has sampled (I7).
    is_known = bool(records) or not spec.deterministic
    return RunChain(records=records, last_link=last_link, lost=file.after(last_link) if is_known else [])


def restored(chain: RunChain, side: TrainerSide, *, policy_version: int, weights_digest: str) -> RunChain:
    """Gives Redis back what it lost up to this version, which is what the trainer goes on with. Raises FencedOff."""
    records = chain.to_restore(policy_version, weights_digest)
    if not records:
        return chain
    log.warning(
        "Redis is older than version %d in the run folder: %d records of the audit chain are given back to it, up to "
        "iteration %d",
        policy_version,
        len(records),
        records[-1].iteration,
    )
    side.restore(records)
    return RunChain(records=[*chain.records, *records], last_link=record_digest(records[-1]), lost=[])


def _committed(records: list[AuditRecord], before: int) -> int:
    """The last iteration that stands after these records."""
    if not records:
        return before
    newest = records[-1]
    return newest.iteration if newest.kind == "commit" else newest.iteration - 1
