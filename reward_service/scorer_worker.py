"""One scorer process: reads a task, answers it, reads the next; ends when its parent does.

    parent ── WorkerTask ──▶ worker ── WorkerAnswer ──▶ parent        MessagePack frames, one answer a task

The loop runs in the main thread, where a scorer may use signals. Whatever a scorer does to this process, the parent
sees it as an answer that never came (timeout) or a closed pipe (crashed).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from multiprocessing.connection import Connection
from threading import Thread

from contracts.rewards import RewardComponent, RewardItem, Scored, Unscorable
from contracts.wire import Record, decode, encode
from reward_service.scorers import rubric

PR_SET_PDEATHSIG = 1
"""Linux prctl option: the signal that this process gets when the thread that started it ends."""


class WorkerTask(Record, frozen=True, kw_only=True):
    """A rubric with the item to score; without an item, the rubric to warm up."""

    components: tuple[RewardComponent, ...]
    item: RewardItem | None


class WorkerAnswer(Record, frozen=True, kw_only=True):
    """The item's result; None: started, or warmed up."""

    result: Scored | Unscorable | None


def serve(connection: Connection, parent_pid: int) -> None:
    """Says that it has started, then answers tasks until the pipe closes. The target of the pool's processes."""
    end_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()  # a process group of its own: the pool kills what a plugin has started along with the worker
    connection.send_bytes(encode(WorkerAnswer(result=None)))
    while True:
        try:
            frame = connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            return
        answer = encode(answer_to(decode(frame, WorkerTask)))
        try:
            connection.send_bytes(answer)
        except BrokenPipeError:
            return


def answer_to(task: WorkerTask) -> WorkerAnswer:
    if task.item is None:
        return WorkerAnswer(result=rubric.warm_up(task.components))
    return WorkerAnswer(result=rubric.score_item(task.components, task.item))


def end_with_parent(parent_pid: int) -> None:
    """A scorer in an endless loop never sees the pipe close: the kernel kills it when the parent dies.

    Elsewhere than on Linux a thread watches, which a loop inside C code that holds the interpreter lock can starve.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        Thread(target=_end_after_parent, daemon=True).start()
    if os.getppid() != parent_pid:  # it died before the kernel was asked
        os._exit(1)


def _end_after_parent() -> None:
    from multiprocessing import parent_process

    parent = parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
