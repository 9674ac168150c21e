"""Shows a plan to a person: a row for each schedule and number of generators, and the measured times."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from onbeat.planning.formulas import Plan, Prediction
from onbeat.terminal.words import count, one_line

COLUMNS = ("schedule", "generators", "seconds an\niteration", "tokens\na second", "generators\nbusy", "trainer\nbusy")


def shown(plan: Plan) -> RenderableType:
    """Returns the plan as text for a terminal."""
    times = plan.measured
    source = f"measured in {times.job_id} ({times.schedule}), {times.num_iterations} iterations"
    parts_of_an_iteration = (
        f"measured: {times.iteration_s:.3g} s an iteration. A batch is sampled in {times.generate_s:.3g} s, scored in "
        f"{times.score_s:.3g} s and trained in {times.train_s:.3g} s; a step with its commit takes "
        f"{times.step_s:.3g} s, loading a version {times.load_s:.3g} s."
    )
    best_case = "≥ : the best case, in which each phase is faster by all the devices that it gains"
    return Group(
        Text(f"{one_line(plan.job)}: {one_line(source)}", "bold"),
        _table(plan),
        Text(),
        Text(parts_of_an_iteration),
        Text(best_case, "dim"),
    )


def _table(plan: Plan) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for heading in COLUMNS:
        table.add_column(heading, justify="left" if heading == "schedule" else "right", no_wrap=True)
    fastest_s = min(row.iteration_s for row in plan.predictions if not row.is_best_case)
    for row in plan.predictions:
        is_fastest = row.iteration_s == fastest_s and not row.is_best_case
        table.add_row(*_cells(row), style="bold green" if is_fastest else "")
    return table


def _cells(row: Prediction) -> list[str]:
    # The best case is the least that an iteration takes, and the most tokens a second.
    at_least = "≥ " if row.is_best_case else ""
    at_most = "≤ " if row.is_best_case else ""
    return [
        row.schedule,
        str(row.generators),
        f"{at_least}{row.iteration_s:.3g}",
        f"{at_most}{count(row.tokens_per_s)}",
        f"{row.generators_busy:.0%}",
        f"{row.trainer_busy:.0%}",
    ]
