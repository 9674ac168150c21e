"""The oracle of the fault tests: what the short job makes when nothing disturbs it."""

from __future__ import annotations

import pytest

from contracts.settings import StackSettings
from tests.builders import DEVICE
from tests.chaos.short_job import short_job
from tests.pipeline import REPOSITORY
from tests.sequential_execution import digests_of_versions


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Final digest of the short job, one thing after the other in this process."""
    settings = StackSettings(model_root=str(REPOSITORY), device=DEVICE)
    return digests_of_versions(short_job(), settings, tmp_path_factory.mktemp("undisturbed"))[-1]
