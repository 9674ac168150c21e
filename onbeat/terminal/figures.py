"""Two pictures of a run: its reward curve, and who generated and trained when."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from contracts.encoding.json_lines import read_json_lines
from contracts.events import IterationMetrics, TimelineSpan
from contracts.jobs import EvaluationScore
from contracts.run_folder import RunFolder

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
    "publish": "#6b4fa0",
    "open": "#2e7d5b",
}


def draw_figures(
    folder: RunFolder, *, metrics: Sequence[IterationMetrics], evaluations: Sequence[EvaluationScore], title: str
) -> list[Path]:
    """Writes the figures for which there are data, and returns their paths. Raises OSError."""
    # The import takes half a second, which only a finished run should pay.
    import matplotlib

    matplotlib.use("Agg")
    drawn = []
    if metrics:
        drawn.append(_draw_rewards(folder.path / REWARD_CURVE, metrics, evaluations, title))
    spans = middle_iterations(read_json_lines(folder.timeline, TimelineSpan), TIMELINE_ITERATIONS)
    if spans:
        drawn.append(_draw_timeline(folder.path / TIMELINE, spans, title))
    return drawn


def middle_iterations(spans: Sequence[TimelineSpan], number: int) -> list[TimelineSpan]:
    """Spans of `number` consecutive iterations from the middle of those that were trained."""
    trained = sorted({span.iteration for span in spans if span.what in ("train", "step")})
    start = max(0, (len(trained) - number) // 2)
    chosen = set(trained[start : start + number])
    return [span for span in spans if span.iteration in chosen]


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
    shown = sorted(evaluations, key=lambda found: found.policy_version)
    held_out = [found.policy_version for found in shown]
    axes.plot(held_out, [found.sampled for found in shown], "o", color="#e0762f", label="held-out, sampled")
    greedy = [(found.policy_version, found.greedy) for found in shown if found.greedy is not None]
    if greedy:
        axes.plot(*zip(*greedy, strict=True), "s", color="#6b4fa0", label="held-out, greedy")
    axes.set(title=title, xlabel="policy version", ylabel="mean reward")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=DOTS_PER_INCH)
    pyplot.close(figure)
    return path


def _draw_timeline(path: Path, spans: Sequence[TimelineSpan], title: str) -> Path:
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
    for iteration in sorted({span.iteration for span in spans}):
        # Opening an iteration is work on the one before.
        of_this = [span for span in spans if span.iteration == iteration and span.what != "open"]
        start_s = min(span.started_s for span in of_this) - origin_s
        axes.axvline(start_s, color="#444444", linewidth=0.8, linestyle=":")
        axes.annotate(
            f" iteration {iteration}", (start_s, 1.0), xycoords=("data", "axes fraction"), va="bottom", fontsize=8
        )
    axes.set_yticks(list(rows.values()), list(rows))
    axes.set_title(f"{title}: who generated and who trained when", pad=18)
    axes.set_xlabel("seconds")
    used = [what for what in COLORS if any(span.what == what for span in spans)]
    handles = [Patch(color=COLORS[what], label=what) for what in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    figure.savefig(path, dpi=DOTS_PER_INCH)
    pyplot.close(figure)
    return path
