"""The specs of tests: a builder has the fields of its jobs, and each call changes some of them."""

from __future__ import annotations

from typing import Any

from contracts.spec.job import JobSpec
from tests.builders import job_spec

SUMS_MODEL = "configs/models/two-digit-addition"
"""The model of the demo, which knows some sums: its rewards differ from each other."""


class SpecBuilder:
    """Builds the specs of one kind of job over `job_spec`, whose small job has every field that is given nowhere.

    A module makes one for its jobs; a test calls it with what is special to the test. Fields are dotted paths with `__`
    in the place of a dot, as `optimizer__learning_rate=1e-3`.
    """

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def __call__(self, **changes: Any) -> JobSpec:
        """Returns a spec of this kind; a change replaces the builder's own field of that name."""
        return job_spec(**(self.fields | changes))

    def but(self, **changes: Any) -> SpecBuilder:
        """Returns a builder of the same kind with other fields."""
        return SpecBuilder(**(self.fields | changes))


trained_job = SpecBuilder(
    model__path=SUMS_MODEL,
    optimizer__learning_rate=1e-3,
    trainer__checkpoint_every_iterations=2,
    timeouts__trainer_lease_s=1.0,
)
"""Jobs that a trainer really trains, whose successor may begin a second after it has died."""
