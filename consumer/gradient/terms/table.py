"""The table of terms: a new term is a file beside this one, and its line here.

A key of `AlgorithmSpec` chooses it, and docs/loss-terms.md has its section (`python -m docs.make_loss_terms`).
"""

from __future__ import annotations

from collections.abc import Sequence

from consumer.gradient.terms.base import LossSpec, LossTerm
from consumer.gradient.terms.distillation import DistributionDistillationTerm, SampledDistillationTerm
from consumer.gradient.terms.entropy import EntropyTerm
from consumer.gradient.terms.policy import SurrogateTerm
from consumer.gradient.terms.reference_kl import ReferenceKlTerm
from consumer.gradient.terms.value import ValueTerm
from contracts.spec.job import JobSpec

TERMS: tuple[type[LossTerm], ...] = (
    SurrogateTerm,
    DistributionDistillationTerm,
    ReferenceKlTerm,
    SampledDistillationTerm,
    EntropyTerm,
    ValueTerm,
)
"""The order in which token losses are made. `pass_loss` adds first those that a correction weighs, then the others,
each in this order.

Floats don't add up to the same bits in another order, so the order is part of every job's digest. A new term belongs at
the end, where it changes the digest of no job that doesn't have it."""


def terms_of(loss: LossSpec) -> Sequence[LossTerm]:
    """Returns the terms that a job's loss has, in the order of `TERMS`.

    Raises InvalidInput for a loss of a package that isn't there or keeps no promise.
    """
    terms = (kind.of(loss) for kind in TERMS)
    return [term for term in terms if term is not None]


def terms_of_job(spec: JobSpec) -> Sequence[LossTerm]:
    """Returns `terms_of` a job. Raises as `terms_of`."""
    return terms_of(LossSpec.of_job(spec))
