"""A batch between its claim and its end, as the serve loop, the heartbeat and its own carrier share it."""

from __future__ import annotations

from dataclasses import dataclass

from broker.generator_side import Claim, GeneratorSide
from contracts.spec import JobSpec
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
        self,
        *,
        job: ActiveJob,
        claim: Claim,
        loaded: LoadedModel,
        weights: VerifiedWeights,
        play: Play | None = None,
    ) -> None:
        super().__init__(
            claim.prompt_batch, attempt=claim.attempt, spec=job.spec, loaded=loaded, weights=weights, play=play
        )
        self.job = job
        self.claim = claim
        self.lacks_room = False
        """Whether the fence has no room for it before an older iteration is committed."""


ClaimKey = tuple[str, int]
"""(job, number of the claim): what a claim is held by."""


def key_of(claim: Claim) -> ClaimKey:
    """A rewind brings the same batch under the same attempt while the first copy is in the engine: they are two."""
    return claim.prompt_batch.job_id, claim.number


def name_of(claim: Claim) -> str:
    """A claim's name for people."""
    batch = claim.prompt_batch
    return f"{batch.job_id} {batch.batch_id} (attempt {claim.attempt}{', a hedge' if claim.hedged else ''})"
