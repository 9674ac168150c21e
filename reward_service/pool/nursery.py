"""A caged process that never sees a completion: it imports what scorers need, and forks scorer processes when told to.

    reward service ── Order ──▶ nursery ── fork ──▶ scorer process ◀── tasks, answers ──▶ reward service
                   ◀── Report ──┘

There is one scorer process at a time. Ending it ends all that it has started, and takes away what it left in its
folder: the next one begins as if there had been none before. The keeper above holds the namespaces, and waits.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import socket
import time
from threading import Thread
from typing import Literal

from contracts.encoding.wire import Record, decode, decode_json, encode
from contracts.rewards import RewardComponent, Unscorable
from reward_service.cage.cage import Cage, CageRules, kernel
from reward_service.pool import scorer_process
from reward_service.pool.frames import Frames, Gone
from reward_service.scorers import rubric

MAX_ORDER_BYTES = 64 * 1024 * 1024
ENDS_WITHIN_S = 0.3
"""How long the threads of a service that was killed may take to end, one after the other."""


class Order(Record, frozen=True, kw_only=True):
    """What the reward service asks of a nursery; `scorer` comes with its end of a socket, and has no answer."""

    what: Literal["warm_up", "scorer", "end_scorer"]
    components: tuple[RewardComponent, ...] = ()
    """warm_up: whose imports to do."""


class Report(Record, frozen=True, kw_only=True):
    """The answer: to its start, to `warm_up`, to `end_scorer`."""

    missing: tuple[str, ...] = ()
    """Its start: locks of the cage that this platform doesn't have."""
    refusal: Unscorable | None = None
    """warm_up: why no item can be scored."""
    exit_code: int | None = None
    """end_scorer: as `subprocess` has it; None where it is unknown."""


def main(control: int, rules: str) -> None:
    """Runs the keeper, which sets the cage up, forks the nursery, and ends with it, after whatever is left of the cage.

    It is out of the reach of what it keeps, and no signal but SIGKILL, which the service sends it last, ends it sooner.
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
            _serve(control, cage)
        finally:
            os._exit(0)
    signal.signal(signal.SIGTERM, lambda *_: kernel.kill(nursery))
    os.close(control)
    status = os.waitpid(nursery, 0)[1]
    kernel.end_children(nursery)
    if _is_gone(parent):
        _remove(known.folder)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _serve(control: int, cage: Cage) -> None:
    orders = Frames(socket.socket(fileno=control), max_bytes=MAX_ORDER_BYTES)
    missing = cage.enter()
    kernel.end_with_parent(signal.SIGKILL)  # after the change of uid, which would take it back
    kernel.adopt_orphans()
    orders.send(encode(Report(missing=missing)))
    scorer: int | None = None
    while True:
        try:
            payload, handle = orders.receive_with_handle()
        except Gone:
            return
        order = decode(payload, Order)
        if order.what == "warm_up":
            orders.send(encode(Report(refusal=rubric.warm_up(order.components))))
            gc.collect()
            gc.freeze()  # a scorer process's collector then leaves the pages alone that it shares with this process
            continue
        status = cage.end_all(scorer) if scorer is not None else None
        scorer = None
        _empty(os.getcwd())
        if order.what == "end_scorer":
            orders.send(encode(Report(exit_code=None if status is None else os.waitstatus_to_exitcode(status))))
            continue
        assert handle is not None
        scorer = _fork_scorer(orders, handle)


def _fork_scorer(orders: Frames, handle: int) -> int:
    scorer = os.fork()
    if scorer:
        os.close(handle)
        return scorer
    try:
        orders.close()
        os.setsid()
        kernel.end_with_parent(signal.SIGKILL)
        kernel.hide_from_own_uid(hidden=False)
        scorer_process.serve(socket.socket(fileno=handle))
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
    """Its thread that forked this process may end, and tell so, a moment before the rest of it."""
    ends_s = time.monotonic() + ENDS_WITHIN_S
    while os.getppid() == parent and time.monotonic() < ends_s:
        time.sleep(0.02)
    return os.getppid() != parent


def _remove(folder: str) -> None:
    """Removes the folder for a service that is gone; while it lives, its other cages have the folder, too."""
    kernel.unmount(folder)
    with contextlib.suppress(OSError):
        os.rmdir(folder)


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
