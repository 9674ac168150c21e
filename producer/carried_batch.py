"""What a worker knows of a batch while it carries it: its job, its claim, and what the engine made of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from contracts.rollouts import Completion
from contracts.spec import JobSpec
from producer.broker_seam import JobSide
from producer.engine.base import VerifiedWeights
from producer.served_model import LoadedModel

if TYPE_CHECKING:
    from broker.generator_side import Claim


@dataclass(frozen=True, kw_only=True)
class ActiveJob:
    job_id: str
    spec: JobSpec
    side: JobSide


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A batch in the engine."""

    job: ActiveJob
    claim: Claim
    loaded: LoadedModel
    weights: VerifiedWeights
    """Under which it is sampled: what the engine held when it started."""
    started_s: float
    """Unix time."""
    answer: asyncio.Future[list[list[Completion]]]


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """A batch that left the engine."""

    claim: Claim
    completions: list[Completion]
    """[k·G], prompt by prompt."""
    weights: VerifiedWeights
    loaded: LoadedModel
    started_s: float
    """Unix time."""
    ended_s: float


def name_of(claim: Claim) -> str:
    """For people, and as the key of what is held for a claim."""
    batch = claim.prompt_batch
    return f"{batch.job_id} {batch.batch_id} (attempt {claim.attempt}{', a hedge' if claim.hedged else ''})"
