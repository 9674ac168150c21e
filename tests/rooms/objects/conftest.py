"""One server of objects for all tests of this folder; a job of its own for each."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from contracts.settings import StackSettings
from onbeat.weights.objects.blobs import Blobs, open_blobs
from tests.rooms.objects.s3_server import BUCKET, FaultyProxy, S3Server, environment

OpenBlobs = Callable[..., Blobs]


def has(blobs: Blobs, digests: Iterable[str]) -> set[str]:
    """Those of them that the store has."""
    return set(digests) & {key.rpartition("/")[2] for key in blobs.bucket.objects(f"{blobs.job_id}/{blobs.area}")}


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture
def proxy(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """This process's requests go through it."""
    with FaultyProxy(s3_server.port) as proxy:
        for name, value in environment(proxy.port).items():
            monkeypatch.setenv(name, value)
        yield proxy


@pytest.fixture
def settings(tmp_path: Path) -> StackSettings:
    """Each test has a prefix of its own."""
    return StackSettings(objects=f"s3://{BUCKET}/{uuid.uuid4().hex}", run_root=str(tmp_path / "runs"))


@pytest.fixture
def open_area(proxy: FaultyProxy, settings: StackSettings) -> OpenBlobs:
    """Opens an area; changes: of the settings."""
    from msgspec.structs import replace

    def opened(area: Any = "weights", *, deadline_s: float = 120.0, **changes: Any) -> Blobs:
        blobs = open_blobs(replace(settings, **changes), "job-1", area, deadline_s=deadline_s)
        blobs.check_writable()
        return blobs

    return opened
