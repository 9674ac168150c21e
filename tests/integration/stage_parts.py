"""A staged job on a real server: what tests of stages open, publish, claim and put; each side has its own user."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from broker.connection.client import Broker, connect
from broker.connection.roles import GATEWAY, GENERATOR, STAGE, TRAINER
from broker.generator_side import Claim, GeneratorSide, PublishOutcome
from broker.job_store import JobStore
from broker.keys import STAGE_BAND, item_fields
from broker.openings import IterationOpening
from broker.stage_side import ClaimedItem, PutOutcome, StageSide
from broker.trainer_side import TrainerSide
from contracts.encoding.arrays import pack_float32
from contracts.events import AuditRecord
from contracts.experience.columns import Column, row_shapes
from contracts.jobs import JobState
from contracts.rollouts import PromptBatch, RolloutBatch
from contracts.settings import StackSettings
from onbeat.stack.redis import EmbeddedRedis
from tests.builders import commit_record, job_spec, manifest, prompt_batch, rollout_batch
from tests.integration.fence_parts import weights_digest

NUM_GROUPS, GROUP_SIZE = 2, 4
NUM_ROWS = NUM_GROUPS * GROUP_SIZE


def external(
    name: str, inputs: Sequence[str] = ("completion_ids",), *, unit: str = "row", **changes: Any
) -> dict[str, Any]:
    """A stage with one output of its own name, a number a row."""
    outputs = [{"name": name, "type": "float32", "per": "rollout"}]
    return {"type": "external", "name": name, "inputs": list(inputs), "outputs": outputs, "unit": unit, **changes}


class StagedJob:
    """A job with stages whose version 0 is announced."""

    def __init__(self, server: EmbeddedRedis, stages: Sequence[Mapping[str, Any]], **spec: Any) -> None:
        server.load_scripts()
        self.server = server
        self.operator = connect(StackSettings(redis_url=server.url))
        self.brokers: dict[str, Broker] = {
            role: connect(StackSettings(redis_url=server.url_of(role))) for role in (GATEWAY, TRAINER, GENERATOR, STAGE)
        }
        self.jobs = JobStore(self.brokers[GATEWAY])
        self.spec = job_spec(name=uuid.uuid4().hex, stages=list(stages), **spec)
        self.job_id, _ = self.jobs.create(self.spec)
        self.jobs.move(self.job_id, JobState.RUNNING)
        self.keys = self.operator.job_keys(self.job_id, self.spec.num_open)
        self.stages: dict[str, StageSide] = {}
        self.generators: dict[str, GeneratorSide] = {}
        self.trainer = self.new_trainer("t1")

    def new_trainer(self, owner: str) -> TrainerSide:
        trainer = TrainerSide(
            self.brokers[TRAINER],
            self.job_id,
            owner=owner,
            lease_s=3600,
            num_open=self.spec.num_open,
            graph=self.spec.stage_graph,
        )
        trainer.acquire()
        return trainer

    def stage(self, worker: str = "s1") -> StageSide:
        """One process of this name: it knows what it has claimed."""
        return self.stages.setdefault(worker, StageSide(self.brokers[STAGE], self.job_id, worker))

    def prompts(self, iteration: int, count: int = 1, purpose: str = "train") -> tuple[PromptBatch, ...]:
        return tuple(
            prompt_batch(
                [[1, 2], [3]],
                job_id=self.job_id,
                batch_id=f"{iteration}/{purpose}/{index}",
                iteration=iteration,
                purpose=purpose,
                policy_version=0,
                weights_digest=weights_digest(0, 0),
                group_size=GROUP_SIZE,
            )
            for index in range(count)
        )

    def open(self, iteration: int = 0, count: int = 1) -> None:
        """Opens an iteration that version 0 samples."""
        digest = weights_digest(0, 0)
        self.trainer.publish_weights(manifest(0, digest), oldest_kept=0)
        opening = IterationOpening(
            iteration=iteration, oldest_version=0, newest_version=0, batches=self.prompts(iteration, count)
        )
        self.trainer.open_iteration(opening, {0: digest})

    def sample(self, generator: str = "g1") -> tuple[GeneratorSide, Claim, RolloutBatch]:
        """Claims a batch and answers it with what was sampled of it."""
        side = self.generators.setdefault(generator, GeneratorSide(self.brokers[GENERATOR], self.job_id, generator))
        claim = side.claim(3600)
        assert claim is not None
        return side, claim, sampled(claim.prompt_batch, generator)

    def publish(self, generator: str = "g1") -> RolloutBatch:
        side, claim, batch = self.sample(generator)
        assert side.publish(claim, batch) is PublishOutcome.ACCEPTED
        return batch

    def publish_all(self, count: int) -> list[RolloutBatch]:
        return [self.publish() for _ in range(count)]

    def arrived(self, iteration: int = 0) -> list[str]:
        """Ids of the batches that the trainer gets now."""
        return [one.batch.batch_id for one in self.trainer.claim_rollouts(iteration, max_batches=100)[0]]

    def run_stage(self, name: str, worker: str = "s1", *, max_rows: int = 1000) -> list[PutOutcome]:
        """Takes all that the stage has, and puts it."""
        side, outcomes = self.stage(worker), []
        while items := side.claim(name, max_rows):
            outcomes += side.put([(item, self.made(item)) for item in items])
        return outcomes

    def made(self, item: ClaimedItem, *, add: float = 0.0) -> dict[str, list[bytes]]:
        """The columns of an item: numbers that tell which stage made them, of which batch and row."""
        graph = self.spec.stage_graph
        return values_of(graph.stages[graph.index(item.stage)].outputs, item, add=add)

    def record(self, batches: Mapping[str, str], iteration: int = 0, previous: str = "") -> AuditRecord:
        made, following = (weights_digest(number, 0) for number in (iteration, iteration + 1))
        return commit_record(iteration, batches, weights_digest=made, next_weights_digest=following, previous=previous)

    def left_behind(self) -> set[str]:
        """The keys of stages that hold something."""
        names = {key for slot in self.keys.slots for key in (slot.work, slot.items)}
        waiting = self.operator.redis.hgetall(self.keys.progress)
        counts = {name.decode() for name in waiting if name.startswith(b"waiting:")}
        return {name for name in names if self.operator.redis.exists(name)} | counts

    def expire(self, item: ClaimedItem) -> None:
        """Ends the lease of an item, as time would."""
        stage = 1 + self.spec.stage_graph.index(item.stage)
        member = item_fields(stage, item.batch_id, item.item).member
        self.operator.redis.zadd(self.keys.slot_of(item.iteration).work, {member: stage * STAGE_BAND + 1})


def open_job(server: EmbeddedRedis, stages: Sequence[Mapping[str, Any]], *, count: int = 1, **spec: Any) -> StagedJob:
    """One whose first iteration is open, with so many batches."""
    job = StagedJob(server, stages, **spec)
    job.open(count=count)
    return job


def sampled(batch: PromptBatch, generator: str, *, seed: int = 0, **changes: Any) -> RolloutBatch:
    return rollout_batch(
        seed=seed,
        job_id=batch.job_id,
        batch_id=batch.batch_id,
        iteration=batch.iteration,
        purpose=batch.purpose,
        policy_version=batch.policy_version,
        weights_digest=batch.weights_digest,
        num_groups=len(batch.prompts),
        group_size=batch.group_size,
        generator_id=generator,
        **changes,
    )


def values_of(outputs: Sequence[Column], item: ClaimedItem, *, add: float = 0.0) -> dict[str, list[bytes]]:
    shapes = row_shapes(item.batch)
    number = float(item.batch_id.rpartition("/")[2])
    return {
        column.name: [pack_float32([1000.0 * number + row + add] * shapes[row].length(column.per)) for row in item.rows]
        for column in outputs
    }
