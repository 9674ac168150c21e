"""Swim lanes of predicted runs: who generates and who trains when, under each schedule over the same seconds.

A lane is a generator or a rank. A picture shows every schedule below the other; the terminal one of them, in which a
character is the iteration that the lane works on, `s` a step with the way of its version, `.` idle time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from contracts.events import TimelineSpan
from contracts.schedule import Schedule
from contracts.spec.job import JobSpec
from onbeat.planning.pipeline.costs import Costs, Machines
from onbeat.planning.pipeline.walk import walk
from onbeat.planning.predictions import Prediction, warm_up

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN_ITERATIONS = 3
"""So many of the slowest schedule fill a picture."""
MOST_LANES = 4
"""Generators, and ranks, that are drawn; the others do the same."""
WIDTH = 64
"""Characters of a lane in the terminal."""
LANE_INCHES, FIGURE_INCHES = 0.34, 11.0
STEP, IDLE = "s", "."
DOTS_PER_INCH = 150
COLORS = {
    **{"generate": "#3b7dd8", "score": "#9ec5f4", "train": "#e0762f"},
    **{"step": "#b3261e", "sync": "#6b4fa0", "open": "#2e7d5b"},
}
"""Those of the timeline that `onbeat demo` draws."""
PALE = 0.55
"""Opacity of every second iteration, so that the eye can tell them apart."""


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """A stretch of one predicted run, from `start_s` on."""

    schedule: Schedule
    spans: tuple[TimelineSpan, ...]
    start_s: float
    shown_s: float
    iteration_s: float
    """Mean seconds of an iteration, as predicted."""

    @property
    def names(self) -> list[str]:
        """The trainer's ranks, then the generators."""
        everything = {span.who for span in self.spans}
        ranks = sorted(who for who in everything if who.startswith("trainer"))
        generators = sorted(everything.difference(ranks), key=lambda who: int(who.split()[-1]))
        return [*ranks[:MOST_LANES], *generators[:MOST_LANES]]


def lanes_of(
    spec: JobSpec, prediction: Prediction, machines: Machines, costs: Costs, *, shown_s: float, seed: int = 0
) -> Lanes:
    """Walks a predicted row once more, and keeps the spans from where the pipeline is full. A short job ends."""
    schedule = Schedule(prediction.schedule, prediction.max_policy_lag)
    wanted = math.ceil(shown_s / prediction.iteration_s.mean) + schedule.num_open + 2
    found = walk(spec, schedule, machines, costs, num_iterations=min(wanted, spec.iterations), seed=seed)
    start_s = found.commits_s[min(warm_up(spec, schedule), len(found.commits_s) - 1)]
    return Lanes(
        schedule=schedule,
        spans=tuple(span for span in found.spans if span.ended_s > start_s),
        start_s=start_s,
        shown_s=shown_s,
        iteration_s=prediction.iteration_s.mean,
    )


def draw(path: Path, lanes: Sequence[Lanes], *, title: str) -> Path:
    """Writes a PNG or an SVG, as the file's name says. Raises OSError."""
    # The import takes half a second, which only a picture should pay.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    heights = [len(one.names) + 1 for one in lanes]
    figure, rows = pyplot.subplots(
        len(lanes),
        1,
        figsize=(FIGURE_INCHES, 1.2 + LANE_INCHES * sum(heights)),
        sharex=True,
        squeeze=False,
        layout="constrained",
        gridspec_kw={"height_ratios": heights},
    )
    for axes, one in zip(rows[:, 0], lanes, strict=True):
        _draw_schedule(axes, one)
    rows[-1, 0].set_xlabel("seconds")
    used = [what for what in COLORS if any(span.what == what for one in lanes for span in one.spans)]
    handles = [Patch(color=COLORS[what], label=what) for what in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    # A job's name is text: between two dollar signs it would be read as a formula, and a wrong one is an error.
    figure.suptitle(f"{title}: predicted, paler every second iteration", parse_math=False)
    figure.savefig(path, dpi=DOTS_PER_INCH)
    pyplot.close(figure)
    return path


def _draw_schedule(axes: Axes, one: Lanes) -> None:
    rows = {who: row for row, who in enumerate(one.names)}
    for span in one.spans:
        if span.who in rows and span.started_s - one.start_s < one.shown_s:
            axes.barh(
                rows[span.who],
                span.ended_s - span.started_s,
                left=span.started_s - one.start_s,
                height=0.35 if span.what == "score" else 0.75,
                color=COLORS[span.what],
                alpha=PALE if span.iteration % 2 else 1.0,
                linewidth=0,
            )
    axes.set_yticks(list(rows.values()), list(rows), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0.0, one.shown_s)
    lag = f", lag {one.schedule.max_policy_lag}" if one.schedule.max_policy_lag else ""
    axes.set_title(f"{one.schedule.name}{lag}: {one.iteration_s:.3g} s an iteration", loc="left", fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def as_text(lanes: Lanes, *, width: int = WIDTH) -> list[tuple[str, str]]:
    """(name of the lane, its characters), the trainer first."""
    cell_s = lanes.shown_s / width
    found = []
    for who in lanes.names:
        filled: list[dict[str, float]] = [defaultdict(float) for _ in range(width)]
        for span in lanes.spans:
            if span.who == who and span.what != "score":
                _fill(filled, span, start_s=lanes.start_s, cell_s=cell_s)
        found.append((who, "".join(_mark(cell) for cell in filled)))
    return found


def _fill(filled: Sequence[dict[str, float]], span: TimelineSpan, *, start_s: float, cell_s: float) -> None:
    """Books the shares of cells that a span covers."""
    mark = str(span.iteration % 10) if span.what in ("generate", "train") else STEP
    started, ended = (span.started_s - start_s) / cell_s, (span.ended_s - start_s) / cell_s
    for at in range(max(0, int(started)), min(len(filled) - 1, int(ended)) + 1):
        filled[at][mark] += max(0.0, min(ended, at + 1) - max(started, at))


def _mark(cell: dict[str, float]) -> str:
    """What fills most of a cell, where it is not mostly idle."""
    if sum(cell.values()) < 0.5:
        return IDLE
    return max(cell, key=lambda mark: cell[mark])
