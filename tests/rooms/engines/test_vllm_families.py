"""Versions of tiny models of many families in vLLM: its own log-probs against transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from contracts.encoding.arrays import unpack_float32, unpack_int32
from contracts.rollouts import Completion
from contracts.sampling import SamplingParams
from onbeat.weights.base_model.text_model import text_model
from onbeat.weights.model_folder import model_config, weight_tensors
from tests.contract.engine_rigs import VLLM_OPTIONS, Rig, Tensors, engine_of, need_vllm, publish, setup
from tests.vllm_families import FAMILIES, vllm_family_folder

PROMPTS = ([5, 6, 7, 8, 9, 4], [8, 3])
SAMPLING = SamplingParams(max_new_tokens=8)
GAP = 1e-4
"""Largest difference of a log-prob in float32."""
NEEDS_TORCHVISION = frozenset({"qwen3_5", "qwen3_vl"})
"""Families whose module of vLLM's imports it. The wheel for the pinned torch (0.28.0) can't be imported next to torch
for a CPU: its operators are in a library that is linked with torch's for CUDA."""


def trained_model(folder: Path) -> PreTrainedModel:
    """The folder's model as a trainer has it, moved from where it was loaded, so that no weight is a zero."""
    model, _ = text_model(model_config(folder)).load(folder, torch.float32)
    return model.eval().requires_grad_(False)


def moved(model: PreTrainedModel, seed: int) -> Tensors:
    """Moves every weight, and returns the version."""
    draw = torch.Generator().manual_seed(seed)
    for _, tensor in weight_tensors(model):
        if tensor.is_floating_point():
            tensor += torch.randn(tensor.shape, generator=draw) * 0.02
    return {name: tensor.numpy().copy() for name, tensor in weight_tensors(model)}


def gap(model: PreTrainedModel, prompt: list[int], completion: Completion) -> float:
    """Returns the largest difference between the sampler's log-probs of a completion and the model's."""
    tokens = list(unpack_int32(completion.token_ids))
    row = torch.tensor([[*prompt, *tokens]])
    log_probs = model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    expected = log_probs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return (expected - torch.tensor(list(unpack_float32(completion.generator_logprobs)))).abs().max().item()


@pytest.mark.parametrize("family", FAMILIES)
def test_two_versions_of_a_family_are_sampled_with_the_log_probs_of_transformers(tmp_path: Path, family: str) -> None:
    need_vllm()
    if family in NEEDS_TORCHVISION:
        pytest.importorskip("torchvision")
    folder = vllm_family_folder(tmp_path, family)
    model = trained_model(folder)
    rig = Rig(family, engine_of(VLLM_OPTIONS, setup(folder)), tmp_path / "runs", {}, lambda tokens: torch.empty(0))
    try:
        for version in (1, 2):
            manifest = publish(rig.run_root, version, moved(model, version))
            rig.run(rig.engine.load_weights(manifest))
            assert rig.engine.policy_version is not None
            assert rig.engine.policy_version.weights_digest == manifest.weights_digest
            groups = rig.generate(manifest, PROMPTS, sampling=SAMPLING)
            gaps = [gap(model, p, completion) for p, group in zip(PROMPTS, groups, strict=True) for completion in group]
            assert max(gaps) <= GAP, gaps
    finally:
        rig.close()
