"""Decides whether a job ends early, by its spec and by the evaluations that are committed, and by nothing else.

The trainer asks it before the step of an iteration that evaluated, writes the answer into the audit record, and
`onbeat verify` asks again. So a trainer that replays the iteration, and a job that is run again, end at the same
version (I7).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import UNSET

from contracts.events import AuditRecord
from contracts.spec.job import JobSpec
from contracts.spec.rollout import StopSpec


def scores_of(chain: Iterable[AuditRecord]) -> dict[int, float]:
    """Returns version → mean held-out reward, of the commits that no rewind took back, oldest version first."""
    scores: dict[int, float] = {}
    for record in chain:
        scores = scores_after(scores, record)
    return scores


def scores_after(scores: Mapping[int, float], record: AuditRecord) -> dict[int, float]:
    """Returns the scores of a chain that has this record behind the others."""
    if record.kind == "rewind":
        return {version: score for version, score in scores.items() if version < record.iteration}
    if record.held_out is UNSET:
        return dict(scores)
    return {**scores, record.policy_version: record.held_out}


def stop_reason(spec: JobSpec, iteration: int, scores: Mapping[int, float]) -> str:
    """Says why a job ends in an iteration instead of training it; "" where it goes on.

    Args:
        spec: The job.
        iteration: The open iteration, whose version was evaluated.
        scores: Version → mean held-out reward of all evaluations so far, oldest version first, this one's included.
    """
    stop = spec.evaluation.stop_when
    # The last iteration only evaluates, and ends the job anyway.
    if stop is UNSET or iteration not in scores or iteration >= spec.iterations:
        return ""
    return _reached(stop, iteration, scores[iteration]) or _out_of_patience(stop, scores)


def _reached(stop: StopSpec, version: int, score: float) -> str:
    if stop.held_out is UNSET or score < stop.held_out:
        return ""
    threshold = f"evaluation.stop_when.held_out is {stop.held_out:g}"
    return f"version {version} has a held-out reward of {score:.4g}, and {threshold}"


def _out_of_patience(stop: StopSpec, scores: Mapping[int, float]) -> str:
    if stop.patience is UNSET or len(scores) <= stop.patience:
        return ""
    versions = list(scores)
    # max returns the first of equal scores: an equal score is no better one.
    best = max(versions, key=lambda version: scores[version])
    if len(versions) - 1 - versions.index(best) < stop.patience:
        return ""
    return (
        f"{stop.patience} evaluations in a row were no better than that of version {best}, {scores[best]:.4g}, and "
        f"evaluation.stop_when.patience is {stop.patience}"
    )
