"""Writes the run folder of a finished job whose every second a test states."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from contracts.encoding.json_lines import append_json_lines
from contracts.encoding.wire import encode_json
from contracts.events import TimelineSpan
from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec
from tests.contract.golden_files import iteration_metrics

JOB = "job-0123456789ab"
TOKENS = 400
"""Sampled tokens of an iteration."""


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Times of the parts, of which no two are alike."""

    generate: float = 1.0
    score: float = 0.5
    train: float = 2.0
    claim: float = 0.25
    load: float = 0.75
    arrival: float = 0.125
    take: float = 0.0625
    step: float = 0.875
    publish: float = 0.375
    open: float = 0.1875
    after: float = 0.03125


SECONDS = Seconds()


def write_synchronous_run(root: Path, spec: JobSpec, seconds: Seconds = SECONDS) -> RunFolder:
    """One generator samples an iteration's batches, then one rank trains them, `spec.iterations` times."""
    folder = RunFolder(root, JOB)
    folder.path.mkdir(parents=True)
    folder.spec.write_bytes(encode_json(spec))
    turned_s = 100.0
    for iteration in range(spec.iterations):
        spans = _iteration(iteration, spec.rollout.batches_per_iteration, turned_s, seconds)
        append_json_lines(folder.timeline, spans)
        committed = spans[-1]
        line = iteration_metrics(
            iteration=iteration,
            num_tokens=TOKENS,
            started_s=turned_s,
            wall_s=committed.ended_s - turned_s,
        )
        append_json_lines(folder.metrics, [line])
        turned_s = committed.ended_s + seconds.after
    return folder


def _iteration(iteration: int, batches: int, turned_s: float, seconds: Seconds) -> list[TimelineSpan]:
    """Returns the spans of one iteration; the last one commits it and opens the next."""
    spans: list[TimelineSpan] = []

    def add(who: str, what: str, started_s: float, duration_s: float, *, batch: str = "", of: int = iteration) -> float:
        ended_s = started_s + duration_s
        span = TimelineSpan(who=who, what=what, iteration=of, batch_id=batch, started_s=started_s, ended_s=ended_s)
        spans.append(span)
        return ended_s

    opened_s = turned_s - seconds.after
    now_s = opened_s + seconds.load
    scored_s = now_s
    for index in range(batches):
        batch = f"{iteration}/train/{index}"
        now_s = add("generator", "generate", now_s + seconds.claim, seconds.generate, batch=batch)
        # Scores come while the next batch is sampled.
        scored_s = add("generator", "score", now_s, seconds.score, batch=batch)
    now_s = scored_s + seconds.arrival
    for index in range(batches):
        gap_s = seconds.take if index else 0.0
        now_s = add("trainer", "train", now_s + gap_s, seconds.train, batch=f"{iteration}/train/{index}")
    now_s = add("trainer", "step", now_s, seconds.step)
    now_s = add("trainer", "sync", now_s, seconds.publish)
    add("trainer", "open", now_s, seconds.open, of=iteration + 1)
    return spans
