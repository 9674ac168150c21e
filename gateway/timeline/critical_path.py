"""The critical path through a timeline: the spans that the end of the last iteration waited for, one after the other.

    generate ─▶ score ─▶ publish ─▶ (compute ─▶) train ─▶ step ─▶ sync ─▶ open ─▶ load ─▶ generate ─▶ …

The walk goes backwards in time, from the span of the last iteration that ended last. Each span waits for the kinds that
`WAITS_FOR` names: of its own lane, of its own batch, of its own iteration, or of the trainer. Of all of those that had
ended when it started, the one that ended last is the one that it waited for. So the path is one chain without overlaps,
and to make any span on it shorter by a little makes the iterations shorter by as much; to make a span beside it shorter
changes nothing. The time between two of its spans is what no span explains: the network, Redis, a poll.

How to read it: a path that is mostly `generate` asks for more or faster generators; mostly `train` and `step`, for more
ranks; mostly `compute`, for more stage workers; mostly `score`, for a faster reward service; mostly `load`, `sync` and
`open`, for another weight transport or fewer, longer iterations.

A load may begin while the version that it loads is still written. It waits for the publication at its end, so what
is asked of a load is what had ended when it ended, and the path counts it from there.

Clocks of several hosts may differ: spans count as in order if they overlap by less than SKEW_S.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from contracts.events import TimelineSpan
from contracts.timeline import COMPUTE, WAIT, kind_of

SKEW_S = 0.002

Scope = Literal["lane", "batch", "iteration", "any"]


class Wanted(NamedTuple):
    """A kind of span that another one may have waited for."""

    scope: Scope
    kind: str
    """`rank sync`, `generator publish`, `stage compute` and so on."""
    at_end: bool = False
    """True: it must have ended when the waiting span ended. False: when that started."""


def _of(kinds: str, scope: Scope, *, at_end: bool = False) -> tuple[Wanted, ...]:
    return tuple(Wanted(scope, kind.strip(), at_end) for kind in kinds.split(","))


WAITS_FOR: dict[str, tuple[Wanted, ...]] = {
    "generator load": (
        *_of("generator load, generator generate", "lane"),
        *_of("rank open", "any"),
        *_of("rank sync", "any", at_end=True),
    ),
    "generator generate": (
        *_of("generator load, generator generate", "lane"),
        *_of("generator score", "batch"),
        *_of("rank open", "any"),
    ),
    "generator score": _of("generator generate", "batch"),
    "generator publish": _of("generator score", "batch"),
    "rank train": (
        *_of("generator score, generator publish, stage compute", "batch"),
        *_of("rank train, rank step, rank sync, rank open, rank checkpoint", "lane"),
        *_of("rank open", "any"),
    ),
    "rank step": (
        *_of("rank train, generator score, generator publish, stage compute", "iteration"),
        *_of("rank step", "lane"),
    ),
    "rank sync": _of("rank step", "lane"),
    "rank open": _of("rank sync, rank train, rank open, rank checkpoint", "lane"),
    "rank checkpoint": _of("rank open, rank sync", "lane"),
    "stage compute": (
        *_of("generator score, generator publish, stage compute", "batch"),
        *_of("stage compute", "lane"),
    ),
}
"""Kind of span → what it may wait for. `rank open` of iteration t is the commit of t-1, after its publication."""


class PathStep(NamedTuple):
    """A span on the critical path."""

    place: int
    """Its index."""
    since_s: float
    """From when on it was what the rest waited for."""
    until_s: float


def critical_path(
    spans: Sequence[TimelineSpan], *, last_iteration: int, since_s: float, until_s: float
) -> list[PathStep]:
    """Returns the path between two times to the end of an iteration, oldest first; [] where no span lies there."""
    known = _Ended(spans)
    ended = (
        at
        for at, span in enumerate(spans)
        if _is_work(span) and span.iteration == last_iteration and since_s < span.ended_s <= until_s + SKEW_S
    )
    last = max(ended, key=lambda at: spans[at].ended_s, default=None)
    path: list[PathStep] = []
    at = last
    seen = set[int]()
    while at is not None and at not in seen and spans[at].ended_s > since_s:
        seen.add(at)  # clocks that disagree by more than the skew could lead in a circle
        before = known.before(at)
        begun_s = spans[at].started_s if before is None else max(spans[at].started_s, spans[before].ended_s)
        until_of_it_s = min(spans[at].ended_s, path[-1].since_s if path else until_s)
        path.append(PathStep(at, max(since_s, min(begun_s, until_of_it_s)), until_of_it_s))
        at = before
    return path[::-1]


class _Ended:
    """Finds, among the spans that a span may wait for, the one that ended last before it."""

    def __init__(self, spans: Sequence[TimelineSpan]) -> None:
        self._spans = spans
        of_each: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for at, span in enumerate(spans):
            if _is_work(span):
                for scope in ("lane", "batch", "iteration", "any"):
                    of_each[_key(scope, _kind(span), span)].append(at)
        self._of_each = {key: sorted(places, key=lambda at: spans[at].ended_s) for key, places in of_each.items()}

    def before(self, at: int) -> int | None:
        return max(self._candidates(at), key=lambda place: self._spans[place].ended_s, default=None)

    def _candidates(self, at: int) -> Iterator[int]:
        span = self._spans[at]
        for wanted in WAITS_FOR.get(_kind(span), ()):
            limit_s = (span.ended_s if wanted.at_end else span.started_s) + SKEW_S
            ended = self._of_each.get(_key(wanted.scope, wanted.kind, span), [])
            num_ended = bisect_right(ended, limit_s, key=lambda place: self._spans[place].ended_s)
            # A span that began later can't be what this one waited for, also where the skew lets it have ended: the
            # walk goes back in time at each step, so it ends.
            for place in reversed(ended[:num_ended]):
                other = self._spans[place]
                if (other.started_s, place) < (span.started_s, at) or (wanted.at_end and other.ended_s < span.ended_s):
                    yield place
                    break


def _is_work(span: TimelineSpan) -> bool:
    return span.what != WAIT


def _kind(span: TimelineSpan) -> str:
    kind = kind_of(span.who)
    return f"{kind} {COMPUTE if kind == 'stage' else span.what}"


def _key(scope: str, kind: str, span: TimelineSpan) -> tuple[str, ...]:
    """Returns the key of the spans of a kind that have this scope in common with `span`."""
    common = {"lane": span.who, "batch": span.batch_id, "iteration": str(span.iteration), "any": ""}[scope]
    return scope, kind, common
