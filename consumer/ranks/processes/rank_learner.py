"""Loads the part of a job's model that one of several ranks computes with."""

from __future__ import annotations

from consumer.gradient.assembly import Sharding, make_learner
from consumer.gradient.learner import Learner, Place
from consumer.ranks.fsdp.sharing import Fsdp
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec


def make_rank_learner(settings: StackSettings, spec: JobSpec, place: Place) -> Learner:
    """Loads a rank's model. Ranks that share one (`trainer.sharding`) each load their part, all at the same time.

    Raises what `make_learner` raises.
    """
    sharding: Sharding | None = None
    if spec.trainer.sharding == "fsdp" and place.world_size > 1:
        sharding = Fsdp()
    return make_learner(settings, spec, place, sharding)
