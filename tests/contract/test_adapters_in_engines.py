"""A generator holds what a trainer of adapters means by its version: the same digest, the same log-probs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from consumer.model.policy import Policy, load_policy
from contracts.encoding.arrays import unpack_float32, unpack_int32
from contracts.run_folder import RunFolder
from contracts.sampling import SamplingParams
from contracts.spec.job import ModelSpec
from contracts.spec.root import SpecRoot
from contracts.spec.trainer import LoraSpec
from onbeat.weights.adapter.publisher import AdapterPublisher
from onbeat.weights.files.store import FolderStore
from onbeat.weights.publication import WeightPublisher
from onbeat.weights.whole import WholePublisher
from producer.engine.base import VerifiedWeights
from producer.engine.transformers.engine import TransformersEngine
from tests.builders import engine_setup, prompt_batch, tiny_model_folder
from tests.publishing import publish

PROMPTS = ([5, 6, 7], [8, 9])


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    """Adapters that are far from zero."""
    tiny_model_folder(tmp_path)
    loaded = load_policy(ModelSpec(path="qwen3"), model_root=SpecRoot(tmp_path), gradient_checkpointing=False)
    policy = loaded.with_adapters(LoraSpec(rank=4), seed=0)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.trained_parameters().values():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.2)
    return policy


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("published", ["merged", "adapter"])
def test_an_engine_samples_with_the_log_probs_of_the_trainer(
    tmp_path: Path, policy: Policy, published: str, temperature: float
) -> None:
    folder = RunFolder(tmp_path, "job")
    publisher: WeightPublisher = WholePublisher(FolderStore(folder, wait_s=60.0), announce=lambda shard: None)
    if published == "adapter":
        source = policy.adapter_source(policy.publish_base)
        assert source is not None
        publisher = AdapterPublisher(publisher, source)
    manifest = publish(publisher, policy.weights(), policy_version=3)
    assert (manifest.adapter is None) == (published == "merged")
    engine = TransformersEngine(engine_setup(tmp_path, deterministic=True))
    asyncio.run(engine.load_weights(manifest))
    assert engine.policy_version == VerifiedWeights(policy_version=3, weights_digest=manifest.weights_digest)
    batch = prompt_batch(
        PROMPTS,
        policy_version=3,
        weights_digest=manifest.weights_digest,
        sampling=SamplingParams(max_new_tokens=6, temperature=temperature),
    )
    completions = asyncio.run(engine.generate(batch))
    asyncio.run(engine.aclose())
    for prompt, of_prompt in zip(PROMPTS, completions, strict=True):
        for completion in of_prompt:
            tokens = unpack_int32(completion.token_ids)
            with torch.no_grad():
                logits = policy.model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            if temperature == 0.0:
                assert logits.argmax(dim=-1).tolist() == tokens
            else:
                ours = torch.log_softmax(logits, dim=-1)[range(len(tokens)), tokens]
                theirs = torch.tensor(unpack_float32(completion.generator_logprobs))
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
