"""Requests to sample a recorded batch again: a gateway asks, a generator with nothing else to do takes one by lease.

    request ─▶ queued ─▶ sampling ─▶ done, with the digest
                 ▲           │
                 └───────────┴─ its lease ran out, or it is left to another kind of generator; failed in the end

They are in one hash of their own that no fence script reads or writes: a replay claims no prompt and publishes nothing.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection
from typing import Any

from broker.connection.client import Broker
from broker.keys import REPLAYS, sealed_name
from contracts.encoding.wire import Record, decode
from contracts.errors import ContractViolation, NotFound, Unavailable
from contracts.replays import Replay, ReplayState

KEPT_S = 3600.0
"""A request, and its answer, is kept so long."""
MAX_KEPT = 100
MAX_ATTEMPTS = 3
"""Generators that may die of the same request."""
MAX_REASON_BYTES = 2000
WAITS = "it waits for a generator that has nothing else to do"
NEVER_TAKEN = "no generator took it, or answered it, in time"


log = logging.getLogger(__name__)


class ReplayEntry(Record, frozen=True, kw_only=True):
    """A request as it stands in Redis; times are the server's, in ms."""

    replay_id: str
    job_id: str
    batch_id: str
    state: ReplayState
    recorded_digest: str
    digest: str
    generator: str
    reason: str
    attempt: int
    lease_ms: int
    """When the generator's lease ends."""
    asked_ms: int
    ends_ms: int
    """When nothing waits for it any more."""


class Replays:
    """Thread-safe."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def request(self, job_id: str, batch_id: str, *, recorded_digest: str) -> Replay:
        """Asks for a batch, or answers the request that stands for it. Raises NotFound, and Unavailable where too many
        wait."""
        outcome, *rest = self._broker.run(
            "request_replay",
            job=job_id,
            replay_id=f"replay-{uuid.uuid4().hex[:12]}",
            batch_id=batch_id,
            recorded_digest=recorded_digest,
            keep_ms=int(KEPT_S * 1000),
            max_kept=MAX_KEPT,
        )
        if outcome == b"unknown":
            raise NotFound(f"there is no job {job_id}", field="job_id", cure="`onbeat jobs` lists them")
        if outcome == b"full":
            raise Unavailable(f"{rest[0]} replays wait already", field="replays", cure="wait for some of them")
        return _replay(decode(rest[0], ReplayEntry), now_ms=0)

    def get(self, replay_id: str) -> Replay | None:
        """None for one that isn't there, or isn't any more."""
        with self._broker.call():
            packed: Any = self._broker.redis.hget(
                sealed_name(REPLAYS, self._broker.seal), replay_id[:64].encode(errors="replace")
            )
        if packed is None:
            return None
        return _replay(decode(packed, ReplayEntry), now_ms=int(self._broker.now_s() * 1000))

    def claim(self, generator_id: str, *, lease_s: float, left_alone: Collection[str] = ()) -> ReplayEntry | None:
        """The oldest request that waits; None where there is none. left_alone: ids of those that are for others."""
        outcome, *rest = self._broker.run(
            "claim_replay",
            generator=generator_id,
            lease_ms=int(lease_s * 1000),
            max_attempts=MAX_ATTEMPTS,
            left_alone=sorted(left_alone),
        )
        try:
            return decode(rest[0], ReplayEntry) if outcome == b"claimed" else None
        except ContractViolation as error:  # any generator may write there; claimed a few times, it has failed
            log.warning("passes over a request to sample a batch again: %s", error)
            return None

    def renew(self, entry: ReplayEntry, *, lease_s: float) -> bool:
        """Whether the generator still holds it."""
        told = {"replay_id": entry.replay_id, "generator": entry.generator, "attempt": entry.attempt}
        return self._broker.run("renew_replay", lease_ms=int(lease_s * 1000), **told)[0] == b"renewed"

    def done(self, entry: ReplayEntry, *, digest: str, reason: str = "") -> bool:
        """Answers it; False where another generator holds it by now. reason: the first difference in words."""
        return self._settle(entry, ReplayState.DONE, digest=digest, reason=reason)

    def failed(self, entry: ReplayEntry, reason: str) -> bool:
        """Gives it up, with the reason."""
        return self._settle(entry, ReplayState.FAILED, reason=reason)

    def left(self, entry: ReplayEntry, reason: str) -> bool:
        """Leaves it to another generator; the attempt doesn't count. reason: what it needs."""
        return self._settle(entry, ReplayState.QUEUED, reason=reason)

    def _settle(self, entry: ReplayEntry, state: ReplayState, *, digest: str = "", reason: str = "") -> bool:
        answer = self._broker.run(
            "settle_replay",
            replay_id=entry.replay_id,
            generator=entry.generator,
            attempt=entry.attempt,
            state=state.value,
            digest=digest,
            reason=reason.encode(errors="backslashreplace")[:MAX_REASON_BYTES].decode(errors="ignore"),
        )
        return answer[0] == b"settled"


def _replay(entry: ReplayEntry, *, now_ms: int) -> Replay:
    state, reason = entry.state, entry.reason
    if state in (ReplayState.QUEUED, ReplayState.SAMPLING) and entry.ends_ms < now_ms:
        state, reason = ReplayState.FAILED, NEVER_TAKEN
    if state is ReplayState.QUEUED:
        reason = reason or WAITS
    is_done = state is ReplayState.DONE
    return Replay(
        replay_id=entry.replay_id,
        job_id=entry.job_id,
        batch_id=entry.batch_id,
        state=state,
        recorded_digest=entry.recorded_digest,
        digest=entry.digest,
        equal=entry.digest == entry.recorded_digest if is_done else None,
        generator_id=entry.generator,
        reason=reason,
    )
