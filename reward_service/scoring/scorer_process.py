"""A scorer process: reads a task, answers its items in order, reads on; ends when it is killed, or its socket closes.

    reward service ── ScorerTask ──▶ scorer process ── ScorerAnswer ──▶ reward service      one answer an item

Its nursery has imported what scorers need. The loop runs in the main thread, where a scorer may use signals. Whatever a
scorer does to this process, the service sees it as an answer that never came (timeout) or a closed socket (crashed).
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Iterator

from msgspec import field
from msgspec.structs import replace

from contracts.encoding.wire import Record, decode, encode
from contracts.rewards import Outcome, Result, RewardComponent, RewardItem, Unscorable
from onbeat.base.cage import nursery
from onbeat.base.cage.frames import Frames, Gone
from onbeat.base.cage.printed import Printed
from reward_service.scorers import rubric

MAX_TASK_BYTES = 256 * 1024 * 1024


class ScorerTask(Record, frozen=True, kw_only=True):
    """A rubric with the items to score; without any, the rubric to warm up, which a nursery does as well."""

    components: tuple[RewardComponent, ...]
    items: tuple[RewardItem, ...] = ()
    group_outcomes: tuple[dict[str, Outcome], ...] = ()
    """Outcomes of each item that are there already, by breakdown name."""
    group_size: int = 0
    """Above 0: one plug-in's call for these items of whole groups, which is answered once."""


class ScorerAnswer(Record, frozen=True, kw_only=True):
    """An item's result, or why none can be scored; None: warmed up, or scores of whole groups."""

    result: Result | None = None
    see_groups: tuple[str, ...] = ()
    """Warmed up: breakdown names of the plug-ins that are called for whole groups."""
    scores: list[float] = field(default_factory=list)
    printed: str = ""
    """The text that was printed since the answer before, MAX_PRINTED_CHARS and a note at most."""


def main(control: int, rules: str) -> None:
    """Runs the keeper of a cage of scorers."""
    nursery.main(control, rules, prepare=_warm_up, serve=serve)


def _warm_up(payload: bytes) -> bytes:
    return encode(ScorerAnswer(result=rubric.warm_up(decode(payload, ScorerTask).components)))


def serve(connection: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    frames = Frames(connection, max_bytes=MAX_TASK_BYTES)
    printed = Printed()
    sys.stdout = sys.stderr = printed
    try:
        while True:
            task = decode(frames.receive(), ScorerTask)
            for answer in _answers(task):
                frames.send(encode(replace(answer, printed=printed.take())))
    except Gone:
        return


def _answers(task: ScorerTask) -> Iterator[ScorerAnswer]:
    if not task.items:
        refusal = rubric.warm_up(task.components)
        yield ScorerAnswer(result=refusal, see_groups=() if refusal else rubric.names_that_see_groups(task.components))
    elif task.group_size:
        scores = rubric.score_groups(task.components[0], task.items, task.group_size)
        yield ScorerAnswer(result=scores) if isinstance(scores, Unscorable) else ScorerAnswer(scores=scores)
    else:
        for item, outcomes in zip(task.items, task.group_outcomes, strict=True):
            yield ScorerAnswer(result=rubric.score_item(task.components, item, outcomes))
