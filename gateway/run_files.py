"""What the gateway reads from a run folder, which the trainer may be writing at the same time."""

from __future__ import annotations

import logging

import msgspec

from contracts.errors import Unavailable
from contracts.events import IterationMetrics
from contracts.run_folder import RunFolder

log = logging.getLogger(__name__)


TAIL_BYTES = 64 * 1024
"""Far more than one line of metrics.jsonl."""


def newest_metrics(folder: RunFolder) -> IterationMetrics | None:
    """The last whole line, without reading the file up to it; None before the first iteration."""
    try:
        with folder.metrics.open("rb") as file:
            file.seek(max(0, folder.metrics.stat().st_size - TAIL_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unavailable(f"cannot be read: {error.strerror}", field="metrics.jsonl") from error
    for line in reversed(lines):
        try:
            return msgspec.json.decode(line, type=IterationMetrics)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return None


def iteration_metrics(folder: RunFolder) -> list[IterationMetrics]:
    """By iteration; the last line of an iteration wins, since a replay writes it again.

    A line that a dying trainer tore is left out: its iteration is not committed, and is written again when it is.
    """
    try:
        lines = folder.metrics.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise Unavailable(f"cannot be read: {error.strerror}", field="metrics.jsonl") from error
    found: dict[int, IterationMetrics] = {}
    for number, line in enumerate(lines, start=1):
        try:
            metrics = msgspec.json.decode(line, type=IterationMetrics)
        except (msgspec.DecodeError, UnicodeDecodeError):
            log.warning("line %d of job %s's metrics is torn and left out", number, folder.job_id)
            continue
        found[metrics.iteration] = metrics
    return [found[iteration] for iteration in sorted(found)]
