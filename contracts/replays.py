"""A recorded batch that is sampled once more, to see that its digest is the same (I7)."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from msgspec import Meta

from contracts.encoding.wire import Record


class ReplayState(str, Enum):
    """queued ─▶ sampling ─▶ done; any ─▶ failed."""

    QUEUED = "queued"
    SAMPLING = "sampling"
    DONE = "done"
    FAILED = "failed"


class ReplayRequest(Record, frozen=True, kw_only=True):
    """Body of `POST /v1/jobs/{id}/replays`."""

    batch_id: Annotated[str, Meta(min_length=1, max_length=64)]


class Replay(Record, frozen=True, kw_only=True):
    """A request to sample a recorded batch again, and its answer. It publishes nothing: no fence sees it."""

    replay_id: str
    job_id: str
    batch_id: str
    state: ReplayState
    recorded_digest: str
    digest: str = ""
    """The digest of what was sampled now; "" before."""
    equal: bool | None = None
    """Whether the two digests are the same; null before it is sampled."""
    generator_id: str = ""
    """The one that samples it, or did."""
    reason: str = ""
    """Where they differ: the first difference in words. Of a failed one: why. Of a queued one: what it waits for."""
