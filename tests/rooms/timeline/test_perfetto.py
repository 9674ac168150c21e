"""The trace that Perfetto opens: what its format asks for (nesting, names, arrows)."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

from contracts.encoding.wire import encode_json
from contracts.events import TimelineSpan
from gateway.timeline.perfetto import perfetto_trace
from gateway.timeline.report import Lane, TimelineReport, timeline_report
from tests.spans import one_iteration


def trace() -> tuple[TimelineReport, dict[str, Any]]:
    report = timeline_report("job-1", [*one_iteration(), *one_iteration(8.7, 1)], last=2)
    return report, json.loads(encode_json(perfetto_trace(report)))


def test_no_two_events_of_a_thread_overlap_since_perfetto_would_drop_one() -> None:
    report, made = trace()
    of_thread: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in made["traceEvents"]:
        if event["ph"] == "X":
            of_thread[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for times in of_thread.values():
        times.sort()
        assert all(end <= start + 0.01 for (_, end), (start, _) in pairwise(times))
    assert sum(map(len, of_thread.values())) == len(report.spans) + len(report.iterations)


def test_each_thread_has_the_name_of_its_lane() -> None:
    _, made = trace()
    threads = {(one["pid"], one["tid"]) for one in made["traceEvents"] if one["ph"] == "X"}
    named = {
        (one["pid"], one["tid"]): one["args"]["name"] for one in made["traceEvents"] if one["name"] == "thread_name"
    }
    assert set(named) == threads
    # g1 scores a batch while it samples the next.
    assert set(named.values()) == {"iterations", "trainer", "g1", "g1 (2)", "g2"}


def test_the_critical_path_is_drawn_as_arrows_that_lie_inside_of_their_events() -> None:
    report, made = trace()
    slices = [one for one in made["traceEvents"] if one["ph"] == "X"]
    flows = [one for one in made["traceEvents"] if one["ph"] in "sf"]
    assert len(flows) == 2 * (len(report.critical) - 1)
    for flow in flows:
        assert any(
            (one["pid"], one["tid"]) == (flow["pid"], flow["tid"])
            and one["ts"] - 0.01 <= flow["ts"] <= one["ts"] + one["dur"] + 0.01
            for one in slices
        )
    assert sum(one.get("args", {}).get("critical", False) for one in slices) == len(report.critical)


def test_spans_that_all_overlap_have_a_row_each_and_cost_no_square_of_their_number() -> None:
    """A generator may report so; each comparison of two spans is counted by what they are compared with."""

    class Counted(float):
        compared = 0

        def __le__(self, other: float) -> bool:
            Counted.compared += 1
            return float(self) <= other

        def __gt__(self, other: float) -> bool:
            Counted.compared += 1
            return float(self) > other

        def __lt__(self, other: float) -> bool:
            Counted.compared += 1
            return float(self) < other

    number = 500
    spans = tuple(
        TimelineSpan(who="g1", what="wait", iteration=0, started_s=1.0 + at, ended_s=Counted(1e9 - at))
        for at in range(number)
    )
    lanes = (Lane(who="g1", kind="generator", busy_s=1.0, idle_share=0.0),)
    made = perfetto_trace(TimelineReport(job_id="job-1", spans=spans, lanes=lanes, words=""))
    assert len({one["tid"] for one in made["traceEvents"] if one["ph"] == "X"}) == number
    assert Counted.compared < 30 * number
