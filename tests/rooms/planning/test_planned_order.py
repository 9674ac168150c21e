"""A plan and the fence of a real server, taken through the same job: they give out the same batches."""

from __future__ import annotations

from collections import defaultdict
from random import Random

import pytest
from msgspec.structs import replace

from broker.connection.client import connect
from broker.generator_side import Claim, GeneratorSide, PublishOutcome
from broker.job_store import JobStore
from broker.trainer_side import TrainerSide
from contracts.encoding.arrays import pack_int32
from contracts.events import record_digest
from contracts.rollouts import Prompt, batch_digest
from contracts.schedule import Schedule
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from onbeat.data.prompts.plan import IterationPlan
from onbeat.loop import window as trainers
from onbeat.planning.pipeline.trainer import Arrival
from onbeat.planning.pipeline.walk import Run
from tests.builders import commit_record, job_spec
from tests.integration.test_fence import DIGEST, answer_to, manifest
from tests.rooms.planned import batch, costs, run

LEASE_S = 600.0
GENERATORS = 3


class Prompts:
    """Prompts of one token; what they say is of no matter here."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec

    def training_prompts(self, iteration: int) -> list[Prompt]:
        return self._prompts(self._spec.rollout.prompts_per_iteration)

    def reserve_prompts(self, iteration: int) -> list[list[Prompt]]:
        return []

    def evaluation_prompts(self) -> list[Prompt]:
        return self._prompts(self._spec.evaluation.num_prompts)

    def _prompts(self, number: int) -> list[Prompt]:
        return [
            Prompt(prompt_id=f"p/{at}", index=at, token_ids=pack_int32([1]), text="1", reference="1")
            for at in range(number)
        ]


class Fence:
    """A job on a real server, with the trainer's own plan of its window."""

    def __init__(self, settings: StackSettings, spec: JobSpec) -> None:
        broker = connect(settings)
        self.job_id, _ = JobStore(broker).create(spec)
        schedule = Schedule(spec.schedule, spec.max_policy_lag)
        plan = IterationPlan(self.job_id, spec, Prompts(spec))  # type: ignore[arg-type]
        self._spec = spec
        self._window = trainers.Window(schedule, plan, last_iteration=spec.last_iteration)
        self._trainer = TrainerSide(broker, self.job_id, owner="t", lease_s=LEASE_S, num_open=spec.num_open)
        self._trainer.acquire()
        self.generators = [GeneratorSide(broker, self.job_id, f"g{number}") for number in range(GENERATORS)]
        self._previous = ""
        self._announce(0)
        for opening in self._window.begin(0):
            self._trainer.open_iteration(opening, self._window.digests)
        self._window.turn_to(0)

    def claim(self, number: int, held: int) -> Claim | None:
        return self.generators[number].claim(LEASE_S, held=(held, DIGEST))

    def publish(self, number: int, claim: Claim) -> str:
        answer = answer_to(
            claim.prompt_batch,
            f"g{number}",
            purpose=claim.prompt_batch.purpose,
            num_groups=len(claim.prompt_batch.prompts),
            group_size=claim.prompt_batch.group_size,
        )
        assert self.generators[number].publish(claim, answer) is PublishOutcome.ACCEPTED
        return batch_digest(answer)

    def commit(self, iteration: int, trained: dict[str, str]) -> None:
        made, opening = None, None
        if iteration < self._spec.iterations:
            self._announce(iteration + 1)
            made, opening = (iteration + 1, DIGEST), self._window.opened_by(iteration)
        committed = replace(commit_record(iteration, trained), previous=self._previous)
        self._trainer.commit(committed, trained, event=None, opening=opening, made=made)
        self._previous = record_digest(committed)
        if iteration < self._spec.last_iteration:
            self._window.turn_to(iteration + 1)
            self._trainer.dispatch(iteration + 1, self._window.evaluation(iteration + 1))

    def _announce(self, version: int) -> None:
        oldest = self._window.oldest_version(max(0, version - 1))
        self._trainer.publish_weights(manifest(version), oldest_kept=oldest)
        self._window.add(manifest(version))


def job(schedule: str, lag: int) -> JobSpec:
    return job_spec(
        iterations=5,
        schedule=schedule,
        max_policy_lag=lag,
        deterministic=schedule != "bounded",
        algorithm__correction="none",
        rollout__batches_per_iteration=3,
        evaluation__num_prompts=4,
        evaluation__prompts_per_batch=4,
        evaluation__every_iterations=2,
    )


@pytest.mark.parametrize(
    ("schedule", "lag"),
    [("periodic", 0), ("synchronous", 0), ("delayed", 1), ("delayed", 3), ("bounded", 1), ("bounded", 3)],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_plan_gives_out_the_batches_that_the_fence_does_under_the_same_versions(
    settings: StackSettings, schedule: str, lag: int, seed: int
) -> None:
    spec, draw = job(schedule, lag), Random(seed)
    stated = costs(*[batch(draw.uniform(0.5, 4.0), draw.uniform(0.1, 2.0)) for _ in range(64)], step_s=0.3)
    planned = run(spec, spec.schedule_rule, stated, seed=seed, num_generators=GENERATORS)
    held = [-1] * GENERATORS
    fence, claims = Fence(settings, spec), {}
    trained: dict[int, dict[str, str]] = defaultdict(dict)
    for _, _, number, event in events(planned):
        if isinstance(event, int):
            fence.commit(event, trained.pop(event))
        elif event.batch_id in claims:
            trained[event.iteration][event.batch_id] = fence.publish(number, claims.pop(event.batch_id))
        else:
            claim = fence.claim(number, held[number])
            assert claim is not None
            asked = claim.prompt_batch
            assert (asked.batch_id, asked.policy_version) == (event.batch_id, event.version)
            held[number], claims[event.batch_id] = event.version, claim
    assert len(planned.batches) == 5 * 3 + 4 * 2  # evaluations of versions 0, 2, 4 and 5


def events(planned: Run) -> list[tuple[float, int, int, Arrival | int]]:
    """(time, its kind, generator, the batch that it claims or publishes); of a commit, the iteration."""
    batches = {one.batch_id: one for one in planned.batches}
    found: list[tuple[float, int, int, Arrival | int]] = [
        (at_s, 1, 0, iteration) for iteration, at_s in enumerate(planned.commits_s)
    ]
    for span in planned.spans:
        if span.what == "generate":
            number, one = int(span.who.split()[-1]) - 1, batches[span.batch_id]
            found += [(span.started_s, 2, number, one), (one.scored_s, 0, number, one)]
    # Sorting is stable: what is claimed at one moment stays in the order of the claims.
    return sorted(found, key=lambda event: event[:2])
