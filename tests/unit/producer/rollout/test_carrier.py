"""A batch that isn't needed any more is dropped where it is, and that is no failure."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from broker.generator_side import Claim, PublishOutcome
from contracts.rewards import RewardItem, RewardSpec, Scored
from contracts.rollouts import Completion, PromptBatch
from producer.activity import Activity
from producer.engine.base import VerifiedWeights
from producer.rollout.carried_batch import ActiveJob, CarriedBatch
from producer.rollout.carrier import Carrier
from tests.builders import DIGEST, completion, job_spec, manifest, prompt_batch
from tests.fakes import Changes, FakeSide, spell

MANIFEST = manifest(0)


class Loaded:
    """A LoadedModel whose engine samples at once, or never."""

    detokenizer = staticmethod(spell)

    def __init__(self, *, hangs: bool) -> None:
        self.context_tokens: Counter[str] = Counter()
        self.asked: list[PromptBatch] = []
        self._hangs = hangs

    async def generate(self, batch: PromptBatch, *, deadline_s: float) -> list[list[Completion]]:
        self.asked.append(batch)
        if self._hangs:
            await asyncio.Event().wait()
        return [[completion([5]) for _ in range(batch.group_size)] for _ in batch.prompts]


class EqualRewards:
    def __init__(self, on_score: Callable[[], None]) -> None:
        self._on_score = on_score

    async def score(
        self, reward: RewardSpec, items: list[RewardItem], *, job_id: str, tries: int, **_: Any
    ) -> list[Scored]:
        self._on_score()
        return [Scored(reward=1.0, breakdown={}) for _ in items]


async def at_once(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return call(*arguments, **options)


class Carried:
    """One batch of two prompts with a reserve each, and its carrier."""

    def __init__(
        self,
        *,
        hangs: bool = False,
        settled_while_scored: bool = False,
        iteration_s: float = 3600.0,
        full: int = 0,
        settled_while_held: bool = False,
    ) -> None:
        """full: publications that are answered so, before there is room."""
        asked = prompt_batch([[5, 6], [7]])
        asked = replace(asked, reserves=(asked.prompts,))
        self.side, self.freed = FakeSide(Changes()), 0
        self.loaded: Any = Loaded(hangs=hangs)
        spec = job_spec(timeouts__iteration_s=iteration_s)
        job = ActiveJob(job_id="job", spec=spec, side=self.side)
        self._full, self._settled_while_held = full, settled_while_held
        if full:
            self.side.outcomes[asked.batch_id] = PublishOutcome.FULL
        claim = Claim(prompt_batch=asked, number=1, attempt=1, manifest=MANIFEST, hedged=False)
        weights = VerifiedWeights(policy_version=0, weights_digest=DIGEST)
        self.batch = CarriedBatch(job=job, claim=claim, loaded=self.loaded, weights=weights)
        calls: Any = at_once
        self.carrier = Carrier(
            generator_id="g",
            calls=calls,
            rewards=EqualRewards(self.batch.settle if settled_while_scored else lambda: None),
            activity=Activity("g", wall_clock=lambda: 1.0),
            freed=self.free,
            sleep=self.pause,
        )

    async def pause(self, seconds: float) -> None:
        self._full -= 1
        if not self._full:
            self.side.outcomes.clear()
        if self._settled_while_held:
            self.batch.settle()

    def free(self) -> None:
        self.freed += 1

    @property
    def ends(self) -> tuple[int, int, int]:
        """(rounds that were sampled, batches published, failed)."""
        return len(self.loaded.asked), len(self.side.published), len(self.side.failed)


def test_a_batch_of_equal_rewards_is_sampled_again_and_published() -> None:
    assert carry().ends == (2, 1, 0)


def test_a_batch_that_is_settled_while_it_is_scored_is_not_sampled_again() -> None:
    assert carry(settled_while_scored=True).ends == (1, 0, 0)


async def test_a_batch_that_is_settled_in_the_engine_ends_without_an_error_and_frees_it() -> None:
    carried = Carried(hangs=True)
    carried.batch.sample(started_s=0.0)
    carrying = asyncio.create_task(carried.carrier.carry(carried.batch))
    while not carried.loaded.asked:
        await asyncio.sleep(0)
    carried.batch.settle()
    await carrying
    assert carried.ends == (1, 0, 0)
    assert carried.freed == 1
    assert carried.batch.generation is None


def carry(**changes: Any) -> Carried:
    async def run() -> Carried:
        carried = Carried(**changes)
        carried.batch.sample(started_s=0.0)
        await carried.carrier.carry(carried.batch)
        return carried

    return asyncio.run(run())


def test_a_finished_batch_is_held_while_stages_are_behind_and_published_when_they_caught_up() -> None:
    carried = carry(full=2)
    assert carried.ends == (2, 1, 0)
    assert carried.side.refused == ["0/train/0"] * 2


def test_a_held_batch_that_is_settled_meanwhile_is_let_go() -> None:
    carried = carry(full=9, settled_while_held=True)
    assert carried.ends == (2, 0, 0)
    assert carried.side.refused == ["0/train/0"] * 2


def test_a_batch_is_held_no_longer_than_an_iteration_may_take_and_then_given_back_with_the_reason() -> None:
    carried = carry(full=9, iteration_s=1e-9)
    assert carried.ends == (2, 0, 0)
    assert "limits.max_waiting_rows" in carried.side.released[0][1]
    assert "start more stage workers" in carried.side.released[0][1]
