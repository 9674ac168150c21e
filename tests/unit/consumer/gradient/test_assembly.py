"""What a rank is put together from, and what is refused before anything is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from consumer.gradient.assembly import make_learner, set_up_torch
from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from tests.builders import job_spec, tiny_model_folder
from tests.refusals import refusal_of


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused_by_the_settings_name(tmp_path: Path) -> None:
    tiny_model_folder(tmp_path)
    settings = StackSettings(model_root=str(tmp_path), device="cuda")
    with pytest.raises(InvalidInput, match="ONBEAT_DEVICE: torch sees no CUDA device here"):
        make_learner(settings, job_spec(deterministic=False, trainer__accumulation="float"))


def test_threads_that_follow_the_load_of_the_machine_are_refused_for_a_deterministic_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also for a stage worker, which calls it for each model."""
    monkeypatch.setenv("OMP_DYNAMIC", "true")
    with refusal_of("OMP_DYNAMIC", match="would follow the load of the machine"):
        set_up_torch(StackSettings(), job_spec(deterministic=True))
