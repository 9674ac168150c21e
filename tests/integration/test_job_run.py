"""How a job ends, by what its trainer meets: a cancel is never a failure."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest
from msgspec import UNSET

import consumer.trainer.job_run as job_run
from broker.connection.client import Broker
from broker.fence import read_fence
from broker.job_store import JobStore
from broker.monitor import job_status
from broker.trainer_side import TrainerSide
from consumer.ranks.processes.orders import Failed, foreign_failure
from contracts.errors import (
    BatchFailed,
    BrokerFull,
    BrokerUnavailable,
    ContractViolation,
    DeadlineExceeded,
    Fault,
    FencedOff,
    FenceViolation,
    InvalidInput,
    OnbeatError,
    TrainingDiverged,
    Unavailable,
    Unhealthy,
    WeightsRejected,
)
from contracts.jobs import JobState, TrainerExit
from contracts.settings import StackSettings
from onbeat.loop.lease_keeper import Cancelled, LeaseKeeper, Stopped
from tests.any_exception import ALL
from tests.builders import job_spec

pytestmark = pytest.mark.usefixtures("restored_process")

FULL = OnbeatError("cannot write: no space left", field="checkpoints/i000003")


class StandIn:
    """A held job whose trainer meets what the test says, in the order of a trainer's calls."""

    def __init__(self, *, runs: Callable[[], None], saves: Callable[[], None] = lambda: None) -> None:
        self.run, self.save = runs, saves
        self.closed = self.cleared = False
        self.ranks = self.weights = self.store = self

    def close(self) -> None:
        self.closed = True

    def remove_all(self) -> None:
        self.cleared = True


class OneJob:
    """A job and its trainer's process, which is this one."""

    def __init__(self, settings: StackSettings, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.settings, self.broker, self.monkeypatch = settings, broker, monkeypatch
        self.jobs = JobStore(broker)
        self.job_id, _ = self.jobs.create(job_spec())

    def train(self, make: Callable[[LeaseKeeper], StandIn]) -> int:
        def held_job(*_: object, keeper: LeaseKeeper, **__: object) -> StandIn:
            return make(keeper)

        self.monkeypatch.setattr(job_run, "HeldJob", held_job)
        self.monkeypatch.setattr(job_run, "run_iterations", lambda held: held.run() or "")
        self.monkeypatch.setattr(job_run, "save", lambda held: held.save())
        return job_run.train(self.settings, self.broker, self.jobs.spec(self.job_id), self.job_id)

    @property
    def end(self) -> tuple[JobState, str]:
        fields = self.jobs.fields(self.job_id)
        return JobState(fields["state"].decode()), fields["reason"].decode()

    @property
    def is_held(self) -> bool:
        return read_fence(self.broker, self.broker.job_keys(self.job_id)).lease_until_s > 0.0


@pytest.fixture(name="job")
def job_of_one_run(settings: StackSettings, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> OneJob:
    return OneJob(settings, broker, monkeypatch)


def raising(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def test_a_cancel_is_a_cancel_with_a_checkpoint(job: OneJob) -> None:
    saved: list[bool] = []

    def runs() -> None:
        assert job.jobs.request_cancel(job.job_id) is JobState.CANCELLING
        raise Cancelled

    assert job.train(lambda _: StandIn(runs=runs, saves=lambda: saved.append(True))) == TrainerExit.DONE
    assert (job.end, saved, job.is_held) == ((JobState.CANCELLED, ""), [True], False)


@pytest.mark.parametrize("error", [FULL, Unavailable("a rank is gone"), FenceViolation("the commit is lost")])
def test_a_cancel_that_cannot_save_is_a_cancel_that_says_so(job: OneJob, error: OnbeatError) -> None:
    def runs() -> None:
        job.jobs.request_cancel(job.job_id)
        raise Cancelled

    assert job.train(lambda _: StandIn(runs=runs, saves=raising(error))) == TrainerExit.DONE
    state, reason = job.end
    assert state is JobState.CANCELLED
    assert reason == f"its last checkpoint could not be written: {error}"
    assert not job.is_held


@pytest.mark.parametrize(
    "error",
    [FULL, BatchFailed("is dead", field="batch 3/train/0"), TrainingDiverged("a loss is nan"), InvalidInput("no data")],
)
def test_an_error_of_a_job_that_is_being_cancelled_does_not_make_it_fail(job: OneJob, error: OnbeatError) -> None:
    def runs() -> None:
        job.jobs.request_cancel(job.job_id)
        raise error

    assert job.train(lambda _: StandIn(runs=runs)) == TrainerExit.FAILED
    assert (job.end, job.is_held) == ((JobState.CANCELLED, str(error)), False)


def test_an_error_while_it_loads_does_not_make_a_cancel_a_failure(job: OneJob) -> None:
    def make(_: LeaseKeeper) -> StandIn:
        job.jobs.request_cancel(job.job_id)
        raise InvalidInput("no folder", field="model.path")

    assert job.train(make) == TrainerExit.FAILED
    assert job.end == (JobState.CANCELLED, "model.path: no folder")


def test_a_cancel_between_the_look_at_the_state_and_the_start_is_a_cancel(
    job: OneJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.jobs.move(job.job_id, JobState.RUNNING)
    look = JobStore.state

    def look_and_cancel(jobs: JobStore, job_id: str) -> JobState:
        state = look(jobs, job_id)
        monkeypatch.setattr(JobStore, "state", look)
        job.jobs.request_cancel(job_id)
        return state

    monkeypatch.setattr(JobStore, "state", look_and_cancel)
    assert job.train(lambda _: pytest.fail("nothing is loaded")) == TrainerExit.DONE
    assert job.end == (JobState.CANCELLED, "")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Unavailable("a rank died"), TrainerExit.DIED),
        (BrokerUnavailable("away"), TrainerExit.DIED),
        (FencedOff("over"), TrainerExit.HELD),
    ],
)
def test_a_trainer_that_dies_while_the_job_is_cancelled_leaves_the_end_to_a_consumer(
    job: OneJob, error: OnbeatError, code: int
) -> None:
    def runs() -> None:
        job.jobs.request_cancel(job.job_id)
        raise error

    stand_in = StandIn(runs=runs)
    assert job.train(lambda _: stand_in) == code
    assert job.end[0] is JobState.CANCELLING
    assert stand_in.closed
    assert not stand_in.cleared


def succeed_it(job: OneJob) -> TrainerSide:
    """Takes the job of a trainer whose lease has run out."""
    job.broker.redis.hset(job.broker.job_keys(job.job_id).fence, "lease_until", "1")
    successor = TrainerSide(job.broker, job.job_id, owner="its successor", lease_s=600.0)
    successor.acquire()
    return successor


def code_of(train: Callable[[], int]) -> int:
    """Returns the exit code of a trainer's process; what leaves it is 1, as Python has it."""
    try:
        return train()
    except Exception:
        return 1


def ends_by_itself(job: OneJob, runs: Callable[[], None]) -> None:
    """By an error that leaves the job to another trainer, whether it is one of ours or a fault."""
    assert code_of(lambda: job.train(lambda _: StandIn(runs=runs))) == TrainerExit.DIED
    assert job.end[0] is JobState.RUNNING


@pytest.mark.parametrize(
    "error",
    [Unavailable("a rank died"), BrokerFull("no room"), FenceViolation("the commit is lost"), ZeroDivisionError()],
)
def test_after_a_trainer_that_ends_by_itself_a_successor_starts_at_once(job: OneJob, error: Exception) -> None:
    ends_by_itself(job, raising(error))
    assert not job.is_held
    assert job.train(lambda _: StandIn(runs=lambda: None)) == TrainerExit.DONE
    assert job.end == (JobState.SUCCEEDED, "")


@pytest.mark.parametrize("kind", ALL)
def test_a_fault_that_repeats_word_for_word_in_two_trainers_ends_the_job_with_its_line(job: OneJob, kind: str) -> None:
    """SystemExit(0) among them: its code would say that the trainer was done."""
    ends_by_itself(job, raising(ALL[kind]()))
    assert not job.is_held
    waits = job_status(job.broker, job.job_id).reason
    assert waits.startswith("waits for a trainer to take over; the last one ended by ")
    line = waits.partition("ended by ")[2]
    of_memory = "out of memory while a trainer trains passes of up to 8192 tokens: "
    words = {
        "ExceptionGroup": "KeyError: 'layers'",
        "BaseExceptionGroup": "ValueError",
        "MemoryError": f"{of_memory}MemoryError",
        "OutOfMemoryError": f"{of_memory}OutOfMemoryError: CUDA out of memory",
    }
    assert line.startswith(words.get(kind, kind))
    assert line.endswith(")"), "it says where"
    assert job.train(lambda _: StandIn(runs=raising(ALL[kind]()))) == TrainerExit.FAILED
    reason = f"{line}; so two trainers in a row ended by the same error, before any progress"
    assert (job.end, job.is_held) == ((JobState.FAILED, reason), False)


def test_a_fault_that_repeats_while_it_loads_ends_the_job_too(job: OneJob) -> None:
    def make(_: LeaseKeeper) -> StandIn:
        raise AttributeError("'Gemma4TextConfig' object has no attribute 'head_dim'")

    assert code_of(lambda: job.train(make)) == TrainerExit.DIED
    assert job.train(make) == TrainerExit.FAILED
    assert "AttributeError: 'Gemma4TextConfig' object has no attribute 'head_dim'" in job.end[1]


def test_numbers_and_addresses_make_no_other_fault(job: OneJob) -> None:
    ends_by_itself(job, raising(RuntimeError("<Cache at 0x7f3a> of process 4711 holds 17 rows")))
    again = raising(RuntimeError("<Cache at 0x55be> of process 12 holds 9 rows"))
    assert job.train(lambda _: StandIn(runs=again)) == TrainerExit.FAILED


@pytest.mark.parametrize(
    "error",
    [Unavailable("a rank died"), BrokerFull("no room"), FenceViolation("the commit is lost"), KeyError("heads")],
)
def test_another_fault_and_one_of_the_stack_leave_the_job_its_further_trainers(job: OneJob, error: Exception) -> None:
    """What passes by itself may say the same twice: Redis that is away, a rank that was killed."""
    for _ in range(2):
        ends_by_itself(job, raising(KeyError("layers")))
        job.jobs.reset_trainer_starts(job.job_id)
    ends_by_itself(job, raising(KeyError("layers")))
    for _ in range(2 if isinstance(error, OnbeatError) else 1):
        ends_by_itself(job, raising(error))
    if isinstance(error, OnbeatError):
        assert job.train(lambda _: StandIn(runs=raising(KeyError("layers")))) == TrainerExit.FAILED


def test_a_resumed_job_has_no_fault_behind_it(job: OneJob) -> None:
    fault = raising(KeyError("layers"))
    ends_by_itself(job, fault)
    assert job.train(lambda _: StandIn(runs=fault)) == TrainerExit.FAILED
    job.jobs.resume(job.job_id)
    ends_by_itself(job, fault)
    assert job.train(lambda _: StandIn(runs=fault)) == TrainerExit.FAILED


def test_a_rank_s_fault_has_its_words_and_a_lost_peer_none(job: OneJob) -> None:
    """torch says in a plain RuntimeError that a peer was killed: that is no fault of the job, however often."""
    for error in (RuntimeError("Connection closed by peer"), RuntimeError("Connection closed by peer")):
        failure = Failed.of(1, 7, foreign_failure(error, 1)).error()
        assert str(failure) == "rank 1: died: RuntimeError: Connection closed by peer"
        ends_by_itself(job, raising(failure))
    ends_by_itself(job, raising(Failed.of(1, 7, foreign_failure(KeyError("layers"), 1)).error()))
    again = Failed.of(0, 3, foreign_failure(KeyError("layers"), 0)).error()
    assert job.train(lambda _: StandIn(runs=raising(again))) == TrainerExit.FAILED
    assert job.end[1].startswith("rank 0: died: KeyError: 'layers'; so ")


def test_a_trainer_that_could_not_reach_redis_leaves_its_lease_to_run_out(job: OneJob) -> None:
    ends_by_itself(job, raising(BrokerUnavailable("away")))
    assert job.is_held
    assert job.train(lambda _: StandIn(runs=lambda: None)) == TrainerExit.HELD


@pytest.mark.parametrize("error", [FenceViolation("the fence is not open"), Unavailable("a rank died")])
def test_a_trainer_that_ends_by_what_its_successor_has_done_is_fenced_off_and_leaves_the_lease_alone(
    job: OneJob, error: Exception
) -> None:
    def runs() -> None:
        succeed_it(job)
        raise error

    assert job.train(lambda _: StandIn(runs=runs)) == TrainerExit.HELD
    assert (job.end[0], job.is_held) == (JobState.RUNNING, True)
    assert job.train(lambda _: StandIn(runs=lambda: None)) == TrainerExit.HELD


def test_a_trainer_that_slept_past_its_lease_does_not_take_its_successors_fence_for_its_own(job: OneJob) -> None:
    side = TrainerSide(job.broker, job.job_id, owner="it slept", lease_s=600.0)
    side.acquire()
    assert side.fence().trainer_epoch == side.trainer_epoch
    successor = succeed_it(job)
    with pytest.raises(FencedOff, match="another trainer holds the job"):
        side.fence()
    assert successor.fence().trainer_epoch == successor.trainer_epoch


def test_a_trainer_whose_keeper_died_while_it_loads_gives_its_lease_back(
    job: OneJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[TrainerExit] = []
    monkeypatch.setattr(job_run, "_exit", ended.append)
    jobs = job.jobs
    side = TrainerSide(job.broker, job.job_id, owner="t", lease_s=600.0)
    for why, is_held in ((Unavailable("the keeper died"), False), (BrokerUnavailable("away"), True)):
        side.acquire()
        job_run._end_loading(why, jobs, side=side, job_id=job.job_id)
        assert job.is_held == is_held
    assert ended == [TrainerExit.DIED, TrainerExit.DIED]


def test_a_trainer_that_hangs_between_its_passes_ends_and_lets_another_go_on(
    job: OneJob, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its lease is renewed all the time: a dead mount, or a lock that it waits for, would hold the job for ever."""
    job.job_id, _ = job.jobs.create(job_spec(timeouts__iteration_s=0.2, timeouts__dependency_s=0.2))
    ended: queue.SimpleQueue[tuple[TrainerExit, JobState, bool]] = queue.SimpleQueue()
    has_ended = threading.Event()

    def ends(code: TrainerExit) -> None:
        ended.put((code, job.end[0], job.is_held))
        has_ended.set()

    def make(keeper: LeaseKeeper) -> StandIn:
        def runs() -> None:
            keeper.loaded()
            with keeper.training(longest_pass_s=60.0):
                pass
            assert has_ended.wait(60.0)

        return StandIn(runs=runs)

    monkeypatch.setattr(job_run, "_exit", ends)
    job.train(make)
    assert ended.get_nowait() == (TrainerExit.DIED, JobState.RUNNING, False)
    assert "in runs" in capfd.readouterr().err, "it says where"


def test_a_stop_that_cannot_save_is_a_stop(job: OneJob) -> None:
    assert job.train(lambda _: StandIn(runs=raising(Stopped()), saves=raising(FULL))) == TrainerExit.DONE
    assert (job.end[0], job.is_held) == (JobState.RUNNING, False)


def test_a_failure_is_a_failure_with_its_reason(job: OneJob) -> None:
    assert job.train(lambda _: StandIn(runs=raising(BatchFailed("is dead")), saves=raising(FULL))) == TrainerExit.FAILED
    assert job.end == (JobState.FAILED, "is dead")


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (BatchFailed("is dead: the reward raised KeyError", field="batch 3/train/0"), Fault.JOB),
        (TrainingDiverged("a loss is nan"), Fault.JOB),
        (Unhealthy("the reward collapsed"), Fault.JOB),
        (InvalidInput("matches no parameter", field="optimizer.groups[0].parameters"), Fault.JOB),
        (InvalidInput("no folder /models/m", field="model.path"), Fault.STACK),
        (InvalidInput("torch sees no CUDA device here", field="ONBEAT_DEVICE"), Fault.STACK),
        (InvalidInput("its weights are others"), Fault.STACK),
        (DeadlineExceeded("waited 600 s for a generator"), Fault.STACK),
        (WeightsRejected("its digest differs"), Fault.STACK),
        (ContractViolation("is damaged", field="/runs/job-1/checkpoints/3"), Fault.STACK),
    ],
)
def test_a_failed_job_says_whether_its_owner_or_the_operator_can_fix_it(
    job: OneJob, error: OnbeatError, fault: Fault
) -> None:
    assert job.train(lambda _: StandIn(runs=raising(error))) == TrainerExit.FAILED
    assert job_status(job.broker, job.job_id).fault is fault
    job.jobs.resume(job.job_id)
    assert job_status(job.broker, job.job_id).fault is UNSET, "it is no failed job any more"


def test_the_end_of_a_job_that_another_has_ended_stays(job: OneJob) -> None:
    def runs() -> None:
        job.jobs.request_cancel(job.job_id)
        job.jobs.move(job.job_id, JobState.CANCELLED, reason="by hand")
        raise BatchFailed("is dead")

    assert job.train(lambda _: StandIn(runs=runs)) in (TrainerExit.FAILED, TrainerExit.HELD)
    assert job.end == (JobState.CANCELLED, "by hand")


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.RUNNING])
def test_of_two_cancels_at_the_same_time_the_second_does_not_end_what_the_first_lets_save(
    job: OneJob, monkeypatch: pytest.MonkeyPatch, state: JobState
) -> None:
    if state is JobState.RUNNING:
        job.jobs.move(job.job_id, state)
    look = JobStore.state

    def look_while_another_cancels(jobs: JobStore, job_id: str) -> JobState:
        found = look(jobs, job_id)
        monkeypatch.setattr(JobStore, "state", look)
        job.jobs.request_cancel(job_id)
        return found

    monkeypatch.setattr(JobStore, "state", look_while_another_cancels)
    ends = {JobState.QUEUED: JobState.CANCELLED, JobState.RUNNING: JobState.CANCELLING}
    assert job.jobs.request_cancel(job.job_id) is ends[state]
