"""Hosts of the tests of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.machines import Machines


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    """They have a generator."""
    with Machines(tmp_path, monkeypatch) as machines:
        machines.start_at("sampler", "producer-1")
        yield machines
