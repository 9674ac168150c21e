"""One scorer process: reads a task, answers its items in order, reads on; ends when it is killed, or its socket closes.

    reward service ── ScorerTask ──▶ scorer process ── ScorerAnswer ──▶ reward service      one answer an item

Its nursery has imported what scorers need. The loop runs in the main thread, where a scorer may use signals. Whatever a
scorer does to this process, the service sees it as an answer that never came (timeout) or a closed socket (crashed).
"""

from __future__ import annotations

import signal
import socket

from contracts.encoding.wire import Record, decode, encode
from contracts.rewards import RewardComponent, RewardItem, Scored, Unscorable
from onbeat.cage import nursery
from onbeat.cage.frames import Frames, Gone
from reward_service.scorers import rubric

MAX_TASK_BYTES = 256 * 1024 * 1024


class WarmUp(Record, frozen=True, kw_only=True):
    """Whose imports the nursery is to do."""

    components: tuple[RewardComponent, ...]


class WarmedUp(Record, frozen=True, kw_only=True):
    refusal: Unscorable | None
    """Why no item can be scored."""


class ScorerTask(Record, frozen=True, kw_only=True):
    """A rubric with the items to score; without any, the rubric to warm up, which is answered once."""

    components: tuple[RewardComponent, ...]
    items: tuple[RewardItem, ...]


class ScorerAnswer(Record, frozen=True, kw_only=True):
    """An item's result; None: warmed up."""

    result: Scored | Unscorable | None


def main(control: int, rules: str) -> None:
    """Runs the keeper of a cage of scorers."""
    nursery.main(control, rules, prepare=_warm_up, serve=serve)


def _warm_up(payload: bytes) -> bytes:
    return encode(WarmedUp(refusal=rubric.warm_up(decode(payload, WarmUp).components)))


def serve(connection: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    frames = Frames(connection, max_bytes=MAX_TASK_BYTES)
    try:
        while True:
            task = decode(frames.receive(), ScorerTask)
            if not task.items:
                frames.send(encode(ScorerAnswer(result=rubric.warm_up(task.components))))
            for item in task.items:
                frames.send(encode(ScorerAnswer(result=rubric.score_item(task.components, item))))
    except Gone:
        return
