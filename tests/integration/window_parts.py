"""A job of which several iterations are open at once, and what its trainer and generators do with it."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from broker.connection.client import Broker
from broker.fence import FenceState, read_fence
from broker.generator_side import Claim, GeneratorSide, PublishOutcome
from broker.job_store import JobStore
from broker.keys import JobKeys, SlotKeys
from broker.openings import IterationOpening
from broker.trainer_side import TrainerSide
from contracts.events import AuditRecord, record_digest
from contracts.jobs import JobState
from contracts.rollouts import PromptBatch, RolloutBatch
from contracts.schedule import Schedule
from contracts.spec.job import JobSpec
from tests.builders import commit_record, job_spec, manifest, prompt_batch, rollout_batch
from tests.integration.fence_parts import let_expire

LEASE_S = 600.0
NUM_TRAIN = 2
"""Training batches of an iteration."""


def digest(version: int) -> str:
    return f"{version:064x}"


def lagging_spec(lag: int, *, schedule: str = "delayed", **changes: object) -> JobSpec:
    fields: dict[str, object] = {
        "name": uuid.uuid4().hex,
        "iterations": 20,
        "schedule": schedule if lag else "periodic",
        "max_policy_lag": lag,
        "deterministic": schedule != "bounded",
        "algorithm__correction": "none",
        "rollout__max_attempts": 2,
    }
    return job_spec(**(fields | changes))


def answer_to(batch: PromptBatch, generator_id: str, **changes: object) -> RolloutBatch:
    fields: dict[str, object] = {
        "job_id": batch.job_id,
        "batch_id": batch.batch_id,
        "iteration": batch.iteration,
        "purpose": batch.purpose,
        "policy_version": batch.policy_version,
        "weights_digest": batch.weights_digest,
        "num_groups": len(batch.prompts),
        "group_size": batch.group_size,
        "generator_id": generator_id,
    }
    return rollout_batch(**(fields | changes))  # type: ignore[arg-type]


def claimed(side: GeneratorSide, lease_s: float = LEASE_S, **asked: Any) -> Claim:
    """A batch that there is."""
    claim = side.claim(lease_s, **asked)
    assert claim is not None
    return claim


@dataclass
class LaggingJob:
    """Every even iteration from 2 on evaluates: its evaluation waits for the version of its number."""

    broker: Broker
    spec: JobSpec
    evaluates: bool = False
    generators: Broker | None = None
    """Theirs, where it is another user's."""
    job_id: str = ""
    sides: dict[str, GeneratorSide] = field(default_factory=dict)
    trainer: TrainerSide = field(init=False)
    last_link: str = ""

    def __post_init__(self) -> None:
        self.job_id, _ = JobStore(self.broker).create(self.spec)
        JobStore(self.broker).move(self.job_id, JobState.RUNNING)
        self.trainer = self.new_trainer("t1")

    @property
    def schedule(self) -> Schedule:
        return self.spec.schedule_rule

    @property
    def keys(self) -> JobKeys:
        return self.broker.job_keys(self.job_id, self.spec.num_open)

    @property
    def fence(self) -> FenceState:
        return read_fence(self.broker, self.keys)

    @property
    def open_iterations(self) -> list[int]:
        return [one.iteration for one in self.fence.window]

    def slot(self, iteration: int) -> SlotKeys:
        return self.keys.slot_of(iteration)

    def new_trainer(self, owner: str) -> TrainerSide:
        """One that holds the job; the one before it is fenced off."""
        self.broker.redis.hset(self.keys.fence, "lease_until", "1")
        trainer = TrainerSide(self.broker, self.job_id, owner=owner, lease_s=30, num_open=self.spec.num_open)
        trainer.acquire()
        return trainer

    def generator(self, name: str = "g1") -> GeneratorSide:
        """One process of this name: it knows what it has claimed."""
        made = GeneratorSide(self.generators or self.broker, self.job_id, name)
        return self.sides.setdefault(name, made)

    # The trainer's prompt batches

    def batches(self, iteration: int) -> list[PromptBatch]:
        version = self.schedule.versions_of(iteration)[0]
        return [self._batch(iteration, "train", index, version) for index in range(NUM_TRAIN)]

    def evaluation(self, iteration: int) -> list[PromptBatch]:
        is_due = self.evaluates and iteration > 0 and iteration % 2 == 0
        return [self._batch(iteration, "evaluation", 0, iteration)] if is_due else []

    def _batch(self, iteration: int, purpose: str, index: int, version: int) -> PromptBatch:
        return prompt_batch(
            [[1, 2], [3]],
            job_id=self.job_id,
            batch_id=f"{iteration}/{purpose}/{index}",
            iteration=iteration,
            purpose=purpose,
            policy_version=version,
            weights_digest=digest(version),
        )

    def opening(self, iteration: int, *, newest_version: int | None = None) -> IterationOpening:
        """newest_version: that is made; an evaluation by a newer one goes out later."""
        oldest, newest = self.schedule.versions_of(iteration)
        evaluation = self.evaluation(iteration)
        is_later = newest_version is None or iteration > newest_version
        return IterationOpening(
            iteration=iteration,
            oldest_version=oldest,
            newest_version=newest,
            batches=tuple(self.batches(iteration) + ([] if is_later else evaluation)),
            num_later=len(evaluation) if is_later else 0,
        )

    # What a trainer does

    def announce(self, version: int, *, oldest_kept: int = 0) -> None:
        self.trainer.publish_weights(manifest(version, digest(version)), oldest_kept=oldest_kept)

    def start(self, version: int = 0) -> None:
        """Announces the versions of the window after `version` - 1, and opens it, oldest first."""
        versions = range(max(0, version - self.schedule.max_policy_lag), version + 1)
        for one in versions:
            self.announce(one)
        for iteration in range(version, version + self.spec.num_open):
            opening = self.opening(iteration, newest_version=version)
            self.trainer.open_iteration(opening, {one: digest(one) for one in versions})

    def trained(self, iteration: int) -> dict[str, str]:
        arrived, _ = self.trainer.claim_rollouts(iteration, max_batches=100)
        return {one.batch.batch_id: one.digest for one in arrived}

    def record(self, iteration: int, trained: dict[str, str], *, kind: str = "commit") -> AuditRecord:
        return commit_record(
            iteration,
            trained,
            kind=kind,
            weights_digest=digest(iteration),
            next_weights_digest=digest(iteration + 1) if kind == "commit" else "",
            trainer_epoch=self.trainer.trainer_epoch,
            previous=self.last_link,
        )

    def commit(self, iteration: int, trained: dict[str, str] | None = None, *, opens: bool = True) -> AuditRecord:
        """Commits it, opens the one that it makes room for, and sends the evaluation of the next."""
        record = self.record(iteration, self.trained(iteration) if trained is None else trained)
        self.announce(iteration + 1)
        self.trainer.commit(
            record,
            record.batches,
            event=None,
            opening=self.opening(self.schedule.opened_by(iteration)) if opens else None,
            next_version=(iteration + 1, digest(iteration + 1)),
        )
        self.last_link = record_digest(record)
        return record

    # What generators do

    def claim(self, name: str = "g1", held: int | None = None, *, hedge: bool = False) -> Claim:
        return claimed(self.generator(name), hedge=hedge, loaded=None if held is None else (held, digest(held)))

    def publish(self, claim: Claim, name: str = "g1", **changes: object) -> PublishOutcome:
        batch = answer_to(claim.prompt_batch, name, **({"attempt": claim.attempt} | changes))
        of_batch = replace(claim, prompt_batch=replace(claim.prompt_batch, batch_id=batch.batch_id))
        return self.generator(name).publish(of_batch, batch)

    def sample(self, name: str = "g1", count: int = NUM_TRAIN) -> list[RolloutBatch]:
        """Claims and publishes some batches."""
        sampled = []
        for _ in range(count):
            claim = self.claim(name)
            sampled.append(answer_to(claim.prompt_batch, name, attempt=claim.attempt))
            assert self.generator(name).publish(claim, sampled[-1]) is PublishOutcome.ACCEPTED
        return sampled

    def let_expire(self, claim: Claim) -> None:
        batch = claim.prompt_batch
        let_expire(self.broker, self.keys, batch.batch_id, iteration=batch.iteration)
