"""A model's folder that no trainer can load is refused by its files, each fault in one line with the cure."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from consumer.model.policy import load_policy
from contracts.errors import InvalidInput
from contracts.spec.environment import EnvironmentSpec
from contracts.spec.job import ModelSpec
from contracts.spec.root import SpecRoot
from onbeat.weights.base_model.folder_check import check_files, check_folder, check_sizes, language_models
from tests.builders import job_spec, tiny_model_folder
from tests.families import ALL_FAMILIES, family_config

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model_folder(tmp_path)


def with_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_bytes()) | changes
        path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))

    return change


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def without_vocabulary(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def with_a_larger_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_bytes())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": 500, "content": "<more>"})
    path.write_text(json.dumps(tokenizer))


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def as_gguf(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model-Q4_K_M.gguf")


def cut_off(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])


def as_a_pointer(folder: Path) -> None:
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 988097824\n")


def with_half_its_files(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
    weight_map = {
        "model.norm.weight": "model-00001-of-00002.safetensors",
        "lm_head.weight": "model-00002-of-00002.safetensors",
    }
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def without_index(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")


def with_the_index_of_another(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.layers.9.norm.weight": WEIGHTS}}))


def with_broken_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


FAULTS: list[tuple[Callable[[Path], None], str]] = [
    (without_tokenizer, r"has no tokenizer files \(save the tokenizer into the folder"),
    (without_vocabulary, r"has a tokenizer_config.json, and no vocabulary \(save the tokenizer"),
    (with_a_larger_tokenizer, r"has ids above the model's \d+ embeddings, up to 500 \(use the tokenizer that belongs"),
    (
        with_config(model_type="my_model", auto_map={"AutoModelForCausalLM": "modeling.My"}),
        r"is a `my_model`, which needs code from the folder, and such code is never run \(name a folder of an",
    ),
    (
        with_config(model_type="qwen9"),
        r"is a `qwen9`, of which transformers 5\.\d+\.\d+ makes no language model \(name a",
    ),
    (with_config(model_type="vit"), r"is a `vit`, of which transformers .* makes no language model"),
    (with_config(model_type=None), r"has a config.json without a model_type \(save the model by save_pretrained"),
    (
        with_config(quantization_config={"quant_method": "fp8"}),
        r"are quantized \(fp8\), and a step is smaller than what they tell apart \(name a folder of the same model in",
    ),
    (
        with_config(text_config={"model_type": "qwen3", "quantization_config": {"bits": 4}}),
        r"are quantized \(no method",
    ),
    (
        pickled,
        r"are pickled \(pytorch_model.bin\), and to read them would run what they hold \(load it where you trust",
    ),
    (as_gguf, r"are a GGUF file \(load it where you trust it"),
    (cut_off, r"is cut off: it has [\d,]+ bytes of [\d,]+ \(copy or download the whole folder again"),
    (as_a_pointer, r"is no file of safetensors, or a part of one \(copy or download"),
    (with_half_its_files, r"has only a part of its weights: model-00002-of-00002.safetensors can't be read"),
    (without_index, r"has weights in several files, and no model.safetensors.index.json \(copy"),
    (with_the_index_of_another, r"lacks model.layers.9.norm.weight, which model.safetensors.index.json says is in it"),
    (with_broken_config, r"config.json` is no JSON: .* \(copy the folder again"),
]


@pytest.mark.parametrize(("fault", "words"), FAULTS)
def test_a_folder_that_no_trainer_can_load_is_refused_in_one_line_with_the_cure(
    folder: Path, fault: Callable[[Path], None], words: str
) -> None:
    check_folder(folder)
    fault(folder)
    with pytest.raises(InvalidInput, match=words) as caught:
        check_folder(folder)
    assert caught.value.field == "model.path"
    assert caught.value.cure
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("fault", "words"), FAULTS)
def test_a_trainer_refuses_it_by_the_same_words(folder: Path, fault: Callable[[Path], None], words: str) -> None:
    fault(folder)
    model = ModelSpec(path=folder.name)
    with pytest.raises(InvalidInput, match=words):
        load_policy(model, model_root=SpecRoot(folder.parent), gradient_checkpointing=False)
    with pytest.raises(InvalidInput, match=words):
        check_files(model, SpecRoot(folder.parent), chat="")


def test_each_family_is_one_that_the_installed_transformers_has() -> None:
    types = {family_config(family).model_type for family in ALL_FAMILIES}
    assert types <= language_models()


def test_the_check_loads_neither_torch_nor_transformers(folder: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from onbeat.weights.base_model.folder_check import check_folder; "
        "check_folder(Path(sys.argv[1])); assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True, timeout=60)


def test_a_completion_that_cannot_fit_the_context_is_refused_by_its_key(folder: Path) -> None:
    with_config(max_position_embeddings=512)(folder)
    root = SpecRoot(folder.parent)
    check_sizes(job_spec(model__path=folder.name, rollout__sampling__max_new_tokens=511), root)
    with pytest.raises(InvalidInput, match="takes up to 512 tokens, the model's context holds 512") as caught:
        check_sizes(job_spec(model__path=folder.name, rollout__sampling__max_new_tokens=512), root)
    assert caught.value.field == "rollout.sampling.max_new_tokens"
    assert caught.value.cure == "set it below 512, or choose a model with a longer context"
    played = job_spec(model__path=folder.name, environment=EnvironmentSpec(name="guess"))
    with pytest.raises(InvalidInput, match="takes up to 4096 tokens") as caught:
        check_sizes(played, root)
    assert caught.value.field == "environment.max_tokens"
    with_config(max_position_embeddings=None)(folder)
    check_sizes(played, root)


def test_a_token_that_the_vocabulary_lacks_is_refused_by_its_key(folder: Path) -> None:
    with_config(vocab_size=100)(folder)
    spec = job_spec(model__path=folder.name, rollout__sampling__stop_token_ids=(100,))
    with pytest.raises(InvalidInput) as caught:
        check_sizes(spec, SpecRoot(folder.parent))
    assert caught.value.field == "rollout.sampling.stop_token_ids"
