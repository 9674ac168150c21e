"""Loading any local causal LM folder, and the log-probs of responses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from consumer.gradient.log_probs import response_logprobs
from consumer.gradient.micro_batch import make_micro_batch
from consumer.gradient.optimizer import groups_of
from consumer.model.language_head import has_plain_head
from consumer.model.policy import Policy, load_policy
from contracts.spec.job import ModelSpec, OptimizerSpec
from contracts.spec.root import SpecRoot
from tests.builders import batch_of, rollout, rollout_batch, tiny_model_folder
from tests.refusals import refusal_of


def load(folder: Path, *, dtype: str = "float32", gradient_checkpointing: bool = False) -> Policy:
    spec = ModelSpec(path=folder.name, dtype="bfloat16" if dtype == "bfloat16" else "float32")
    return load_policy(spec, model_root=SpecRoot(folder.parent), gradient_checkpointing=gradient_checkpointing)


def refused(folder: Path) -> str:
    with refusal_of("model.path") as refusal:
        load(folder)
    return str(refusal.value)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_a_saved_folder_loads_as_it_was_saved(tmp_path: Path, architecture: str) -> None:
    folder = tiny_model_folder(tmp_path, "llama" if architecture == "llama" else "qwen3")
    policy = load(folder)
    saved = load_file(folder / "model.safetensors")
    assert policy.context_tokens == 128
    assert not policy.model.training
    assert policy.weights().keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in policy.weights().items())


def test_parameters_take_the_dtype_of_the_spec(tmp_path: Path) -> None:
    policy = load(tiny_model_folder(tmp_path), dtype="bfloat16")
    assert {tensor.dtype for tensor in policy.weights().values()} == {torch.bfloat16}


def test_a_tied_head_is_one_weight_and_an_untied_head_is_two(tmp_path: Path) -> None:
    assert "lm_head.weight" not in load(tiny_model_folder(tmp_path / "tied")).weights()
    assert "lm_head.weight" in load(tiny_model_folder(tmp_path / "untied", tied=False)).weights()


@pytest.mark.parametrize("tied", [True, False])
def test_the_token_embedding_is_one_also_where_it_is_the_head_and_a_head_of_its_own_is_none(
    tmp_path: Path, *, tied: bool
) -> None:
    policy = load(tiny_model_folder(tmp_path, tied=tied))
    assert policy.embedding_names() == {"model.embed_tokens.weight"}
    assert policy.head_names() == {"model.embed_tokens.weight" if tied else "lm_head.weight"}
    settings = groups_of(
        policy.trained_parameters(), OptimizerSpec(weight_decay=0.1), embeddings=policy.embedding_names()
    )
    decayed = {name for name, (_, decay) in settings.items() if decay}
    assert ("lm_head.weight" in decayed) == (not tied)
    assert {name.rpartition("layers.")[2] for name in policy.weights().keys() - decayed} == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        *(f"{layer}.{norm}.weight" for layer in (0, 1) for norm in ("input_layernorm", "post_attention_layernorm")),
        *(f"{layer}.self_attn.{norm}.weight" for layer in (0, 1) for norm in ("q_norm", "k_norm")),
    }


def test_positions_that_are_learnt_are_an_embedding_too() -> None:
    small = {"vocab_size": 8, "n_positions": 4, "n_embd": 4, "n_layer": 1, "n_head": 1}
    policy = Policy(model=GPT2LMHeadModel(GPT2Config(**small)), tokenizer=None, context_tokens=4)  # type: ignore[arg-type]
    assert policy.embedding_names() == {"transformer.wte.weight", "transformer.wpe.weight"}


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert f"no folder `{tmp_path / 'nowhere'}`" in refused(tmp_path / "nowhere")


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refused(tmp_path / "empty")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert "has no tokenizer files" in refused(folder)


def test_a_tokenizer_without_an_end_of_sequence_token_is_refused(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("eos_token")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "no end-of-sequence token" in refused(folder)


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["~"] = 500
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "ids above the model's" in refused(folder)


def test_weights_that_lack_a_tensor_are_refused_instead_of_filled_at_random(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "lack 1 tensors of the model, e.g. model.layers.1.mlp.up_proj.weight" in refused(folder)


def test_weights_of_other_shapes_than_the_config_says_are_refused_by_name(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refusal = refused(folder)
    assert "1 tensors have other shapes there than it says, e.g. model.norm.weight" in refusal
    assert "(take both from the same model)" in refusal


@pytest.mark.parametrize(
    "content", ["{}", "not json", '{"model_type": "no_such_architecture"}', '{"model_type": "vit"}']
)
def test_a_config_of_no_causal_lm_is_refused(tmp_path: Path, content: str) -> None:
    folder = tiny_model_folder(tmp_path)
    (folder / "config.json").write_text(content)
    assert str(folder) in refused(folder)


def test_a_damaged_weight_file_is_refused(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path)
    (folder / "model.safetensors").write_bytes(b"damaged")
    assert "is no file of safetensors" in refused(folder)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "are pickled (pytorch_model.bin)" in refused(folder)


def test_a_reference_copy_does_not_follow_the_policy(tmp_path: Path) -> None:
    policy = load(tiny_model_folder(tmp_path))
    reference = policy.reference()
    before = {name: tensor.clone() for name, tensor in reference.named_parameters()}
    with torch.no_grad():
        for parameter in policy.trained_parameters().values():
            parameter.add_(1.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in reference.named_parameters())
    assert not any(parameter.requires_grad for parameter in reference.parameters())


def test_response_logprobs_equal_a_plain_forward_pass_of_each_row(tmp_path: Path) -> None:
    policy = load(tiny_model_folder(tmp_path, "llama"))
    rows = [([5, 6, 7, 8], [9, 10, 11]), ([12, 13], [14])]
    batch = batch_of([(prompt, [rollout(response, 1.0)]) for prompt, response in rows])
    micro_batch = make_micro_batch(batch, advantages=np.zeros((2, 1)))
    with torch.no_grad():
        logprobs = response_logprobs(policy.model, micro_batch, 0.7)
        for row, (prompt, response) in enumerate(rows):
            logits = policy.model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            expected = torch.log_softmax(logits / 0.7, dim=-1)[range(len(response)), response]
            torch.testing.assert_close(logprobs[row, : len(response)], expected, rtol=0, atol=2e-6)
    assert logprobs.shape == (2, 3)
    assert logprobs.isfinite().all()


def test_gradient_checkpointing_recomputes_and_gives_the_same_gradient(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path)
    batch = rollout_batch()
    micro_batch = make_micro_batch(batch, advantages=np.zeros((2, 4)))
    gradients, passes = [], []
    for gradient_checkpointing in (False, True):
        policy = load(folder, gradient_checkpointing=gradient_checkpointing)
        assert has_plain_head(policy.model)
        calls: list[int] = []
        policy.model.get_submodule("model.layers.0.mlp").register_forward_pre_hook(
            lambda *_, calls=calls: calls.append(1)
        )
        response_logprobs(policy.model, micro_batch, 1.0).sum().backward()
        gradients.append({name: p.grad for name, p in policy.trained_parameters().items()})
        passes.append(len(calls))
    assert passes == [1, 2]
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())
