"""The bytes of one job, named by their digest: what is a version, a checkpoint or a record stands elsewhere.

    {prefix}/{job}/run/{digest}         checkpoints and files of a run
    {prefix}/{job}/weights/{digest}     files of versions
    {prefix}/{job}/versions/{name}      lists of these (versions.py)
    {prefix}/{job}/pointers/{name}      names that are given once

    get ─▶ cache ─ hashed ─▶ bytes                              put ─▶ bucket, cache
             └ not there, or damaged ─▶ hosts, bucket ─ hashed ─▶ cache, bytes

Bytes never change under their name, so no reader can be told old ones, and two writers write the same.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import IO, Literal

from blake3 import blake3

from contracts.encoding.digests import Digest, content_digest, file_digest
from contracts.encoding.names import SEGMENT, check_job_id
from contracts.encoding.wire import Record
from contracts.errors import ContractViolation, InvalidInput, NotFound
from contracts.settings import StackSettings
from onbeat.base.metrics.wrong_reads import WRONG_READS
from onbeat.base.process.folders import written_whole
from onbeat.weights.objects.bucket import MOST_READS, Bucket, check_name
from onbeat.weights.objects.cache import HostCache, open_cache
from onbeat.weights.objects.hosts import CacheHost, CacheHosts

Area = Literal["run", "weights"]
DIGEST = "[0-9a-f]{64}"
REFRESHED_S = 1800.0
"""Age from which bytes that are put again are written again: a sweep by age takes them for left behind otherwise."""

log = logging.getLogger(__name__)


class Piece(Record, frozen=True, kw_only=True):
    """The digest and size of bytes that were stored."""

    digest: Digest
    num_bytes: int


@dataclass(kw_only=True)
class Blobs:
    """An area of a job in the object store, read through this host's cache and other hosts' caches. Thread-safe.

    `open_blobs` creates it; a job's versions and run files are written and read through it.

    Raises:
        ObjectsUnavailable: The store is away past the deadline.
        NotFound: No layer has the bytes.
    """

    bucket: Bucket
    cache: HostCache | None
    job_id: str
    area: Area
    deadline_s: float
    hosts: CacheHosts

    def check_writable(self) -> None:
        """Raises InvalidInput that names ONBEAT_OBJECTS for no such bucket, or one that this process may not write."""
        self.bucket.now(self._folder)

    def put(self, data: bytes | memoryview, *, again: bool = False) -> str:
        """Stores bytes, and returns their digest. Bytes that the store has already aren't sent.

        Args:
            data: The bytes.
            again: True sends them all the same, as where readers find them damaged.
        """
        digest = content_digest(data)
        if again or not self._is_fresh(digest, len(data)):
            self.bucket.put(self._key(digest), data)
        if self.cache is not None:
            self.cache.put(digest, data)
        return digest

    def put_file(self, path: Path) -> Piece:
        """Stores a file's bytes, part by part.

        Raises ContractViolation for a file that changes meanwhile; nothing is stored of it.
        """
        piece = Piece(digest=file_digest(path), num_bytes=path.stat().st_size)
        if self._is_fresh(piece.digest, piece.num_bytes):
            return piece
        sent = blake3()

        def parts(part_bytes: int) -> Iterator[bytes]:
            sent.reset()
            with path.open("rb") as file:
                while part := file.read(part_bytes):
                    sent.update(part)
                    yield part

        self.bucket.put_parts(self._key(piece.digest), parts, num_bytes=piece.num_bytes)
        if sent.hexdigest() != piece.digest:
            self.drop([piece.digest])
            raise ContractViolation("changed while it was stored", field=str(path))
        return piece

    def get(self, digest: str, *, num_bytes: int) -> bytes:
        """Reads bytes; they are those of the digest, from whichever layer they come."""
        file = BytesIO()
        self._read(digest, num_bytes, file, lambda cache: cache.put(digest, file.getbuffer()))
        return file.getvalue()

    def fetch(self, digest: str, path: Path, *, num_bytes: int) -> None:
        """Reads bytes into a file, which is there whole and durable, or not at all. Raises OSError."""
        with written_whole(path) as file:
            self._read(digest, num_bytes, file, lambda cache: cache.put_file(digest, file))

    def drop(self, digests: Collection[str]) -> None:
        """Deletes those of them that are there; a cache forgets them by itself."""
        self.bucket.delete([self._key(digest) for digest in digests])

    def sweep(self, keep: Collection[str], *, older_than_s: float) -> None:
        """Deletes the objects that were written longer ago than `older_than_s`, by the store's clock, except for
        `keep`.
        """
        keys = {self._key(digest) for digest in keep}
        others = {key: at for key, at in self.bucket.objects(self._folder).items() if key not in keys}
        if others:
            # Ages are measured by the store's own clock, which wrote the times of the objects.
            before = self.bucket.now(self._folder) - timedelta(seconds=older_than_s)
            self.bucket.delete([key for key, written_at in others.items() if written_at < before])

    def drop_versions(self) -> None:
        """Deletes the versions of the job, whichever area of it this is."""
        self.bucket.delete_below(f"{self.job_id}/versions", f"{self.job_id}/weights")

    def put_pointer(self, name: str, data: bytes) -> bool:
        """Gives a name to bytes once; False where it is given to others already."""
        return self.bucket.create(self._pointer(name), data)

    def pointers(self) -> list[str]:
        """Returns the names that point to bytes, sorted."""
        return sorted(key.rpartition("/")[2] for key in self.bucket.objects(f"{self.job_id}/pointers"))

    def get_pointer(self, name: str) -> bytes:
        """Returns the bytes that a name was given to, at most a MiB; no digest says what they must be."""
        return self.bucket.get(self._pointer(name), most_bytes=1024**2)

    @property
    def _folder(self) -> str:
        return f"{self.job_id}/{self.area}"

    def _key(self, digest: str) -> str:
        return f"{self._folder}/{check_name(digest, DIGEST)}"

    def _pointer(self, name: str) -> str:
        return f"{self.job_id}/pointers/{check_name(name, SEGMENT)}"

    def _is_fresh(self, digest: str, num_bytes: int) -> bool:
        try:
            there, written_at = self.bucket.size_and_age(self._key(digest))
        except NotFound:
            return False
        # The clocks of store and host may differ by some minutes.
        return there == num_bytes and time.time() - written_at.timestamp() < REFRESHED_S

    def _read(self, digest: str, num_bytes: int, file: IO[bytes], keep: Callable[[HostCache], None]) -> None:
        """Reads bytes into a file from the nearest layer that has them.

        Args:
            digest: The bytes' digest.
            num_bytes: Their number.
            file: The file.
            keep: Puts bytes that came from another layer into the cache.
        """
        check_name(digest, DIGEST)
        if self.cache is None:
            self._verified(digest, num_bytes, file)
        elif not self.cache.read(digest, _emptied(file)):
            with self.cache.locked(digest[:2], wait_s=self.deadline_s):
                if not self.cache.read(digest, _emptied(file)):
                    self._verified(digest, num_bytes, file)
                    keep(self.cache)

    def _verified(self, digest: str, num_bytes: int, file: IO[bytes]) -> None:
        """Reads bytes into a file until they have the digest: from other hosts, then from the store.

        Bytes that come wrong from the store twice alike are stored wrong. They are deleted, if the store gives back
        correctly what it is given now: else a proxy answers in its place. Bytes that come wrong in two ways were
        spoilt on their way. An object of more bytes than `num_bytes` stays: the caller may be mistaken, and a writer
        that puts it again sees that its size is another.

        Args:
            digest: The blake3 digest of the bytes.
            num_bytes: Their number.
            file: The file, which is emptied before each try.

        Raises:
            NotFound: No layer has the bytes as they were put.
        """

        def came(source: Bucket | CacheHost) -> str:
            """Reads the bytes from a source; returns their digest, "" where there are more than `num_bytes`."""
            hasher = blake3()
            take = _emptied(file)

            def take_hashed(piece: memoryview) -> None:
                hasher.update(piece)
                take(piece)

            num_came = source.stream(self._key(digest), take_hashed, most_bytes=num_bytes)
            return hasher.hexdigest() if num_came <= num_bytes else ""

        for host in self.hosts:
            with contextlib.suppress(NotFound):
                if came(host) == digest:
                    return
                WRONG_READS["host"] += 1
        wrong: set[str] = set()
        for _ in range(MOST_READS):
            came_as = came(self.bucket)
            if came_as == digest:
                return
            WRONG_READS["store"] += 1
            log.warning(
                "%s came from the object store with other bytes, those of %s",
                self._key(digest),
                came_as or "more bytes",
            )
            if not came_as or came_as in wrong:
                break
            wrong.add(came_as)
        else:
            came_as = ""
        try:
            self.bucket.now(self._folder)
            self.drop([digest] if came_as else [])
        except InvalidInput as error:
            log.warning("%s came with wrong bytes, and can't be deleted: %s", self._key(digest), error)
        raise NotFound("neither a cache nor the object store has the right bytes", field=self._key(digest))


def open_blobs(
    settings: StackSettings, job_id: str, area: Area, *, deadline_s: float, sleep: Callable[[float], None] = time.sleep
) -> Blobs:
    """Opens an area of a job; sends no request to the store.

    Args:
        settings: The stack's settings.
        job_id: The job.
        area: The area.
        deadline_s: The longest that each call goes on without a byte from the store, in seconds.
        sleep: Pauses between tries; it may raise.

    Raises:
        InvalidInput: The setting, which it names, is no URL of a store, or a cache or hosts that can't be used.
    """
    return Blobs(
        bucket=Bucket(settings.objects, deadline_s=deadline_s, sleep=sleep),
        cache=open_cache(settings.cache, cache_mb=settings.cache_mb) if settings.cache else None,
        hosts=CacheHosts(settings),
        job_id=check_job_id(job_id),
        area=area,
        deadline_s=deadline_s,
    )


def _emptied(file: IO[bytes]) -> Callable[[memoryview], object]:
    file.seek(0)
    file.truncate()
    return file.write
