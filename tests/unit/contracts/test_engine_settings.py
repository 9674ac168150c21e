"""Which engine a generator has is its own setting, and a setting that its engine would ignore is refused."""

from __future__ import annotations

from typing import Any

import pytest

from contracts.engines import OpenaiOptions, VllmOptions
from contracts.errors import InvalidInput
from contracts.settings import StackSettings, engine_from, settings_from
from contracts.spec.job import ModelSpec
from producer.engine.factory import make_engine
from tests.refusals import refusal_of

HEAD = {"dtype": "bfloat16", "cast_lm_head_to_fp32": True}


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"ONBEAT_ENGINE": "llama.cpp"}, "ONBEAT_ENGINE: invalid enum value 'llama.cpp'"),
        ({"ONBEAT_ENGINE_SLEEP_MODE": "true"}, "engine_sleep_mode has no effect with engine = transformers"),
        ({"ONBEAT_ENGINE_URL": "http://127.0.0.1:1"}, "engine_url has no effect with engine = transformers"),
        ({"ONBEAT_ENGINE": "openai"}, "engine_url must be the http:// or https:// address"),
        ({"ONBEAT_ENGINE": "vllm", "ONBEAT_ENGINE_MAX_SEQUENCES": "0"}, "_MAX_SEQUENCES: expected `int` >= 1"),
        ({"ONBEAT_ENGINE": "vllm", "ONBEAT_ENGINE_TIMEOUT_S": "soon"}, "ONBEAT_ENGINE_TIMEOUT_S: `soon` is not"),
        ({"ONBEAT_ENGINE_TENSOR_PARALLEL_SIZE": "2"}, "engine_tensor_parallel_size has no effect with engine = tr"),
        ({"ONBEAT_ENGINE": "vllm", "ONBEAT_ENGINE_TENSOR_PARALLEL_SIZE": "0"}, "_PARALLEL_SIZE: expected `int` >= 1"),
        ({"ONBEAT_ENGINE": "vllm", "ONBEAT_ENGINE_DATA_PARALLEL_SIZE": "65"}, "_PARALLEL_SIZE: expected `int` <= 64"),
        ({"ONBEAT_ENGINE": "vllm", "ONBEAT_ENGINE_MAX_MODEL_LEN": "-1"}, "_MAX_MODEL_LEN: expected `int` >= 0"),
        ({"ONBEAT_ENGINE": "vllm", "ONBEAT_ENGINE_QUANTIZATION": "awq"}, "_QUANTIZATION: invalid enum value 'awq'"),
    ],
)
def test_an_engine_setting_without_effect_or_meaning_is_refused(environment: dict[str, str], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        engine_from(environment)


def test_the_default_of_another_engine_s_option_is_no_contradiction() -> None:
    assert engine_from({"ONBEAT_ENGINE_TIMEOUT_S": "600", "ONBEAT_ENGINE_URL": ""}).name == "transformers"


def test_an_engines_options_are_no_setting_of_another_process_and_a_misspelt_one_is_refused_by_every_process() -> None:
    settings = settings_from({"ONBEAT_ENGINE": "vllm", "ONBEAT_ENGINE_KV_CACHE_MB": "64"})
    assert settings == StackSettings()
    for read in (settings_from, engine_from):
        with pytest.raises(InvalidInput, match="ONBEAT_ENGINE_KV_CACHE: unknown setting"):
            read({"ONBEAT_ENGINE_KV_CACHE": "64"})


def test_engine_settings_survive_the_way_through_the_environment() -> None:
    for options in (
        VllmOptions(max_sequences=32, kv_cache_mb=64, timeout_s=5.0),
        VllmOptions(tensor_parallel_size=2, data_parallel_size=4, quantization="mxfp8", max_model_len=4096),
        OpenaiOptions(url="http://127.0.0.1:1", api_key="secret"),
    ):
        assert engine_from(options.environment()) == options


@pytest.mark.parametrize(
    ("fields", "deterministic", "problem", "field"),
    [
        ({}, True, "deterministic = false", "deterministic"),
        (HEAD, False, "vllm computes logits in the model's dtype", "model.cast_lm_head_to_fp32"),
    ],
    ids=["batches beside each other", "a float32 head"],
)
def test_an_engine_is_not_made_for_a_job_that_it_would_sample_otherwise(
    fields: dict[str, Any], deterministic: bool, problem: str, field: str
) -> None:
    with refusal_of(field, match=problem):
        make_engine(
            ModelSpec(path="any", **fields),
            options=VllmOptions(),
            settings=StackSettings(),
            deterministic=deterministic,
            chunks=lambda job_id: pytest.fail(f"{job_id} is not asked for"),
        )
