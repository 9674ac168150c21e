"""A plan as a person reads it: a row for each schedule and number of generators, the advice, and the lanes of it."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from onbeat.planning.lanes import IDLE, STEP, Lanes, as_text
from onbeat.planning.plan import Plan, named
from onbeat.planning.predictions import Prediction
from onbeat.terminal.words import count, duration, one_line, size

LANE_STYLES = {STEP: "red", IDLE: "dim"}
DASH = "\N{EN DASH}"
EVEN, ODD = "blue", "cyan"


def shown(plan: Plan, lanes: Lanes) -> RenderableType:
    """lanes: of the recommended schedule."""
    parts: list[RenderableType] = [Text(f"{one_line(plan.job)}: {one_line(plan.source)}", "bold"), _table(plan), Text()]
    parts.append(Text.assemble(("recommended  ", "bold green"), one_line(plan.reason)))
    if plan.recommended_without_lag != plan.recommended:
        without = plan.recommended_without_lag
        parts.append(Text(f"without a lag  {named(without)}: {without.iteration_s.mean:.3g} s an iteration"))
    redis = plan.recommended.redis
    speed = f"{count(plan.recommended.tokens_per_s)} tokens/s   {redis.scripts_per_s:.3g} scripts/s"
    parts.append(
        Text(f"its Redis      {speed}   {size(redis.bytes_per_s)}/s   {size(redis.most_resident_bytes)} at once")
    )
    parts += [Text(), *_lanes(plan.recommended, lanes)]
    parts += [Text(f"note: {one_line(warning)}", "yellow") for warning in plan.warnings]
    if plan.picture:
        parts.append(Text(f"picture: {one_line(plan.picture)}"))
    return Group(*parts)


def _table(plan: Plan) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    heads = ("schedule", "gens", "s", f"5{DASH}95 %", "bound", "gens\nbusy", "rank\nbusy", "lag", "job")
    for head in heads:
        table.add_column(head, justify="left" if head == "schedule" else "right", no_wrap=True)
    for one in plan.predictions:
        chosen = one == plan.recommended
        table.add_row(*_cells(one), style="bold green" if chosen else "")
    return table


def _cells(one: Prediction) -> list[str]:
    spread = one.iteration_s
    lag = f" {one.max_policy_lag}" if one.max_policy_lag else ""
    at_best = "≥ " if one.is_at_best else ""
    return [
        f"{one.schedule}{lag}",
        str(one.generators),
        f"{at_best}{spread.mean:.3g}",
        f"{spread.low:.3g}{DASH}{spread.high:.3g}",
        f"{one.bound_s:.3g}",
        f"{one.generators_busy:.0%}",
        f"{one.trainer_busy:.0%}",
        f"{one.lag_mean:.2f}",
        duration(one.job_s),
    ]


def _lanes(chosen: Prediction, lanes: Lanes) -> list[RenderableType]:
    rows: list[RenderableType] = []
    drawn = as_text(lanes)
    longest = max((len(who) for who, _ in drawn), default=0)
    for who, cells in drawn:
        text = Text(f"{who:{longest}}  ")
        for cell in cells:
            text.append(cell, LANE_STYLES.get(cell) or (EVEN if int(cell) % 2 == 0 else ODD))
        rows.append(text)
    rows.append(Text(f"{'':{longest}}  a digit: the iteration that it works on; s: a step; .: it waits", "dim"))
    if chosen.generators > len([who for who, _ in drawn if who.startswith("generator")]):
        rows.append(Text(f"{'':{longest}}  the first of {chosen.generators} generators", "dim"))
    return rows
