"""A stage of a job as a process of one's own: it gets rows, and puts the columns that it makes of them.

    with Stage("job-1", "brevity") as stage:
        for rows in stage:                                            # until the job ends
            stage.put(rows, {"brevity": [1.0 / len(text) for text in rows["text"]]})

Rows are leased to this process for the stage's `lease_s`, and a thread renews the leases while they are computed. Where
the process dies, they go to another worker of the stage. A put that was answered stands, whatever dies after it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from broker.connection.roles import STAGE
from broker.presence import StagePresence
from broker.stage_side import ClaimedItem, PutOutcome, StageSide
from contracts.errors import Conflict, InvalidInput, JobEnded, NotFound
from contracts.experience.columns import BASE_COLUMNS, Column, check_values, row_shapes
from contracts.experience.plan import PlannedStage
from contracts.settings import StackSettings
from contracts.spec_tables.stages import ExternalStage
from onbeat.client.connection import JobConnection, client_settings, speaking_the_same
from onbeat.client.rows import RowKey, Rows, packed

WAIT_S = 5.0
"""Longest wait of an iteration over a stage before it looks whether the job goes on."""
PRESENCE_S = 2.0


@dataclass(frozen=True, kw_only=True, repr=False)
class StageRows(Rows):
    """Rows that this process holds under a lease: whole items, of one batch or of several."""

    items: tuple[ClaimedItem, ...] = field(repr=False)


class Stage:
    """One stage of one job. A context manager; its methods may be called by several threads."""

    def __init__(
        self,
        job_id: str,
        name: str,
        *,
        redis_url: str = "",
        run_dir: str | Path | None = None,
        settings: StackSettings | None = None,
    ) -> None:
        """redis_url, run_dir, settings: as for `client_settings`; the role is `stage`.

        Raises NotFound for a job or a stage that isn't there, InvalidInput for a stage of another type than external.
        """
        found = client_settings(STAGE, redis_url=redis_url, run_dir=run_dir, settings=settings)
        self._connection = JobConnection(found, job_id, what=f"stage-{name}")
        try:
            self.stage: PlannedStage = _external(self._connection, name)
        except BaseException:
            self._connection.close(lambda: None)
            raise
        self._side = StageSide(self._connection.broker, job_id, self._connection.process_id)
        self._presence = StagePresence(self._connection.broker)
        self._held: dict[tuple[int, str, int], ClaimedItem] = {}
        self._lock = threading.Lock()
        made = {column.name: column for stage in self._side.plan.stages for column in stage.outputs}
        self._columns: dict[str, Column] = {name: made.get(name) or BASE_COLUMNS[name] for name in self.stage.inputs}

    def __enter__(self) -> Stage:
        self._connection.keep(self._beat, every_s=min(PRESENCE_S, self.stage.lease_s / 3))
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives up what it holds: the leases run out, and another worker computes it."""
        self._connection.close(lambda: self._presence.leave(self._connection.process_id))

    def get(self, max_rows: int = 256, *, timeout_s: float = 60.0) -> StageRows | None:
        """Returns rows whose input columns are there, and that no other worker holds; None when there are none in time.

        One item at least, and no more of them than max_rows together. Raises JobEnded once the job needs no more,
        BrokerUnavailable where Redis stays away.
        """
        ends_s = time.monotonic() + timeout_s
        while True:
            with speaking_the_same():
                items = self._side.claim(self.stage.name, max_rows)
            if items:
                with self._lock:
                    self._held |= {_key(item): item for item in items}
                return self._rows(items)
            self._connection.check()
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                return None
            self._side.wait(min(left_s, WAIT_S))

    def __iter__(self) -> Iterator[StageRows]:
        """Yields rows until the job has ended."""
        while True:
            try:
                rows = self.get(timeout_s=WAIT_S)
            except JobEnded:
                return
            if rows is not None:
                yield rows

    def put(self, rows: StageRows, columns: Mapping[str, Sequence[Any]]) -> bool:
        """Puts the stage's outputs of these rows, and so acknowledges them; False where they are not needed any more.

        columns: output → a value for each row: numbers for a column per rollout, arrays for one per token, texts.
        Safe to repeat. Raises ContractViolation that names column and row for a wrong type or shape, and Conflict for
        rows that were put before with other content: the first put stands.
        """
        values = self._packed(rows, columns)
        made: list[tuple[ClaimedItem, dict[str, list[bytes]]]] = []
        start = 0
        for item in rows.items:
            end = start + len(item.rows)
            made.append((item, {name: given[start:end] for name, given in values.items()}))
            start = end
        outcomes = self._connection.until_room(lambda: self._side.put(made))
        self._let_go(rows)
        for (item, _), outcome in zip(made, outcomes, strict=True):
            if outcome is PutOutcome.DIVERGENT:
                raise self._divergent(item)
        return any(outcome in (PutOutcome.ACCEPTED, PutOutcome.AGAIN) for outcome in outcomes)

    def fail(self, rows: StageRows, reason: str) -> None:
        """Gives rows back: they are tried again, and past the stage's `max_attempts` their batch is dead (I6)."""
        self._let_go(rows)
        for item in rows.items:
            self._side.fail(item, reason)

    def release(self, rows: StageRows, reason: str) -> None:
        """Gives rows back as if they had not been claimed: this process, or a service, is the cause (I6)."""
        self._let_go(rows)
        for item in rows.items:
            self._side.fail(item, reason, is_released=True)

    def _packed(self, rows: StageRows, columns: Mapping[str, Sequence[Any]]) -> dict[str, list[bytes]]:
        of = f"stage {self.stage.name}, batch {', '.join(sorted(rows.batch_ids))}"
        outputs = {column.name: column for column in self.stage.outputs}
        values = {
            name: packed(outputs[name], given, of=of) if name in outputs else [] for name, given in columns.items()
        }
        shapes = [shape for item in rows.items for shape in row_shapes(item.batch)[item.rows.start : item.rows.stop]]
        check_values(values, self.stage.outputs, shapes, of=of)
        return values

    def _rows(self, items: Sequence[ClaimedItem]) -> StageRows:
        return StageRows(
            items=tuple(items),
            keys_of_rows=tuple(
                RowKey(iteration=item.iteration, batch_id=item.batch_id, row=row) for item in items for row in item.rows
            ),
            columns=self._columns,
            values_as_bytes={
                name: [value for item in items for value in item.inputs[name]] for name in self.stage.inputs
            },
        )

    def _let_go(self, rows: StageRows) -> None:
        with self._lock:
            for item in rows.items:
                self._held.pop(_key(item), None)

    def _divergent(self, item: ClaimedItem) -> Conflict:
        names = ", ".join(column.name for column in self.stage.outputs)
        return Conflict(
            f"rows {item.rows.start} to {item.rows.stop - 1} have other values of {names} already, which are trained",
            field=f"stage {self.stage.name}, batch {item.batch_id}",
            cure="make the stage a function of its inputs, or leave out what was put",
        )

    def _beat(self) -> None:
        connection = self._connection
        self._presence.beat(connection.process_id, [f"{connection.job_id}/{self.stage.name}"])
        with self._lock:
            held = list(self._held.values())
        if held:
            renewal = self._side.renew(held)
            with self._lock:
                for item in (*renewal.lost, *renewal.settled):
                    self._held.pop(_key(item), None)


def _external(connection: JobConnection, name: str) -> PlannedStage:
    stages = {stage.name: stage for stage in connection.spec.stages}
    if name not in stages:
        raise NotFound(
            f"{connection.job_id} has no stage {name}", field="stage", cure=f"it has {', '.join(stages) or 'none'}"
        )
    if not isinstance(stages[name], ExternalStage):
        raise InvalidInput(
            f"stage {name} of {connection.job_id} is of type {stages[name].kind}, which Onbeat's own workers serve",
            field="stage",
            cure='declare one with type = "external"',
        )
    plan = connection.spec.stage_plan
    return plan.stages[plan.index(name)]


def _key(item: ClaimedItem) -> tuple[int, str, int]:
    """What an item is held by: a rewind brings it again, under another claim."""
    return item.claim, item.batch_id, item.item
