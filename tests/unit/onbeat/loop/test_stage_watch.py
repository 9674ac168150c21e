"""A stage that has work and no worker ends the job after its deadline, by its name; every other state does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from msgspec.structs import replace

from broker.presence import StagePresence
from contracts.errors import DeadlineExceeded
from contracts.spec.job import JobSpec
from contracts.spec.stages import StageSpec
from onbeat.loop.watches import LOOK_EVERY_S, StageWatch
from tests.builders import job_spec

MINE = {"type": "external", "name": "mine", "inputs": ["text"], "outputs": [{"name": "score", "type": "float32"}]}
STAGES: list[dict[str, Any]] = [{"type": "reference"}, MINE]


class Played:
    """A clock, the broker's presence and the items in work, in one."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.absent = {"reference", "mine"}
        self.with_work = {"reference", "mine"}
        self.num_looks = 0
        self.why = ""
        self.judge_is = ""
        """What all workers miss of the judge; "" while one reaches it."""

    def unserved(self, job_id: str, stages: Sequence[StageSpec]) -> dict[str, str]:
        assert job_id == "job"
        self.num_looks += 1
        names = [stage.name for stage in stages if stage.name in self.absent]
        return {name: f"a live worker of stage {name}{self.why}" for name in names}

    def left_alone(self, job_id: str, stages: Sequence[StageSpec]) -> frozenset[str]:
        assert job_id == "job"
        return frozenset(stage.name for stage in stages if self.why)

    def missed(self, job_id: str, stages: Sequence[StageSpec]) -> dict[str, str]:
        assert job_id == "job"
        return {one.name: self.judge_is for one in stages if self.judge_is and one.kind == "llm_judge"}

    def watch(self, spec: JobSpec) -> StageWatch:
        return StageWatch(
            presence=cast(StagePresence, self),
            spec=replace(spec, timeouts=replace(spec.timeouts, no_stage_worker_s=60.0, dependency_s=300.0)),
            job_id="job",
            with_work=lambda iteration: sorted(self.with_work) if iteration == 3 else [],
            clock=lambda: self.now_s,
        )

    def wait(self, watch: StageWatch, seconds: float) -> None:
        for _ in range(int(seconds / LOOK_EVERY_S)):
            self.now_s += LOOK_EVERY_S
            watch.check(3)


def staged_spec() -> JobSpec:
    return job_spec(algorithm__kl_coefficient=0.1, stages=STAGES)


def test_a_stage_with_work_and_no_worker_is_named_after_the_deadline() -> None:
    played = Played()
    watch = played.watch(staged_spec())
    played.wait(watch, 60.0)
    with pytest.raises(DeadlineExceeded, match="waited 60 s for a live worker of stage reference") as late:
        played.wait(watch, 4.0)
    assert "onbeat up --stage-workers" in str(late.value)


def test_the_reason_that_a_worker_gives_at_last_is_the_one_that_is_named() -> None:
    played = Played()
    watch = played.watch(staged_spec())
    played.wait(watch, 30.0)
    played.why = "; w1 doesn't serve it: model.path: no folder `/models/m`"
    with pytest.raises(DeadlineExceeded, match="stage reference; w1 doesn't serve it: model") as late:
        played.wait(watch, 40.0)
    assert "(fix that, and `onbeat resume` goes on;" in str(late.value)
    assert "start one" not in str(late.value), "another worker would leave it alone for the same reason"


def test_one_of_ones_own_is_named_with_its_own_cure() -> None:
    played = Played()
    played.absent = {"mine"}
    watch = played.watch(staged_spec())
    with pytest.raises(DeadlineExceeded, match=r"of stage mine \(start your process that serves it"):
        played.wait(watch, 70.0)


def test_a_worker_that_comes_or_work_that_ends_starts_the_wait_again() -> None:
    played = Played()
    watch = played.watch(staged_spec())
    played.wait(watch, 50.0)
    played.absent = {"mine"}
    played.with_work = {"reference"}
    played.wait(watch, 2.0)
    played.absent, played.with_work = {"reference", "mine"}, {"reference", "mine"}
    played.wait(watch, 58.0)


def test_a_stage_without_work_needs_no_worker_and_a_job_without_stages_asks_nothing() -> None:
    played = Played()
    played.with_work = set()
    played.wait(played.watch(staged_spec()), 1000.0)
    asked = played.num_looks
    played.wait(played.watch(job_spec()), 1000.0)
    assert played.num_looks == asked > 0


def test_a_judge_that_no_worker_reaches_has_a_deadline_of_its_own() -> None:
    played = Played()
    played.absent = set()
    played.with_work = {"llm_judge"}
    judge = {"type": "llm_judge", "model": "m", "prompt": "{completion}"}
    watch = played.watch(job_spec(deterministic=False, stages=[judge]))
    played.judge_is = "the judge at http://j: no answer"
    played.wait(watch, 200.0)
    played.judge_is = ""
    played.wait(watch, 10.0)
    played.judge_is = "the judge at http://j: no answer"
    played.wait(watch, 200.0)
    with pytest.raises(DeadlineExceeded, match="the judge at http://j: no answer: stage llm_judge needs it"):
        played.wait(watch, 200.0)
