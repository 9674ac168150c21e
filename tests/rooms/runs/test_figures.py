"""Figures and the summary of a finished run."""

from __future__ import annotations

import struct
from pathlib import Path

from msgspec.structs import replace

from contracts.encoding.wire import encode_json
from contracts.events import IterationMetrics, TimelineSpan
from contracts.run_folder import RunFolder
from onbeat.training.figures import (
    draw_figures,
    middle_iterations,
    moving_mean,
    samplers_of,
    while_trained,
    window_of,
)
from tests.e2e.stand_in_gateway import evaluation, metrics_of


def span(iteration: int, what: str = "train", who: str = "trainer") -> TimelineSpan:
    return TimelineSpan(who=who, what=what, iteration=iteration, started_s=float(iteration), ended_s=iteration + 0.5)


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_a_run_is_drawn_as_a_reward_curve_and_a_timeline(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "job")
    folder.path.mkdir()
    spans = [span(n, what, who) for n in range(8) for what, who in (("train", "trainer"), ("generate", "generator-a"))]
    folder.timeline.write_bytes(b"\n".join(map(encode_json, spans)) + b"\n")
    metrics = [metrics_of(n, n / 8) for n in range(8)]
    paths = draw_figures(folder, metrics=metrics, evaluations=[evaluation(0, 0.4), evaluation(8, 0.9)], title="test")
    assert [path.name for path in paths] == ["reward_curve.png", "timeline.png"]
    assert [png_size(path) for path in paths] == [(1350, 675), (1350, 675)]


def test_a_job_whose_name_looks_like_a_formula_has_figures_too(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "job")
    folder.path.mkdir()
    folder.timeline.write_bytes(b"\n".join(encode_json(span(n)) for n in range(4)) + b"\n")
    paths = draw_figures(folder, metrics=[metrics_of(0, 0.5)], evaluations=[], title="cost $\\nonsense{$")
    assert [path.name for path in paths] == ["reward_curve.png", "timeline.png"]


def test_a_run_without_data_has_no_figures(tmp_path: Path) -> None:
    assert draw_figures(RunFolder(tmp_path, "job"), metrics=[], evaluations=[], title="") == []


def test_the_timeline_shows_whole_iterations_from_the_middle_of_the_training() -> None:
    spans = [span(iteration, what) for iteration in range(10) for what in ("generate", "train")]
    assert {found.iteration for found in middle_iterations([*spans, span(10, "generate")], 4)} == {3, 4, 5, 6}
    assert {found.iteration for found in middle_iterations(spans[:4], 4)} == {0, 1}


def lagging(iteration: int, counts: tuple[int, ...]) -> IterationMetrics:
    return replace(metrics_of(iteration, 0.5), iteration=iteration, lag_counts=counts)


def test_under_a_lag_the_timeline_shows_what_is_sampled_meanwhile_and_each_iteration_with_its_versions(
    tmp_path: Path,
) -> None:
    """Iteration t is sampled while t - 2 is trained."""
    spans = [span(n) for n in range(8)] + [
        replace(span(n, "generate", "generator-a"), started_s=n - 2.0, ended_s=n - 1.5) for n in range(2, 8)
    ]
    shown = while_trained(spans, 2)
    assert {(one.what, one.iteration) for one in shown} == {
        ("train", 3),
        ("train", 4),
        ("generate", 5),
        ("generate", 6),
    }
    metrics = [lagging(n, (0, 0, 4)) for n in range(2, 8)]
    window = window_of(spans, metrics)
    assert window[5] == (3.0, 5.5, "version 3 (lag 2)")
    assert samplers_of(lagging(7, (1, 2, 0))) == "versions 6 to 7 (lag 0 to 1)"
    assert window_of(spans, [metrics_of(n, 0.5) for n in range(8)]) == {}
    folder = RunFolder(tmp_path, "job")
    folder.path.mkdir()
    folder.timeline.write_bytes(b"\n".join(map(encode_json, spans)) + b"\n")
    paths = draw_figures(folder, metrics=metrics, evaluations=[], title="test")
    assert [png_size(path) for path in paths] == [(1350, 675), (1350, 675)]


def test_a_moving_mean_narrows_at_the_ends() -> None:
    assert moving_mean([0.0, 3.0, 6.0, 9.0], 3) == [1.5, 3.0, 6.0, 7.5]
