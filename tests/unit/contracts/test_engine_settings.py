"""Which engine a generator has is its own setting, and a setting that its engine would ignore is refused."""

from __future__ import annotations

import pytest

from contracts.errors import InvalidInput
from contracts.settings import StackSettings, settings_from
from contracts.spec import ModelSpec
from producer.engine.factory import make_engine


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"ONBEAT_ENGINE": "llama.cpp"}, "ONBEAT_ENGINE: invalid enum value 'llama.cpp'"),
        ({"ONBEAT_ENGINE_KV_CACHE_MB": "64"}, "engine_kv_cache_mb has no effect with engine = transformers"),
        ({"ONBEAT_ENGINE_URL": "http://127.0.0.1:1"}, "engine_url has no effect with engine = transformers"),
        ({"ONBEAT_ENGINE": "openai"}, "engine_url must be the http:// or https:// address"),
        (
            {"ONBEAT_ENGINE": "vllm", "ONBEAT_ENGINE_MAX_SEQUENCES": "0"},
            "_MAX_SEQUENCES: expected `int` >= 1",
        ),
        ({"ONBEAT_ENGINE": "vllm", "ONBEAT_ENGINE_TIMEOUT_S": "soon"}, "ONBEAT_ENGINE_TIMEOUT_S: `soon` is not"),
    ],
)
def test_an_engine_setting_without_effect_or_meaning_is_refused(environment: dict[str, str], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        settings_from(environment)


def test_engine_settings_survive_the_way_through_the_environment() -> None:
    settings = StackSettings(engine="vllm", engine_max_sequences=32, engine_kv_cache_mb=64, engine_timeout_s=5.0)
    assert settings_from(settings.environment()) == settings


def test_an_engine_that_samples_batches_beside_each_other_is_not_made_for_a_deterministic_job() -> None:
    with pytest.raises(InvalidInput, match="deterministic = false") as caught:
        make_engine(
            ModelSpec(path="any"),
            settings=StackSettings(engine="vllm"),
            deterministic=True,
            chunks=lambda job_id: pytest.fail(f"{job_id} is not asked for"),
        )
    assert caught.value.field == "deterministic"
