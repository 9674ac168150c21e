"""The older versions of a checkpoint, which batches of its window are sampled with: nothing else could make them again.

    published ─ read back, hashed ─▶ checkpoints/i000010/older-v000009.safetensors ─▶ published again at a start

Only a job whose batches may lag has any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from torch import Tensor

from contracts.checkpoints import OlderVersion
from contracts.errors import ContractViolation, WeightsRejected
from contracts.versions import WeightManifest
from onbeat.process.crash_points import reach
from onbeat.weights.files.store import LocalFile
from onbeat.weights.files.stored_tensors import StoredTensors
from onbeat.weights.hashing import HashingThreads, bytes_of
from onbeat.weights.layout import Layout, check_names, layout_of
from onbeat.weights.publication import StoredVersion
from onbeat.weights.receiver import read_back
from onbeat.weights.redis.chunks import ChunkReader
from onbeat.weights.stores import TensorFile

Take = Callable[[str, Tensor], None]
"""What is done with a tensor, by its name."""


class PublishedVersions:
    """Versions as generators find them, read back by their trainer."""

    def __init__(self, layout: Layout, *, root: Path, chunks: Callable[[str], ChunkReader]) -> None:
        """layout: of the weights. root: the weight root. chunks: job id → its chunks in Redis."""
        self._layout = layout
        self._root = root
        self._chunks = chunks

    def check(self, manifest: WeightManifest) -> None:
        """Raises WeightsRejected for a version that is not there as it was published."""
        self._pass_through(manifest, lambda layout: lambda name, tensor: None)

    def save(self, manifests: Iterable[WeightManifest], folder: Path) -> tuple[OlderVersion, ...]:
        """Writes a file for each into a folder that exists, whichever transport carried it; raises as `check` does."""
        return tuple(self._save(manifest, folder) for manifest in manifests)

    def _save(self, manifest: WeightManifest, folder: Path) -> OlderVersion:
        name = f"older-v{manifest.policy_version:06d}.safetensors"

        def into_file(layout: Layout) -> Take:
            file = TensorFile(name, layout, lambda name, num_bytes: LocalFile(folder / name))
            return lambda tensor_name, tensor: file.write(tensor_name, bytes_of(tensor))

        tensors_digest = self._pass_through(manifest, into_file)
        reach("consumer.saving_older_versions")
        return OlderVersion(
            policy_version=manifest.policy_version,
            weights_digest=manifest.weights_digest,
            tensors_digest=tensors_digest,
            file=name,
        )

    def _pass_through(self, manifest: WeightManifest, make_take: Callable[[Layout], Take]) -> str:
        """Hands each tensor on and hashes it, one in memory where the transport lets it; returns their digest.

        make_take: the layout of what the version's files hold → what takes the tensors.
        """
        version = manifest.policy_version
        published = manifest.adapter.adapter_digest if manifest.adapter else manifest.weights_digest
        try:
            tensors = read_back(manifest, self._layout, root=self._root, chunks=self._chunks)
            layout = layout_of(tensors) if manifest.adapter else self._layout
            check_names(version, expected=layout, found=tensors)
            take = make_take(layout)
            with HashingThreads() as hashing:
                for name in layout:
                    tensor = tensors[name]
                    hashed = hashing.add_one(name, tensor)
                    take(name, tensor)
                    hashed.result()
                found = hashing.digest()
        except ContractViolation as error:
            raise WeightsRejected(f"version {version}: {error}") from error
        if found != published:
            raise WeightsRejected(f"version {version} has digest {found}, it was published with {published}")
        return found


def stored_version(folder: Path, older: OlderVersion) -> StoredVersion:
    """Opens one that a checkpoint in `folder` holds. Raises ContractViolation for a file that is none."""
    return StoredVersion(
        policy_version=older.policy_version,
        weights_digest=older.weights_digest,
        tensors=StoredTensors([folder / older.file]),
        tensors_digest=older.tensors_digest,
    )


def check_older(older: Iterable[OlderVersion], needed: Iterable[int], versions: Mapping[int, str]) -> None:
    """Raises WeightsRejected unless `older` has each version that is needed, as the job's audit chain knows it.

    versions: version → digest by the chain.
    """
    held = {one.policy_version: one.weights_digest for one in older}
    for version in needed:
        if version not in held:
            raise WeightsRejected(f"it lacks version {version}, which batches of its window are sampled with")
        if held[version] != versions.get(version):
            raise WeightsRejected(f"its version {version} is not one of this job")
