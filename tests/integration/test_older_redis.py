"""Redis comes back older than what is on disk, from a backup: what follows from its chain is gone on with, and given
back to it; what doesn't is put aside. Each test has a server of its own."""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import consumer.trainer.trainer as trainer
from broker.connection.client import Broker, connect
from broker.fence import read_fence
from broker.job_store import JobStore
from broker.trainer_side import TrainerSide
from consumer.trainer.held_job import HeldJob
from consumer.trainer.iteration import Iteration
from consumer.trainer.step import Stepped
from contracts.errors import Conflict, FencedOff, FenceViolation
from contracts.events import record_digest
from contracts.jobs import JobState
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from onbeat.client import Consumer
from onbeat.stack.redis import EmbeddedRedis
from tests.builders import job_spec, tiny_model_folder
from tests.integration.test_client import created, model_of, step, trained, verified
from tests.integration.test_trainer_restarts import STEP, Dead, gaps, made, spec_of
from tests.own_trainer import generating, names_in, one_trainer


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """A trainer installs signal handlers, and sets torch."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    torch.use_deterministic_algorithms(False)
    for number, handler in before.items():
        signal.signal(number, handler)


class Backed:
    """A server with a backup of its append-only file."""

    def __init__(self, folder: Path) -> None:
        self.server = EmbeddedRedis(folder / "redis")
        self.server.start()
        tiny_model_folder(folder / "models")
        self.settings = StackSettings(
            redis_url=self.server.url,
            model_root=str(folder / "models"),
            run_root=str(folder / "runs"),
            api_key="key",
            reward_key="key",
            threads=1,
        )
        self.broker: Broker = connect(self.settings)
        self.jobs = JobStore(self.broker)
        self._sync_at_once()
        self._data, self._backup = self.server.folder / "appendonlydir", folder / "backup"

    def back_up(self) -> None:
        assert self.broker.durability.persisted()
        shutil.copytree(self._data, self._backup)

    def restore(self) -> None:
        self.server.kill()
        shutil.rmtree(self._data)
        shutil.copytree(self._backup, self._data)
        self.server.restart()
        self._sync_at_once()

    def _sync_at_once(self) -> None:
        """No checkpoint waits for the next second."""
        self.broker.redis.config_set("appendfsync", "always")

    def chain(self, job_id: str) -> list[str]:
        return [record_digest(record) for record in self.jobs.audit(job_id)]

    def folder(self, job_id: str) -> RunFolder:
        return RunFolder(self.settings.run_root_path, job_id)


@pytest.fixture
def backed(tmp_path: Path) -> Iterator[Backed]:
    made = Backed(tmp_path)
    yield made
    made.broker.close()
    made.server.stop()


def saving(**changes: object) -> JobSpec:
    """Six iterations with a checkpoint after each, of which two are kept."""
    return spec_of(
        **{"trainer__checkpoint_every_iterations": 1, "trainer__keep_checkpoints": 2, "deterministic": False, **changes}
    )


def until_dead(backed: Backed, monkeypatch: pytest.MonkeyPatch, job_id: str, *, backed_up: int, dead: int) -> None:
    """One trainer: the server is backed up before the step of one iteration, and it dies before that of another."""

    def backs_up(held: HeldJob, current: Iteration) -> Stepped:
        if current.number == backed_up:
            backed.back_up()
        if current.number == dead:
            raise Dead
        return STEP(held, current)

    monkeypatch.setattr(trainer, "step", backs_up)
    with pytest.raises(Dead):
        one_trainer(backed.settings, backed.broker, job_id)
    monkeypatch.setattr(trainer, "step", STEP)


def test_a_trainer_goes_on_at_the_newest_checkpoint_and_gives_redis_its_records_back(
    backed: Backed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job_id, _ = backed.jobs.create(saving())
    folder = backed.folder(job_id)
    salts = ["first"]
    with generating(backed.broker, job_id, salt=lambda: salts[-1]):
        until_dead(backed, monkeypatch, job_id, backed_up=1, dead=5)
    chain = backed.chain(job_id)
    assert names_in(folder.checkpoints) == ["i000003", "i000004"]
    backed.restore()
    assert backed.chain(job_id) == chain[:1]
    salts.append("second")  # what is sampled again would be other batches
    with generating(backed.broker, job_id, salt=lambda: salts[-1]):
        assert one_trainer(backed.settings, backed.broker, job_id) == 0
    assert backed.jobs.state(job_id) is JobState.SUCCEEDED
    after = backed.chain(job_id)
    assert (after[:5], len(after)) == (chain[:5], 6), "nothing was done again"
    assert gaps(backed.jobs, folder) == ()
    assert not (folder.checkpoints / "aside").exists()
    assert "4 records of the audit chain are given back to it, up to iteration 4" in caplog.text


def test_without_its_records_a_newer_checkpoint_is_put_aside_and_an_older_one_taken(
    backed: Backed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job_id, _ = backed.jobs.create(saving(trainer__checkpoint_every_iterations=2))
    folder = backed.folder(job_id)
    with generating(backed.broker, job_id):
        until_dead(backed, monkeypatch, job_id, backed_up=3, dead=5)
    chain = backed.chain(job_id)
    assert names_in(folder.checkpoints) == ["i000001", "i000003"]
    lines = folder.chain.read_bytes().splitlines(keepends=True)
    folder.chain.write_bytes(b"".join(lines[:3]) + lines[4])  # a disk has lost the fourth
    backed.restore()
    with generating(backed.broker, job_id):
        assert one_trainer(backed.settings, backed.broker, job_id) == 0
    assert backed.chain(job_id)[:3] == chain[:3]
    assert gaps(backed.jobs, folder) == ()
    assert names_in(folder.checkpoints / "aside") == ["i000003"]
    assert "checkpoint i000003 is skipped: its version is not one of this job" in caplog.text
    assert "can't go on from 1 folders, and has moved them to" in caplog.text
    records = backed.jobs.audit(job_id)
    assert [record.iteration for record in records if record.kind == "rewind"] == [2], "from the checkpoint after 1"


def test_records_go_back_under_the_newest_epoch_alone_and_where_they_follow(backed: Backed) -> None:
    job_id = created(backed.broker, iterations=4)
    with generating(backed.broker, job_id), Consumer(job_id, settings=backed.settings) as consumer:
        trained(consumer)
    first, *later = backed.jobs.audit(job_id)
    other_id, _ = backed.jobs.create(job_spec())
    old = TrainerSide(backed.broker, other_id, owner="old", lease_s=0.001)
    old.acquire()
    side = TrainerSide(backed.broker, other_id, owner="new", lease_s=60.0)
    while True:
        with contextlib.suppress(Conflict):
            side.acquire()
            break
    with pytest.raises(FencedOff):
        old.restore([first])
    with pytest.raises(FenceViolation, match="broken_link"):
        side.restore(later)
    assert backed.jobs.audit(other_id) == []
    side.restore([first, *later])
    assert backed.jobs.audit(other_id) == [first, *later]
    fence = read_fence(backed.broker, backed.broker.job_keys(other_id))
    assert (fence.committed, fence.window) == (later[-1].iteration, ())
    side.restore([first, *later])
    assert len(backed.jobs.audit(other_id)) == 1 + len(later), "a repeat writes nothing"


def test_a_deterministic_job_without_a_commit_in_redis_is_done_again_to_the_same_weights(
    backed: Backed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which kind of engine sampled it, Redis alone knew (I7)."""
    job_id, _ = backed.jobs.create(saving(deterministic=True))
    folder = backed.folder(job_id)
    with generating(backed.broker, job_id):
        until_dead(backed, monkeypatch, job_id, backed_up=0, dead=4)
    versions = made(backed.jobs, job_id)
    assert len(versions) == 4
    backed.restore()
    with generating(backed.broker, job_id):
        assert one_trainer(backed.settings, backed.broker, job_id) == 0
    again = made(backed.jobs, job_id)
    assert {version: again[version] for version in versions} == versions
    assert names_in(folder.checkpoints / "aside") == ["i000002", "i000003"]
    assert gaps(backed.jobs, folder) == ()


@pytest.mark.parametrize("has_chain", [True, False], ids=["with its records", "without them"])
def test_an_external_trainer_loses_no_commit_that_returned(backed: Backed, has_chain: bool) -> None:
    job_id = created(backed.broker, iterations=5)
    folder = backed.folder(job_id)
    with generating(backed.broker, job_id), Consumer(job_id, settings=backed.settings) as consumer:
        model = model_of(consumer)
        consumer.begin(model)
        for iteration in consumer:
            if iteration.number == 1:
                backed.back_up()
            if iteration.number == 4:
                break
            step(model, list(iteration))
            consumer.commit(save=model.save_pretrained)
    chain = backed.chain(job_id)
    assert names_in(folder.trainer_state) == ["v000003", "v000004"]
    if not has_chain:
        folder.chain.unlink()
    backed.restore()
    with generating(backed.broker, job_id), Consumer(job_id, settings=backed.settings) as consumer:
        assert consumer.version == (4 if has_chain else 0)
        trained(consumer)
    assert backed.jobs.state(job_id) is JobState.SUCCEEDED
    if has_chain:
        assert backed.chain(job_id)[:4] == chain
        assert verified(backed.settings, backed.broker, job_id) == 0
    else:
        assert names_in(folder.trainer_state / "aside") == ["v000003", "v000004"]
        assert verified(backed.settings, backed.broker, job_id) == 1
