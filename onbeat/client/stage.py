"""A stage of a job as a process of one's own: it gets rows, and puts the columns that it makes of them.

    with Stage("job-1", "brevity") as stage:
        for rows in stage:                                            # until the job ends
            stage.put(rows, {"brevity": [1.0 / len(text) for text in rows["text"]]})

Rows are leased to this process for the stage's `lease_s`, and a thread renews the leases while they are computed. Where
the process dies, they go to another worker of the stage. A put that was answered stands, whatever dies after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from broker.connection.roles import STAGE
from broker.presence import StagePresence
from broker.stage_side import ClaimedItem, PutOutcome, StageSide, wait_for_items
from contracts.errors import Conflict, InvalidInput, NotFound
from contracts.experience.columns import BASE_COLUMNS, Column, check_values, row_shapes
from contracts.experience.graph import StageNode
from contracts.monitor import StageWorkerSeen
from contracts.settings import StackSettings
from contracts.spec.stages import ExternalStage
from onbeat.client.connection import JobConnection, connected
from onbeat.client.joined_worker import OwnWorker
from onbeat.client.rows import RowKey, Rows, packed

MAX_ROWS = 256
"""A `get` takes no more, where its caller doesn't say."""


@dataclass(frozen=True, kw_only=True, repr=False)
class StageRows(Rows):
    """Rows that this process holds under a lease: whole items, of one batch or of several."""

    items: tuple[ClaimedItem, ...] = field(repr=False)


class Stage(OwnWorker[ClaimedItem, StageRows]):
    """A stage of one job in a process of the user's own, as a context manager.

    Several threads may call its methods.
    """

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
        who = {"redis_url": redis_url, "run_dir": run_dir, "settings": settings}
        with connected(job_id, role=STAGE, what=f"stage-{name}", **who) as connection:
            self.stage: StageNode = _external(connection, name)
            self._side = StageSide(connection.broker, job_id, connection.process_id)
            super().__init__(
                connection,
                side=self._side,
                board=StagePresence(connection.broker),
                lease_s=self.stage.lease_s,
                wait=partial(wait_for_items, [(self._side, None)]),
            )
        outputs = {column.name: column for stage in self._side.graph.stages for column in stage.outputs}
        self._columns: dict[str, Column] = {name: outputs.get(name) or BASE_COLUMNS[name] for name in self.stage.inputs}

    def get(self, max_rows: int = MAX_ROWS, *, timeout_s: float = 60.0) -> StageRows | None:
        """Returns rows whose input columns are there, and that no other worker holds; None when there are none in time.

        One item at least, and no more of them than max_rows together. Raises JobEnded once the job needs no more,
        BrokerUnavailable where Redis stays away.
        """
        return self._take(partial(self._claim, max_rows), timeout_s)

    def _claim(self, max_rows: int = MAX_ROWS) -> StageRows | None:
        items = self._side.claim(self.stage.name, max_rows)
        for item in items:
            self._hold(item, name=str(item))
        return self._rows(items) if items else None

    def _claims_of(self, taken: StageRows) -> Sequence[ClaimedItem]:
        return taken.items

    def _seen(self) -> StageWorkerSeen:
        stage = f"{self._connection.job_id}/{self.stage.name}"
        items = self._leases.names
        return StageWorkerSeen(worker_id=self._connection.process_id, serves=(stage,), stages=(stage,), items=items)

    def put(self, rows: StageRows, columns: Mapping[str, Sequence[Any]]) -> bool:
        """Puts the stage's outputs of these rows, and so acknowledges them; False where they are not needed any more.

        columns: output → a value for each row: numbers for a column per rollout, arrays for one per token, texts.
        Safe to repeat. Raises ContractViolation that names column and row for a wrong type or shape, and Conflict for
        rows that were put before with other content: the first put stands.
        """
        values = self._packed(rows, columns)
        outputs: list[tuple[ClaimedItem, dict[str, list[bytes]]]] = []
        start = 0
        for item in rows.items:
            end = start + len(item.rows)
            outputs.append((item, {name: row_values[start:end] for name, row_values in values.items()}))
            start = end
        outcomes = self._connection.until_room(lambda: self._side.put(outputs))
        self._end(rows)
        for (item, _), outcome in zip(outputs, outcomes, strict=True):
            if outcome is PutOutcome.DIVERGENT:
                raise self._divergent(item)
        return any(outcome in (PutOutcome.ACCEPTED, PutOutcome.AGAIN) for outcome in outcomes)

    def _packed(self, rows: StageRows, columns: Mapping[str, Sequence[Any]]) -> dict[str, list[bytes]]:
        of = f"stage {self.stage.name}, batch {', '.join(sorted(rows.batch_ids))}"
        outputs = {column.name: column for column in self.stage.outputs}
        values: dict[str, list[bytes]] = {}
        for name, column in columns.items():
            # A column that is no output of the stage stays without values: `check_values` names it.
            values[name] = packed(outputs[name], column, of=of) if name in outputs else []
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

    def _divergent(self, item: ClaimedItem) -> Conflict:
        names = ", ".join(column.name for column in self.stage.outputs)
        return Conflict(
            f"rows {item.rows.start} to {item.rows.stop - 1} have other values of {names} already, which are trained",
            field=f"stage {self.stage.name}, batch {item.batch_id}",
            cure="make the stage a function of its inputs, or leave out what was put",
        )


def _external(connection: JobConnection, name: str) -> StageNode:
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
    graph = connection.spec.stage_graph
    return graph.stages[graph.index(name)]
