"""What rests on transformers' own loading steps: ranks that read their rows hold what `from_pretrained` loads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from consumer.model.policy import load_model, load_whole
from consumer.model.rows import gathered
from consumer.ranks.fsdp.sharded_loading import load_sharded
from consumer.ranks.processes.orders import join
from contracts.errors import InvalidInput
from contracts.spec.job import ModelSpec
from contracts.spec.root import SpecRoot
from tests.building.specs import SpecBuilder
from tests.rooms.ranks.two_ranks import run_two_ranks

SHAPE: dict[str, Any] = {
    "vocab_size": 83,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
LOADED: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
    "gemma3_text": {"tie_word_embeddings": True},
    "qwen3_moe": {"tie_word_embeddings": False},
}
"""A tied head; an untied one; buffers that the architecture computes; experts that are files' tensors of their own."""
SPOILT = {
    "missing": "the safetensors of .* lack 1 tensors of the model, e.g. model.norm.weight",
    "mismatched": "1 tensors have other shapes there than it says, e.g. model.norm.weight",
}


spec = SpecBuilder(trainer__world_size=2, timeouts__ranks_s=60.0)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, also those that no file holds."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: gathered(tensor.detach()) for name, tensor in named}


def be_rank(rank: int, folder: Path) -> None:
    """Each rank writes {model: whether it is the same, or why it is refused}."""
    _ = join(spec() if rank == 0 else None, device="cpu")
    mesh, device = init_device_mesh("cpu", (2,)), torch.device("cpu")
    said: dict[str, Any] = {}

    def load(path: Path, config: Any, dtype: torch.dtype) -> Any:
        return load_sharded(path, config, dtype, mesh=mesh, device=device)

    def model(path: str, dtype: Any, load: Any) -> Any:
        return load_model(
            ModelSpec(path=path, dtype=dtype), model_root=SpecRoot(folder), gradient_checkpointing=False, load=load
        )

    for name in LOADED:
        for dtype in ("float32", "bfloat16"):
            whole, sharded = model(name, dtype, load_whole), model(name, dtype, load)
            shared = sum(isinstance(parameter, DTensor) for parameter in sharded.parameters())
            expected, found = tensors_of(whole), tensors_of(sharded)
            same = [
                name
                for name, tensor in expected.items()
                if tensor.dtype is found[name].dtype and torch.equal(tensor, found[name])
            ]
            said[f"{name} {dtype}"] = [
                sorted(expected.keys() ^ found.keys()),
                sorted(expected.keys() - same),
                shared == len(list(sharded.parameters())),
            ]
    for name in SPOILT:
        try:
            model(name, "float32", load)
        except InvalidInput as error:
            said[name] = str(error)
    (folder / f"said-{rank}.json").write_text(json.dumps(said))


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found, by rank."""
    folder = tmp_path_factory.mktemp("models")
    for name, options in LOADED.items():
        config = AutoConfig.for_model(name, **SHAPE, **options)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    for name in SPOILT:
        AutoModelForCausalLM.from_pretrained(folder / "llama").save_pretrained(folder / name)
        tensors = load_file(folder / name / "model.safetensors")
        norm = tensors.pop("model.norm.weight")
        if name == "mismatched":
            tensors["model.norm.weight"] = norm[:-1].clone()
        save_file(tensors, folder / name / "model.safetensors", metadata={"format": "pt"})
    run_two_ranks(be_rank, folder)
    return [json.loads((folder / f"said-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LOADED)
def test_ranks_that_read_their_rows_hold_what_transformers_loads(
    said: list[dict[str, Any]], name: str, dtype: str
) -> None:
    for of_rank in said:
        other_names, other_values, all_are_shared = of_rank[f"{name} {dtype}"]
        assert other_names == []
        assert other_values == []
        assert all_are_shared


@pytest.mark.parametrize("name", SPOILT)
def test_files_that_are_not_the_models_are_refused(said: list[dict[str, Any]], name: str) -> None:
    """A rank whose rows they lack refuses them; its error ends the job."""
    refusals = [of_rank[name] for of_rank in said if name in of_rank]
    assert refusals
    assert all(re.search(SPOILT[name], refusal) for refusal in refusals)
