"""The stream monitor's answer as tables: whatever it reports is shown, so that a new counter needs no change here."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from onbeat.terminal.words import UNKNOWN, by_reason, count, duration, lag_in_words, number, one_line, size

MAX_COLUMNS = 120
"""A wider table is no table for a reader of lines, in a file or a pipe."""


def report_tables(report: Mapping[str, Any], *, max_columns: int | None = None) -> Iterator[Table]:
    """Yields a table of the plain values, then one for each list of records.

    Args:
        report: The report of a job's streams, as the gateway answers it.
        max_columns: The most columns of a line. Records that would be wider have a line for each item; None: a terminal
            folds their cells.
    """
    report = _shown(report)
    plain = {key: value for key, value in report.items() if not _is_records(value)}
    if plain:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")  # a digest that is cut names no version
        for key, value in plain.items():
            table.add_row(_words(key), cell(key, value) or UNKNOWN)
        yield table
    for key, value in report.items():
        if _is_records(value):
            is_process = key in ("generators", "stage_workers")
            records = value
            if is_process:
                records = [_folded(worker) for worker in value]
            if max_columns is not None and _num_columns(records) > max_columns:
                yield from _records_in_lines(key, value)
            else:
                yield _records_table(key, records)


def live_report(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The report for a screen of 24 lines that is drawn again and again: what moves, and no long list of numbers."""
    report = _shown(report)
    opened = "not open yet "
    if report.get("fence_state"):
        opened = f"{report.get('fence_state')} "
    yield Text.assemble(
        (one_line(str(report.get("job_id", ""))), "bold"), one_line(f"  iteration {report.get('iteration')} {opened}")
    )
    for keys in LIVE_LINES:
        parts = [f"{_words(key)} {cell(key, report[key])}" for key in keys if key in report]
        yield Text("   ".join(parts), no_wrap=True, overflow="ellipsis")
    for key, value in report.items():
        if _is_records(value) and key != "redis_keys":
            rows = value
            if key == "generators":
                rows = [_briefly(generator) for generator in value]
            yield _records_table(key, rows[:MAX_LIVE_ROWS])
            if len(value) > MAX_LIVE_ROWS:
                yield Text(f" and {len(value) - MAX_LIVE_ROWS} more", "dim")


def _folded(worker: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a live process in three columns: the last has all else that it says of itself."""
    named = {name: value for name, value in worker.items() if name in ("worker_id", "seen_s")}
    statements = {
        name: value for name, value in worker.items() if name not in named and value not in ("", None, [], {}, ())
    }
    return named | {"says": statements}


def _briefly(generator: Mapping[str, Any]) -> dict[str, Any]:
    """A live generator without what stays as it is."""
    names = ("worker_id", "seen_s", "policy_version", "tokens_per_s", "doing")
    return {name: generator[name] for name in names if name in generator}


BETWEEN = 2
"""Blanks between two columns of a table."""
LIVE_LINES = (
    ("policy_version", "trainer_lease_s", "batches_expected", "batches_published"),
    ("batches_accepted", "accepted_bytes", "batches_rejected"),
    ("batches_reclaimed", "leases_lost", "batches_hedged", "hedges_won", "batches_dead", "rewinds"),
    ("rows_waiting", "columns_bytes"),
)
MAX_LIVE_ROWS = 8


def report_line(report: Mapping[str, Any]) -> str:
    """Returns the report in one line, for a reader of lines."""
    streams = {str(stream.get("name")): stream for stream in report.get("streams", ())}
    backlog = "   ".join(
        f"{name} {streams[name].get('num_waiting')} waiting, {streams[name].get('num_pending')} in work"
        for name in ("prompts", "rollouts")
        if name in streams
    )
    return one_line(
        f"{time.strftime('%H:%M:%S')}   iteration {report.get('iteration')} {report.get('fence_state') or 'not open'}"
        f"   {report.get('batches_published')} of {report.get('batches_expected')} batches in"
        f"   version {report.get('policy_version')}   {backlog}   dead {report.get('batches_dead')}"
        f"   rejected {by_reason(dict(report.get('batches_rejected') or {}))}"
    )


def _shown(report: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the report with the lag of each open iteration; of a job without a lag, without the window.

    Such a window would say what the plain values say.
    """
    if not report.get("max_policy_lag"):
        return {key: value for key, value in report.items() if key not in ("max_policy_lag", "window")}
    return dict(report) | {"window": [_with_lag(opened) for opened in report.get("window", ())]}


def _with_lag(opened: Any) -> Any:
    """Returns an open iteration as the gateway answers it, with its lag where its versions are there."""
    match opened:
        case {"iteration": int(iteration), "oldest_version": int(oldest), "newest_version": int(newest)}:
            return {**opened, "lag": lag_in_words(iteration, oldest, newest)}
    return opened


def cell(key: str, value: Any) -> str:
    """A value as its key's unit asks: `_bytes`, `_s`, counts by reason; an epoch is a name, not an amount."""
    if value is None:
        return UNKNOWN
    if isinstance(value, Mapping):
        if all(isinstance(number, int) for number in value.values()):
            return by_reason(dict(value))
        return "   ".join(f"{_words(str(name))} {cell(str(name), part)}" for name, part in value.items())
    if isinstance(value, str):
        return one_line(value) or UNKNOWN
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int | float):
        return _number(key, value)
    return ", ".join(cell(key, entry) for entry in value) or UNKNOWN


def _number(key: str, value: float) -> str:
    if key.endswith("epoch"):
        return str(value)
    if key.endswith("bytes"):
        return size(value)
    if key.endswith("_ms"):
        return duration(value / 1000)
    if key.endswith("_s") and not key.endswith("_per_s") and value < 1e8:
        return duration(value)
    return count(value) if isinstance(value, int) else number(value)


def _records_table(title: str, records: Sequence[Mapping[str, Any]]) -> Table:
    columns = list(dict.fromkeys(key for record in records for key in record))
    table = Table(title=_words(title), title_justify="left", title_style="bold", box=None, header_style="dim")
    for column in columns:
        table.add_column(_words(column), overflow="fold")
    for record in records:
        table.add_row(*(cell(column, record.get(column)) for column in columns))
    return table


def _num_columns(records: Sequence[Mapping[str, Any]]) -> int:
    """Columns that a table of these records takes with every cell on one line."""
    names = dict.fromkeys(key for record in records for key in record)
    widths = (max(len(_words(name)), *(len(cell(name, record.get(name))) for record in records)) for name in names)
    return sum(width + BETWEEN for width in widths)


def _records_in_lines(title: str, records: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    """A table for each record: a line for each of its items, without empty ones."""
    for at, record in enumerate(records, start=1):
        counted = f" {at} of {len(records)}" if len(records) > 1 else ""
        table = Table(
            title=f"{_words(title)}{counted}", title_justify="left", title_style="bold", box=None, show_header=False
        )
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for key, value in record.items():
            for name, text in _items(key, value):
                table.add_row(one_line(name), text)
        yield table


def _items(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """(name, text) of each item of a record's value: those of a mapping and of a list of records one by one."""
    if value in ("", None, [], {}, ()):
        return
    if isinstance(value, Mapping) and not all(isinstance(part, int) for part in value.values()):
        for name, part in value.items():
            yield f"{_words(key)} {name}", cell(str(name), part)
    elif _is_records(value):
        for record in value:
            yield _words(key), cell(key, record)
    else:
        yield _words(key), cell(key, value)


def _is_records(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(entry, Mapping) for entry in value)


def _words(key: str) -> str:
    """`oldest_age_s` → `oldest age`: the unit stands with the number; `tokens_per_s` is no time."""
    if key.endswith("_per_s"):
        return key.replace("_", " ")
    for unit in ("_bytes", "_ms", "_s"):
        if key.endswith(unit) and len(key) > len(unit):
            return key.removesuffix(unit).replace("_", " ") + (" size" if unit == "_bytes" else "")
    return key.replace("_", " ")
