"""vLLM in the generator: what runs side by side, adapters, and how a generator notices that its engine core is gone."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.numpy import save
from safetensors.torch import load_file
from torch import Tensor, nn

from contracts.encoding.arrays import unpack_float32, unpack_int32
from contracts.errors import BatchFailed, EngineUnavailable, WeightsRejected
from contracts.run_folder import RunFolder
from contracts.sampling import SamplingParams
from contracts.versions import WeightFile, WeightManifest
from onbeat.weights.adapter.matrices import AdapterSource, layers_of, matrix_names, merge_into
from onbeat.weights.adapter.publisher import AdapterPublisher
from onbeat.weights.chunks import CHUNK_BYTES, num_chunks
from onbeat.weights.files.store import FolderStore
from onbeat.weights.transports import make_stores
from onbeat.weights.whole import WholePublisher
from producer.engine.base import VerifiedWeights
from producer.engine.sampling import sample
from producer.engine.vllm_kept_sets import kept_sets, num_logprobs
from tests.builders import kept_ids, prompt_batch
from tests.contract.engine_rigs import (
    VLLM_OPTIONS,
    Rig,
    engine_of,
    need_vllm,
    reference_model,
    rig_of,
    scaled,
    setup,
    under,
    vllm_folder,
)
from tests.publishing import given_by, publish
from tests.unit.onbeat.weights.test_weight_store import FakeChunks

PROMPTS = ([5, 6, 7], [8], [4, 9, 10])
LONG = SamplingParams(max_new_tokens=100)
IN_REDIS = FakeChunks()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    built = new_rig(tmp_path_factory.mktemp("vllm"))
    yield built
    built.close()


def new_rig(root: Path) -> Rig:
    need_vllm()
    folder = vllm_folder(root, "llama")
    engine = engine_of(VLLM_OPTIONS, setup(folder, stores=make_stores(root / "runs", lambda job_id: IN_REDIS)))
    return rig_of("vllm llama", engine, folder, root / "runs")


def engine_core(rig: Rig) -> int:
    """Process number."""
    (process,) = rig.engine._llm.engine_core.resources.engine_manager.processes  # type: ignore[attr-defined]
    return process.pid


def test_a_version_in_redis_is_read_by_the_generator_and_verified_by_the_core(rig: Rig) -> None:
    def in_redis(version: int) -> WeightManifest:
        tensors = scaled(rig.tensors, 0.5)
        data = save(tensors)
        file = WeightFile(name="weights.safetensors", num_bytes=len(data))
        for number in range(num_chunks(len(data))):
            chunk = data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
            IN_REDIS.put_chunk(version, file.name, number, chunk, keep_s=1.0)
        return replace(rig.publish(version, tensors), transport="redis", files=(file,))

    manifest = in_redis(5)
    rig.run(rig.engine.load_weights(manifest))
    held = VerifiedWeights(policy_version=5, weights_digest=manifest.weights_digest)
    assert rig.engine.policy_version == held
    assert len(rig.generate(manifest, PROMPTS)) == len(PROMPTS)
    damaged, gone = in_redis(6), in_redis(7)
    key, data = next((key, data) for key, data in IN_REDIS.data.items() if key[0] == 6)
    IN_REDIS.data[key] = data[:-1] + bytes([data[-1] ^ 1])
    IN_REDIS.drop_chunks_before(8, {5, 6})
    for manifest, reason in ((damaged, "digest"), (gone, "chunk 0 of version 7 is not in Redis")):
        with pytest.raises(WeightsRejected, match=reason):
            rig.run(rig.engine.load_weights(manifest))
        assert rig.engine.policy_version is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kept_sets_are_those_of_our_engine_on_equal_logits_and_ties_of_the_k_th(dtype: torch.dtype) -> None:
    """vLLM's own functions filter the logits, and pick the most likely log-probs."""
    need_vllm()
    filtered = import_module("vllm.v1.sample.ops.topk_topp_sampler").apply_top_k_top_p_pytorch
    gathered = import_module("vllm.v1.sample.sampler").Sampler.gather_logprobs
    num_rows, vocabulary_tokens = 64, 1000
    drawn = torch.randn(num_rows, vocabulary_tokens, generator=torch.Generator().manual_seed(0)) * 3.0
    logits, num_ties = drawn.to(dtype).float(), 0
    for top_k, top_p in ((5, 1.0), (300, 1.0), (1000, 1.0), *([(20, 0.9), (300, 0.99)] * (dtype == torch.float32))):
        sampling = SamplingParams(max_new_tokens=1, top_k=top_k, top_p=top_p)
        batch, ours = prompt_batch([[5]], sampling=sampling), sample(logits.numpy(), sampling, np.full(num_rows, 0.3))
        limits = torch.full((num_rows,), top_k), torch.full((num_rows,), top_p)
        theirs = filtered(logits.clone(), *limits, allow_cpu_sync=True).log_softmax(dim=-1)
        num_asked = num_logprobs(batch, vocabulary_tokens=vocabulary_tokens)
        found = gathered(theirs, num_asked, torch.from_numpy(ours.tokens))
        likely = list(zip(found.logprob_token_ids.tolist(), found.logprobs.tolist(), strict=True))
        packed = kept_sets(batch, ours.tokens.tolist(), likely, vocabulary_tokens=vocabulary_tokens)
        for row, kept in enumerate(kept_ids(packed)):
            of_ours = ours.kept_ids[row].tolist()
            assert set(of_ours) <= set(kept)
            more = [logits[row, one] for one in set(kept) - set(of_ours)]
            assert not more or set(map(float, more)) == {logits[row, of_ours].min().item()}
            num_ties += len(more)
    assert (num_ties > 0) == (dtype == torch.bfloat16)


class Adapters:
    """Versions as a trainer of adapters publishes them: rank 4, in every linear layer of the blocks."""

    SCALING = 0.5

    def __init__(self, rig: Rig) -> None:
        assert rig.folder is not None
        self.folder = RunFolder(rig.run_root, "adapters")
        self._model_folder = rig.folder
        self._base = load_file(rig.folder / "model.safetensors")
        self._matrices: dict[str, Tensor] = {}
        source = AdapterSource(scaling=self.SCALING, matrices=lambda: self._matrices, base=given_by(lambda: self._base))
        store = FolderStore(self.folder, wait_s=60.0)
        self._publisher = AdapterPublisher(WholePublisher(store, announce=lambda shard: None), source)

    def publish(self, version: int) -> WeightManifest:
        draw = torch.Generator().manual_seed(version)
        for name, weight in self._base.items():
            if name.endswith("proj.weight"):
                of_a, of_b = matrix_names(name.removesuffix(".weight"))
                self._matrices[of_a] = torch.randn(4, weight.shape[1], generator=draw) * 0.1
                self._matrices[of_b] = torch.randn(weight.shape[0], 4, generator=draw) * 0.1
        merged = {name: tensor.clone() for name, tensor in self._base.items()}
        for name, of_layer in layers_of(self._matrices, weights=merged).items():
            merge_into(merged[name], merged[name], lora_a=of_layer.lora_a, lora_b=of_layer.lora_b, scaling=self.SCALING)
        return publish(self._publisher, merged, policy_version=version)

    def trainers_model(self) -> nn.Module:
        """The base with B A beside it, as a trainer computes: nothing is merged."""
        model = reference_model(self._model_folder)
        for name, of_layer in layers_of(self._matrices, weights=self._base).items():

            def beside(_: nn.Module, inputs: tuple[Tensor], answer: Tensor, adapter=of_layer) -> Tensor:
                return answer + self.SCALING * (inputs[0] @ adapter.lora_a.T) @ adapter.lora_b.T

            model.get_submodule(name.removesuffix(".weight")).register_forward_hook(beside)
        return model


def test_adapters_sample_with_the_log_probs_of_the_trainer_before_and_after_an_update(rig: Rig) -> None:
    adapters = Adapters(rig)
    greedy = []
    for version in (1, 2):
        manifest = adapters.publish(version)
        assert manifest.adapter is not None
        rig.run(rig.engine.load_weights(manifest))
        assert rig.engine.policy_version == VerifiedWeights(
            policy_version=version, weights_digest=manifest.weights_digest
        )
        model = adapters.trainers_model()
        for temperature in (1.0, 0.0):
            sampling = SamplingParams(max_new_tokens=20, temperature=temperature)
            groups = rig.generate(manifest, PROMPTS, sampling=sampling)
            for prompt, group in zip(PROMPTS, groups, strict=True):
                for completion in group:
                    tokens = unpack_int32(completion.token_ids)
                    with torch.no_grad():
                        logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
                    if temperature == 0.0:
                        greedy.append(tokens)
                        assert logits.argmax(dim=-1).tolist() == tokens
                    else:
                        expected = logits.log_softmax(dim=-1)[range(len(tokens)), tokens]
                        found = torch.tensor(unpack_float32(completion.generator_logprobs))
                        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        # The base was read with the first version, and never again.
        shutil.rmtree(adapters.folder.weights / "base", ignore_errors=True)
    assert greedy[: len(greedy) // 2] != greedy[len(greedy) // 2 :]


def test_damaged_adapters_are_refused_and_whole_weights_follow_them(rig: Rig) -> None:
    adapters = Adapters(rig)
    manifest = adapters.publish(3)
    path = rig.run_root / manifest.directory / manifest.files[0].name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightsRejected, match="the adapters of version 3 have digest"):
        rig.run(rig.engine.load_weights(manifest))
    assert rig.engine.policy_version is None
    assert len(rig.generate(rig.load(4), PROMPTS)) == len(PROMPTS)


def test_a_load_waits_for_what_is_being_sampled_and_no_batch_starts_meanwhile(rig: Rig) -> None:
    first, second = rig.publish(0), rig.publish(1, scaled(rig.tensors, 0.5))

    async def load_in_the_middle() -> list:
        await rig.engine.load_weights(first)
        running = asyncio.ensure_future(rig.engine.generate(under(first, PROMPTS, group_size=8, sampling=LONG)))
        await asyncio.sleep(0)
        loading = asyncio.ensure_future(rig.engine.load_weights(second))
        await asyncio.sleep(0)
        with pytest.raises(BatchFailed, match="no verified weights"):
            await rig.engine.generate(under(first, PROMPTS))
        groups = await running
        await loading
        return groups

    groups = rig.run(load_in_the_middle())
    assert [len(group) for group in groups] == [8] * len(PROMPTS)
    assert rig.engine.policy_version is not None
    assert rig.engine.policy_version.policy_version == 1


def test_batches_are_sampled_side_by_side_and_a_cancelled_one_takes_none_with_it(rig: Rig) -> None:
    manifest = rig.load()

    async def three_at_once() -> list:
        batches = [
            asyncio.ensure_future(rig.engine.generate(under(manifest, PROMPTS, iteration=number, sampling=LONG)))
            for number in range(3)
        ]
        await asyncio.sleep(0)
        batches[1].cancel()
        return await asyncio.gather(*batches, return_exceptions=True)

    first, dropped, third = rig.run(three_at_once())
    assert isinstance(dropped, asyncio.CancelledError)
    for groups in (first, third):
        assert [len(group) for group in groups] == [2] * len(PROMPTS)
    assert first != third


def test_a_core_that_does_not_answer_ends_the_call_at_its_deadline(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = rig.load()
    monkeypatch.setattr(rig.engine, "_timeout_s", 0.5)
    os.kill(engine_core(rig), signal.SIGSTOP)
    try:
        with pytest.raises(EngineUnavailable, match="batch 0/train/0 is not done after"):
            rig.generate(manifest, PROMPTS)
    finally:
        os.kill(engine_core(rig), signal.SIGCONT)


def test_a_core_that_is_killed_ends_what_it_was_sampling_and_every_call_after(rig: Rig) -> None:
    """The last test of this module: nothing can be done with the engine afterwards."""
    manifest = rig.load()

    async def killed_in_the_middle() -> None:
        running = asyncio.ensure_future(rig.engine.generate(under(manifest, PROMPTS, group_size=64, sampling=LONG)))
        await asyncio.sleep(0)
        os.kill(engine_core(rig), signal.SIGKILL)
        await running

    # Not by its deadline, which has another message.
    with pytest.raises(EngineUnavailable, match="its engine core died"):
        rig.run(killed_in_the_middle())
    with pytest.raises(EngineUnavailable):
        rig.generate(manifest, PROMPTS)
    with pytest.raises(EngineUnavailable):
        rig.load(1)


def test_a_core_that_is_killed_while_it_loads_ends_the_load(tmp_path: Path) -> None:
    rig = new_rig(tmp_path)
    rig.load()
    manifest = rig.publish(1)

    async def killed_while_loading() -> None:
        os.kill(engine_core(rig), signal.SIGSTOP)
        loading = asyncio.ensure_future(rig.engine.load_weights(manifest))
        await asyncio.sleep(0)
        os.kill(engine_core(rig), signal.SIGKILL)
        await loading

    with pytest.raises(EngineUnavailable, match="its engine core died: loading version 1"):
        rig.run(killed_while_loading())
    rig.close()
