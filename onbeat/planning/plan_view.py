"""Shows a plan to a person: a row for each schedule and number of generators, the advice, and the measured times."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from onbeat.planning.formulas import Plan, Prediction, name_of
from onbeat.terminal.words import count, duration, one_line, plural, size

COLUMNS = ("schedule", "lag", "generators", "seconds an\niteration", "generators\nbusy", "trainer\nbusy", "job")


def shown(plan: Plan) -> RenderableType:
    """Returns the plan as text for a terminal."""
    times = plan.measured
    source = f"measured in {times.job_id} ({times.schedule}), {times.num_iterations} iterations"
    chosen = plan.recommended
    parts: list[RenderableType] = [
        Text(f"{one_line(plan.job)}: {one_line(source)}", "bold"),
        _table(plan),
        Text(),
        Text.assemble(("recommended    ", "bold green"), one_line(plan.reason)),
    ]
    if plan.recommended_without_lag != chosen:
        other = plan.recommended_without_lag
        parts.append(Text(f"without a lag  {name_of(other)}: {other.iteration_s:.3g} s an iteration"))
    balanced = plural(plan.balanced_generators, "generator")
    parts.append(Text(f"balance        from {balanced} on the trainer is the limit, and further ones wait for it"))
    parts.append(
        Text(
            f"Redis          {size(chosen.redis_bytes)} of rollouts at once   {size(chosen.redis_bytes_per_s)}/s   "
            f"{count(chosen.tokens_per_s)} tokens/s"
        )
    )
    parts.append(
        Text(
            f"measured       {times.iteration_s:.3g} s an iteration: a batch is sampled in {times.generate_s:.3g} s, "
            f"scored in {times.score_s:.3g} s and trained in {times.train_s:.3g} s; a step takes {times.step_s:.3g} s, "
            f"publishing {times.publish_s:.3g} s, loading {times.load_s:.3g} s"
        )
    )
    parts += [Text(f"note: {one_line(warning)}", "yellow") for warning in plan.warnings]
    return Group(*parts)


def _table(plan: Plan) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for heading in COLUMNS:
        table.add_column(heading, justify="left" if heading == "schedule" else "right", no_wrap=True)
    for row in plan.predictions:
        style = "bold green" if row == plan.recommended else ""
        table.add_row(*_cells(row), style=style)
    return table


def _cells(row: Prediction) -> list[str]:
    at_best = "≥ " if row.is_at_best else ""
    return [
        row.schedule,
        str(row.max_policy_lag),
        str(row.generators),
        f"{at_best}{row.iteration_s:.3g}",
        f"{row.generators_busy:.0%}",
        f"{row.trainer_busy:.0%}",
        duration(row.job_s),
    ]
