"""Parts that a family keeps in float32 in a model of another dtype: versions have them, and engines load them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from broker.connection.client import connect
from contracts.settings import StackSettings
from contracts.spec.job import ModelSpec
from onbeat.weights.base_model.text_model import text_model
from onbeat.weights.layout import layout_of
from onbeat.weights.model_folder import empty_model, model_config, weight_tensors
from producer.engine.transformers.engine import TransformersEngine
from tests.builders import engine_setup
from tests.families import ALL_FAMILIES, family_folder
from tests.rooms.engines.probed_job import ProbedJob

IN_FLOAT32 = {
    "deepseek_v3": {"e_score_correction_bias"},
    "glm4_moe": {"e_score_correction_bias"},
    "nemotron_h": {"e_score_correction_bias"},
    "ernie4_5_moe": {"e_score_correction_bias", "weight"},
    "olmo_hybrid": {"A_log"},
    "qwen3": set(),
}
"""Family → the last words of the names that are float32 in a model of bfloat16."""


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_model_without_weights_has_the_dtypes_of_the_one_that_is_loaded(family: str, tmp_path: Path) -> None:
    folder = family_folder(tmp_path, family)
    loaded, _ = text_model(model_config(folder)).load(folder, torch.bfloat16)
    empty = empty_model(folder, dtype=torch.bfloat16, device="meta")
    layout = layout_of(dict(weight_tensors(loaded)))
    assert layout_of(dict(weight_tensors(empty))) == layout
    if family in IN_FLOAT32:
        wide = {name.rpartition(".")[2] for name, tensor in layout.items() if tensor.dtype is torch.float32}
        assert wide == IN_FLOAT32[family]


@pytest.mark.parametrize("family", ["deepseek_v3", "ernie4_5_moe"])
def test_an_engine_loads_a_version_with_parts_in_float32_and_proves_it(
    family: str, redis_url: str, tmp_path: Path
) -> None:
    folder = family_folder(tmp_path / "models", family)
    setup = engine_setup(folder.parent, tmp_path / "runs", model=ModelSpec(path=family, dtype="bfloat16"))
    broker = connect(StackSettings(redis_url=redis_url, run_root=str(tmp_path)))
    with asyncio.Runner() as runner:
        engine = TransformersEngine(setup)
        try:
            job = ProbedJob(broker, folder, tmp_path / "runs", dtype="bfloat16")
            for version in range(2):
                job.step(version, 0.002)
                assert job.verdict(runner, engine, job.publish(version)).is_proved
        finally:
            runner.run(engine.aclose())
            broker.close()
