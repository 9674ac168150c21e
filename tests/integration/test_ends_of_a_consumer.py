"""A consumer that is asked to end has one deadline, its trainer too, wherever Redis goes away on their way out (I8)."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from broker.connection import roles
from broker.connection.client import connect
from broker.fence import read_fence
from broker.job_store import JobStore
from contracts.jobs import JobState
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from onbeat.base.process.launcher import with_own_packages
from onbeat.stack.redis import EmbeddedRedis
from tests.builders import job_spec
from tests.chaos.short_job import long_variant
from tests.forked import FORKED_LOG, WORKER_OF_STAND_INS, ForkedChild, forked_and_running
from tests.until import until

TRAINER = "tests.integration.saving_trainer"
PROMISED_S = 15.0
"""From a process's SIGTERM to its end, as docs/operate.md says."""
SAVES_S = 6.0
"""A checkpoint takes longer than a trainer waits for a server that is away."""
DEADLINE_S = 300.0


class Consumer:
    """A consumer with one job, whose trainer holds it."""

    def __init__(self, server: EmbeddedRedis, folder: Path) -> None:
        self.server = server
        self.settings = StackSettings(
            redis_url=server.url_of(roles.TRAINER), run_root=str(folder / "runs"), broker_timeout_s=3600.0
        )
        self.broker = connect(StackSettings(redis_url=server.url))
        self.jobs = JobStore(self.broker)
        self.job_id, _ = self.jobs.create(job_spec())
        self.forked = folder / "forked"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ONBEAT_")}
        environment |= {"OMP_NUM_THREADS": "1", FORKED_LOG: str(self.forked)}
        self.process = ForkedChild(
            "consumer",
            command=(sys.executable, "-m", WORKER_OF_STAND_INS, TRAINER),
            environment=with_own_packages(environment | self.settings.environment()),
            log_path=folder / "consumer.log",
        )
        self.process.start()
        until(lambda: self.jobs.state(self.job_id) is JobState.RUNNING and self.is_held, "a trainer")

    @property
    def is_held(self) -> bool:
        return read_fence(self.broker, self.broker.job_keys(self.job_id)).lease_until_s > 0.0

    @property
    def trainers(self) -> set[psutil.Process]:
        return forked_and_running(self.forked, TRAINER, self.job_id)

    def ask_to_end(self) -> None:
        """Sends SIGTERM; returns when the trainer writes its checkpoint."""
        self.asked_s = time.monotonic()
        self.process.terminate()
        until((self.settings.run_root_path / "saving").exists, "a checkpoint that is written")

    def end_checkpoint(self) -> None:
        (self.settings.run_root_path / "saved").touch()

    def take_redis(self, how: str) -> None:
        if how == "hangs":
            assert self.server.child.pid is not None
            os.kill(self.server.child.pid, signal.SIGSTOP)
            return
        self.server.kill()
        if how == "is gone":
            self.server.socket.unlink()

    def ended(self) -> float:
        """Seconds from its SIGTERM to its end, which is orderly and leaves no trainer."""
        assert self.process.wait(DEADLINE_S)
        took_s = time.monotonic() - self.asked_s
        assert self.process.exit_code == 0
        assert not self.trainers
        return took_s

    @property
    def said(self) -> str:
        trainer_log = RunFolder(self.settings.run_root_path, self.job_id).trainer_log
        return self.process.log_path.read_text() + trainer_log.read_text()


@contextmanager
def running(folder: Path) -> Iterator[Consumer]:
    with EmbeddedRedis(folder / "redis") as server:
        consumer = Consumer(server, folder)
        try:
            yield consumer
        finally:
            consumer.process.kill()
            if server.child.is_running:
                assert server.child.pid is not None
                os.kill(server.child.pid, signal.SIGCONT)


def long(how: str) -> Any:
    """A variant of another case: `make chaos` runs it."""
    return pytest.param(how, marks=long_variant)


@pytest.mark.parametrize("how", [long("refuses"), "hangs", long("is gone")])
def test_redis_goes_away_behind_the_last_checkpoint_and_the_end_does_not_wait_for_it(tmp_path: Path, how: str) -> None:
    with running(tmp_path) as consumer:
        consumer.ask_to_end()
        consumer.take_redis(how)
        consumer.end_checkpoint()
        assert consumer.ended() <= PROMISED_S, consumer.said
        assert "stopped; another trainer may go on" in consumer.said
        assert "killing it" not in consumer.said


@pytest.mark.parametrize("how", [long("refuses"), "hangs"])
def test_a_checkpoint_that_is_being_written_gets_its_time_while_redis_is_away(tmp_path: Path, how: str) -> None:
    with running(tmp_path) as consumer:
        consumer.ask_to_end()
        consumer.take_redis(how)
        time.sleep(SAVES_S)
        assert len(consumer.trainers) == 1, consumer.said
        consumer.end_checkpoint()
        assert consumer.ended() <= PROMISED_S, consumer.said
        assert "stopped; another trainer may go on" in consumer.said


@pytest.mark.parametrize("how", ["hangs", long("")])
def test_a_checkpoint_that_is_never_done_ends_with_the_deadline(tmp_path: Path, how: str) -> None:
    """A dead mount, for instance; with how == "" Redis is there all the time."""
    with running(tmp_path) as consumer:
        consumer.ask_to_end()
        if how:
            consumer.take_redis(how)
        assert consumer.ended() <= PROMISED_S, consumer.said
        assert "this process ends now" in consumer.said


def test_a_checkpoint_that_is_written_in_time_is_followed_by_the_lease_that_is_given_back(tmp_path: Path) -> None:
    with running(tmp_path) as consumer:
        consumer.ask_to_end()
        time.sleep(SAVES_S)
        assert consumer.is_held
        consumer.end_checkpoint()
        assert consumer.ended() <= PROMISED_S, consumer.said
        assert not consumer.is_held
        assert consumer.jobs.state(consumer.job_id) is JobState.RUNNING
