"""A reload by vLLM's own code of models that load in ways of their own: nothing is left as it was without a word."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from contracts.encoding.wire import encode_json
from contracts.errors import WeightsUnfit
from producer.engine.batching import verified_by_all
from tests.builders import tiny_model_folder
from tests.contract.engine_rigs import Tensors, need_vllm, publish

NAMES = ("first.weight", "first.bias", "second.weight")


class Model(nn.Module):
    """Two layers that are loaded as vLLM's are; each kind has a way of its own with the last."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.reloads: Any = None
        """Those of the worker that has the model."""
        self.num_loads = 0
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.requires_grad_(False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str] | None:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        self.num_loads += 1
        loaded = set()
        for name, tensor in weights:
            if name == "second.weight" and self.kind == "forgets":
                continue
            if name == "second.weight" and self.kind == "raises":
                raise KeyError(name)
            parameter = self.get_parameter(name)
            if name == "second.weight" and self.kind == "writes":
                parameter.data.copy_(tensor)
            else:
                getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
            loaded.add(name)
        return None if self.kind == "says nothing" else loaded


def new_model(kind: str) -> Model:
    need_vllm()
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    model = Model(kind)
    record_metadata_for_reloading(model)
    return model


def reload(model: Model, value: float) -> str:
    """Reloads every weight with a value; returns the problem."""
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    from producer.engine.vllm.reloading import Reloads

    tensors = {name: torch.full_like(model.get_parameter(name), value, device="cpu") for name in NAMES}
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(quantization=None, dtype=torch.float32), load_config=None, lora_config=None
    )

    def reload_of_worker(weights_iterator: Iterable[tuple[str, Tensor]]) -> None:
        reload_weights(config, model, weights_iterator, None, is_checkpoint_format=True)

    model.reloads = model.reloads or Reloads(model, has_tied_head=False)
    return model.reloads.run(reload_of_worker, lambda: iter(tensors.items()))


def values(model: Model) -> list[set[float]]:
    return [set(model.get_parameter(name).flatten().tolist()) for name in NAMES]


@pytest.mark.parametrize("kind", ["loads", "says nothing", "writes"])
def test_a_model_holds_each_version_also_where_it_writes_weights_by_itself_or_does_not_say_what_it_loads(
    kind: str,
) -> None:
    model = new_model(kind)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    for value in (2.0, 3.0):
        assert reload(model, value) == ""
        assert values(model) == [{value}] * 3
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert model.num_loads == (3 if kind == "writes" else 2), "the first version is loaded twice where it has to be"


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("forgets", "1 parameters of vLLM's model got nothing, the first: second.weight"),
        ("raises", "vLLM's model can't take it: KeyError: 'second.weight'"),
    ],
)
def test_a_parameter_that_gets_nothing_is_named_and_the_next_version_loads(kind: str, problem: str) -> None:
    model = new_model(kind)
    assert reload(model, 2.0) == problem
    assert not any(parameter.is_meta for parameter in model.parameters())
    model.kind = "loads"
    assert reload(model, 3.0) == ""
    assert values(model) == [{3.0}] * 3


def test_a_version_that_leaves_a_parameter_as_it_was_is_unfit_and_not_held(tmp_path: Path) -> None:
    model = new_model("forgets")
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    from producer.engine.vllm.extension import VerifiedLoader

    folder = tiny_model_folder(tmp_path)

    class Worker(VerifiedLoader):
        """A worker whose model knows three names."""

        model_runner = SimpleNamespace()
        model_config = SimpleNamespace(
            model=str(folder),
            dtype=torch.float32,
            hf_text_config=SimpleNamespace(tie_word_embeddings=False),
            logprobs_mode="processed_logprobs",
            max_logprobs=-1,
            max_model_len=128,
            quantization=None,
            get_vocab_size=lambda: 79,
        )

        def get_model(self) -> Any:
            return model

        def reload_weights(self, weights_iterator: Iterable[tuple[str, Tensor]]) -> None:
            next(iter(weights_iterator))
            config: Any = SimpleNamespace(model_config=self.model_config, load_config=None, lora_config=None)
            mine = ((name, torch.ones_like(model.get_parameter(name), device="cpu")) for name in NAMES)
            reload_weights(config, model, mine, None, is_checkpoint_format=True)

    from onbeat.weights.model_folder import empty_model, weight_tensors

    tensors: Tensors = {
        name: np.zeros(tensor.shape, dtype=np.float32)
        for name, tensor in weight_tensors(empty_model(folder, dtype=torch.float32, device="meta"))
    }
    manifest = publish(tmp_path / "runs", 1, tensors)
    answer = Worker().load_version(str(tmp_path / "runs"), encode_json(manifest).decode())
    assert (answer["policy_version"], answer["weights_digest"]) == ("", "")
    with pytest.raises(WeightsUnfit, match=r"version 1: 1 parameters of vLLM's model got nothing.*second\.weight"):
        verified_by_all([answer])
