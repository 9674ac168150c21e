"""Makes the ranks of a trainer: this process alone, with threads or without, or those its launcher has put it among."""

from __future__ import annotations

from consumer.gradient.assembly import make_learner
from consumer.ranks.base import Ranks
from consumer.ranks.launching import is_rank
from consumer.ranks.processes.group import make_group
from consumer.ranks.threads import has_room_for_gradients, passes_at_once, with_threads
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec


def make_ranks(settings: StackSettings, spec: JobSpec) -> Ranks:
    """Loads the model of the only rank, or of rank 0 of several. Raises what `make_learner` and `make_group` raise."""
    if is_rank():
        return make_group(settings, spec)
    learner = make_learner(settings, spec)
    passes = passes_at_once(settings, spec)
    if passes.then > 1 and has_room_for_gradients(learner):
        return with_threads(learner, passes)
    return Ranks(learner)
