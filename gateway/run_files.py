"""The gateway's reader of a run folder, which the trainer may be writing at the same time."""

from __future__ import annotations

import codecs
import math
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Generic, TypeVar

from fastapi import Response
from fastapi.responses import StreamingResponse
from msgspec import UNSET
from msgspec.structs import astuple, replace

from contracts.answers import LogPart
from contracts.encoding.json_lines import (
    PlacedLine,
    json_line,
    json_lines,
    last_json_lines,
    line_after,
    open_plain,
)
from contracts.encoding.wire import MAX_ITERATIONS, encode_json
from contracts.errors import Unavailable
from contracts.events import NOT_DRAWN, IterationMetrics
from contracts.jobs import EvaluationScore, JobStatus
from contracts.run_folder import STACK_FILE, RunFolder
from contracts.settings import StackSettings
from onbeat.base.http.bodies import JSON, json_answer

T = TypeVar("T")
OfIteration = TypeVar("OfIteration", IterationMetrics, EvaluationScore)
FIRST_TAIL_BYTES = 256 * 1024
HELD_BYTES = 6 * 1024 * 1024
"""Lines that become records, and an answer, at the same time; together they take some eight times as much memory."""
PIECE_BYTES = 256 * 1024
"""A longer answer is made in pieces of so many bytes."""
MAX_READ_BYTES = 4 * 1024**3
"""How much of a file one request goes through: of a larger one, which no job writes, its end."""
ENDED_AGAIN_S = 3600.0
"""The folder of an ended job is measured again after so long, because its files are removed at their age."""


class IterationLines(Generic[OfIteration]):
    """The lines of a file that count, found by one pass over it, and read again one by one.

        file ─ pass ─▶ places of the lines that stand ─ chosen ─▶ read again ─▶ records

    The last line of each iteration counts; a line takes back those of later iterations, which stood before a rewind.
    A line that a dying trainer tore is left out: its iteration is not committed, and is written again when it is. What
    is kept of a line is its place, so that memory doesn't grow with the size of the file.
    """

    def __init__(self, path: Path, kind: type[OfIteration], *, first: int = 0) -> None:
        """first: the first iteration that is asked for. Raises Unavailable."""
        self._path = path
        self._kind = kind
        self.iterations = array("q")
        """Numbers of the iterations, ascending."""
        self._starts = array("q")
        self._num_bytes = array("q")
        with readable(path.name):
            for place, record in json_lines(path, kind, start=self._start(first)):
                self._add(place, record.iteration, first)

    def __len__(self) -> int:
        return len(self.iterations)

    @property
    def num_bytes(self) -> int:
        return sum(self._num_bytes)

    def records(self, chosen: Sequence[int] | None = None) -> Iterator[OfIteration]:
        """Yields the records at these places of `iterations`, None for all. Raises Unavailable.

        One that is gone, since the file was replaced meanwhile, is left out.
        """
        if not self.iterations:
            return
        with readable(self._path.name), open_plain(self._path) as file:
            for place in range(len(self)) if chosen is None else chosen:
                line = PlacedLine(self._starts[place], self._num_bytes[place])
                record = json_line(file, self._kind, line)
                if record is not None:
                    yield record

    def fitting(self, places: Sequence[int]) -> Sequence[int]:
        """Returns the first of these places whose lines take HELD_BYTES together, at least one."""
        left = HELD_BYTES
        for number, place in enumerate(places):
            left -= self._num_bytes[place]
            if left < 0 and number:
                return places[:number]
        return places

    def thinned(self, places: Sequence[int], most: int) -> Sequence[int]:
        """Returns all of these places, or of more than `most`, or than HELD_BYTES, each k-th and the last one."""
        chosen = thinned(places, most)
        while len(chosen) > 2 and sum(self._num_bytes[place] for place in chosen) > HELD_BYTES:
            most = max(2, len(chosen) // 2)
            chosen = thinned(places, most)
        return chosen

    def _add(self, place: PlacedLine, iteration: int, first: int) -> None:
        if not 0 <= iteration <= MAX_ITERATIONS:  # of no job: their number would have no bound
            return
        while self.iterations and self.iterations[-1] >= iteration:
            for column in (self.iterations, self._starts, self._num_bytes):
                column.pop()
        if iteration >= first:
            self.iterations.append(iteration)
            self._starts.append(place.start)
            self._num_bytes.append(place.num_bytes)

    def _start(self, first: int) -> int:
        """Returns a place before all lines of iterations from the first on, near the end where they are few."""
        try:
            with open_plain(self._path) as file:
                size = file.seek(0, os.SEEK_END)
        except FileNotFoundError:
            return 0
        oldest = line_after(self._path, size - MAX_READ_BYTES)
        tail = FIRST_TAIL_BYTES
        while first and tail < size - oldest:
            start = line_after(self._path, size - tail)
            _, record = next(json_lines(self._path, self._kind, start=start), (None, None))
            if record is not None and record.iteration < first:
                return start
            tail *= 4
        return oldest


def iteration_metrics(folder: RunFolder, *, first: int = 0) -> IterationLines[IterationMetrics]:
    """Finds those from the first on. Raises Unavailable."""
    return IterationLines(folder.metrics, IterationMetrics, first=first)


def evaluations(folder: RunFolder) -> IterationLines[EvaluationScore]:
    """Finds the held-out scores. Raises Unavailable."""
    return IterationLines(folder.evaluations, EvaluationScore)


def streamed(key: str, lines: IterationLines[OfIteration], chosen: Sequence[int] | None = None) -> Response:
    """Answers `{key: [records]}`: at once where they are few, else piece by piece as its client reads.

    chosen: places in the lines; None for all.
    """
    if lines.num_bytes <= HELD_BYTES:
        return json_answer({key: list(lines.records(chosen))})
    return StreamingResponse(_pieces(key, lines.records(chosen)), media_type=JSON)


def _pieces(key: str, records: Iterator[OfIteration]) -> Iterator[bytes]:
    piece = encode_json({key: []}).removesuffix(b"]}")
    separator = b""
    for record in records:
        piece += separator + encode_json(record)
        separator = b","
        if len(piece) >= PIECE_BYTES:
            yield piece
            piece = b""
    yield piece + b"]}"


def thinned(rows: Sequence[T], most: int) -> Sequence[T]:
    """Returns all rows, or of more than `most` each k-th and the last one."""
    step = 1 if len(rows) <= most else -(-len(rows) // (most - 1))
    return [row for place, row in enumerate(rows) if place % step == 0 or place == len(rows) - 1]


def columns_of(rows: Sequence[IterationMetrics]) -> dict[str, tuple[float | None, ...]]:
    """Returns the columns that a chart draws of the iterations, by name, to six digits.

    A value is nan (in JSON null) where an iteration has no such number.
    """
    if not rows:
        return {}
    values = zip(IterationMetrics.__struct_fields__, zip(*map(astuple, rows), strict=True), strict=True)
    columns: dict[str, Sequence[object]] = {name: of_each for name, of_each in values if name not in NOT_DRAWN}
    if not any(row.lag_counts for row in rows):
        columns.pop("lag_mean", None)
    played = [{} if row.trajectories is UNSET else row.trajectories.numbers() for row in rows]
    labelled = [row.labelled() for row in rows]
    for prefix, each in (
        ("", [row.loss_metrics for row in rows]),
        ("", played),
        ("environment: ", [numbers["environment"] for numbers in labelled]),
        ("reward: ", [numbers["reward_components"] for numbers in labelled]),
        ("source: ", [numbers["source_rewards"] for numbers in labelled]),
        ("pool: ", [numbers["difficulty_pools"] for numbers in labelled]),
    ):
        for name in dict.fromkeys(name for numbers in each for name in numbers):
            columns[prefix + name] = [numbers.get(name) for numbers in each]
    drawn = {
        name: column for name, column in columns.items() if any(isinstance(value, int | float) for value in column)
    }
    return {name: _short(column) for name, column in drawn.items()} | {
        "started_s": tuple(row.started_s for row in rows)
    }


def _short(column: Sequence[object]) -> tuple[float | None, ...]:
    numbers = tuple(value if isinstance(value, int | float) else math.nan for value in column)
    return tuple(map(float, ("%.6g " * len(numbers) % numbers).split()))


def end_of(path: Path, kind: type[T], is_enough: Callable[[list[T], int], bool]) -> list[T]:
    """Reads more of a file's end until it is enough; is_enough: of the records, and how many bytes were read."""
    max_bytes = FIRST_TAIL_BYTES
    while True:
        with readable(path.name):
            records, is_whole = last_json_lines(path, kind, max_bytes=max_bytes)
        if is_whole or is_enough(records, max_bytes):
            return records
        max_bytes *= 4


def trainer_log(folder: RunFolder, *, after: int, limit: int) -> LogPart:
    """Returns at most `limit` bytes behind the first `after` ones; a place beyond the end is the end."""
    with readable("trainer.log"):
        try:
            opened = open_plain(folder.trainer_log)
        except FileNotFoundError:
            return LogPart(text="", after=0, next=0, size=0)
    with readable("trainer.log"), opened as file:
        size = file.seek(0, os.SEEK_END)
        after = file.seek(min(after, size))
        data = file.read(min(limit, size - after))
    if after + limit < size and (end := data.rfind(b"\n") + 1):
        data = data[:end]
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    text = decoder.decode(data)
    cut = len(decoder.getstate()[0])  # of a character that goes on in the next part
    if cut == len(data):
        text = data.decode(errors="replace")
        cut = 0
    return LogPart(text=text, after=after, next=after + len(data) - cut, size=size)


class DiskUse:
    """Job id → bytes of its run folder and versions, as of the last `measure`: a walk takes long."""

    def __init__(self, settings: StackSettings) -> None:
        self._run_root, self._weight_root = settings.run_root_path, settings.weight_root_path
        self.bytes: dict[str, int] = {}
        self._looked_s: dict[str, float] = {}
        self._active: set[str] = set()
        """The jobs that were active at the last `measure`."""

    def measure(self, *, active: set[str], now_s: float) -> None:
        """Walks the folders of active jobs, of those that have ended since, of new ones, and the rest once an hour."""
        with readable("ONBEAT_RUN_ROOT"):
            job_ids = {entry.name for entry in os.scandir(self._run_root) if entry.name.startswith("job-")}
        for job_id in job_ids:
            is_changing = job_id in active or job_id in self._active
            if is_changing or now_s - self._looked_s.get(job_id, -ENDED_AGAIN_S) >= ENDED_AGAIN_S:
                self.bytes[job_id] = sum(map(_size_of, {self._run_root / job_id, self._weight_root / job_id}))
                self._looked_s[job_id] = now_s
        for gone in self.bytes.keys() - job_ids:
            del self.bytes[gone], self._looked_s[gone]
        self._active = set(active)

    def with_size_and_folder(self, status: JobStatus) -> JobStatus:
        """Returns the status with its size, where that is known, and the folder by which commands find the stack."""
        directory = str(self._run_root.resolve()) if (self._run_root / STACK_FILE).exists() else ""
        return replace(status, disk_bytes=self.bytes.get(status.job_id), stack_directory=directory)


def _size_of(folder: Path) -> int:
    """Bytes of all files below it; what vanishes meanwhile counts for nothing."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                size += os.lstat(os.path.join(parent, name)).st_size
    return size


@contextmanager
def readable(name: str = "metrics.jsonl") -> Iterator[None]:
    """Raises Unavailable, with the reason, where a file or folder of a job can't be read."""
    try:
        yield
    except OSError as error:
        raise Unavailable(f"cannot be read: {error.strerror}", field=name) from error
