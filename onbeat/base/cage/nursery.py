"""A caged process that never sees what may be hostile: it imports what is slow, and forks children when told to.

    service ── Order ──▶ nursery ── fork ──▶ child ◀── tasks, answers ──▶ service
            ◀── Report ──┘

There is one child at a time. Ending it ends all that it has started, and takes away what it left in its folder: the
next one begins as if there had been none before. The keeper above holds the namespaces, and waits.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from threading import Thread
from typing import Literal

from contracts.encoding.wire import Record, decode, decode_json, encode
from onbeat.base.cage.cage import Cage, CageRules, kernel
from onbeat.base.cage.frames import Frames, Gone

MAX_ORDER_BYTES = 64 * 1024 * 1024
ENDS_WITHIN_S = 0.3
"""How long the threads of a service that was killed may take to end, one after the other."""


class Order(Record, frozen=True, kw_only=True):
    """A request of a service to its nursery. `child` comes with the child's end of a socket, and has no answer."""

    what: Literal["prepare", "child", "end_child"]
    payload: bytes = b""
    """prepare: what to import, as the service and its `prepare` have it."""


class Report(Record, frozen=True, kw_only=True):
    """The nursery's answer to its start, to `prepare` or to `end_child`."""

    missing: tuple[str, ...] = ()
    """Its start: locks of the cage that this platform doesn't have."""
    payload: bytes = b""
    """prepare: what came of it."""
    exit_code: int | None = None
    """end_child: as `subprocess` has it; None where it is unknown."""


def main(
    control: int, rules: str, *, prepare: Callable[[bytes], bytes], serve: Callable[[socket.socket], None]
) -> None:
    """Runs the keeper, which sets the cage up, forks the nursery, and ends after it and all that is left in the cage.

    The keeper is out of the reach of its cage's processes, and no signal but SIGKILL, which the service sends last,
    ends it sooner.

    Args:
        control: The descriptor of the socket to the service.
        rules: The cage's CageRules as JSON.
        prepare: The nursery's work for an order `prepare`.
        serve: A child's work with its socket.
    """
    parent = os.getppid()
    _end_with(parent)
    known = decode_json(rules, CageRules)
    cage = Cage(known)
    cage.separate()
    kernel.adopt_orphans()
    nursery = os.fork()
    if nursery == 0:
        try:
            _serve(control, cage, prepare=prepare, serve=serve)
        finally:
            os._exit(0)
    signal.signal(signal.SIGTERM, lambda *_: kernel.kill(nursery))
    os.close(control)
    status = os.waitpid(nursery, 0)[1]
    kernel.end_children(nursery)
    if _is_gone(parent):  # while the service lives, its other cages have the folder, too
        with contextlib.suppress(OSError):
            os.rmdir(known.folder)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _serve(
    control: int, cage: Cage, *, prepare: Callable[[bytes], bytes], serve: Callable[[socket.socket], None]
) -> None:
    orders = Frames(socket.socket(fileno=control), max_bytes=MAX_ORDER_BYTES)
    missing = cage.enter()
    kernel.end_with_parent(signal.SIGKILL)  # after the change of uid, which would take it back
    kernel.adopt_orphans()
    orders.send(encode(Report(missing=missing)))
    child: int | None = None
    while True:
        try:
            payload, handle = orders.receive_with_handle()
        except Gone:
            return
        order = decode(payload, Order)
        if order.what == "prepare":
            orders.send(encode(Report(payload=prepare(order.payload))))
            gc.collect()
            gc.freeze()  # a child's collector then leaves the pages alone that it shares with this process
            continue
        status = cage.end_all(child) if child is not None else None
        child = None
        _empty(os.getcwd())
        if order.what == "end_child":
            orders.send(encode(Report(exit_code=None if status is None else os.waitstatus_to_exitcode(status))))
            continue
        assert handle is not None
        child = _fork_child(orders, handle, serve)


def _fork_child(orders: Frames, handle: int, serve: Callable[[socket.socket], None]) -> int:
    child = os.fork()
    if child:
        os.close(handle)
        return child
    try:
        orders.close()
        os.setsid()
        kernel.end_with_parent(signal.SIGKILL)
        kernel.hide_from_own_uid(hidden=False)
        serve(socket.socket(fileno=handle))
    finally:
        os._exit(0)


def _empty(folder: str) -> None:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(entry.path)


def _is_gone(parent: int) -> bool:
    """Returns True where the parent process has ended, though its thread that forked this process may end a moment
    before the rest of it.
    """
    ends_s = time.monotonic() + ENDS_WITHIN_S
    while os.getppid() == parent and time.monotonic() < ends_s:
        time.sleep(0.02)
    return os.getppid() != parent


def _end_with(parent: int) -> None:
    """Ends with the parent. On other systems than Linux a thread watches it, which code can starve of its lock."""
    if not kernel.end_with_parent(signal.SIGTERM):
        Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
