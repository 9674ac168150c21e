"""The self-test of an environment of vLLM passes where its log-probs are the trainer's, and only there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from contracts.errors import JobFailed, Unhealthy
from contracts.spec.job import JobSpec
from onbeat.installing import self_test
from onbeat.installing.self_test import run_self_test
from onbeat.stack.options import StackOptions


class PlayedRun:
    """A run of a job that has ended, with these largest differences of its iterations."""

    def __init__(self, *differences: float, failure: str = "") -> None:
        self.metrics = [SimpleNamespace(mismatch_max=difference, wall_s=1.5) for difference in differences]
        self.failure = failure

    def result(self, timeout_s: float) -> None:
        if self.failure:
            raise JobFailed(self.failure)


def play(run: PlayedRun, monkeypatch: pytest.MonkeyPatch) -> list[tuple[JobSpec, StackOptions]]:
    """Has the self-test take this run for its own; returns the list of the jobs that it starts, with their stacks."""
    started: list[tuple[JobSpec, StackOptions]] = []

    @contextmanager
    def on_own_stack(spec: JobSpec, options: StackOptions) -> Iterator[Any]:
        started.append((spec, options))
        yield run

    monkeypatch.setattr(self_test, "on_own_stack", on_own_stack)
    return started


def test_it_trains_the_shipped_demo_with_a_generator_of_that_python(monkeypatch: pytest.MonkeyPatch) -> None:
    started = play(PlayedRun(1e-5, 2e-5), monkeypatch)
    proof = run_self_test(sys.executable)
    assert (proof.iterations, proof.largest_difference, proof.wall_s) == (2, 2e-5, 3.0)
    ((spec, options),) = started
    assert (options.model_root / spec.model.path / "model.safetensors").is_file()
    assert proof.completions == 2 * spec.rollout.prompts_per_iteration * spec.rollout.group_size
    assert options.profile is not None
    assert [(kind.name, kind.interpreter(Path())) for kind in options.profile.each] == [("vllm", sys.executable)]
    assert not options.run_root.parent.exists()


@pytest.mark.parametrize("difference", [0.5, float("nan")])
def test_other_log_probs_than_the_trainers_are_an_error(difference: float, monkeypatch: pytest.MonkeyPatch) -> None:
    play(PlayedRun(1e-5, difference), monkeypatch)
    with pytest.raises(Unhealthy, match="the log-probs of vLLM and of the trainer differ by"):
        run_self_test(sys.executable)


def test_a_job_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    play(PlayedRun(failure="this Python has no vllm"), monkeypatch)
    with pytest.raises(JobFailed, match="this Python has no vllm"):
        run_self_test(sys.executable)
