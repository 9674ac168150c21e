"""The generator of most tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.producer.test_generator import Stack


@pytest.fixture
def stack(tmp_path: Path) -> Stack:
    return Stack(tmp_path)
