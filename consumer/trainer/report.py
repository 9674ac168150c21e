"""What a run leaves to read: metrics, timeline and evaluations as JSON lines, and the events of the job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from consumer.trackers.family import Trackers, tracker_makers
from contracts.encoding.wire import Record, decode_json, encode_json
from contracts.errors import InvalidInput, OnbeatError
from contracts.events import IterationMetrics, TimelineSpan
from contracts.jobs import EvaluationScore
from contracts.run_folder import RunFolder
from contracts.spec import JobSpec
from process.private_folders import make_private

T = TypeVar("T", bound=Record)


class RunLog:
    """Appends lines; a replayed iteration appends its lines again, and readers take the last of an iteration.

    The job's trackers get the same numbers, once.
    """

    def __init__(self, folder: RunFolder, spec: JobSpec) -> None:
        """Raises OnbeatError naming the folder when it cannot be made or written, InvalidInput for a tracker."""
        self._folder = folder
        try:
            make_private(folder.path)
            folder.spec.write_bytes(encode_json(spec))
        except OSError as error:
            raise OnbeatError(
                f"cannot be written: {error.strerror}", field=str(folder.path), cure="choose another run root"
            ) from error
        makers = tracker_makers(spec, folder)
        self._trackers = Trackers(
            makers,
            last_iteration=max(_iterations(folder.metrics, IterationMetrics), default=-1) if makers else -1,
            last_evaluation=max(_iterations(folder.evaluations, EvaluationScore), default=-1) if makers else -1,
        )

    def close(self) -> None:
        """Waits for the trackers, each up to its deadline."""
        self._trackers.close()

    def metrics(self, metrics: IterationMetrics) -> None:
        _append(self._folder.metrics, [metrics])
        self._trackers.iteration(metrics)

    def timeline(self, spans: Iterable[TimelineSpan]) -> None:
        _append(self._folder.timeline, spans)

    def evaluation(self, score: EvaluationScore) -> None:
        _append(self._folder.evaluations, [score])
        self._trackers.evaluation(score)


def sampled_scores(folder: RunFolder) -> dict[int, float]:
    """Policy version → its held-out score under the job's sampling; the last evaluation of a version counts.

    A line that a killed writer cut off is passed over. Raises OnbeatError naming the file when it cannot be read.
    """
    return {score.policy_version: score.sampled for score in _records(folder.evaluations, EvaluationScore)}


def _iterations(path: Path, kind: type[IterationMetrics] | type[EvaluationScore]) -> list[int]:
    return [record.iteration for record in _records(path, kind)]


def _records(path: Path, kind: type[T]) -> Iterator[T]:
    """A line that a killed writer cut off is passed over."""
    try:
        lines = path.read_bytes().splitlines() if path.exists() else []
    except OSError as error:
        raise OnbeatError(f"cannot be read: {error.strerror}", field=str(path)) from error
    for line in lines:
        try:
            record = decode_json(line, kind)
        except InvalidInput:
            continue
        yield record


def _append(path: Path, records: Iterable[Record]) -> None:
    lines = b"".join(encode_json(record) + b"\n" for record in records)
    try:
        with path.open("ab") as file:
            file.write(lines)
    except OSError as error:
        raise OnbeatError(f"cannot be written: {error.strerror}", field=str(path)) from error
