"""A multi-modal folder is trained by its text: the numbers are those of the whole, and its towers are in no version."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from consumer.gradient.assembly import make_learner
from consumer.gradient.learner import Learner
from consumer.gradient.saved_state import adapter_state
from consumer.model.checkpoint import write_checkpoint
from contracts.errors import InvalidInput
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from onbeat.export.export import export
from onbeat.weights.base_model.text_model import text_model, untrained_tensors
from onbeat.weights.hashing import tensors_digest
from onbeat.weights.model_folder import empty_model, model_config, weight_tensors
from tests.builders import job_spec, rollout_batch
from tests.families import MULTI_MODAL, family_folder, family_model

TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])


def learner_of(root: Path, family: str, lora: dict[str, int] | None = None) -> Learner:
    family_folder(root, family)
    settings = StackSettings(run_root=str(root / "runs"), model_root=str(root))
    return make_learner(settings, job_spec(model__path=family, trainer__packing="padded", trainer__lora=lora))


@pytest.mark.parametrize("family", MULTI_MODAL)
def test_the_text_of_a_folder_computes_what_the_whole_model_computes_and_alone_is_trained(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        learner = learner_of(tmp_path, family)
    lines = [line for line in caplog.messages if "multi-modal" in line or "UNEXPECTED" in line]
    assert len(lines) == 1, "one line says it, and not one for each tensor"
    assert f"model.path: `{family}` is multi-modal ({family}): its text is trained" in lines[0]
    policy = learner.policy
    with torch.no_grad():
        expected = family_model(family)(input_ids=TOKENS, use_cache=False).logits
        actual = policy.model(input_ids=TOKENS, use_cache=False).logits  # type: ignore[operator]
    # Experts' products have other last bits where their weights lie elsewhere in memory.
    assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-5)
    names = set(policy.weights())
    assert not [name for name in names if "vision" in name or "visual" in name or "projector" in name]
    folder = tmp_path / family
    assert names == {name for name, _ in weight_tensors(empty_model(folder, dtype=torch.float32, device="meta"))}
    assert policy.out_of_reach == frozenset()
    assert learner.train(rollout_batch()).stats.num_tokens > 0


@pytest.mark.parametrize("family", MULTI_MODAL)
def test_the_tensors_that_no_text_passes_through_are_told_by_the_names_in_the_files(
    tmp_path: Path, family: str
) -> None:
    folder = family_folder(tmp_path, family)
    untrained = untrained_tensors(folder, model_config(folder))
    stored = load_file(folder / "model.safetensors")
    towers = {name for name in stored if any(part in name for part in ("vision", "visual", "projector"))}
    assert untrained.keys() == towers
    assert set(untrained.values()) == {folder / "model.safetensors"}


def test_a_folder_of_text_has_no_towers(tmp_path: Path) -> None:
    folder = family_folder(tmp_path, "qwen3")
    assert untrained_tensors(folder, model_config(folder)) == {}


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_of_the_text_is_tied_where_the_folders_own_class_ties_it(tmp_path: Path, tied: bool) -> None:
    folder = family_folder(tmp_path, "qwen3_5")
    config = json.loads((folder / "config.json").read_bytes())
    config["tie_word_embeddings"] = tied
    config["text_config"]["tie_word_embeddings"] = not tied
    (folder / "config.json").write_text(json.dumps(config))
    assert text_model(model_config(folder)).config.tie_word_embeddings is tied


def test_a_folder_of_a_model_without_text_is_refused_by_its_type_with_the_cure(tmp_path: Path) -> None:
    folder = family_folder(tmp_path, "qwen3")
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(InvalidInput, match=r"is a `vit`, of which transformers [\d.]+ makes no language model.*name"):
        text_model(model_config(folder))


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["all parameters", "adapters"])
@pytest.mark.parametrize("family", MULTI_MODAL)
def test_an_export_loads_as_the_folders_own_class_with_its_towers_as_they_were(
    tmp_path: Path, family: str, lora: dict[str, int] | None
) -> None:
    learner = learner_of(tmp_path, family, lora)
    for parameter in learner.policy.trained_parameters().values():
        parameter.data += 0.05
    learner.policy.follow()
    digest = tensors_digest(learner.policy.weights())
    folder = RunFolder(tmp_path / "runs", "job-1")
    write_checkpoint(
        folder.checkpoint_after(0),
        job_id="job-1",
        iteration=0,
        weights_digest=digest,
        save=learner.save,
        adapters=adapter_state(learner.policy),
    )
    source = tmp_path / family
    exported = export(folder, learner.spec, tmp_path / "exported", model_folder=source, versions=None)
    before = load_file(source / "model.safetensors")
    after = load_file(tmp_path / "exported" / "model.safetensors")
    assert after.keys() == before.keys()
    untrained = untrained_tensors(source, model_config(source))
    assert all(torch.equal(after[name], before[name]) for name in untrained)
    assert not all(torch.equal(after[name], before[name]) for name in before.keys() - untrained.keys())
    assert (exported.weights_digest, exported.files_digest) == (digest, tensors_digest(after))
    auto: Any = AutoModelForImageTextToText
    model, loading = auto.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert type(model) is type(family_model(family))
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    with torch.no_grad():
        actual = model.eval()(input_ids=TOKENS, use_cache=False).logits
        expected = merged_logits(learner)
    assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-4)


def merged_logits(learner: Learner) -> Tensor:
    """Returns the logits of the policy as it is published."""
    policy = learner.policy
    with torch.no_grad():
        return policy.model(input_ids=TOKENS, use_cache=False).logits  # type: ignore[operator]
