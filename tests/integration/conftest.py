"""What trainers of these tests' own process begin with."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from contracts.settings import StackSettings
from tests.builders import tiny_model_folder


@pytest.fixture
def own(settings: StackSettings, tmp_path: Path) -> StackSettings:
    """Settings of a trainer of the test's own process, with a model."""
    tiny_model_folder(tmp_path / "models")
    return replace(settings, model_root=str(tmp_path / "models"), run_root=str(tmp_path / "runs"), threads=1)
