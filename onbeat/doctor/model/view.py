"""Shows the report on a model to a person: the job, a line for each finding, and a table of bytes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from onbeat.doctor.finding import GIB, in_bytes
from onbeat.doctor.model.alternatives import ACTIVATIONS, CHECKPOINTING, FREE, OFFLOAD
from onbeat.doctor.model.report import Alternative, Memory, MemoryPart, ModelReport, SizesRow
from onbeat.terminal.words import one_line


def heading(report: ModelReport) -> Text:
    """Returns the line above the findings."""
    return Text(one_line(f"{report.folder}, for a job with {report.job}"), "bold")


def memory_table(memory: Memory) -> RenderableType:
    """Returns a row for each purpose for which a rank needs memory, and the sums."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column("a rank's memory", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("counted as")
    _add(table, "", memory.permanent)
    table.add_row("kept for the whole job", in_bytes(memory.kept_bytes), "", style="bold")
    _add(table, "in a pass: ", memory.in_a_pass)
    _add(table, "in a step: ", memory.in_a_step)
    table.add_row("peak", in_bytes(memory.peak_bytes), "kept, with a pass or a step, whichever is larger", style="bold")
    if memory.elsewhere:
        table.add_section()
        _add(table, "elsewhere: ", memory.elsewhere)
    return Group(Text(), table)


def alternatives_table(alternatives: Sequence[Alternative]) -> RenderableType:
    """Returns a row for the job, and one for each key that saves memory."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column("what would fit", no_wrap=True)
    table.add_column("a rank's peak", justify="right", no_wrap=True)
    table.add_column("elsewhere", justify="right", no_wrap=True)
    for alternative in alternatives:
        keys = " ".join(f"--set {key}" for key in alternative.keys[-1:]) or "this job"
        # A row has the keys of the rows before it.
        name = f"… {keys}" if len(alternative.keys) > 1 else keys
        elsewhere = in_bytes(alternative.elsewhere_bytes) if alternative.elsewhere_bytes else ""
        table.add_row(name, in_bytes(alternative.peak_bytes), elsewhere)
    return Group(Text(), table)


def _add(table: Table, prefix: str, parts: tuple[MemoryPart, ...]) -> None:
    for part in parts:
        table.add_row(f"{prefix}{part.name}", in_bytes(part.num_bytes), Text(part.says, "dim"))


COLUMN_NAMES = {
    CHECKPOINTING: "+ gradient_checkpointing",
    FREE: "+ free_gradients",
    OFFLOAD: '+ offload "host"',
    ACTIVATIONS: "+ offload_activations",
}
"""A key of `sizes_table` → the head of its column: each has the keys of those before."""


def sizes_view(rows: Sequence[SizesRow]) -> RenderableType:
    """Returns the table of models of common sizes, in GiB of a GPU."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column("GiB of a GPU", no_wrap=True)
    table.add_column("trained", no_wrap=True)
    table.add_column("plain", justify="right")
    for name in COLUMN_NAMES.values():
        table.add_column(name, justify="right")
    table.add_column("then on the host", justify="right")
    for row in rows:
        table.add_row(row.model, row.trained, *sizes_cells(row))
    return table


def sizes_cells(row: SizesRow) -> list[str]:
    """Returns the numbers of a row, in GiB: plain, with each key, and on the host with all of them."""
    cells = [_in_gib(row.steps[0].peak_bytes)]
    for key in COLUMN_NAMES:
        step = row.with_key(key)
        cells.append("-" if step is None else _in_gib(step.peak_bytes))
    return [*cells, _in_gib(row.steps[-1].elsewhere_bytes)]


def _in_gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f}"
