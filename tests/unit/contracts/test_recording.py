"""Which batches a spec has recorded."""

from __future__ import annotations

import pytest

from contracts.spec.recording import RecordingSpec


@pytest.mark.parametrize("evaluations", [True, False])
def test_an_evaluation_is_recorded_by_its_own_setting_whatever_the_share_of_training(evaluations: bool) -> None:
    recording = RecordingSpec(share=1e-9 if evaluations else 1.0, evaluations=evaluations)
    assert recording.takes("3/evaluate/0", purpose="evaluate", seed=0) is evaluations
    assert recording.takes("3/train/0", purpose="train", seed=0) is not evaluations
