"""A host's cache: bytes in files that are named by their digest, bounded, hashed again each time that they are read.

    folder/
        owner.json       the host, and its boot: a folder that two hosts share is refused, for locks end at the host
        locks/00 … ff    a lock for each first byte of a digest: of several processes that miss one, one fetches it
        blobs/DIGEST     mode 0600; its time is that of the last use, and the oldest make room
        blobs/.…         being written

No trouble with it is an error: a file that is damaged is deleted, a disk that is full takes nothing, and the bytes come
from the next layer.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import IO

from blake3 import blake3

from contracts.encoding.wire import Record, decode_json, encode_json
from contracts.errors import InvalidInput
from onbeat.base.metrics.wrong_reads import WRONG_READS
from onbeat.base.process.folders import make_private, written_whole

SETTING = "ONBEAT_CACHE"
CURE = "give each host a folder of its own"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
POLL_S = 0.02
OWNER_S = 10.0
"""Longest that another process of the host takes to say whose folder it is."""
ABANDONED_S = 3600.0
"""Age at which a file that is being written was left by a process that was killed."""
PIECE_BYTES = 8 * 1024**2

log = logging.getLogger(__name__)


class Owner(Record, frozen=True, kw_only=True):
    """The stack that a cache's folder belongs to."""

    host: str
    boot_id: str
    """The running kernel: containers of one machine share it, and locks work among them."""


class HostCache:
    """Thread-safe, and shared with other processes of this host. Only `open_cache` raises."""

    def __init__(self, folder: Path, *, most_bytes: int) -> None:
        self._blobs = folder / "blobs"
        self._locks = folder / "locks"
        self._most_bytes = most_bytes
        for subfolder in (self._blobs, self._locks):
            make_private(subfolder)

    def read(self, digest: str, take: Callable[[memoryview], object]) -> bool:
        """Hands on the bytes of a digest.

        Bytes that don't have the digest, or that `take` raises an OSError for, count for nothing, though some were
        handed on.

        Returns:
            True where the cache had the bytes and they have their digest.
        """
        path = self._blobs / digest
        hasher = blake3()
        try:
            with path.open("rb") as file:
                while piece := file.read(PIECE_BYTES):
                    hasher.update(piece)
                    take(memoryview(piece))
            if hasher.hexdigest() == digest:
                os.utime(path)
                return True
            WRONG_READS["cache"] += 1
            log.warning("%s in the cache has other bytes than its name says, and is deleted", path)
            path.unlink()
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("the cache of this host can't be used: %s", error)
        return False

    def whole_file(self, digest: str) -> Path | None:
        """Returns the file of the bytes, as they were a moment ago; None where `read` would return False."""
        if self.read(digest, lambda _: None):
            return self._blobs / digest
        return None

    def put(self, digest: str, data: bytes | memoryview) -> None:
        """Keeps bytes whose digest this is, if there is room."""
        self._put(digest, len(data), lambda file: file.write(data))

    def put_file(self, digest: str, source: IO[bytes]) -> None:
        """Keeps a copy of an open file whose digest this is, if there is room."""
        source.flush()
        self._put(digest, os.fstat(source.fileno()).st_size, lambda file: shutil.copyfile(source.name, file.name))

    def _put(self, digest: str, num_bytes: int, write: Callable[[IO[bytes]], object]) -> None:
        if num_bytes > self._most_bytes:
            return
        try:
            with written_whole(self._blobs / digest, durable=False) as file:
                self._reserve(file, num_bytes)
                write(file)
        except OSError as error:
            log.warning("the cache of this host can't keep another file: %s", error)

    def _reserve(self, file: IO[bytes], num_bytes: int) -> None:
        """Makes room, and a file of that size in it, so that processes that write at once stay within the limit.

        Raises OSError where others are writing as much.
        """
        with self.locked("room", wait_s=OWNER_S):
            files = sorted(self._files())
            left = sum(size for _, size, _ in files) + num_bytes - self._most_bytes
            abandoned_s = time.time() - ABANDONED_S
            for used_s, size, path in files:
                if (used_s < abandoned_s) if path.name.startswith(".") else left > 0:
                    path.unlink(missing_ok=True)
                    left -= size
            if left > 0:
                raise OSError(errno.ENOSPC, "files that other processes are writing fill it")
            file.truncate(num_bytes)

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """Yields for each file the time of its last use, its bytes, and its path."""
        with os.scandir(self._blobs) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    state = entry.stat(follow_symlinks=False)
                    yield state.st_mtime, state.st_size, Path(entry.path)

    @contextlib.contextmanager
    def locked(self, name: str, *, wait_s: float) -> Iterator[None]:
        """Keeps other processes of this host from the same name during the block; past `wait_s` without the lock it
        goes on.
        """
        try:
            descriptor = os.open(self._locks / name, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            log.warning("the cache has no locks: %s", error)
            yield
            return
        try:
            if not lock(descriptor, fcntl.LOCK_EX, wait_s=wait_s):
                log.warning("another process has held %s of the cache for %.0f s", self._locks / name, wait_s)
            yield
        finally:
            os.close(descriptor)


@lru_cache(maxsize=8)
def open_cache(folder: str, *, cache_mb: int) -> HostCache:
    """Opens the cache of this host, one for each folder and process.

    Raises InvalidInput that names ONBEAT_CACHE for a folder of another host, or one that can't be written.
    """
    path = Path(folder).resolve()
    try:
        make_private(path)
        _claim(path)
        return HostCache(path, most_bytes=cache_mb * 1024**2)
    except OSError as error:
        raise InvalidInput(f"{path} can't be used: {error}", field=SETTING, cure=CURE) from error


def this_host() -> Owner:
    return Owner(host=socket.gethostname(), boot_id=BOOT_ID.read_text().strip() if BOOT_ID.exists() else "")


def _claim(folder: Path, own: Callable[[], Owner] = this_host) -> None:
    """Says whose folder it is, and keeps the lock that says that a process uses it as long as this one lives.

    A host that started anew takes its folder again. Raises InvalidInput where it is another host's, or where another
    one of the same name uses it now, as far as the file system has locks over hosts.
    """
    path = folder / "owner.json"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        is_alone = lock(descriptor, fcntl.LOCK_EX, wait_s=0.0)
        if not is_alone and not lock(descriptor, fcntl.LOCK_SH, wait_s=OWNER_S):
            raise InvalidInput(f"{folder} is locked by a process of an unknown host", field=SETTING, cure=CURE)
        here = own()
        owner = None
        with contextlib.suppress(InvalidInput):  # it isn't said yet, or not whole
            owner = decode_json(path.read_bytes(), Owner)
        if owner is not None and owner.boot_id != here.boot_id and not (is_alone and owner.host == here.host):
            whose = f"another host {owner.host}" if owner.host == here.host else f"host {owner.host}"
            problem = f"{folder} is the cache of {whose}, this is {here.host}"
            raise InvalidInput(problem, field=SETTING, cure=f"{CURE}; remove {path} if that host is no more")
        if owner != here and is_alone:
            # Blanks cover the rest of a longer one.
            os.pwrite(descriptor, encode_json(here).ljust(os.fstat(descriptor).st_size), 0)
        # Shared, for others of this host; it goes with the process.
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except BaseException:
        os.close(descriptor)
        raise


def lock(descriptor: int, kind: int, *, wait_s: float) -> bool:
    """Tries to lock a file until `wait_s` is over; the lock ends with the descriptor.

    Args:
        descriptor: The open file.
        kind: The operation of `fcntl.flock`: LOCK_SH or LOCK_EX.
        wait_s: The longest wait, in seconds.

    Returns:
        True where it was locked in time.
    """
    until_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until_s:
                return False
        time.sleep(POLL_S)
