"""A group's prompt goes through once, in each family: layers that keep states are repeated with their rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from contracts.errors import InvalidInput
from contracts.spec.job import ModelSpec
from onbeat.base.group_cache import StateLayer, cache_argument, group_cache, unknown_layers
from onbeat.weights.model_folder import weight_tensors
from producer.engine.transformers.engine import TransformersEngine
from tests.builders import char_tokenizer, engine_setup
from tests.contract.engine_rigs import transformers_rig
from tests.family_checks import decodes
from tests.state_families import MAMBAS, STATES, state_model

PROMPTS = ([5, 6, 7], [8])


@pytest.mark.parametrize("family", [*STATES, *MAMBAS, "gpt_oss", "gemma3_text", "deepseek_v3"])
def test_a_group_that_is_decoded_has_the_logits_of_each_row_by_itself(family: str) -> None:
    assert decodes(state_model(family)) == ""


@pytest.mark.parametrize("family", [*STATES, *MAMBAS])
def test_the_numbers_are_those_of_the_layers_of_transformers_bit_for_bit(family: str) -> None:
    model: Any = state_model(family)
    tokens = torch.arange(3, 15)[None].repeat(2, 1) + torch.tensor([[0], [20]])
    answers = []
    for cache in (group_cache(model.config), DynamicCache(config=model.config)):
        past = {cache_argument(type(model)): cache, "use_cache": True}
        with torch.no_grad():
            parts = [model(input_ids=part, **past).logits for part in tokens.split((2, 5, 4, 1), dim=1)]
        answers.append(torch.cat(parts, dim=1))
    assert torch.equal(*answers)


def test_a_state_goes_on_with_its_row_wherever_that_row_goes() -> None:
    layer: Any = StateLayer()
    layer.update_conv_state(torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]), conv_kernel_size=3)
    layer.update_recurrent_state(torch.tensor([[10.0], [20.0]]))
    layer.batch_repeat_interleave(2)
    assert layer.conv_states[0].tolist() == [[[0.0, 1.0, 2.0]], [[0.0, 1.0, 2.0]], [[0.0, 3.0, 4.0]], [[0.0, 3.0, 4.0]]]
    assert layer.recurrent_states[0].tolist() == [[10.0], [10.0], [20.0], [20.0]]
    layer.batch_select_indices(torch.tensor([1, 2]))
    assert layer.recurrent_states[0].tolist() == [[10.0], [20.0]]
    inputs = layer.update_conv_state(torch.tensor([[[5.0]], [[6.0]]]))
    assert inputs.tolist() == [[[0.0, 1.0, 2.0, 5.0]], [[0.0, 3.0, 4.0, 6.0]]]
    assert layer.conv_states[0].tolist() == [[[1.0, 2.0, 5.0]], [[3.0, 4.0, 6.0]]]


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h", "falcon_h1"])
def test_the_engine_samples_a_family_with_states_and_samples_the_same_again(tmp_path: Path, family: str) -> None:
    model = state_model(family, vocab_size=len(char_tokenizer()))
    model.save_pretrained(tmp_path / family)
    char_tokenizer().save_pretrained(tmp_path / family)
    rig = transformers_rig(family, tmp_path, tmp_path / "runs")
    try:
        # By the model's own names, as a trainer publishes them; those of the folder's files may be others.
        version = rig.load(0, {name: tensor.detach().numpy() for name, tensor in weight_tensors(model)})
        completions = [rig.generate(version, PROMPTS, group_size=3) for _ in range(2)]
        assert completions[0] == completions[1]
        assert all(completion.num_tokens > 0 for group in completions[0] for completion in group)
    finally:
        rig.close()


def test_layers_that_remember_something_of_their_own_are_refused_by_name(tmp_path: Path) -> None:
    config = AutoConfig.for_model("deepseek_v4", num_hidden_layers=4)
    # transformers knows the layers of a family once its module is imported.
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(config)
    assert unknown_layers(group_cache(config)) == ["DeepseekV4CSACache", "DeepseekV4HCACache"]
    config.save_pretrained(tmp_path / "v4")
    char_tokenizer().save_pretrained(tmp_path / "v4")
    with pytest.raises(InvalidInput, match="DeepseekV4CSACache, DeepseekV4HCACache"):
        TransformersEngine(engine_setup(tmp_path, model=ModelSpec(path="v4")))
