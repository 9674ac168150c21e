"""The lock of a run folder, which has one stack at a time.

`stack.lock` is locked from before anything starts until all that writes there has ended.

    stack ── flock ──▶ stack.lock ◀── the same open file ── its server, which appends to redis/

The kernel gives a lock back when the last process that has the file open ends, however it ends. The server inherits it:
one that outlives a killed stack for some seconds keeps the next stack from its append-only file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
from pathlib import Path

import psutil

from contracts.encoding.wire import Record, decode_json, encode_json
from contracts.errors import Conflict, InvalidInput
from onbeat.base.process.waiting import Waiting
from onbeat.stack.access import read_stack_file

FILE_NAME = "stack.lock"
ORPHAN_GRACE_S = 20.0
"""The server of a stack that was killed is asked to end by the kernel, and syncs its file first."""
POLL_S = 0.1
MAX_BYTES = 4096
UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)

log = logging.getLogger(__name__)


class Holder(Record, frozen=True, kw_only=True):
    """The stack that took the lock last. A number alone may be a stranger's by now."""

    pid: int
    started_s: float

    @property
    def lives(self) -> bool:
        try:
            return psutil.Process(self.pid).create_time() == self.started_s
        except psutil.AccessDenied:
            return True
        except psutil.NoSuchProcess:
            return False


class FolderLock:
    """Taken once, given back once; a second `release` does nothing."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._descriptor: int | None = None

    @property
    def shared_with(self) -> tuple[int, ...]:
        """The descriptors that a process is to inherit which keeps the lock as long as it lives."""
        return () if self._descriptor is None else (self._descriptor,)

    def take(self) -> None:
        """Returns with the lock held. Raises Conflict that names the folder and the holder, and OSError.

        What is left of a stack that was killed is waited for; a stack that lives is not.
        """
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            self._lock(descriptor)
            holder = Holder(pid=os.getpid(), started_s=psutil.Process().create_time())
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, encode_json(holder), 0)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def release(self) -> None:
        """Gives the lock back, once those that inherited it have ended."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _lock(self, descriptor: int) -> None:
        waiting = Waiting(f"the server of a killed stack in {self._path.parent} to end", deadline_s=ORPHAN_GRACE_S)
        while not self._is_locked(descriptor):
            holder = _read_holder(descriptor)
            if (holder is not None and holder.lives) or waiting.left_s <= 0:
                raise self._conflict(holder)
            time.sleep(POLL_S)

    def _is_locked(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            log.warning("%s can't be locked on this file system: start no second stack there", self._path)
        return True

    def _conflict(self, holder: Holder | None) -> Conflict:
        who = "another process" if holder is None else f"process {holder.pid}"
        what = "is dead, and its server still runs there"
        if holder is None or holder.lives:
            what = "runs a stack there"
        return Conflict(
            f"{self._path.parent}: {who} {what}{self._gateway_of(holder)}",
            field="--run-dir",
            cure="stop it by `onbeat down`, or choose another --run-dir",
        )

    def _gateway_of(self, holder: Holder | None) -> str:
        """Returns `, its gateway is URL` for a stack that is up, "" for any other."""
        if holder is None or not holder.lives:
            return ""
        with contextlib.suppress(InvalidInput, OSError):
            stack = read_stack_file(self._path.parent)
            if stack is not None and stack.pid == holder.pid:
                return f", its gateway is {stack.gateway_url}"
        return ""


def _read_holder(descriptor: int) -> Holder | None:
    """Reads the lock's holder; None where the holder has not written it yet, or a hand has."""
    with contextlib.suppress(InvalidInput):
        return decode_json(os.pread(descriptor, MAX_BYTES, 0), Holder)
    return None
