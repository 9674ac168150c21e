"""Pictures of docs/schedules.md: the speed and the bound of each schedule, and who computes when."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._pipeline import Run
from onbeat.training.figures import DOTS_PER_INCH

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    "colocated": "#b9bec6",
    "synchronous": "#7b828d",
    "periodic": "#3b7dd8",
    "delayed 1": "#e0762f",
    "delayed 2": "#f0b07f",
    "bounded 1": "#6b4fa0",
    "bounded 2": "#b3a1d6",
}
SHOWN_ITERATIONS = 4


def draw_speeds(path: Path, medians: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """Draws how many times as fast as synchronous each schedule is in each workload, and the bound of its own times."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(10.0, 4.6), layout="constrained")
    names = list(dict.fromkeys(name for each in medians.values() for name in each))
    width = 0.86 / len(names)
    for place, each in enumerate(medians.values()):
        slowest_s = each["synchronous"]["iteration_s"]
        for number, (name, median) in enumerate(each.items()):
            left = place + (number - (len(names) - 1) / 2) * width
            label = name if place == 0 else None
            axes.bar(left, slowest_s / median["iteration_s"], width * 0.9, color=COLORS[name], label=label)
            bound = slowest_s / median["bound_s"]
            axes.hlines(bound, left - width * 0.45, left + width * 0.45, color="#222222", linewidth=1.4)
    axes.hlines([], 0, 0, color="#222222", linewidth=1.4, label="bound of its own times")
    axes.set_xticks(range(len(medians)), [_label(workload) for workload in medians])
    axes.set(
        ylabel="speed, synchronous = 1",
        title="The same work under every schedule, by lengths and $T_{gen}$ : $T_{train}$ (two CPU cores)",
    )
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=len(names) + 1, fontsize=8, columnspacing=1.2)
    figure.savefig(path, dpi=DOTS_PER_INCH)
    pyplot.close(figure)


def _label(workload: str) -> str:
    """`tailed 3:1 on 2` has two generators."""
    lengths, ratio, *rest = workload.split()
    generators = "2 generators" if rest else ""
    return f"{lengths} lengths\n{ratio.replace(':', ' : ')}\n{generators}".rstrip()


def draw_timelines(path: Path, runs: Mapping[str, Run], first: int) -> None:
    """Draws, one above the other on one scale, who samples and who trains from iteration `first` on."""
    pyplot = _pyplot()
    figure, grid = pyplot.subplots(
        len(runs), figsize=(10.0, 1.55 * len(runs)), sharex=True, squeeze=False, layout="constrained"
    )
    all_axes = grid[:, 0]
    longest_s = 0.0
    for axes, (name, run) in zip(all_axes, runs.items(), strict=True):
        longest_s = max(longest_s, _draw_rows(axes, run, first))
        axes.set_title(name, loc="left", fontsize=10)
    all_axes[-1].set(xlabel="seconds", xlim=(0.0, longest_s))
    figure.savefig(path, dpi=DOTS_PER_INCH)
    pyplot.close(figure)


def _draw_rows(axes: Axes, run: Run, first: int) -> float:
    """Returns the seconds from the end of iteration first - 1 to the end of the last one that is shown."""
    shown = range(first, first + SHOWN_ITERATIONS)
    origin_s, end_s = run.announced_s(first - 1), run.announced_s(shown[-1])
    rows = {"train": 0, "step": 0, "generate": 1}
    tones = (("#e0762f", "#f0b07f"), ("#3b7dd8", "#9ec5f4"))
    for span in run.spans:
        if span.what in rows and span.ended_s > origin_s and span.started_s < end_s:
            row = rows[span.what]
            color = "#b3261e" if span.what == "step" else tones[row][span.iteration % 2]
            left = max(span.started_s, origin_s) - origin_s
            axes.barh(
                row,
                min(span.ended_s, end_s) - origin_s - left,
                left=left,
                height=0.8,
                color=color,
                edgecolor="white",
                linewidth=0.3,
            )
    for iteration in shown:
        axes.axvline(run.announced_s(iteration) - origin_s, color="#444444", linewidth=0.8, linestyle=":")
    axes.set_yticks([0, 1], ["trainer", "generator"])
    return end_s - origin_s


def _pyplot() -> Any:
    """The import takes half a second, which only a finished measurement should pay."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
