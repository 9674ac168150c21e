"""The comparison with TRL: rates leave out the warm-up, neighbours are compared, and both sides do the same work."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks._side_by_side import Run, Sample, Step, compared, draw_rewards, look, seconds_at, seconds_to, spread
from benchmarks.trl import CASES, check, settings_of
from onbeat.client.spec_file import load_spec

STEPS = [
    Step(ended_s=110.0 + 2.0 * number, num_completions=8, num_tokens=24, reward_mean=0.1 * number)
    for number in range(5)
]
SAMPLES = [
    Sample(at_s=100.0, processor_s=0.0, machine_s=50.0, pss_bytes=1_000_000, rss_bytes=9_000_000),
    Sample(at_s=110.0, processor_s=5.0, machine_s=60.0, pss_bytes=4_000_000, rss_bytes=8_000_000),
    Sample(at_s=120.0, processor_s=25.0, machine_s=80.0, pss_bytes=2_000_000, rss_bytes=7_000_000),
]
RUN = Run(command_s=100.0, first_s=108.0, ended_s=120.0, steps=STEPS, samples=SAMPLES)


def arguments(**changes: object) -> argparse.Namespace:
    given = {"trl": sys.executable, "cases": list(CASES), "repeats": 1, "set": [], "ours": []}
    return argparse.Namespace(**given | changes)


def test_a_rate_begins_where_the_warm_up_has_ended() -> None:
    figures = RUN.figures(warm_up=2, level=0.25, window=2)
    assert figures["completions_per_s"] == pytest.approx(3 * 8 / 6.0)
    assert figures["iteration_s"] == pytest.approx(2.0)
    assert figures["core_s_per_iteration"] == pytest.approx(2.0 * 2.0)
    assert figures["tokens_per_completion"] == pytest.approx(3.0)
    assert figures["last_rewards"] == pytest.approx(0.35)


def test_what_other_work_took_of_the_machine_is_told_apart() -> None:
    others = [dataclasses.replace(sample, machine_s=1.2 * sample.processor_s) for sample in SAMPLES]
    assert RUN.figures(warm_up=2, level=0.25, window=2)["cores_of_others"] == pytest.approx(0.0)
    assert dataclasses.replace(RUN, samples=others).figures(warm_up=2, level=0.25, window=2)[
        "cores_of_others"
    ] == pytest.approx(0.4)


def test_start_and_end_of_the_command_have_figures_of_their_own() -> None:
    figures = RUN.figures(warm_up=2, level=0.25, window=2)
    assert figures["start_s"] == pytest.approx(8.0)
    assert figures["completions_per_s_of_command"] == pytest.approx(40 / 20.0)
    assert (figures["peak_pss_mb"], figures["peak_rss_mb"]) == (4.0, 9.0)


def test_a_reward_is_reached_with_the_mean_of_a_window_and_counted_from_the_first_iteration() -> None:
    assert seconds_to(STEPS, 0.25, window=2) == 116.0
    assert seconds_to(STEPS, 0.3, window=1) == 116.0
    assert seconds_to(STEPS, 0.5, window=1) is None
    assert RUN.figures(warm_up=2, level=0.25, window=2)["to_reward_s"] == pytest.approx(8.0)


def test_processor_time_is_read_between_two_samples_and_held_outside_of_them() -> None:
    found = [
        seconds_at(SAMPLES, at_s, lambda sample: sample.processor_s) for at_s in (90.0, 105.0, 110.0, 115.0, 130.0)
    ]
    assert found == pytest.approx([0.0, 2.5, 5.0, 15.0, 25.0])


def test_neighbouring_runs_are_compared_and_not_their_medians() -> None:
    ours, theirs = [{"rate": 4.0}, {"rate": 9.0}, {"rate": 8.0}], [{"rate": 2.0}, {"rate": 3.0}, {"rate": 8.0}]
    assert compared(ours, theirs)["rate"] == {
        "ours": {"min": 4.0, "median": 8.0, "max": 9.0},
        "trl": {"min": 2.0, "median": 3.0, "max": 8.0},
        "ours_over_trl": {"min": 1.0, "median": 2.0, "max": 3.0},
    }


def test_a_reward_that_one_run_never_reached_has_no_spread() -> None:
    assert spread([1.0, None]) is None
    sides = compared([{"to_reward_s": 1.0}, {"to_reward_s": None}], [{"to_reward_s": 2.0}, {"to_reward_s": 2.0}])
    assert sides["to_reward_s"]["ours_over_trl"] is None


def test_what_processes_take_is_added_up_with_that_of_ended_ones() -> None:
    own = psutil.Process(os.getpid())

    class Ended(psutil.Process):
        def cpu_times(self) -> Any:
            raise psutil.NoSuchProcess(self.pid)

    spent_s = {(1, 0.5): 100.0}
    alone, beside = look([own], {}, clock=lambda: 5.0), look([own, Ended()], spent_s, clock=lambda: 5.0)
    assert alone.at_s == 5.0
    assert 0 < alone.pss_bytes <= alone.rss_bytes
    assert 100.0 < beside.processor_s < alone.processor_s + 101.0, "what has ended has spent its time"
    assert beside.rss_bytes < 1.5 * alone.rss_bytes


@pytest.mark.parametrize("case", CASES)
def test_both_sides_of_a_case_have_one_job(case: str) -> None:
    check(arguments(cases=[case]))
    spec = load_spec(CASES[case].spec, settings_of(CASES[case], Path("model"), [], 3))
    assert spec.seed == 3
    assert (spec.algorithm.advantage, spec.algorithm.loss, spec.algorithm.kl_coefficient) == ("grpo", "grpo", 0.0)
    assert (spec.schedule, spec.rollout.max_resamples) == ("periodic", 0)


def test_ours_may_cut_an_iteration_into_other_batches_and_not_into_fewer_prompts() -> None:
    check(arguments(cases=["8m-8"], ours=["rollout.batches_per_iteration=8", "rollout.prompts_per_batch=1"]))
    with pytest.raises(SystemExit, match="--ours: 8m-8 would be another job"):
        check(arguments(cases=["8m-8"], ours=["rollout.prompts_per_batch=1"]))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"trl": "no/such/python"}, "make bench-trl"),
        ({"repeats": 0}, "--repeats"),
        ({"set": ["iterations=5"]}, "demo needs 10 iterations or more"),
    ],
)
def test_what_would_fail_after_minutes_is_refused_at_once(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(SystemExit, match=problem):
        check(arguments(**changes))


def test_rewards_are_drawn_against_the_seconds_since_the_first_iteration_began(tmp_path: Path) -> None:
    curve = RUN.rewards()
    assert curve[:3] == [(2.0, 0.0), (4.0, 0.1), (6.0, 0.2)]
    draw_rewards(tmp_path / "a.png", {"Onbeat": [curve, curve], "TRL": [curve]}, level=0.3, title="both")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
