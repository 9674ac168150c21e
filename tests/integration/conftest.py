"""What several of these tests begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from broker.connection.client import Broker, connect
from broker.job_store import JobStore
from contracts.settings import StackSettings
from onbeat.stack.redis import EmbeddedRedis
from tests.builders import tiny_model_folder


@pytest.fixture
def broker(settings: StackSettings) -> Iterator[Broker]:
    made = connect(settings)
    yield made
    made.close()


@pytest.fixture
def jobs(broker: Broker) -> JobStore:
    return JobStore(broker)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """One without the jobs of other tests, which may be stopped and killed."""
    with EmbeddedRedis(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def own(settings: StackSettings, tmp_path: Path) -> StackSettings:
    """Settings of a trainer of the test's own process, with a model."""
    tiny_model_folder(tmp_path / "models")
    return replace(settings, model_root=str(tmp_path / "models"), run_root=str(tmp_path / "runs"), threads=1)
