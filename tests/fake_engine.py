"""An engine without torch: a language model made of hashes, for tests of everything around an engine.

Its logits are a function of (weights digest, tokens so far), so they differ between versions and prompts, and the
contract suite can check its log-probs as it checks a real model's. Files, digests and refusals are the real ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize

from contracts.errors import WeightsRejected
from contracts.probes import LogProbs, ProbeRow
from contracts.rollouts import Completion, PromptBatch
from contracts.versions import TORCH_NAMES, WeightManifest, WeightShard, weights_digest
from onbeat.weights.arrival import check_digest
from onbeat.weights.files.store import FolderFiles
from onbeat.weights.layout import check_names
from onbeat.weights.stores import version_files
from producer.engine.base import GenerationEngine, Turn, VerifiedWeights, check_version, probe_batch
from producer.engine.growing_rows import GrowingBatch, HeldRows
from producer.engine.sampling import Ends


class FakeEngine(GenerationEngine):
    """It samples from a vocabulary of `vocab_size` tokens; token `eos_id` ends a completion."""

    def __init__(self, *, run_root: Path, tensor_names: frozenset[str], vocab_size: int = 16, eos_id: int = 0) -> None:
        self._run_root = run_root
        self._tensor_names = tensor_names
        self._vocab_size = vocab_size
        self._ends = Ends(frozenset({eos_id}))
        self._beside: list[VerifiedWeights] = []

    @property
    def max_concurrent_completions(self) -> int:
        return 1

    async def generate(self, batch: PromptBatch, turn: Turn | None = None) -> list[list[Completion]]:
        check_version(self._verified_weights, batch)
        return self._sampled(batch)

    def _sampled(self, batch: PromptBatch) -> list[list[Completion]]:
        """By whatever weights are there: as in a real engine, the version was checked when the batch came."""
        rows, growing = HeldRows(self._ends), GrowingBatch(batch=batch)
        rows.join(growing)
        prefixes = [
            np.frombuffer(prompt.token_ids, dtype="<i4").tolist()
            for prompt in batch.prompts
            for _ in range(batch.group_size)
        ]
        while not growing.finished:
            next_tokens, _ = rows.append(np.stack([self.logits(prefix) for prefix in prefixes]))
            for prefix, token in zip(prefixes, next_tokens.tolist(), strict=True):
                prefix.append(token)
        return growing.completions

    async def logprobs(self, rows: Sequence[ProbeRow]) -> LogProbs:
        completions = self._sampled(probe_batch(self._verified_weights, rows))
        return b"".join(completion.generator_logprobs for (completion,) in completions)

    async def load_weights(self, weights: WeightManifest | WeightShard) -> None:
        """A shard is read with the rest of its version."""
        before, self._verified_weights = self._verified_weights, None
        if isinstance(weights, WeightShard):
            return
        ready = asked_for(weights) in (before, *self._beside)
        self._verified_weights = asked_for(weights) if ready else self._load(weights)
        if self._verified_weights in self._beside and before is not None:
            self._beside[self._beside.index(self._verified_weights)] = before

    @property
    def ready_versions(self) -> tuple[VerifiedWeights, ...]:
        return (*([self._verified_weights] if self._verified_weights else []), *self._beside)

    async def receive_weights(
        self, announced: Sequence[WeightManifest], shards: Sequence[WeightShard] = (), *, num_versions: int
    ) -> bool:
        known = [asked_for(manifest) for manifest in announced]
        self._beside = [one for one in self._beside if one in known]
        if self._verified_weights is None or num_versions == 1:
            return False
        coming = [one for one in announced if one.policy_version > self._verified_weights.policy_version]
        missing = [one for one in coming if asked_for(one) not in self._beside]
        # As in HeldVersions: one before the version in use makes way, where there is no other room.
        passed = [one for one in self._beside if one.policy_version < self._verified_weights.policy_version]
        if missing and passed and len(self._beside) >= num_versions - 1:
            self._beside.remove(passed[0])
        if missing and len(self._beside) < num_versions - 1:
            self._beside.append(self._load(missing[0]))
            return True
        return False

    def _load(self, manifest: WeightManifest) -> VerifiedWeights:
        tensors: list[tuple[str, str, tuple[int, ...], bytes]] = []
        for path in map(FolderFiles(self._run_root).path, version_files(manifest)):
            try:
                entries = deserialize(path.read_bytes())
            except (SafetensorError, OSError) as error:
                raise WeightsRejected(f"{path} cannot be read: {error}") from error
            for name, entry in entries:
                tensors.append((name, TORCH_NAMES[entry["dtype"]], tuple(entry["shape"]), bytes(entry["data"])))
        check_names(manifest.policy_version, expected=set(self._tensor_names), actual={tensor[0] for tensor in tensors})
        found = weights_digest(tensors)
        check_digest(manifest, found)
        return VerifiedWeights(policy_version=manifest.policy_version, weights_digest=found)

    async def aclose(self) -> None:
        self._verified_weights, self._beside = None, []

    def logits(self, prefix: list[int]) -> NDArray[np.float32]:
        """[V] logits in [-2, 2) after the tokens of `prefix`, under the loaded weights."""
        digest = self._verified_weights.weights_digest if self._verified_weights else ""
        name = f"{digest}/{','.join(map(str, prefix))}"
        noise = hashlib.shake_128(name.encode()).digest(2 * self._vocab_size)
        return np.frombuffer(noise, dtype="<u2").astype(np.float32) / np.float32(16384.0) - np.float32(2.0)


def asked_for(manifest: WeightManifest) -> VerifiedWeights:
    return VerifiedWeights(policy_version=manifest.policy_version, weights_digest=manifest.weights_digest)
