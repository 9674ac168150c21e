"""The critical path of small timelines that are drawn by hand, and what it says in words."""

from __future__ import annotations

from contracts.events import TimelineSpan
from gateway.timeline.critical_path import critical_path
from gateway.timeline.report import timeline_report
from tests.spans import one_iteration, span


def names(spans: list[TimelineSpan], *, until_s: float = 100.0) -> list[str]:
    path = critical_path(spans, last_iteration=max(one.iteration for one in spans), since_s=-1.0, until_s=until_s)
    found = [spans[step.place] for step in path]
    return [f"{one.who} {one.what} {one.batch_id[-1:]}".strip() for one in found]


def test_the_path_goes_back_from_the_publication_through_the_batch_that_came_last() -> None:
    spans = sorted(one_iteration(), key=lambda one: one.started_s)
    assert names(spans) == [
        "g1 generate 0",
        "g1 generate 2",
        "g1 score 2",
        "g1 publish 2",
        "trainer train 2",
        "trainer step",
        "trainer sync",
    ]


def test_a_step_that_waited_for_a_rank_leads_through_that_rank() -> None:
    spans = sorted(
        [
            span("g1", "generate", 0.0, 1.0, "0"),
            span("g1", "score", 1.0, 1.1, "0"),
            span("g2", "generate", 0.0, 1.3, "1"),
            span("g2", "score", 1.3, 1.4, "1"),
            span("trainer", "train", 1.1, 2.0, "0"),
            span("trainer 1", "train", 1.4, 4.0, "1"),
            span("trainer", "step", 4.0, 4.5),
        ],
        key=lambda one: one.started_s,
    )
    assert names(spans) == ["g2 generate 1", "g2 score 1", "trainer 1 train 1", "trainer step"]


def test_a_batch_that_waited_for_its_columns_leads_through_the_stage_workers() -> None:
    spans = sorted(
        [
            span("g1", "generate", 0.0, 1.0, "0"),
            span("g1", "score", 1.0, 1.1, "0"),
            span("stage a", "compute teacher", 1.1, 2.0, "0"),
            span("stage b", "compute reward_model", 1.1, 1.5, "0"),
            span("stage b", "compute judge of it", 2.0, 3.0, "0"),
            span("trainer", "train", 3.0, 4.0, "0"),
            span("trainer", "step", 4.0, 4.5),
        ],
        key=lambda one: one.started_s,
    )
    assert names(spans) == [
        "g1 generate 0",
        "g1 score 0",
        "stage a compute teacher 0",
        "stage b compute judge of it 0",
        "trainer train 0",
        "trainer step",
    ]
    lanes = timeline_report("job-1", spans, last=1).lanes
    assert [(lane.who, lane.kind) for lane in lanes] == [
        ("trainer", "rank"),
        ("stage a", "stage"),
        ("stage b", "stage"),
        ("g1", "generator"),
    ]


def test_a_trainer_that_saved_a_checkpoint_before_the_next_batch_is_seen_to() -> None:
    spans = [
        span("trainer", "step", 0.0, 1.0),
        span("trainer", "sync", 1.0, 1.1),
        span("trainer", "open", 1.1, 1.2, iteration=1),
        span("trainer", "checkpoint", 1.2, 4.0),
        span("g1", "generate", 1.2, 2.0, "0", iteration=1),
        span("g1", "score", 2.0, 2.1, "0", iteration=1),
        span("trainer", "train", 4.0, 5.0, "0", iteration=1),
    ]
    assert names(spans)[-2:] == ["trainer checkpoint", "trainer train 0"]


def test_a_load_that_began_while_the_version_was_written_waited_for_its_publication() -> None:
    spans = [
        span("trainer", "train", 0.0, 1.0, "0"),
        span("trainer", "step", 1.0, 2.0),
        span("g1", "load", 1.5, 2.6, iteration=1),
        span("trainer", "sync", 2.0, 2.4),
        span("trainer", "open", 2.4, 2.5, iteration=1),
        span("g1", "generate", 2.6, 3.9, "0", iteration=1),
        span("g1", "score", 3.9, 4.0, "0", iteration=1),
        span("trainer", "train", 4.0, 5.0, "0", iteration=1),
    ]
    assert names(spans) == [
        "trainer train 0",
        "trainer step",
        "trainer sync",
        "g1 load",
        "g1 generate 0",
        "g1 score 0",
        "trainer train 0",
    ]
    path = critical_path(spans, last_iteration=1, since_s=0.0, until_s=5.0)
    # Its part of the path is what came after the publication.
    assert [round(step.until_s - step.since_s, 3) for step in path] == [1.0, 1.0, 0.4, 0.2, 1.3, 0.1, 1.0]


def test_the_next_iteration_begins_behind_the_opening() -> None:
    spans = sorted([*one_iteration(), *one_iteration(8.7, 1)], key=lambda one: one.started_s)
    path = names(spans)
    assert path[6:9] == ["trainer sync", "trainer open", "g1 generate 0"]
    assert len(path) == 15


def test_clocks_that_disagree_lead_in_no_circle() -> None:
    spans = [
        span("g1", "generate", 1.0, 1.0005, "0"),
        span("g1", "load", 1.0002, 1.0006),
        span("trainer", "open", 1.0, 1.0004),
        span("trainer", "sync", 1.0, 1.0005),
        span("trainer", "step", 1.0, 1.0005),
        span("trainer", "train", 1.0, 1.0006, "0"),
    ]
    path = critical_path(spans, last_iteration=0, since_s=0.0, until_s=2.0)
    assert len({step.place for step in path}) == len(path) > 0


def test_a_report_has_lanes_iterations_and_words() -> None:
    spans = [*one_iteration(), *one_iteration(8.7, 1), *one_iteration(17.4, 2)]
    report = timeline_report("job-1", spans, last=2)
    assert [one.iteration for one in report.iterations] == [1, 2]
    assert [(lane.who, lane.kind) for lane in report.lanes] == [
        ("trainer", "rank"),
        ("g1", "generator"),
        ("g2", "generator"),
    ]
    since_s, until_s = report.iterations[0].started_s, report.iterations[-1].ended_s
    assert (round(since_s, 3), round(until_s, 3)) == (8.6, 25.9)
    idle = {lane.who: lane.idle_share for lane in report.lanes}
    assert idle["g2"] == round(1 - 2 * 2.5 / (until_s - since_s), 4)
    assert report.words.startswith("g2 was idle 71 % of the last 2 iterations; the longest wait was for batch ")
    assert (
        "1/train/2 (generate), 3.6 s of 17.3 s" in report.words
        or "2/train/2 (generate), 3.6 s of 17.3 s" in report.words
    )
    assert "65 % generate" in report.words
    critical = [report.spans[index] for index in report.critical]
    assert [one.started_s for one in critical] == sorted(one.started_s for one in critical)


def test_an_iteration_that_a_lag_samples_ahead_is_left_out_while_the_job_runs() -> None:
    spans = [*one_iteration(), *one_iteration(8.7, 1), *one_iteration(17.4, 2)]
    assert [one.iteration for one in timeline_report("job-1", spans, last=3, left_out=1).iterations] == [0, 1]
    assert timeline_report("job-1", [], last=3).words == "no iteration is done yet"
