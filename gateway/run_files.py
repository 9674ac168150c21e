"""What the gateway reads from a run folder, which the trainer may be writing at the same time."""

from __future__ import annotations

import codecs
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from msgspec import UNSET
from msgspec.structs import astuple, replace

from contracts.answers import LogPart
from contracts.encoding.json_lines import last_json_lines, open_plain, read_json_lines
from contracts.errors import Unavailable
from contracts.events import NOT_DRAWN, IterationMetrics
from contracts.jobs import EvaluationScore, JobStatus
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings

T = TypeVar("T")
OfIteration = TypeVar("OfIteration", IterationMetrics, EvaluationScore)
FIRST_TAIL_BYTES = 256 * 1024
ENDED_AGAIN_S = 3600.0
"""An ended job's folder is smaller one day: retention takes files away."""


def iteration_metrics(folder: RunFolder, *, first: int = 0) -> list[IterationMetrics]:
    """Returns those from the first on, in order.

    A line that a dying trainer tore is left out: its iteration is not committed, and is written again when it is.
    """
    if first:
        lines = end_of(folder.metrics, IterationMetrics, lambda found, _: bool(found) and found[0].iteration < first)
    else:
        with readable():
            lines = read_json_lines(folder.metrics, IterationMetrics)
    return [metrics for metrics in _as_they_stand(lines) if metrics.iteration >= first]


def thinned(rows: Sequence[T], most: int) -> Sequence[T]:
    """All of them, or of more than `most` each k-th and the last one."""
    step = 1 if len(rows) <= most else -(-len(rows) // (most - 1))
    return [row for place, row in enumerate(rows) if place % step == 0 or place == len(rows) - 1]


def evaluations(folder: RunFolder) -> list[EvaluationScore]:
    """Returns them in order."""
    with readable("evaluations.jsonl"):
        return _as_they_stand(read_json_lines(folder.evaluations, EvaluationScore))


def columns_of(rows: Sequence[IterationMetrics]) -> dict[str, tuple[float | None, ...]]:
    """What a chart draws of the iterations, by name, to six digits; nan (in JSON null) where one has no such number."""
    if not rows:
        return {}
    values = zip(IterationMetrics.__struct_fields__, zip(*map(astuple, rows), strict=True), strict=True)
    columns: dict[str, Sequence[object]] = {name: of_each for name, of_each in values if name not in NOT_DRAWN}
    if not any(row.lag_counts for row in rows):
        columns.pop("lag_mean", None)
    played = [{} if row.trajectories is UNSET else row.trajectories.numbers() for row in rows]
    labelled = [row.labelled() for row in rows]
    for prefix, each in (
        ("", played),
        ("environment: ", [one["environment"] for one in labelled]),
        ("reward: ", [one["reward_components"] for one in labelled]),
        ("source: ", [one["source_rewards"] for one in labelled]),
        ("pool: ", [one["difficulty_pools"] for one in labelled]),
    ):
        for name in dict.fromkeys(name for one in each for name in one):
            columns[prefix + name] = [one.get(name) for one in each]
    drawn = {name: column for name, column in columns.items() if any(isinstance(one, int | float) for one in column)}
    return {name: _short(column) for name, column in drawn.items()} | {
        "started_s": tuple(row.started_s for row in rows)
    }


def _short(column: Sequence[object]) -> tuple[float | None, ...]:
    numbers = tuple(one if isinstance(one, int | float) else math.nan for one in column)
    return tuple(map(float, ("%.6g " * len(numbers) % numbers).split()))


def _as_they_stand(lines: Iterable[OfIteration]) -> list[OfIteration]:
    """The last line of each iteration; a line takes back those of later iterations, which stood before a rewind."""
    kept: list[OfIteration] = []
    for line in lines:
        while kept and kept[-1].iteration >= line.iteration:
            kept.pop()
        kept.append(line)
    return kept


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
        text, cut = data.decode(errors="replace"), 0
    return LogPart(text=text, after=after, next=after + len(data) - cut, size=size)


class DiskUse:
    """Job id → bytes of its run folder and versions, as of the last `measure`: a walk takes long."""

    def __init__(self, settings: StackSettings) -> None:
        self._run_root, self._weight_root = settings.run_root_path, settings.weight_root_path
        self.bytes: dict[str, int] = {}
        self._looked_s: dict[str, float] = {}

    def measure(self, *, active: set[str], now_s: float) -> None:
        """Walks the folders of active jobs, and each other one where it is new, or was looked at an hour ago."""
        with readable("ONBEAT_RUN_ROOT"):
            job_ids = {entry.name for entry in os.scandir(self._run_root) if entry.name.startswith("job-")}
        for job_id in job_ids:
            if job_id in active or now_s - self._looked_s.get(job_id, -ENDED_AGAIN_S) >= ENDED_AGAIN_S:
                self.bytes[job_id] = sum(map(_size_of, {self._run_root / job_id, self._weight_root / job_id}))
                self._looked_s[job_id] = now_s
        for gone in self.bytes.keys() - job_ids:
            del self.bytes[gone], self._looked_s[gone]

    def told(self, status: JobStatus) -> JobStatus:
        """The status with its size, where that is known."""
        return replace(status, disk_bytes=self.bytes.get(status.job_id))


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
