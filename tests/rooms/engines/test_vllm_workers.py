"""vLLM with several workers on a CPU, which talk by gloo: parts of a model, copies of it, and what a version costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from contracts.encoding.arrays import unpack_float32, unpack_int32
from contracts.errors import WeightsRejected
from contracts.sampling import SamplingParams
from producer.engine.base import VerifiedWeights
from tests.contract.engine_rigs import VLLM_OPTIONS, Rig, engine_of, need_vllm, rig_of, scaled, setup, vllm_folder

PROMPTS = ([5, 6, 7], [8])
SAMPLING = SamplingParams(max_new_tokens=6)
WORKERS = {"two parts": {"tensor_parallel_size": 2}, "two copies": {"data_parallel_size": 2}}


@pytest.fixture(params=WORKERS)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    need_vllm()
    folder = vllm_folder(tmp_path, "llama")
    options = replace(VLLM_OPTIONS, timeout_s=300.0, **WORKERS[request.param])
    built = rig_of("vllm llama", engine_of(options, setup(folder)), folder, tmp_path / "runs")
    yield built
    built.close()


def test_each_worker_answers_the_version_s_digest_and_their_log_probs_are_the_model_s(rig: Rig) -> None:
    for version, factor in ((1, 1.0), (2, 0.5)):
        manifest = rig.load(version, scaled(rig.tensors, factor))
        held = VerifiedWeights(policy_version=version, weights_digest=manifest.weights_digest)
        assert rig.engine.policy_version == held
        answers = rig.run(rig.engine._on_each_worker("describe_version"))  # type: ignore[attr-defined]
        assert [answer["weights_digest"] for answer in answers] == [manifest.weights_digest] * 2
    # Version 0, which `full_logits` are of.
    manifest = rig.load(3)
    for prompt, group in zip(PROMPTS, rig.generate(manifest, PROMPTS, sampling=SAMPLING), strict=True):
        for completion in group:
            tokens = list(prompt)
            sampled = zip(
                unpack_int32(completion.token_ids), unpack_float32(completion.generator_logprobs), strict=True
            )
            for token, logprob in sampled:
                expected = torch.log_softmax(rig.full_logits(tokens), dim=-1)[token].item()
                assert logprob == pytest.approx(expected, abs=1e-4)
                tokens.append(token)


def test_a_version_that_a_worker_refuses_is_held_by_none(rig: Rig) -> None:
    rig.load(1)
    with pytest.raises(WeightsRejected, match="digest"):
        rig.run(rig.engine.load_weights(replace(rig.publish(2), weights_digest="ab" * 32)))
    assert rig.engine.policy_version is None
    manifest = rig.load(3)
    assert len(rig.generate(manifest, PROMPTS, sampling=SAMPLING)) == len(PROMPTS)
