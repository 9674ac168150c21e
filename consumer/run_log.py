"""What a run leaves to read: metrics, timeline and evaluations as JSON lines, and the events of the job."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from contracts.errors import InvalidInput, OnbeatError
from contracts.events import IterationMetrics, TimelineSpan
from contracts.jobs import EvaluationScore
from contracts.run_folder import RunFolder
from contracts.spec import JobSpec
from contracts.wire import Record, decode_json, encode_json


class RunLog:
    """Appends lines; a replayed iteration appends its lines again, and readers take the last of an iteration."""

    def __init__(self, folder: RunFolder, spec: JobSpec) -> None:
        """Raises OnbeatError naming the folder when it cannot be made or written."""
        self._folder = folder
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.spec.write_bytes(encode_json(spec))
        except OSError as error:
            raise OnbeatError(
                f"cannot be written: {error.strerror}", field=str(folder.path), cure="choose another run root"
            ) from error

    def metrics(self, metrics: IterationMetrics) -> None:
        _append(self._folder.metrics, [metrics])

    def timeline(self, spans: Iterable[TimelineSpan]) -> None:
        _append(self._folder.timeline, spans)

    def evaluation(self, score: EvaluationScore) -> None:
        _append(self._folder.evaluations, [score])


def sampled_scores(folder: RunFolder) -> dict[int, float]:
    """Policy version → its held-out score under the job's sampling; the last evaluation of a version counts.

    A line that a killed writer cut off is passed over. Raises OnbeatError naming the file when it cannot be read.
    """
    scores: dict[int, float] = {}
    try:
        lines = folder.evaluations.read_bytes().splitlines() if folder.evaluations.exists() else []
    except OSError as error:
        raise OnbeatError(f"cannot be read: {error.strerror}", field=str(folder.evaluations)) from error
    for line in lines:
        try:
            score = decode_json(line, EvaluationScore)
        except InvalidInput:
            continue
        scores[score.policy_version] = score.sampled
    return scores


def _append(path: Path, records: Iterable[Record]) -> None:
    lines = b"".join(encode_json(record) + b"\n" for record in records)
    try:
        with path.open("ab") as file:
            file.write(lines)
    except OSError as error:
        raise OnbeatError(f"cannot be written: {error.strerror}", field=str(path)) from error
