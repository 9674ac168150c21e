"""A model is tried on padded rows as it is loaded: a row is what it is by itself, or the job is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BertConfig

from consumer.gradient.assembly import make_learner
from consumer.model.shared_prompt.padded_trial import check_padded_rows
from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from tests.builders import job_spec
from tests.families import DENSE, HYBRIDS, INDEXED, MIXTURES, REFUSED, family_folder, family_model


@pytest.mark.parametrize("family", [*DENSE, *MIXTURES, *INDEXED, *HYBRIDS])
def test_the_padding_of_a_row_does_not_show_in_it(family: str) -> None:
    model = family_model(family)
    check_padded_rows(model)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        ("float32", r"so that padded rows can't be trained right \(name a model of another family"),
        ("bfloat16", r"fails in a trial pass of 16 tokens in bfloat16: .* \(set model\.dtype = \"float32\", or name a"),
    ],
)
@pytest.mark.parametrize("family", REFUSED)
def test_an_architecture_that_counts_padding_is_refused_by_name_with_the_cure(
    tmp_path: Path, family: str, dtype: str, words: str
) -> None:
    """The classes of transformers keep some of its weights in float32, which its products in bfloat16 don't take."""
    family_folder(tmp_path, family)
    spec = job_spec(model__path=family, model__dtype=dtype, trainer__packing="padded")
    with pytest.raises(InvalidInput, match=rf"model\.path: DeepseekV4ForCausalLM .*{words}"):
        make_learner(StackSettings(run_root=str(tmp_path / "runs"), model_root=str(tmp_path)), spec)


def test_an_encoder_is_refused_since_its_tokens_see_those_behind_them() -> None:
    """transformers makes a causal language model of BERT, whose attention looks both ways unless its config forbids."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    options: dict[str, Any] = sizes | {"vocab_size": 64, "max_position_embeddings": 64}
    encoder = AutoModelForCausalLM.from_config(BertConfig(**options)).eval()
    with pytest.raises(InvalidInput, match=r"model\.path: BertLMHeadModel lets a token see those behind it"):
        check_padded_rows(encoder)
    check_padded_rows(AutoModelForCausalLM.from_config(BertConfig(**options, is_decoder=True)).eval())


def test_states_that_come_from_the_padding_are_found_in_any_dtype() -> None:
    model = family_model("llama").to(torch.bfloat16)

    def leak(module: object, inputs: object, output: Tensor) -> Tensor:
        # A thousandth of the first column's state goes into each column behind it.
        return output + 1e-3 * output[:, :1]

    model.model.layers[0].input_layernorm.register_forward_hook(leak)
    with pytest.raises(InvalidInput, match="looks at the padding in front of a row"):
        check_padded_rows(model)
