"""The record of this generator's work: for its presence, for the timelines of its jobs, for its metrics.

serve loop, prefetch, carrier ─ record ─▶ Activity ─┬─▶ Spans ─▶ Reports (onbeat/work/spans.py)
                                                   ├─▶ the process's metrics
                                                   └─▶ tokens a second ─▶ heartbeat
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator

from broker.generator_side import Claim
from contracts.timeline import covered_s
from onbeat.base.metrics.process_metrics import ProcessMetrics
from onbeat.work.spans import Spans

RATE_S = 60.0
"""The tokens a second are those of the rounds that ended in this time."""
LEAST_S = 0.001
"""A shorter load, or wait, is not worth a line."""


class Activity:
    """The event loop's thread alone touches it."""

    def __init__(
        self, generator_id: str, *, wall_clock: Callable[[], float] = time.time, metrics: ProcessMetrics | None = None
    ) -> None:
        """metrics: of the process."""
        self.now_s = wall_clock
        self.spans = Spans(generator_id)
        self._metrics = metrics or ProcessMetrics("generator")
        self._rounds: deque[tuple[float, float, int]] = deque(maxlen=256)
        self._waits_since_s: float | None = None

    def record(
        self, job_id: str, what: str, *, iteration: int, batch_id: str = "", started_s: float, ended_s: float
    ) -> None:
        """Books what was done for a job; times are Unix times."""
        self.observe(what, ended_s - started_s)
        self.spans.record(job_id, what, iteration=iteration, batch_id=batch_id, started_s=started_s, ended_s=ended_s)

    def observe(self, what: str, seconds: float) -> None:
        """Books how long something took that is no span of its own."""
        self._metrics.observe(what, seconds)

    def ended(self, outcome: str) -> None:
        """Books how a claimed batch ended: as the fence answered it, or `failed`."""
        self._metrics.count("batches", label=outcome)

    def holds(self, policy_version: int) -> None:
        """Books which version the engine holds."""
        self._metrics.set("policy_version", policy_version)

    @contextlib.contextmanager
    def span(self, job_id: str, what: str, *, iteration: int, batch_id: str = "") -> Iterator[None]:
        """Times a piece of work, unless it raises or is over at once."""
        started_s = self.now_s()
        yield
        ended_s = self.now_s()
        if ended_s - started_s >= LEAST_S:
            self.record(job_id, what, iteration=iteration, batch_id=batch_id, started_s=started_s, ended_s=ended_s)

    def went_on(self, context_tokens: Counter[str]) -> None:
        """Books tokens before later turns, by where they came from, and takes them out."""
        while context_tokens:
            source, number = context_tokens.popitem()
            self._metrics.count("context_tokens", number, label=source)

    def sampled(self, num_tokens: int, *, started_s: float, ended_s: float) -> None:
        """Books a round of a batch that left the engine."""
        self.observe("generate", ended_s - started_s)
        self._metrics.count("tokens", num_tokens)
        self._rounds.append((started_s, ended_s, num_tokens))

    def waits(self) -> None:
        """Begins a wait, unless one goes on: there is nothing to do."""
        if self._waits_since_s is None:
            self._waits_since_s = self.now_s()
            self.spans.idle.set()

    def claimed(self, claim: Claim) -> None:
        """Ends a wait with this batch, if there was one."""
        since_s = self._waits_since_s
        self._waits_since_s = None
        self.spans.idle.clear()
        now_s = self.now_s()
        batch = claim.prompt_batch
        if since_s is not None and now_s - since_s >= LEAST_S:
            self.record(batch.job_id, "wait", iteration=batch.iteration, started_s=since_s, ended_s=now_s)

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens over the seconds in which this generator sampled, of the last RATE_S; 0.0 without any."""
        since_s = self.now_s() - RATE_S
        recent = [(started_s, ended_s, number) for started_s, ended_s, number in self._rounds if ended_s >= since_s]
        seconds = covered_s((started_s, ended_s) for started_s, ended_s, _ in recent)
        if seconds > 0.0:
            return sum(number for _, _, number in recent) / seconds
        return 0.0
