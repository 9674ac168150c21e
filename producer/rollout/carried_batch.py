"""Batches between their claims and their ends, as the serve loop, the heartbeat and their own carriers share them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from broker.generator_side import Claim, GeneratorSide
from contracts.spec.job import JobSpec
from producer.engine.base import VerifiedWeights
from producer.rollout.sampled_batch import Play, SampledBatch
from producer.served_model import LoadedModel


@dataclass(frozen=True, kw_only=True)
class ActiveJob:
    job_id: str
    spec: JobSpec
    side: GeneratorSide


class CarriedBatch(SampledBatch):
    """A claimed batch: it is published when its rounds are over."""

    def __init__(
        self, *, job: ActiveJob, claim: Claim, loaded: LoadedModel, weights: VerifiedWeights, play: Play | None = None
    ) -> None:
        super().__init__(
            claim.prompt_batch, attempt=claim.attempt, spec=job.spec, loaded=loaded, weights=weights, play=play
        )
        self.job = job
        self.claim = claim
        self.lacks_room = False
        """True: the fence has no room for the batch before an older iteration is committed."""


class HeldBatches:
    """The claims that this generator carries, each from its claim to its end. The generator creates and asks it.

    Claims are told apart by identity: a rewind brings the same batch again while the first copy is in the engine.
    """

    def __init__(self, freed: Callable[[], None]) -> None:
        """Begins without a batch.

        Args:
            freed: Called when a batch needs its engine no more.
        """
        self._freed = freed
        self._carried: dict[int, CarriedBatch] = {}
        """Every batch that may be in the engine: what is not here may have another version loaded under it."""
        self._settled: set[int] = set()
        """The claims whose batches are needed no more; each is on its way to its end."""

    def is_settled(self, claim: Claim) -> bool:
        """Returns True where the batch was settled before it was in the engine: nothing has to be put into it then."""
        return id(claim) in self._settled

    def carry(self, batch: CarriedBatch) -> None:
        self._carried[id(batch.claim)] = batch

    def end(self, claim: Claim) -> None:
        self._carried.pop(id(claim), None)
        self._settled.discard(id(claim))

    def settle(self, claim: Claim) -> None:
        """Drops the generation of a batch that is settled: an engine that was late, or hedged in vain, is free."""
        self._settled.add(id(claim))
        batch = self._carried.get(id(claim))
        if batch is not None:
            batch.settle()
            self._freed()

    @property
    def in_words(self) -> str:
        """The batches in the engine and those out of it, for people; "" where there are none."""
        of_each: dict[str, list[str]] = {"generating": [], "scoring": []}
        for batch in self._carried.values():
            of_each["generating" if batch.num_sampling else "scoring"].append(batch.claim.prompt_batch.batch_id)
        return "; ".join(f"{what} {', '.join(sorted(ids))}" for what, ids in of_each.items() if ids)

    @property
    def num_sampling(self) -> int:
        """Completions that are in the engine."""
        return sum(batch.num_sampling for batch in self._carried.values())

    @property
    def num_in_engine(self) -> int:
        """Batches that are in the engine."""
        return sum(batch.num_sampling > 0 for batch in self._carried.values())

    @property
    def num_finishing(self) -> int:
        """Batches that are out of the engine, on their way through the reward service and the fence.

        Those that wait for a commit to make room are not: this generator may have to sample what it waits for.
        """
        return sum(not batch.num_sampling and not batch.lacks_room for batch in self._carried.values())

    @property
    def lacks_room(self) -> bool:
        """True while a batch waits for a commit to make room in Redis."""
        return any(batch.lacks_room for batch in self._carried.values())

    @property
    def need_weights(self) -> bool:
        """True while a batch is in the engine, or may come back to it: until then the engine must keep its version."""
        return any(
            batch.generation is not None or (batch.places.may_go_on and not batch.is_settled)
            for batch in self._carried.values()
        )


def name_of(claim: Claim) -> str:
    """Returns a claim's name for people."""
    batch = claim.prompt_batch
    return f"{batch.job_id} {batch.batch_id} (attempt {claim.attempt}{', a hedge' if claim.hedged else ''})"
