"""What vLLM's engine core reads of a version, which has no account with any store but folders."""

from __future__ import annotations

import os

import pytest

from contracts.errors import WeightsRejected
from contracts.settings import StackSettings
from onbeat.weights.receiver import WeightReceiver
from producer.engine.vllm.engine import VllmEngine
from producer.engine.vllm.extension import stores_of_core
from tests.unit.onbeat.weights.test_registered_store import manifest_of, registered, settings, stores_of, targets  # noqa: F401  (fixtures)
from tests.unit.onbeat.weights.test_weight_store import version


def test_an_engine_core_without_an_account_loads_what_the_generator_has_read(
    settings: StackSettings,  # noqa: F811
) -> None:
    manifest, engine = manifest_of(settings), VllmEngine.__new__(VllmEngine)
    engine._stores = stores_of(settings)
    at_hand = engine._files_elsewhere(manifest)
    assert set(at_hand) == {file.name for file in manifest.files}
    for handed, reason in (({}, "has 0 bytes in a crate"), (at_hand, "")):
        core = WeightReceiver(targets(version(0)), stores_of_core(settings.weight_root_path, lambda it=handed: it))
        if reason:
            with pytest.raises(WeightsRejected, match=reason):
                core.load(manifest)
        else:
            assert core.load(manifest) == manifest.weights_digest


def test_a_process_with_it_has_triton_multiply_float32_in_float32() -> None:
    assert os.environ["TRITON_F32_DEFAULT"] == "ieee"
