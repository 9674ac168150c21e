"""The oracle of the fault tests: what the short job makes when nothing disturbs it."""

from __future__ import annotations

import pytest

from tests.chaos.short_job import short_job, undisturbed_digest
from tests.pipeline import Pipeline


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Final digest of the short job, synchronous, in one go."""
    with Pipeline(tmp_path_factory.mktemp("undisturbed")) as pipeline:
        pipeline.start_generators(1)
        return undisturbed_digest(pipeline, short_job())
