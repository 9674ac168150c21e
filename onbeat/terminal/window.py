"""The window of a job with a lag, in words: its open iterations, who samples them, and how stale the samples are."""

from __future__ import annotations

from collections.abc import Sequence

from contracts.events import IterationMetrics
from contracts.jobs import JobStatus, WindowIteration
from contracts.schedule import LAGGING
from onbeat.terminal.words import number, plural, share


def kind_in_words(status: JobStatus) -> str:
    """`periodic · on-policy`, `delayed · lag 2`, or `bounded · lag 2 at most`."""
    if status.schedule not in LAGGING:
        return f"{status.schedule} · on-policy"
    most = " at most" if status.schedule == "bounded" else ""
    return f"{status.schedule} · lag {status.max_policy_lag}{most}"


def open_in_words(window: Sequence[WindowIteration]) -> list[str]:
    """`iteration 7 ← version 5 (lag 2)   3 of 8 in   1 dead` for each open iteration, the oldest first."""
    lines = []
    for one in window:
        dead = f"   {one.batches_dead} dead" if one.batches_dead else ""
        lag = lag_in_words(one.iteration, one.oldest_version, one.newest_version)
        sampled = f"{versions_in_words(one.oldest_version, one.newest_version)} (lag {lag})"
        backlog = f"{one.batches_published} of {one.batches_expected} in{dead}"
        lines.append(f"iteration {one.iteration} ← {sampled}   {backlog}")
    return lines


def lag_in_words(iteration: int, oldest_version: int, newest_version: int) -> str:
    """`2`, or `0 to 2` where several versions may sample the iteration."""
    least, most = iteration - newest_version, iteration - oldest_version
    return str(most) if least == most else f"{least} to {most}"


def lags_of(metrics: IterationMetrics) -> str:
    """`lag 2` where all batches have it; else `lag 0.8 (2 batches of 0, 6 of 1)`."""
    found = [(lag, number) for lag, number in enumerate(metrics.lag_counts) if number]
    if len(found) == 1:
        return f"lag {found[0][0]}"
    parts = [f"{number} of {lag}" for lag, number in found]
    if found:
        parts[0] = f"{plural(found[0][1], 'batch')} of {found[0][0]}"
    return f"lag {metrics.lag_mean:.1f} ({', '.join(parts)})"


def staleness(metrics: IterationMetrics) -> str:
    """`K3 0.0123   effective samples 93.1%   corrected 1.2%`: over the tokens that went through the trainer's model."""
    effective, corrected = share(metrics.effective_sample_share), share(metrics.corrected_share)
    return f"K3 {number(metrics.mismatch_k3)}   effective samples {effective}   corrected {corrected}"


def versions_in_words(oldest: int, newest: int) -> str:
    """`version 5`, or `versions 4 to 6`."""
    return f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"
