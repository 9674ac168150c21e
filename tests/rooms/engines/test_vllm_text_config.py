"""The config that vLLM gets of a folder of which the text alone is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedConfig

from onbeat.weights.model_folder import model_config
from producer.engine.vllm.text_config import text_overrides
from tests.vllm_families import vllm_family_folder


@pytest.mark.parametrize("tied", [True, False])
def test_of_a_multi_modal_folder_it_is_the_text_s_with_the_class_that_is_trained(tmp_path: Path, tied: bool) -> None:
    folder = vllm_family_folder(tmp_path, "qwen3_5", tied=tied)
    config = model_config(folder)
    text = text_overrides(folder)(config)
    assert text is config.get_text_config()
    assert (text.model_type, text.architectures) == ("qwen3_5_text", ["Qwen3_5ForCausalLM"])
    assert text.tie_word_embeddings == tied
    # vLLM first asks with a config that has no parts, to see which model_type is to be read.
    bare = PreTrainedConfig(architectures=[""])
    assert text_overrides(folder)(bare) is bare


def test_of_a_folder_of_text_it_is_the_folder_s_own(tmp_path: Path) -> None:
    assert text_overrides(vllm_family_folder(tmp_path, "mixtral")) == {}
