"""A stage worker that loses nothing: each claimed item ends with its columns, failed with its reason, or given up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from broker.stage_side import PutOutcome
from contracts.encoding.arrays import pack_float32
from contracts.errors import (
    BatchFailed,
    BrokerFull,
    BrokerUnavailable,
    CompletionUnjudged,
    ContractViolation,
    DeadlineExceeded,
    EngineUnavailable,
    InvalidInput,
    JudgeUnavailable,
    NotFound,
    OnbeatError,
    RewardUnavailable,
)
from contracts.events import TimelineSpan
from onbeat.base.process.dependency import JUDGE as JUDGE_NAME
from onbeat.base.process.dependency import Dependency
from onbeat.stages.served_stages import ServedStage, ServedStages
from onbeat.stages.worker import StageWorker
from onbeat.work.calls import BrokerCalls
from onbeat.work.declined_work import PAUSES_S
from onbeat.work.heartbeat import Heartbeat
from tests.builders import job_spec
from tests.fakes import Changes
from tests.rooms.stages.stage_fakes import FakeService, FakeStack, FakeStageSide, Waiting, typed

TEACHER = {"type": "teacher", "model": "teacher", "lease_s": 0.5}
SCORER = {"type": "reward_model", "model": "scorer"}
JUDGE = {"type": "llm_judge", "model": "m", "prompt": "{completion}"}
OWN = {"type": "external", "name": "own", "inputs": ["text"], "outputs": [{"name": "x", "type": "float32"}]}


class Stack:
    """A stage worker over fakes, with a service for one item and one for several."""

    def __init__(
        self, *, stop_grace_s: float = 20.0, full_timeout_s: float = 20.0, dependencies: tuple[Dependency, ...] = ()
    ) -> None:
        self.changes = Changes()
        self.stack = FakeStack(self.changes)
        self.waiting = Waiting()
        self.sides: dict[str, FakeStageSide] = {}
        self.told: list[tuple[str, TimelineSpan]] = []
        """Spans of the timeline, with their job."""
        self.models = FakeService(self.changes)
        self.judge = FakeService(self.changes, most=3)
        services = {"teacher": self.models, "reward_model": self.models, "llm_judge": self.judge}
        self.now_s = 0.0
        """What the stages are left alone by."""
        self.lacking: set[str] = set()
        """Stages whose models this host lacks."""
        self.stages = ServedStages(
            typed(self.stack),
            typed(self.sides.__getitem__),
            kinds=services,
            check=self.look_for_model,
            clock=lambda: self.now_s,
        )
        self.worker = StageWorker(
            worker_id="worker-a",
            stages=self.stages,
            presence=self.stack,
            calls=BrokerCalls(timeout_s=0.05, full_timeout_s=full_timeout_s),
            services=services,
            dependencies=dependencies,
            wait_for_items=typed(self.waiting),
            stop_grace_s=stop_grace_s,
            report=lambda job_id, spans: self.told.extend((job_id, one) for one in spans),
        )

    def add_job(self, *stages: dict[str, Any], job_id: str = "job") -> FakeStageSide:
        changes = {"algorithm__distillation_coefficient": 1.0} if TEACHER in stages else {}
        spec = job_spec(deterministic=False, stages=list(stages), **changes)
        side = self.sides[job_id] = FakeStageSide(spec, self.changes)
        self.stack.active.append(job_id)
        return side

    def look_for_model(self, stage: ServedStage) -> None:
        if stage.stage.name in self.lacking:
            raise InvalidInput("no folder `/models/m`", field=f"stages.{stage.stage.name}.model")

    def leaves_alone(self) -> dict[str, str]:
        """What it says of the stages that it leaves alone."""
        return dict(self.stack.beats[-1].leaves_alone) if self.stack.beats else {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        """The worker as a task that must end by itself after `stop`."""
        task = self.changes.worker = asyncio.create_task(self.worker.run())
        task.add_done_callback(lambda _: self.changes.notify())
        yield task
        self.worker.stop()
        async with asyncio.timeout(120.0):
            await task


@pytest.fixture
def stack() -> Stack:
    return Stack()


async def test_every_claimed_item_gets_its_columns_and_other_peoples_stages_are_left_alone(stack: Stack) -> None:
    side = stack.add_job(TEACHER, SCORER, OWN)
    side.add(*(("teacher", "0/train/0", 0), ("reward_model", "0/train/0", 5), ("own", "0/train/0", 0)))
    async with stack.running():
        # A beat may be older than the look at the jobs.
        await stack.changes.until(
            lambda: len(side.there) == 2 and stack.stack.beats[-1].stages != () and not stack.stack.beats[-1].items
        )
    said = stack.stack.beats[-1]
    assert (said.serves, said.stages) == (("llm_judge", "reward_model", "teacher"), ("job/reward_model", "job/teacher"))
    assert (said.worker_id, said.leaves_alone) == (stack.worker.name.rpartition(" ")[2], {})
    assert list(side.there) == [("teacher", "0/train/0", 0), ("reward_model", "0/train/0", 5)]
    assert len(side.there["teacher", "0/train/0", 0]["teacher_logprobs"]) == 8
    assert "own" not in {stage for stage, _ in side.asked}
    assert (side.failed, stack.stack.left, stack.models.is_closed) == ([], ["worker-a"], True)


async def test_what_was_computed_is_told_to_its_job_also_by_a_worker_that_stops_at_once(stack: Stack) -> None:
    side = stack.add_job(TEACHER, SCORER)
    side.add(("teacher", "0/train/0", 0), ("reward_model", "0/train/0", 5))
    async with stack.running():
        await stack.changes.until(lambda: len(side.there) == 2)
    assert {(job_id, span.who, span.what, span.batch_id) for job_id, span in stack.told} == {
        ("job", "stage worker-a", "compute teacher", "0/train/0"),
        ("job", "stage worker-a", "compute reward_model", "0/train/0"),
    }
    assert len(stack.told) == 2, "each once"
    assert all(span.started_s <= span.ended_s for _, span in stack.told)


async def test_no_more_is_claimed_than_a_service_has_room_for_and_one_that_is_full_holds_no_other_up(
    stack: Stack,
) -> None:
    side = stack.add_job(TEACHER, JUDGE)
    stack.models.gate.clear()
    stack.judge.gate.clear()
    side.add(*(("teacher", f"0/train/{number}", 0) for number in range(2)))
    side.add(*(("llm_judge", "0/train/0", row) for row in range(5)))
    async with stack.running():
        await stack.changes.until(lambda: len(side.claimed) == 4)
        assert len(side.free) == 3
        assert (side.idle[0], side.idle[-1]) == (True, False)
        # Both are full, so that no item is waited for: the oldest news of either would end each wait at once.
        num_waits = len(stack.waiting.stages)
        stack.judge.gate.set()
        await stack.changes.until(lambda: len(side.there) == 5)
        assert not [names for names in stack.waiting.stages[num_waits:] if "teacher" in names]
        stack.models.gate.set()
        await stack.changes.until(lambda: len(side.there) == 7)
    assert max(rows for stage, rows in side.asked if stage == "llm_judge") == 3


async def test_stages_and_jobs_take_turns(stack: Stack) -> None:
    one, other = stack.add_job(TEACHER, job_id="job-a"), stack.add_job(TEACHER, SCORER, job_id="job-b")
    for side in (one, other):
        side.add(*(("teacher", f"0/train/{number}", 0) for number in range(3)))
    other.add(*(("reward_model", "0/train/0", row) for row in range(3)))
    async with stack.running():
        await stack.changes.until(lambda: len(one.there) + len(other.there) == 9)
    assert sorted(place[0] for place in stack.models.begun[:3]) == ["reward_model", "teacher", "teacher"]
    assert sorted(place[0] for place in stack.models.begun[3:6]) == ["reward_model", "teacher", "teacher"]


@pytest.mark.parametrize("error", [BatchFailed("no number"), ContractViolation("no such token")])
async def test_an_item_that_fails_is_given_back_with_its_reason_and_those_beside_it_are_not(
    error: Exception, stack: Stack
) -> None:
    side = stack.add_job(JUDGE)
    bad = ("llm_judge", "0/train/0", 1)
    stack.judge.errors[bad] = error
    side.add(*(("llm_judge", "0/train/0", row) for row in range(3)))
    async with stack.running():
        await stack.changes.until(lambda: len(side.there) == 2 and bool(side.failed))
    assert side.failed == [(bad, str(error))]


async def test_columns_of_another_shape_fail_their_item(stack: Stack) -> None:
    side = stack.add_job(JUDGE)
    side.put_errors = [ContractViolation("column x is missing")]
    side.add(("llm_judge", "0/train/0", 0))
    async with stack.running():
        await stack.changes.until(lambda: bool(side.failed))
    assert side.failed == [(("llm_judge", "0/train/0", 0), "column x is missing")]


async def test_columns_wait_for_room_in_a_full_server(stack: Stack) -> None:
    side = stack.add_job(TEACHER)
    side.put_errors = [BrokerFull("at maxmemory"), BrokerFull("at maxmemory")]
    side.add(("teacher", "0/train/0", 0))
    async with stack.running():
        await stack.changes.until(lambda: len(side.there) == 1)
    assert (len(stack.models.begun), side.failed) == (1, [])


@pytest.mark.parametrize("outcome", [PutOutcome.DIVERGENT, PutOutcome.SETTLED, PutOutcome.NOT_READY])
async def test_refused_columns_are_dropped_and_the_worker_goes_on(outcome: PutOutcome, stack: Stack) -> None:
    side = stack.add_job(TEACHER)
    side.outcome = outcome
    side.add(*(("teacher", f"0/train/{number}", 0) for number in range(2)))
    async with stack.running():
        await stack.changes.until(lambda: len(side.there) == 2)
    assert side.failed == []


async def test_leases_are_renewed_and_what_is_not_needed_any_more_is_dropped(stack: Stack) -> None:
    side = stack.add_job(TEACHER)
    place, following = ("teacher", "0/train/0", 0), ("teacher", "0/train/1", 0)
    stack.models.gate.clear()
    side.add(place, following)
    async with stack.running():
        await stack.changes.until(lambda: [place] in side.renewed)
        side.settled.add(place)
        await stack.changes.until(lambda: stack.models.dropped == [place])
        stack.models.gate.set()
        await stack.changes.until(lambda: list(side.there) == [following])
    assert side.failed == []


async def test_an_item_whose_lease_was_lost_is_computed_to_its_end_and_its_worker_is_not_idle(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stack: Stack
) -> None:
    monkeypatch.setattr("onbeat.work.worker.LOG_AFTER_S", 0.0)
    caplog.set_level("INFO", logger="onbeat.work.worker")
    side = stack.add_job(TEACHER, JUDGE)
    side.at_claim = stack.changes.notify
    place = ("teacher", "0/train/0", 0)
    stack.models.gate.clear()
    side.lost.add(place)
    side.add(place)
    async with stack.running():
        await stack.changes.until(lambda: any("no longer holds" in line for line in caplog.messages))
        asked = len(side.asked)
        await stack.changes.until(lambda: len(side.asked) > asked + 5)
        assert not any("waiting for" in line for line in caplog.messages)
        stack.models.gate.set()
        await stack.changes.until(lambda: place in side.there)
    assert sum(place in places for places in side.renewed) == 1, "a lost lease is not begun anew"


async def test_the_server_of_a_lone_stage_that_is_left_alone_is_asked_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onbeat.work.worker.PROBE_EVERY_S", 0.001)
    probed: list[bool] = []

    async def probe() -> None:
        probed.append(True)

    server = Dependency(JUDGE_NAME, "http://judge", probe=probe)
    stack = Stack(dependencies=(server,))
    side = stack.add_job(JUDGE)
    bad = ("llm_judge", "0/train/0", 0)
    stack.judge.errors[bad] = InvalidInput("refuses its key", field="ONBEAT_JUDGE_KEY")
    side.add(bad)
    async with stack.running():
        await stack.changes.until(lambda: "refuses its key" in stack.leaves_alone().get("job/llm_judge", ""))
        probed.clear()
        server.missed(JudgeUnavailable("no answer"))
        async with asyncio.timeout(120.0):
            while server.is_away:
                await asyncio.sleep(0)
    assert probed


async def test_a_service_that_is_away_costs_an_item_no_attempt_whichever_it_is(stack: Stack) -> None:
    side = stack.add_job(TEACHER)
    bad = ("teacher", "0/train/0", 0)
    stack.models.errors[bad] = RewardUnavailable("no answer")
    side.add(bad)
    async with stack.running():
        await stack.changes.until(lambda: bool(side.released))
        stack.models.errors.clear()
        await stack.changes.until(lambda: bad in side.there)
    assert side.failed == []


async def test_a_job_that_ends_is_forgotten_and_one_that_is_removed_or_unreadable_is_left_alone(stack: Stack) -> None:
    async def until_forgotten(stack: Stack) -> None:
        async with asyncio.timeout(120.0):
            while stack.models.jobs:
                await asyncio.sleep(0)

    side, gone = stack.add_job(TEACHER), stack.add_job(TEACHER, job_id="gone")
    gone.is_removed = True
    side.add(("teacher", "0/train/0", 0))
    async with stack.running():
        await stack.changes.until(lambda: len(side.there) == 1)
        assert stack.models.jobs == {"job"}
        stack.stack.active.clear()
        side.add(("teacher", "0/train/1", 0))
        await stack.changes.until(lambda: not stack.models.jobs or len(side.there) == 2)
        await until_forgotten(stack)


@pytest.mark.parametrize("error", [NotFound("there is no such job"), ContractViolation("it published no `prompt`")])
async def test_a_job_of_which_nothing_can_be_claimed_holds_no_other_up(error: Exception, stack: Stack) -> None:
    bad, side = stack.add_job(TEACHER, job_id="bad"), stack.add_job(TEACHER)
    bad.claim_errors = [error] * 3
    side.add(("teacher", "0/train/0", 0))
    async with stack.running():
        await stack.changes.until(lambda: len(side.there) == 1 and not bad.claim_errors)
    assert (side.failed, bad.failed) == ([], [])


async def test_a_stage_whose_model_is_not_here_is_left_alone_until_it_is(stack: Stack) -> None:
    """No item of it is tried: another worker may have the model."""
    side = stack.add_job(TEACHER, SCORER)
    stack.lacking.add("teacher")
    side.add(("teacher", "0/train/0", 0), ("reward_model", "0/train/0", 0))
    async with stack.running():
        said = "stages.teacher.model: no folder `/models/m`"
        await stack.changes.until(lambda: len(side.there) == 1 and stack.leaves_alone() == {"job/teacher": said})
        assert (side.free, side.failed) == ([("teacher", "0/train/0", 0)], [])
        stack.lacking.clear()
        await stack.changes.until(lambda: len(side.there) == 2 and not stack.leaves_alone())
    assert side.failed == []


async def test_a_worker_of_which_all_stages_lack_their_models_waits_for_none_of_them(stack: Stack) -> None:
    side = stack.add_job(TEACHER)
    stack.lacking.add("teacher")
    side.add(("teacher", "0/train/0", 0))
    async with stack.running():
        await stack.changes.until(lambda: "job/teacher" in stack.leaves_alone())
        stack.lacking.clear()
        await stack.changes.until(lambda: len(side.there) == 1)
    assert [] not in stack.waiting.stages


async def test_a_stage_that_this_host_can_not_serve_costs_no_attempt_and_is_served_again_once_it_can(
    stack: Stack,
) -> None:
    side = stack.add_job(TEACHER, SCORER)
    bad = ("teacher", "0/train/0", 0)
    stack.models.errors[bad] = InvalidInput("its vocabulary\nis another", field="stages.teacher.model")
    side.add(bad)
    async with stack.running():
        said = "stages.teacher.model: its vocabulary is another"
        await stack.changes.until(lambda: stack.leaves_alone() == {"job/teacher": said})
        side.add(("teacher", "0/train/1", 0), ("reward_model", "0/train/0", 0))
        await stack.changes.until(lambda: len(side.there) == 1)
        assert side.free == [bad, ("teacher", "0/train/1", 0)]
        assert [place for place, _ in side.released] == [bad]
        stack.models.refusal = InvalidInput("it is another still", field="stages.teacher.model")
        stack.now_s += PAUSES_S[0]
        await stack.changes.until(lambda: "it is another still" in stack.leaves_alone()["job/teacher"])
        assert len(side.there) == 1, "nothing is claimed to find that out"
        stack.models.refusal = None
        stack.models.errors.clear()
        stack.now_s += 2 * PAUSES_S[0]
        await stack.changes.until(lambda: len(side.there) == 3 and not stack.leaves_alone())
    assert side.failed == []


async def test_an_idle_worker_says_once_what_it_waits_for_and_again_after_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stack: Stack
) -> None:
    monkeypatch.setattr("onbeat.work.worker.LOG_AFTER_S", 0.0)
    caplog.set_level("INFO", logger="onbeat.work.worker")

    def said() -> int:
        return sum("waiting for items of job/" in line for line in caplog.messages)

    side = stack.add_job(TEACHER, JUDGE)
    side.at_claim = stack.changes.notify
    stack.models.gate.clear()
    side.add(("teacher", "0/train/0", 0))
    async with stack.running():
        await stack.changes.until(lambda: len(side.asked) > 5)
        assert said() == 0, "it works"
        stack.models.gate.set()
        await stack.changes.until(lambda: said() == 1)
        asked = len(side.asked)
        await stack.changes.until(lambda: len(side.asked) > asked + 5)
        assert said() == 1
        side.add(("teacher", "0/train/1", 0))
        await stack.changes.until(lambda: said() == 2)


async def test_a_stop_in_the_middle_of_a_turn_claims_of_no_other_stage(stack: Stack) -> None:
    side, loop = stack.add_job(TEACHER, SCORER), asyncio.get_running_loop()
    side.add(("reward_model", "0/train/0", 0))
    side.at_claim = lambda: typed(loop.call_soon_threadsafe(stack.worker.stop))
    async with stack.running() as task:
        await asyncio.wait({task}, timeout=120.0)
    assert (side.asked, side.claimed) == ([("teacher", 1)], [])


async def test_after_a_stop_nothing_is_claimed_and_what_is_in_work_ends(stack: Stack) -> None:
    side = stack.add_job(TEACHER)
    stack.models.gate.clear()
    side.add(("teacher", "0/train/0", 0))
    async with stack.running():
        await stack.changes.until(lambda: len(stack.models.begun) == 1)
        side.add(("teacher", "0/train/1", 0))
        stack.worker.stop()
        stack.models.gate.set()
    assert list(side.there) == [("teacher", "0/train/0", 0)]
    assert side.free == [("teacher", "0/train/1", 0)]


async def test_what_does_not_end_within_the_grace_is_given_up_and_not_failed() -> None:
    stack = Stack(stop_grace_s=0.05)
    side = stack.add_job(TEACHER)
    stack.models.gate.clear()
    side.add(("teacher", "0/train/0", 0))
    async with stack.running():
        await stack.changes.until(lambda: len(stack.models.begun) == 1)
    assert (side.there, side.failed) == ({}, [])


async def test_a_worker_that_can_not_go_on_dies_with_its_reason(stack: Stack) -> None:
    side = stack.add_job(TEACHER)
    stack.models.errors["teacher", "0/train/0", 0] = DeadlineExceeded("not done after 5 s")
    side.add(("teacher", "0/train/0", 0))
    with pytest.raises(BaseExceptionGroup) as raised:
        await stack.worker.run()
    assert raised.value.subgroup(DeadlineExceeded) is not None
    assert (stack.worker.has_claimed, side.failed) == (True, [])


async def test_what_leaves_no_process_to_go_on_with_ends_a_worker_and_its_item_goes_back_first(stack: Stack) -> None:
    side = stack.add_job(TEACHER)
    place = ("teacher", "0/train/0", 0)
    stack.models.errors[place] = MemoryError("no room")
    side.add(place)
    with pytest.raises(BaseExceptionGroup) as raised:
        async with asyncio.timeout(120.0):
            await stack.worker.run()
    assert raised.value.subgroup(EngineUnavailable) is not None
    ((failed, reason),) = side.failed
    assert failed == place
    assert "its service failed, and its process starts anew: MemoryError: no room" in reason


async def test_a_part_of_a_worker_that_ends_by_itself_ends_the_worker(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its heartbeat a worker would look dead to others, and go on."""

    async def ends(self: Heartbeat[Any]) -> None: ...

    monkeypatch.setattr(Heartbeat, "run", ends)
    with pytest.raises(BaseExceptionGroup) as raised:
        async with asyncio.timeout(30.0):
            await stack.worker.run()
    assert raised.group_contains(OnbeatError, match="of this worker ended by itself")


async def test_a_broker_that_stays_away_ends_a_worker(stack: Stack) -> None:
    stack.stack.is_away = True
    with pytest.raises(BaseExceptionGroup) as raised:
        await stack.worker.run()
    assert raised.value.subgroup(BrokerUnavailable) is not None
    assert not stack.worker.has_claimed


async def test_a_server_that_stays_full_ends_a_worker() -> None:
    stack = Stack(full_timeout_s=0.0)
    side = stack.add_job(TEACHER)
    side.put_errors = [BrokerFull("at maxmemory")]
    side.add(("teacher", "0/train/0", 0))
    with pytest.raises(BaseExceptionGroup) as raised:
        await stack.worker.run()
    assert raised.value.subgroup(BrokerFull) is not None


JUDGES = {**JUDGE, "on_failure": -0.5, "max_attempts": 3}
OF_MODEL = {**SCORER, "on_failure": 0.25}


def unjudged(*, lasts: bool) -> CompletionUnjudged:
    return CompletionUnjudged("no number", reason="no_answer", lasts=lasts)


@pytest.mark.parametrize(("stage", "score"), [(JUDGES, -0.5), (OF_MODEL, 0.25)])
async def test_a_completion_that_cannot_be_judged_gets_the_stated_score_and_the_reason_beside_it(
    stage: dict[str, Any], score: float, stack: Stack
) -> None:
    name, asked = stage["type"], 3 if stage is JUDGES else 1
    side = stack.add_job(stage)
    bad, good = (name, "0/train/0", 1), (name, "0/train/0", 2)
    service = stack.judge if stage is JUDGES else stack.models
    service.errors[bad] = unjudged(lasts=stage is OF_MODEL)
    side.add(bad, good)
    async with stack.running():
        await stack.changes.until(lambda: len(side.there) == 2)
    assert side.there[bad] == {name: [pack_float32([score])], f"{name}_failure": [b"no_answer"]}
    assert side.there[good] == {name: [pack_float32([1.0])], f"{name}_failure": [b""]}
    assert service.begun.count(bad) == asked, "in each of max_attempts, unless it is the same each time"
    assert side.failed == []


@pytest.mark.parametrize(
    ("stage", "error"), [(JUDGE, unjudged(lasts=True)), (JUDGES, BatchFailed("the server is away"))]
)
async def test_without_a_stated_score_and_where_the_completion_is_not_the_cause_the_item_fails(
    stage: dict[str, Any], error: BatchFailed, stack: Stack
) -> None:
    side = stack.add_job(stage)
    bad = ("llm_judge", "0/train/0", 1)
    stack.judge.errors[bad] = error
    side.add(bad)
    async with stack.running():
        await stack.changes.until(lambda: bool(side.failed))
    assert side.failed == [(bad, str(error))]
    assert side.there == {}


async def test_what_a_resume_states_holds_for_a_worker_that_never_saw_the_job_end(stack: Stack) -> None:
    side = stack.add_job(JUDGE)
    bad = ("llm_judge", "0/train/0", 1)
    stack.judge.errors[bad] = unjudged(lasts=True)
    side.add(bad)
    async with stack.running():
        await stack.changes.until(lambda: bool(side.failed))
        resumed = stack.add_job(JUDGES)
        stack.stack.active.pop()
        resumed.add(bad)
        await stack.changes.until(lambda: bool(resumed.there))
    assert resumed.there[bad]["llm_judge_failure"] == [b"no_answer"]
