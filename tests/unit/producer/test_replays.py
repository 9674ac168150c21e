"""A generator samples recorded batches again between two claims, by the path of a claimed batch, and publishes none."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from broker.replays import ReplayEntry
from contracts.recorded.batches import RecordedBatch
from contracts.recorded.files import RecordedFiles, write_record
from contracts.replays import ReplayState
from contracts.rollouts import batch_digest
from contracts.run_folder import RunFolder
from producer.replays import Replayer
from tests.builders import DIGEST
from tests.unit.producer.test_generator import Stack, drive


class Requests:
    """The requests of one stack; `said` has the answers, in order."""

    def __init__(self) -> None:
        self.waiting: list[ReplayEntry] = []
        self.said: list[tuple[str, str, str]] = []

    def add(self, batch_id: str, digest: str, job_id: str = "job") -> None:
        entry = ReplayEntry(
            replay_id=f"replay-{len(self.waiting)}",
            job_id=job_id,
            batch_id=batch_id,
            state=ReplayState.QUEUED,
            recorded_digest=digest,
            digest="",
            generator="generator-a",
            reason="",
            attempt=1,
            lease_ms=0,
            asked_ms=0,
            ends_ms=0,
        )
        self.waiting.append(entry)

    def claim(self, generator_id: str, *, lease_s: float, left_alone: tuple[str, ...]) -> ReplayEntry | None:
        found = next((one for one in self.waiting if one.replay_id not in left_alone), None)
        if found is not None:
            self.waiting.remove(found)
        return found

    def renew(self, entry: ReplayEntry, *, lease_s: float) -> bool:
        return True

    def done(self, entry: ReplayEntry, *, digest: str, reason: str) -> bool:
        return self._say("done", digest, reason)

    def failed(self, entry: ReplayEntry, reason: str) -> bool:
        return self._say("failed", "", reason)

    def left(self, entry: ReplayEntry, reason: str) -> bool:
        self.waiting.append(entry)
        return self._say("left", "", reason)

    def _say(self, what: str, digest: str, reason: str) -> bool:
        self.said.append((what, digest, reason))
        return True


def with_replays(stack: Stack) -> Requests:
    """Makes the stack's generator one that samples recorded batches again."""
    requests, generator = Requests(), stack.generator
    generator._replayer = Replayer(
        generator_id="generator-a",
        replays=requests,  # type: ignore[arg-type]
        jobs=stack.jobs,  # type: ignore[arg-type]
        make_side=stack._side,  # type: ignore[arg-type]
        calls=generator._calls,
        model=generator._model,
        carrier=generator._carrier,
        players=stack.players,
        run_root=stack.run_root,
        weight_root=stack.run_root,
        not_reproducible=lambda: "",
        fingerprint=lambda spec: f"kind a; {spec.model.dtype}",
    )
    return requests


async def until_said(requests: Requests, count: int) -> None:
    async with asyncio.timeout(20.0):
        while len(requests.said) < count:
            await asyncio.sleep(0.005)


def recorded(stack: Stack, **changes: Any) -> RecordedBatch:
    """Records what the generator published first."""
    batch = next(iter(stack.sides["job"].published))
    asked, manifest = stack.work("job", 0)
    record = RecordedBatch(
        asked=asked, batch=batch, batch_digest=batch_digest(batch), manifest=manifest, engine="kind a; float32"
    )
    path = RecordedFiles(RunFolder(stack.run_root, "job")).path_of(batch.batch_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = replace(record, **changes)
    write_record(path, record)
    return record


async def published(stack: Stack) -> RecordedBatch:
    """Lets the generator publish its one batch, and records it."""
    await stack.changes.until(lambda: len(stack.sides["job"].published) == 1)
    return recorded(stack)


def test_a_recorded_batch_is_the_same_and_is_not_published_again(tmp_path: Path) -> None:
    async def scenario(stack: Stack) -> None:
        requests = with_replays(stack)
        side = stack.add_job(num_batches=1, rollout__group_size=2)
        async with stack.running():
            record = await published(stack)
            requests.add("0/train/0", record.batch_digest)
            await until_said(requests, 1)
            changed = recorded(stack, batch_digest=DIGEST)
            requests.add("0/train/0", changed.batch_digest)
            await until_said(requests, 2)
        assert requests.said[0] == ("done", record.batch_digest, "")
        assert requests.said[1] == ("done", record.batch_digest, ""), "the record's own batch is what was sampled"
        assert (len(side.published), len(side.claimed), side.failed) == (1, 1, [])

    drive(tmp_path, scenario)


def test_what_a_job_has_to_sample_comes_first(tmp_path: Path) -> None:
    async def scenario(stack: Stack) -> None:
        requests = with_replays(stack)
        side = stack.add_job(num_batches=1, rollout__group_size=2)
        async with stack.running():
            record = await published(stack)
            for number in range(1, 4):
                side.add(*stack.work("job", number))
            requests.add("0/train/0", record.batch_digest)
            await until_said(requests, 1)
            assert len(side.claimed) == 4

    drive(tmp_path, scenario)


def test_what_cannot_be_sampled_again_fails_with_the_reason(tmp_path: Path) -> None:
    async def scenario(stack: Stack) -> None:
        requests = with_replays(stack)
        stack.add_job(num_batches=1, rollout__group_size=2)
        async with stack.running():
            record = await published(stack)
            recorded(stack, asked=replace(record.asked, seed=7))
            requests.add("0/train/0", record.batch_digest)
            requests.add("0/train/9", record.batch_digest)
            requests.add("0/train/0", record.batch_digest, job_id="job-gone")
            requests.add("0/train/0", "f" * 64)
            await until_said(requests, 4)
        said = [(what, next(word for word in WORDS if word in reason)) for what, _, reason in requests.said]
        assert said == [("failed", word) for word in WORDS]

    WORDS = ["of another spec", "is not recorded", "no job job-gone", "recorded anew"]
    drive(tmp_path, scenario)


def test_a_batch_of_another_kind_of_engine_is_left_to_others_and_asked_for_once(tmp_path: Path) -> None:
    async def scenario(stack: Stack) -> None:
        requests = with_replays(stack)
        stack.add_job(num_batches=1, rollout__group_size=2)
        async with stack.running():
            record = await published(stack)
            other = recorded(stack, engine="kind b; float32")
            requests.add("0/train/0", other.batch_digest)
            await until_said(requests, 1)
            requests.add("0/train/9", record.batch_digest)
            await until_said(requests, 2)
        assert [what for what, _, _ in requests.said] == ["left", "failed"]
        assert "kind b" in requests.said[0][2]

    drive(tmp_path, scenario)


def test_a_colocated_jobs_trainer_is_not_disturbed(tmp_path: Path) -> None:
    async def scenario(stack: Stack) -> None:
        requests = with_replays(stack)
        stack.add_job(num_batches=1, rollout__group_size=2, schedule="colocated")
        async with stack.running():
            record = await published(stack)
            requests.add("0/train/0", record.batch_digest)
            beats = len(stack.jobs.infos)
            await stack.changes.until(lambda: len(stack.jobs.infos) >= beats + 2)
            assert requests.said == []
            stack.jobs.active.clear()
            await until_said(requests, 1)

    drive(tmp_path, scenario)
