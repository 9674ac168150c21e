"""Two pictures of a run: its reward curve, and who generated and trained when."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contracts.encoding.json_lines import read_json_lines
from contracts.events import IterationMetrics, TimelineSpan
from contracts.jobs import EvaluationScore
from contracts.run_folder import RunFolder
from contracts.schedule import versions_in_words
from contracts.timeline import is_of_the_pipeline
from onbeat.terminal.words import lag_in_words

REWARD_CURVE = "reward_curve.png"
TIMELINE = "timeline.png"
SIZE_INCHES = (9.0, 4.5)
DOTS_PER_INCH = 150
SMOOTHED_OVER = 9
TIMELINE_ITERATIONS = 4
"""More are a smear; these are taken from the middle of the run."""
COLORS = {
    "generate": "#3b7dd8",
    "score": "#9ec5f4",
    "train": "#e0762f",
    "step": "#b3261e",
    "sync": "#6b4fa0",
    "open": "#2e7d5b",
}

Window = Mapping[int, tuple[float, float, str]]
"""Iteration → Unix times of its first generation and its last step, and which versions sampled it."""


def draw_figures(
    folder: RunFolder, *, metrics: Sequence[IterationMetrics], evaluations: Sequence[EvaluationScore], title: str
) -> list[Path]:
    """Writes the figures for which there are data, and returns their paths.

    Raises:
        ImportError: matplotlib isn't installed, or is broken.
        OSError: A figure can't be written.
    """
    # The import takes half a second, which only a finished run should pay.
    import matplotlib

    matplotlib.use("Agg")
    drawn = []
    if metrics:
        drawn.append(_draw_rewards(folder.path / REWARD_CURVE, metrics, evaluations, title))
    spans = [span for span in read_json_lines(folder.timeline, TimelineSpan) if is_of_the_pipeline(span)]
    window = window_of(spans, metrics)
    middle = while_trained(spans, TIMELINE_ITERATIONS) if window else middle_iterations(spans, TIMELINE_ITERATIONS)
    if middle:
        drawn.append(_draw_timeline(folder.path / TIMELINE, middle, title, window))
    return drawn


def window_of(spans: Sequence[TimelineSpan], metrics: Sequence[IterationMetrics]) -> Window:
    """Returns when each iteration of a lagging job was sampled and trained, by which versions; {} without a lag."""
    samplers = {entry.iteration: samplers_of(entry) for entry in metrics if entry.lag_counts}
    extents: dict[int, tuple[float, float]] = {}
    for span in spans:
        if span.iteration in samplers and span.what != "open":
            start_s, end_s = extents.get(span.iteration, (span.started_s, span.ended_s))
            extents[span.iteration] = (min(start_s, span.started_s), max(end_s, span.ended_s))
    return {iteration: (*extent, samplers[iteration]) for iteration, extent in extents.items()}


def samplers_of(metrics: IterationMetrics) -> str:
    """`version 5 (lag 2)`, or `versions 4 to 6 (lag 0 to 2)` where several sampled the iteration."""
    lags = [lag for lag, number in enumerate(metrics.lag_counts) if number]
    oldest = metrics.iteration - max(lags)
    newest = metrics.iteration - min(lags)
    return f"{versions_in_words(oldest, newest)} (lag {lag_in_words(metrics.iteration, oldest, newest)})"


def middle_iterations(spans: Sequence[TimelineSpan], number: int) -> list[TimelineSpan]:
    """Spans of `number` consecutive iterations from the middle of those that were trained."""
    trained = sorted({span.iteration for span in spans if span.what in ("train", "step")})
    start = max(0, (len(trained) - number) // 2)
    chosen = set(trained[start : start + number])
    return [span for span in spans if span.iteration in chosen]


def while_trained(spans: Sequence[TimelineSpan], number: int) -> list[TimelineSpan]:
    """Spans of all iterations while `number` of them were trained: under a lag others are sampled meanwhile."""
    own = [span for span in middle_iterations(spans, number) if span.what in ("train", "step", "sync")]
    if not own:
        return []
    start_s = min(span.started_s for span in own)
    end_s = max(span.ended_s for span in own)
    return [span for span in spans if span.ended_s > start_s and span.started_s < end_s]


def moving_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of up to `width` values around each, fewer at the ends."""
    half = width // 2
    return [statistics.fmean(values[max(0, index - half) : index + half + 1]) for index in range(len(values))]


def _draw_rewards(
    path: Path, metrics: Sequence[IterationMetrics], evaluations: Sequence[EvaluationScore], title: str
) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=SIZE_INCHES, layout="constrained")
    versions = [entry.policy_version for entry in metrics]
    rewards = [entry.reward_mean for entry in metrics]
    axes.plot(versions, rewards, color="#9ec5f4", linewidth=1, label="reward of an iteration")
    axes.plot(versions, moving_mean(rewards, SMOOTHED_OVER), color="#3b7dd8", linewidth=2, label="smoothed")
    scores = sorted(evaluations, key=lambda score: score.policy_version)
    held_out = [score.policy_version for score in scores]
    axes.plot(held_out, [score.sampled for score in scores], "o", color="#e0762f", label="held-out, sampled")
    greedy = [(score.policy_version, score.greedy) for score in scores if score.greedy is not None]
    if greedy:
        axes.plot(*zip(*greedy, strict=True), "s", color="#6b4fa0", label="held-out, greedy")
    # A job's name is text: between two dollar signs it would be read as a formula, and a wrong one is an error.
    axes.set_title(title, parse_math=False)
    axes.set(xlabel="policy version", ylabel="mean reward")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=DOTS_PER_INCH)
    pyplot.close(figure)
    return path


def _draw_timeline(path: Path, spans: Sequence[TimelineSpan], title: str, window: Window) -> Path:
    """window: empty for a job without a lag."""
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(figsize=SIZE_INCHES, layout="constrained")
    origin_s = min(span.started_s for span in spans)
    rows = {
        who: row
        for row, who in enumerate(sorted({span.who for span in spans}, key=lambda who: (who != "trainer", who)))
    }
    for span in spans:
        axes.barh(
            rows[span.who],
            span.ended_s - span.started_s,
            left=span.started_s - origin_s,
            height=0.4 if span.what == "score" else 0.7,
            color=COLORS.get(span.what, "#999999"),
            edgecolor="white",
            linewidth=0.3,
        )
    if window:
        _draw_window(axes, rows, spans, window, origin_s)
    else:
        _mark_iterations(axes, spans, origin_s)
    axes.set_yticks(list(rows.values()), list(rows))
    axes.set_title(f"{title}: who generated and who trained when", pad=18, parse_math=False)
    axes.set_xlabel("seconds")
    used = [what for what in COLORS if any(span.what == what for span in spans)]
    handles = [Patch(color=COLORS[what], label=what) for what in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    figure.savefig(path, dpi=DOTS_PER_INCH)
    pyplot.close(figure)
    return path


def _mark_iterations(axes: Any, spans: Sequence[TimelineSpan], origin_s: float) -> None:
    """A dotted line where each iteration begins: there the weights change."""
    for iteration in sorted({span.iteration for span in spans}):
        # Opening an iteration is work on the one before.
        of_this = [span for span in spans if span.iteration == iteration and span.what != "open"]
        _mark(axes, min(span.started_s for span in of_this) - origin_s, f"iteration {iteration}")


def _draw_window(
    axes: Any, rows: dict[str, int], spans: Sequence[TimelineSpan], window: Window, origin_s: float
) -> None:
    """A row for each open iteration: from its first generation to its last step, and which versions sampled it."""
    right_s = max(span.ended_s for span in spans) - origin_s
    free_s: list[float] = []
    for iteration in sorted({span.iteration for span in spans} & window.keys()):
        started_s, ended_s, samplers = window[iteration]
        start_s = max(0.0, started_s - origin_s)
        end_s = min(right_s, ended_s - origin_s)
        place = next((number for number, free in enumerate(free_s) if free <= start_s), len(free_s))
        free_s[place:] = [end_s, *free_s[place + 1 :]]
        row = rows.setdefault(f"open {place + 1}", len(rows))
        axes.barh(row, end_s - start_s, left=start_s, height=0.7, color="#eeeeee", edgecolor="#444444", linewidth=0.8)
        axes.text(start_s, row, f" {iteration} ← {samplers}", va="center", fontsize=7, clip_on=True)
    for span in spans:
        if span.what == "sync" and span.ended_s - origin_s <= right_s:
            _mark(axes, span.ended_s - origin_s, f"version {span.iteration + 1}")


def _mark(axes: Any, at_s: float, words: str) -> None:
    axes.axvline(at_s, color="#444444", linewidth=0.8, linestyle=":")
    axes.annotate(f" {words}", (at_s, 1.0), xycoords=("data", "axes fraction"), va="bottom", fontsize=8)
