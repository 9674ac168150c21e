"""A consumer as a real process, with a stand-in for the trainer: each active job has one, whichever process dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import msgspec
import pytest

import consumer.supervisor.reconciler as reconciler_module
from broker.connection import roles
from broker.connection.client import Broker, connect
from broker.fence import read_fence
from broker.job_store import JobStore
from broker.keys import CONSUMERS, sealed_name
from broker.monitor import STARTED_WITHIN_S, job_status
from broker.presence import LIVE_S, ConsumerPresence, Presence
from broker.trainer_side import TrainerSide
from consumer.supervisor import __main__ as look_out
from consumer.supervisor import trainer_process
from consumer.supervisor.__main__ import LookOut
from consumer.supervisor.reconciler import Reconciler, RunRoots
from consumer.supervisor.trainer_process import TrainerProcess
from contracts.encoding.wire import encode
from contracts.jobs import JobState
from contracts.monitor import ConsumerSeen, GeneratorSeen
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.extras import missing_extras
from contracts.spec.trainer_plugins import offered_plugins
from onbeat.stack.redis import EmbeddedRedis
from tests.builders import job_spec
from tests.forked import ForkedChild
from tests.pipeline import refusals
from tests.until import until

ROOT = Path(__file__).parents[2]
TRAINER = "tests.integration.stand_in_trainer"
WORKER = (
    "import os, sys; from consumer.supervisor.__main__ import run; from contracts.settings import settings_from; "
    "from onbeat.base.telemetry import logs; settings = settings_from(os.environ); "
    "logs.configure(settings, service='consumer'); "
    f"sys.exit(run(settings, trainer_module={TRAINER!r}))"
)


@pytest.fixture
def own_settings(server: EmbeddedRedis, tmp_path: Path) -> StackSettings:
    return StackSettings(
        redis_url=server.url_of(roles.TRAINER), run_root=str(tmp_path / "runs"), api_key="never-logged-key"
    )


@pytest.fixture
def broker(server: EmbeddedRedis) -> Iterator[Broker]:
    """Connects as the operator; asserts at the end that nothing was refused to the worker or its trainers."""
    made = connect(StackSettings(redis_url=server.url), patience_s=30.0)
    yield made
    if server.child.is_running:
        assert refusals(made) == []
    made.close()


@contextmanager
def worker(settings: StackSettings, log_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A consumer; its log is shown when the test fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ONBEAT_")}
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            env=environment | settings.environment(),
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    except BaseException:
        sys.stderr.write(log_path.read_text())
        raise
    finally:
        process.kill()
        process.wait()


class Holder:
    """The holder of a job's lease: the stand-in names itself by its process number."""

    def __init__(self, broker: Broker, job_id: str) -> None:
        self._broker = broker
        self._keys = broker.job_keys(job_id)

    @property
    def epoch(self) -> int:
        return read_fence(self._broker, self._keys).trainer_epoch

    @property
    def pid(self) -> int:
        """Returns 0 while no trainer holds the job."""
        owner = self._broker.redis.hget(self._keys.fence, "owner")
        return int(owner or 0)  # type: ignore[arg-type]

    def appears(self, after_epoch: int = 0, *, tick: Callable[[], object] = lambda: None) -> int:
        """The epoch of a trainer that came after `after_epoch`. tick: runs between two looks."""
        until(lambda: self.epoch > after_epoch and self.pid > 0, "a trainer", tick=tick)
        return self.epoch


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_submitted_job_gets_a_trainer_a_killed_one_is_replaced_and_sigterm_ends_both(
    own_settings: StackSettings, broker: Broker, tmp_path: Path, jobs: JobStore
) -> None:
    job_id, _ = jobs.create(job_spec())
    holder = Holder(broker, job_id)
    log_path = tmp_path / "worker.log"
    with worker(own_settings, log_path) as process:
        first = holder.appears()
        until(lambda: jobs.state(job_id) is JobState.RUNNING, "a running job")
        os.kill(holder.pid, signal.SIGKILL)
        second = holder.appears(after_epoch=first)
        assert second > first
        pid = holder.pid
        process.terminate()
        assert process.wait(timeout=300) == 0
        assert not is_running(pid)
    assert holder.pid == 0, "the lease is given back"
    assert jobs.state(job_id) is JobState.RUNNING, "the job goes on in another trainer"
    log = log_path.read_text()
    assert "stand-in trainer holds the job" in RunFolder(own_settings.run_root_path, job_id).trainer_log.read_text()
    assert own_settings.redis_url not in log
    assert own_settings.api_key not in log
    assert "Traceback" not in log


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG")
def test_a_killed_worker_takes_its_trainer_along_and_the_next_worker_starts_another(
    own_settings: StackSettings, broker: Broker, tmp_path: Path, jobs: JobStore
) -> None:
    job_id, _ = jobs.create(job_spec())
    holder = Holder(broker, job_id)
    with worker(own_settings, tmp_path / "worker.log") as process:
        first = holder.appears()
        pid = holder.pid
        process.kill()
        until(lambda: not is_running(pid), "the trainer's end")
    broker.redis.delete(broker.job_keys(job_id).starting)  # so as not to wait for it to expire
    with worker(own_settings, tmp_path / "worker.log"):
        assert holder.appears(after_epoch=first) > first


def test_a_restarted_redis_harms_neither_worker_nor_trainer(
    server: EmbeddedRedis, own_settings: StackSettings, broker: Broker, tmp_path: Path, jobs: JobStore
) -> None:
    first_id, _ = jobs.create(job_spec())
    first = Holder(broker, first_id)
    with worker(own_settings, tmp_path / "worker.log") as process:
        epoch = first.appears()
        until(lambda: jobs.state(first_id) is JobState.RUNNING, "a running job")
        server.restart()
        assert jobs.request_cancel(first_id) in (JobState.CANCELLING, JobState.CANCELLED)
        until(lambda: jobs.state(first_id) is JobState.CANCELLED, "the first job's end")
        assert first.epoch == epoch, "the trainer outlived the restart"
        second_id, _ = jobs.create(job_spec())
        Holder(broker, second_id).appears()
        assert process.poll() is None


Reconciling = Callable[..., AbstractContextManager[tuple[Reconciler, TrainerProcess]]]


@pytest.fixture
def reconciling(own_settings: StackSettings, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Reconciling:
    """Makes a reconciler in this process, over trainer processes of the stand-in, which are forked."""
    monkeypatch.setattr(trainer_process, "ChildProcess", ForkedChild)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name, value in own_settings.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)

    @contextmanager
    def made(trainer_start_s: float = 180.0) -> Iterator[tuple[Reconciler, TrainerProcess]]:
        trainer, roots = TrainerProcess(own_settings.run_root_path, module=TRAINER), RunRoots(own_settings)
        reconciler = Reconciler(
            broker=broker, trainer=trainer, roots=roots, worker_id="consumer-a", trainer_start_s=trainer_start_s
        )
        try:
            yield reconciler, trainer
        finally:
            reconciler.close()

    return made


def test_a_job_whose_trainers_die_fails_with_the_end_of_their_log(
    own_settings: StackSettings, jobs: JobStore, reconciling: Reconciling
) -> None:
    job_id, _ = jobs.create(job_spec(name="crash", timeouts__max_trainer_starts=2))
    with reconciling() as (reconciler, _):
        until(lambda: jobs.state(job_id) is JobState.FAILED, "the job's failure", tick=reconciler.reconcile)
    reason = jobs.fields(job_id)["reason"].decode()
    assert reason.startswith("cannot load the model; so 2 trainers ended without committing a new iteration")
    assert reason.endswith("cannot load the model")
    assert jobs.fields(job_id)["fault"] == b"stack"
    assert jobs.active_jobs() == []
    log = RunFolder(own_settings.run_root_path, job_id).trainer_log.read_text()
    assert log.count("cannot load the model") == 2


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("one\ntwo\nthree\nfour\n", "two / three / four"),
        ("one\ntwo" + "\n" * 50, "one / two"),
        ("", "(no log)"),
        (None, "(no log)"),
    ],
    ids=["lines", "blank lines", "an empty log", "no log"],
)
def test_the_end_of_a_trainers_log_has_its_last_words_or_says_that_there_are_none(
    tmp_path: Path, text: str | None, shown: str
) -> None:
    log = RunFolder(tmp_path, "job-a").trainer_log
    if text is not None:
        log.parent.mkdir()
        log.write_text(text)
    assert TrainerProcess(tmp_path).tail("job-a") == shown


def test_a_consumer_runs_one_trainer_and_the_next_job_waits_for_its_end(
    broker: Broker, jobs: JobStore, reconciling: Reconciling
) -> None:
    first_id, _ = jobs.create(job_spec())
    second_id, _ = jobs.create(job_spec())
    with reconciling() as (reconciler, trainer):
        reconciler.reconcile()
        assert trainer.job_id == first_id
        Holder(broker, first_id).appears()
        reconciler.reconcile()
        assert (trainer.job_id, jobs.state(second_id)) == (first_id, JobState.QUEUED)
        until(lambda: jobs.state(first_id) is JobState.RUNNING, "a running job")
        jobs.request_cancel(first_id)
        until(lambda: trainer.job_id == second_id, "the second job's trainer", tick=reconciler.reconcile)
        assert jobs.state(first_id) is JobState.CANCELLED


def test_a_consumer_says_that_it_lives_since_when_and_what_it_trains_until_it_ends(
    broker: Broker, jobs: JobStore, reconciling: Reconciling
) -> None:
    board = ConsumerPresence(broker)

    def own() -> list[ConsumerSeen]:
        return [one for one in board.live() if one.worker_id == "consumer-a"]

    said = encode(ConsumerSeen(worker_id="of-last-week", lives_s=1.0))
    at_ms = 1000 * int(broker.now_s() - 10 * LIVE_S - 1.0)
    broker.redis.hset(sealed_name(CONSUMERS, broker.seal), "of-last-week", b"%d %s" % (at_ms, said))
    with reconciling() as (reconciler, _):
        assert b"of-last-week" not in broker.run("present", kind="consumers"), "the dead never fill the board"
        assert own() == [], "it has not looked yet"
        reconciler.reconcile()
        (idle,) = own()
        assert (idle.job_id, 0.0 <= idle.lives_s < 60.0) == ("", True)
        assert (idle.lacks, idle.offers) == (missing_extras(), offered_plugins()), "what the gateway refuses jobs by"
        job_id, _ = jobs.create(job_spec())
        reconciler.reconcile()
        (busy,) = own()
        assert (busy.job_id, busy.lives_s > idle.lives_s) == (job_id, True)
    assert own() == []


def test_a_queued_job_misses_a_generator_once_one_that_was_started_with_the_stack_would_live(
    broker: Broker, jobs: JobStore
) -> None:
    job_id, _ = jobs.create(job_spec())
    external_id, _ = jobs.create(job_spec(trainer__external=True))
    for one in ConsumerPresence(broker).live():
        ConsumerPresence(broker).leave(one.worker_id)
    assert job_status(broker, job_id).reason == "waits for a trainer", "no consumer says how long the stack has lived"
    ConsumerPresence(broker).beat(ConsumerSeen(worker_id="new", lives_s=STARTED_WITHIN_S - 0.1))
    assert job_status(broker, job_id).reason == "waits for a trainer", "a generator may be on its way"
    ConsumerPresence(broker).beat(ConsumerSeen(worker_id="old", lives_s=STARTED_WITHIN_S))
    assert job_status(broker, job_id).reason == (
        "waits for a trainer; and for a generator, but none is running: start one with `onbeat up` or "
        "`python -m producer`"
    )
    assert job_status(broker, external_id).reason == "waits for an external trainer"
    Presence(broker).beat(GeneratorSeen(worker_id="g1"))
    assert job_status(broker, job_id).reason == "waits for a trainer"
    Presence(broker).leave("g1")
    ConsumerPresence(broker).leave("old")


def test_only_one_consumer_starts_the_trainer_of_a_job(jobs: JobStore, reconciling: Reconciling) -> None:
    job_id, _ = jobs.create(job_spec())
    assert jobs.reserve_start(job_id, "consumer-b", life_s=60.0)
    with reconciling() as (reconciler, trainer):
        reconciler.reconcile()
        assert trainer.job_id == ""
        jobs.release_start(job_id, "consumer-a")
        reconciler.reconcile()
        assert trainer.job_id == ""
        jobs.release_start(job_id, "consumer-b")
        reconciler.reconcile()
        assert trainer.job_id == job_id
        assert not jobs.reserve_start(job_id, "consumer-b", life_s=60.0)


def test_a_trainer_that_outlives_its_job_does_not_keep_the_consumer_from_others(
    jobs: JobStore, reconciling: Reconciling
) -> None:
    first_id, _ = jobs.create(job_spec(name="stuck"))
    second_id, _ = jobs.create(job_spec())
    with reconciling(trainer_start_s=0.0) as (reconciler, trainer):
        trainer.start(first_id)
        jobs.move(first_id, JobState.CANCELLED)
        reconciler.reconcile()
        assert trainer.job_id == second_id


def test_a_trainer_that_never_answers_is_killed_and_replaced(jobs: JobStore, reconciling: Reconciling) -> None:
    job_id, _ = jobs.create(job_spec(name="stuck"))
    with reconciling(trainer_start_s=0.0) as (reconciler, trainer):
        trainer.start(job_id)
        reconciler.reconcile()
        assert trainer.job_id == job_id
        assert jobs.count_trainer_start(job_id) == 2, "the reconciler's start, and this one"


def test_a_trainer_that_hangs_with_its_lease_is_replaced_once_that_has_run_out(
    broker: Broker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    jobs: JobStore,
    reconciling: Reconciling,
) -> None:
    """The time for a start, an hour here, is for a trainer that was never seen with its lease."""
    monkeypatch.setattr(reconciler_module, "LAPSE_GRACE_S", 0.2)
    job_id, _ = jobs.create(job_spec())
    with reconciling(trainer_start_s=3600.0) as (reconciler, trainer):
        reconciler.reconcile()
        holder = Holder(broker, job_id)
        holder.appears()
        hung = holder.pid
        reconciler.reconcile()
        assert trainer.has_held
        os.kill(hung, signal.SIGSTOP)
        until(lambda: holder.pid not in (0, hung), "another trainer", tick=reconciler.reconcile)
    assert f"the trainer of {job_id} has not answered for" in caplog.text


def test_a_trainer_whose_lease_ran_out_while_redis_was_away_may_renew_it(
    broker: Broker, jobs: JobStore, reconciling: Reconciling
) -> None:
    job_id, _ = jobs.create(job_spec())
    with reconciling(trainer_start_s=3600.0) as (reconciler, trainer):
        reconciler.reconcile()
        holder = Holder(broker, job_id)
        holder.appears()
        pid = holder.pid
        reconciler.reconcile()
        os.kill(pid, signal.SIGSTOP)
        until(lambda: not read_fence(broker, broker.job_keys(job_id)).is_held(broker.now_s()), "the end of its lease")
        reconciler.reconcile()
        os.kill(pid, signal.SIGCONT)
        until(lambda: read_fence(broker, broker.job_keys(job_id)).is_held(broker.now_s()), "its renewal")
        reconciler.reconcile()
        assert (trainer.job_id, holder.pid) == (job_id, pid)


def test_a_cancelling_job_without_a_trainer_is_cancelled(
    broker: Broker, jobs: JobStore, reconciling: Reconciling
) -> None:
    job_id, _ = jobs.create(job_spec())
    jobs.move(job_id, JobState.RUNNING)
    TrainerSide(broker, job_id, owner="dead", lease_s=0.001).acquire()
    assert jobs.request_cancel(job_id) is JobState.CANCELLING

    with reconciling() as (reconciler, trainer):
        until(lambda: jobs.state(job_id) is JobState.CANCELLED, "the job's end", tick=reconciler.reconcile)
        assert trainer.job_id == ""


def test_a_job_with_an_external_trainer_is_left_to_it_and_cancelled_where_none_comes(
    broker: Broker, jobs: JobStore, reconciling: Reconciling
) -> None:
    job_id, _ = jobs.create(job_spec(trainer__external=True))
    with reconciling() as (reconciler, trainer):
        reconciler.reconcile()
        assert trainer.job_id == ""
        assert job_status(broker, job_id).reason == "waits for an external trainer"
        jobs.move(job_id, JobState.RUNNING)
        assert job_status(broker, job_id).reason == "waits for an external trainer to take over"
        jobs.request_cancel(job_id)
        reconciler.reconcile()
        assert jobs.state(job_id) is JobState.CANCELLED


@pytest.mark.parametrize("root", ["run_root", "weight_root"])
def test_a_consumer_that_cannot_write_its_roots_refuses_to_start(
    own_settings: StackSettings, tmp_path: Path, root: str
) -> None:
    (tmp_path / "file").write_text("")
    settings = msgspec.structs.replace(own_settings, **{root: str(tmp_path / "file" / "runs")})
    log_path = tmp_path / "worker.log"
    with worker(settings, log_path) as process:
        assert process.wait(timeout=300) != 0
    assert "is ready for jobs" not in log_path.read_text()
    assert f"ONBEAT_{root.upper()}: {tmp_path / 'file' / 'runs'} cannot be written" in log_path.read_text()


def test_a_run_root_that_cannot_be_written_any_more_leaves_jobs_to_others_until_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, jobs: JobStore, reconciling: Reconciling
) -> None:
    job_id, _ = jobs.create(job_spec())
    (tmp_path / "runs").write_text("in the way")
    with reconciling() as (reconciler, trainer):
        reconciler.reconcile()
        reconciler.reconcile()
        assert (jobs.state(job_id), trainer.job_id) == (JobState.QUEUED, "")
        assert jobs.reserve_start(job_id, "consumer-b", life_s=60.0), "another consumer may start it"
        jobs.release_start(job_id, "consumer-b")
        assert caplog.text.count("this consumer takes no jobs: ONBEAT_RUN_ROOT") == 1
        (tmp_path / "runs").unlink()
        reconciler.reconcile()
        assert trainer.job_id == job_id


def test_an_ended_trainers_starts_no_longer_count(broker: Broker, jobs: JobStore, reconciling: Reconciling) -> None:
    job_id, _ = jobs.create(job_spec())
    with reconciling() as (reconciler, _):
        reconciler.reconcile()
        Holder(broker, job_id).appears()
        reconciler.close()
    assert jobs.count_trainer_start(job_id) == 1


def test_a_job_whose_record_is_lost_does_not_keep_others_from_a_trainer(
    broker: Broker, jobs: JobStore, reconciling: Reconciling
) -> None:
    lost_id, _ = jobs.create(job_spec())
    job_id, _ = jobs.create(job_spec())
    broker.redis.delete(broker.job_keys(lost_id).job)
    with reconciling() as (reconciler, trainer):
        reconciler.reconcile()
        assert trainer.job_id == job_id


def test_a_job_whose_spec_cannot_be_read_fails_and_does_not_keep_others_from_a_trainer(
    broker: Broker, jobs: JobStore, reconciling: Reconciling
) -> None:
    old_id, _ = jobs.create(job_spec())
    job_id, _ = jobs.create(job_spec())
    broker.redis.set(broker.job_keys(old_id).spec, msgspec.msgpack.encode({"algorithm": {"correction": "decoupled"}}))
    with reconciling() as (reconciler, trainer):
        reconciler.reconcile()
        assert trainer.job_id == job_id
    assert jobs.state(old_id) is JobState.FAILED
    assert "its spec can't be read" in jobs.fields(old_id)["reason"].decode()
    assert jobs.active_jobs() == [job_id]


def test_a_job_that_is_cancelled_while_its_trainer_loads_frees_the_consumer_at_once(
    jobs: JobStore, reconciling: Reconciling
) -> None:
    first_id, _ = jobs.create(job_spec(name="stuck"))
    second_id, _ = jobs.create(job_spec())
    with reconciling() as (reconciler, trainer):
        reconciler.reconcile()
        assert trainer.job_id == first_id
        jobs.request_cancel(first_id)
        reconciler.reconcile()
        assert trainer.job_id == second_id
    assert jobs.state(first_id) is JobState.CANCELLED
    assert jobs.count_trainer_start(first_id) == 1, "a start that was taken back doesn't count"


def test_a_successor_that_loads_is_ended_with_its_job(jobs: JobStore, reconciling: Reconciling) -> None:
    job_id, _ = jobs.create(job_spec(name="stuck"))
    jobs.move(job_id, JobState.RUNNING)
    with reconciling() as (reconciler, trainer):
        reconciler.reconcile()
        assert trainer.job_id == job_id
        assert jobs.request_cancel(job_id) is JobState.CANCELLING
        reconciler.reconcile()
        assert (jobs.state(job_id), trainer.job_id) == (JobState.CANCELLED, "")


def test_a_trainer_that_others_stop_has_used_up_its_start(
    broker: Broker, jobs: JobStore, reconciling: Reconciling
) -> None:
    job_id, _ = jobs.create(job_spec())
    holder = Holder(broker, job_id)
    with reconciling() as (reconciler, trainer):
        epoch = 0
        for _ in range(2):
            # A trainer that the first one's lease still keeps out ends, and has not used up its start.
            epoch = holder.appears(after_epoch=epoch, tick=reconciler.reconcile)
            os.kill(holder.pid, signal.SIGTERM)

            until(lambda: not trainer.is_running, "the trainer's end")
    assert jobs.count_trainer_start(job_id) == 3


def test_a_trainer_that_finds_another_one_has_not_used_up_its_start(jobs: JobStore, reconciling: Reconciling) -> None:
    job_id, _ = jobs.create(job_spec(name="held", timeouts__max_trainer_starts=1))
    with reconciling() as (reconciler, trainer):
        for _ in range(2):
            reconciler.reconcile()
            assert trainer.job_id == job_id, "one is started, the job has not failed"
            until(lambda: not trainer.is_running, "the trainer's end")
    assert jobs.state(job_id) is JobState.QUEUED


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
@pytest.mark.parametrize(("how", "has_trainer"), [("killed", False), ("hung", False), ("hung", True)])
def test_sigterm_ends_a_consumer_and_its_trainer_without_redis(
    server: EmbeddedRedis,
    own_settings: StackSettings,
    broker: Broker,
    tmp_path: Path,
    how: str,
    has_trainer: bool,
    jobs: JobStore,
) -> None:
    job_id = jobs.create(job_spec())[0] if has_trainer else "no-job"
    holder, trainer_pid = Holder(broker, job_id), 0
    log_path = tmp_path / "worker.log"
    with worker(own_settings, log_path) as process:
        until(lambda: "ready for jobs" in log_path.read_text(), "a consumer")
        if has_trainer:
            holder.appears()
            trainer_pid = holder.pid
        assert server.child.pid
        os.kill(server.child.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        try:
            process.terminate()
            assert process.wait(timeout=300) == 0
            assert not trainer_pid or not is_running(trainer_pid)
        finally:
            if how == "hung":
                os.kill(server.child.pid, signal.SIGCONT)


def test_a_change_of_a_job_makes_a_consumer_look_at_once(
    monkeypatch: pytest.MonkeyPatch, jobs: JobStore, reconciling: Reconciling
) -> None:
    monkeypatch.setattr(look_out, "LOOK_EVERY_S", 3600.0)
    monkeypatch.setattr(look_out, "LISTEN_S", 0.2)
    with reconciling() as (reconciler, trainer):
        looks = LookOut(reconciler, jobs)
        looking = threading.Thread(target=looks.run)
        looking.start()
        job_id, _ = jobs.create(job_spec())
        until(lambda: trainer.job_id == job_id, "the trainer of a job that came after the first look")
        jobs.request_cancel(job_id)
        until(lambda: jobs.state(job_id) is JobState.CANCELLED and not trainer.job_id, "the job's end")
        looks.stop()
        looking.join()
        until(lambda: "changes" not in {thread.name for thread in threading.enumerate()}, "the listener's end")


def test_a_redis_at_maxmemory_takes_the_successor_of_a_dead_trainer_and_a_cancel(
    own_settings: StackSettings, broker: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture, jobs: JobStore
) -> None:
    """Only a trainer's commit would make room."""
    job_id, _ = jobs.create(job_spec())
    broker.redis.config_set("maxmemory", 1)
    holder = Holder(broker, job_id)
    with worker(own_settings, tmp_path / "worker.log") as process:
        first = holder.appears()
        os.kill(holder.pid, signal.SIGKILL)
        assert holder.appears(after_epoch=first) > first
        until(lambda: jobs.state(job_id) is JobState.RUNNING, "a running job")
        jobs.request_cancel(job_id)
        until(lambda: jobs.state(job_id) is JobState.CANCELLED, "the job's end")
        broker.redis.config_set("maxmemory", 0)
        second_id, _ = jobs.create(job_spec())
        Holder(broker, second_id).appears()
        assert process.poll() is None
